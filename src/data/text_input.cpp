#include "data/text_input.h"

#include <algorithm>

namespace echelon {
namespace {

class PlainInput final : public TextInput {
 public:
  explicit PlainInput(const OpenFile& file) : file_(&file) {}
  std::size_t read(std::span<std::byte> out) override {
    const auto here = std::min<std::int64_t>(std::ssize(out), file_->size() - at_);
    file_->read(at_, out.first(static_cast<std::size_t>(here)));
    at_ += here;
    return static_cast<std::size_t>(here);
  }
  double done() const override {
    return file_->size() == 0 ? 1 : static_cast<double>(at_) / static_cast<double>(file_->size());
  }

 private:
  const OpenFile* file_;
  std::int64_t at_ = 0;
};

}  // namespace

bool is_compressed(const std::string& path) { return path.ends_with(".gz") || path.ends_with(".zst"); }

std::string uncompressed_name(const std::string& path) {
  return is_compressed(path) ? path.substr(0, path.rfind('.')) : path;
}

std::unique_ptr<TextInput> open_text(const OpenFile& file) {
  if (file.path().ends_with(".gz")) return open_gzip(file);
  if (file.path().ends_with(".zst")) return open_zstd(file);
  return std::make_unique<PlainInput>(file);
}

}  // namespace echelon

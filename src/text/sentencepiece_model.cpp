// SentencePiece's .model files, by its own library.
#include <sentencepiece_processor.h>

#include "base/error.h"
#include "base/open_file.h"
#include "text/tokenizer_formats.h"
#include "text/unicode.h"

namespace echelon {
namespace {

class SentencePieceTokenizer final : public Tokenizer {
 public:
  explicit SentencePieceTokenizer(const std::string& path) : path_(path) {
    const auto status = processor_.LoadFromSerializedProto(read_text(path));
    if (!status.ok()) refuse("{}: no model of SentencePiece: {}", path, status.ToString());
  }
  std::int64_t vocab() const override { return processor_.GetPieceSize(); }
  std::vector<std::int32_t> encode(std::string_view text) const override {
    std::vector<int> ids;
    const std::string whole = replace_broken(text);
    const auto status = processor_.Encode(whole, &ids);
    if (!status.ok()) fail("{}: {}", path_, status.ToString());
    return {ids.begin(), ids.end()};
  }
  std::vector<std::int32_t> encode_whole(std::string_view text) const override {
    std::vector<std::int32_t> ids = encode(text);
    if (processor_.bos_id() >= 0) ids.insert(ids.begin(), processor_.bos_id());
    return ids;
  }
  std::string decode(std::span<const std::int32_t> ids, Special special) const override {
    std::vector<std::string> pieces;
    std::string text;
    std::vector<int> run;
    const auto flush = [&] {
      std::string part;
      const auto status = processor_.Decode(run, &part);
      if (!status.ok()) fail("{}: {}", path_, status.ToString());
      text += part;
      run.clear();
    };
    for (const std::int32_t id : ids) {
      if (id < 0 || id >= vocab())
        refuse("token {}: {} has no such token; legal: 0 to {}", id, path_, vocab() - 1);
      if (!processor_.IsControl(id)) {
        run.push_back(id);
        continue;
      }
      flush();
      if (special == Special::shown) text += processor_.IdToPiece(id);
    }
    flush();
    return text;
  }
  std::optional<std::int32_t> end_of_text() const override {
    return processor_.eos_id() >= 0 ? std::optional<std::int32_t>(processor_.eos_id()) : std::nullopt;
  }
  std::string name() const override { return path_; }

 private:
  std::string path_;
  sentencepiece::SentencePieceProcessor processor_;
};

}  // namespace

std::shared_ptr<const Tokenizer> read_sentencepiece(const std::string& path) {
  return std::make_shared<SentencePieceTokenizer>(path);
}

}  // namespace echelon

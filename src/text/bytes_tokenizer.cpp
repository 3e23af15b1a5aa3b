#include "base/error.h"
#include "text/tokenizer.h"

namespace echelon {
namespace {

class BytesTokenizer final : public Tokenizer {
 public:
  std::int64_t vocab() const override { return bytes_vocab; }
  std::vector<std::int32_t> encode(std::string_view text) const override {
    std::vector<std::int32_t> ids;
    ids.reserve(text.size());
    for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
    return ids;
  }
  std::string decode(std::span<const std::int32_t> ids, Special) const override {
    std::string text;
    for (const std::int32_t id : ids) {
      if (id < 0 || id >= bytes_vocab)
        refuse("token {}: the bytes tokenizer has no such token; legal: 0 to {}", id, bytes_vocab - 1);
      if (id < 256) text += static_cast<char>(id);
    }
    return text;
  }
  std::optional<std::int32_t> end_of_text() const override { return echelon::end_of_text; }
  std::string name() const override { return "bytes"; }
};

}  // namespace

std::shared_ptr<const Tokenizer> bytes_tokenizer() { return std::make_shared<BytesTokenizer>(); }

}  // namespace echelon

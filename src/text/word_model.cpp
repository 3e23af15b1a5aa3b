// Words and parts of words from a list (BERT's WordPiece, WordLevel).
#include "text/json_fields.h"
#include "text/token_model.h"
#include "text/unicode.h"

namespace echelon {
namespace {

class WordModel final : public TokenModel {
 public:
  WordModel(TokenIds ids, std::int32_t unknown, std::string prefix, std::size_t longest)
      : ids_(std::move(ids)), unknown_(unknown), prefix_(std::move(prefix)), longest_(longest) {}

  void encode(std::string_view piece, ModelScratch&, std::vector<std::int32_t>& ids) const override {
    const std::size_t first = ids.size();
    if (longest_ == 0 || characters_of(piece).size() <= longest_) {
      std::size_t begin = 0;
      while (begin < piece.size()) {
        const std::size_t end = longest_match(piece, begin, ids);
        if (end == begin) break;
        begin = end;
      }
      if (begin == piece.size()) return;
    }
    ids.resize(first);
    ids.push_back(unknown_);
  }

 private:
  std::size_t longest_match(std::string_view piece, std::size_t begin, std::vector<std::int32_t>& ids) const {
    std::string part = begin > 0 ? prefix_ : "";
    part += piece.substr(begin);
    for (std::size_t end = piece.size(); end > begin;) {
      if (const auto found = ids_.find(part); found != ids_.end()) {
        ids.push_back(found->second);
        return end;
      }
      if (longest_ == 0) break;  // WordLevel: all or nothing
      do {
        --end;
        part.pop_back();
      } while (end > begin && (static_cast<unsigned char>(piece[end]) & 0xc0u) == 0x80u);
    }
    return begin;
  }

  TokenIds ids_;
  std::int32_t unknown_;
  std::string prefix_;
  std::size_t longest_;  // characters; 0: whole words alone
};

}  // namespace

std::unique_ptr<const TokenModel> make_word_model(const nlohmann::json& described, const std::string& where,
                                                  TokenIds& ids) {
  const bool parts = JsonFields(described, where).text("type") == "WordPiece";
  const JsonFields f(described, where,
                     {"unk_token", "continuing_subword_prefix", "max_input_chars_per_word", "vocab"});
  ids = read_token_ids(f.at("vocab"), where + ".vocab");
  const auto unknown = ids.find(f.text("unk_token"));
  if (unknown == ids.end())
    refuse("{}.unk_token: {} is not in the vocabulary; legal: a token of model.vocab", where,
           f.text("unk_token"));
  const std::int64_t longest = !parts ? 0
                               : f.has("max_input_chars_per_word")
                                   ? f.number("max_input_chars_per_word", 1, 1 << 20)
                                   : 100;
  return std::make_unique<WordModel>(ids, unknown->second, f.text("continuing_subword_prefix", "##"),
                                     static_cast<std::size_t>(longest));
}

}  // namespace echelon

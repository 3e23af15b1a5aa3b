// The models of a tokenizer: what makes the ids of one piece of text.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace echelon {

struct TextHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};
using TokenIds = std::unordered_map<std::string, std::int32_t, TextHash, std::equal_to<>>;

// What a model works with while it encodes, kept from piece to piece.
struct ModelScratch {
  struct Symbol {
    std::int32_t id = 0;
    std::int32_t previous = -1, next = -1;
    std::uint32_t length = 0;  // bytes; 0: has become part of another
  };
  struct Merge {
    std::uint32_t rank = 0;
    std::int32_t at = 0, id = 0;
    std::uint32_t left = 0, right = 0;  // lengths when it was found
  };
  std::vector<Symbol> symbols;
  std::vector<Merge> merges;
  std::vector<std::uint32_t> ranks;
  struct Best {
    double score = 0;
    std::int64_t from = -1;
    std::int32_t id = 0;
  };
  std::vector<Best> best;
};

class TokenModel {
 public:
  virtual ~TokenModel() = default;
  // Appends the ids of a piece, which is not empty. RunError where the vocabulary has no token for it.
  virtual void encode(std::string_view piece, ModelScratch& scratch,
                      std::vector<std::int32_t>& ids) const = 0;
  // Where a piece may be cut without another result: at this text, where something else precedes it. Empty:
  // nowhere.
  virtual std::string_view mark() const { return ""; }
};

struct BpePair {
  std::int32_t left = 0, right = 0;
  std::uint32_t rank = 0;
  std::int32_t id = 0;
};

struct BpeOptions {
  std::int32_t unknown = -1;  // id; negative: none
  bool fuse_unknown = false, byte_fallback = false, ignore_merges = false;
  std::string prefix, suffix;
};

// `ids` are of the tokens as text has them. A token for each byte where `raw_bytes`.
std::unique_ptr<const TokenModel> make_bpe(TokenIds ids, const std::vector<BpePair>& pairs,
                                           BpeOptions options, bool raw_bytes);

// The model of a tokenizer.json; `ids` are its tokens as they are written. RequestError naming the field.
std::unique_ptr<const TokenModel> make_token_model(const nlohmann::json& described, const std::string& where,
                                                   bool raw_bytes, TokenIds& ids);
std::unique_ptr<const TokenModel> make_unigram(const nlohmann::json& described, const std::string& where,
                                               TokenIds& ids);
std::unique_ptr<const TokenModel> make_word_model(const nlohmann::json& described, const std::string& where,
                                                  TokenIds& ids);
TokenIds read_token_ids(const nlohmann::json& vocab, const std::string& where);

}  // namespace echelon

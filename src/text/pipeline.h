// A tokenizer as steps: added tokens, normalizer, pre-tokenizer, model, what is put around it, decoder.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "text/text_steps.h"
#include "text/token_model.h"
#include "text/token_trie.h"
#include "text/tokenizer.h"

namespace echelon {

// A token that is found in the text as it is, before anything else.
struct AddedToken {
  std::int32_t id = 0;
  std::string content;
  bool single_word = false;             // only with no word around it
  bool lstrip = false, rstrip = false;  // takes the white space beside it
  bool normalized = false;              // found in the text that is normalised, as it is normalised itself
  bool special = false;
};

struct PipelineParts {
  std::string name;
  std::vector<AddedToken> added;
  std::unique_ptr<const Normalizer> normalizer;
  std::unique_ptr<const PreTokenizer> pre_tokenizer;
  std::unique_ptr<const TokenModel> model;
  std::vector<std::int32_t> prefix, suffix;  // of a whole text
  std::unique_ptr<const Decoder> decoder;
  std::unordered_map<std::int32_t, std::string> names;  // of the model's tokens, as the decoder wants them
  std::optional<std::int32_t> end_of_text;
};

class PipelineTokenizer final : public Tokenizer {
 public:
  explicit PipelineTokenizer(PipelineParts parts);
  ~PipelineTokenizer() override;

  std::int64_t vocab() const override { return vocab_; }
  std::vector<std::int32_t> encode(std::string_view text) const override;
  std::vector<std::int32_t> encode_whole(std::string_view text) const override;
  std::string decode(std::span<const std::int32_t> ids, Special special) const override;
  std::optional<std::int32_t> end_of_text() const override { return parts_.end_of_text; }
  std::string name() const override { return parts_.name; }

 private:
  // Added tokens, found at once: the leftmost, and of those the longest.
  struct Finder {
    explicit Finder(const std::vector<std::pair<std::string, std::size_t>>& texts);
    TokenTrie trie;  // its ids: indices of parts_.added
    bool any = false;
    bool begins[256] = {};
  };
  struct Workspace;
  // Calls found(added) and text(part, at the beginning) in the order of the text.
  template <class Found, class Text>
  void split_added(const Finder& finder, std::string_view text, const Found& found,
                   const Text& between) const;
  void encode_part(std::string_view text, bool begins_text, Workspace& work,
                   std::vector<std::int32_t>& ids) const;
  void encode_piece(std::string_view piece, Workspace& work, std::vector<std::int32_t>& ids) const;

  PipelineParts parts_;
  Finder raw_, normal_;
  std::unordered_set<std::int32_t> special_;
  std::int64_t vocab_ = 0;
  // What calls of encode() work with, used again: each takes one for itself.
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Workspace>> idle_;
};

}  // namespace echelon

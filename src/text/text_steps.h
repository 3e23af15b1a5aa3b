// The steps of a tokenizer.json before and after its model, as Hugging Face's `tokenizers` defines them.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "text/regex.h"

namespace echelon {

class Normalizer {
 public:
  virtual ~Normalizer() = default;
  // `begins` becomes false where characters that `text` begins with are left out.
  virtual std::string apply(std::string_view text, bool& begins) const = 0;
};

// A text in pieces, of each of which the model makes tokens by itself.
struct Pieces {
  std::string text;
  std::vector<TextRange> ranges;  // none empty
  bool begins_text = false;  // the first piece is the beginning of what was given, of which nothing is out
  std::vector<TextRange> found, scratch;
};

class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;
  virtual void split(Pieces& pieces) const = 0;
};

class Decoder {
 public:
  virtual ~Decoder() = default;
  virtual void apply(std::vector<std::string>& tokens) const = 0;
};

// RequestError that begins with `where`, or the field below it, for what is not understood; null: a null
// pointer.
std::unique_ptr<const Normalizer> make_normalizer(const nlohmann::json& described, const std::string& where);
std::unique_ptr<const Decoder> make_decoder(const nlohmann::json& described, const std::string& where);
// `raw_bytes` is set where the last step is ByteLevel, which then leaves the bytes as they are: the model's
// tokens are written with a character for each byte, and are read as the bytes.
std::unique_ptr<const PreTokenizer> make_pre_tokenizer(const nlohmann::json& described,
                                                       const std::string& where, bool& raw_bytes);

// Pieces cut at the matches of an expression, each match a piece: what a .tiktoken file stands on.
std::unique_ptr<const PreTokenizer> make_isolating_split(const std::string& pattern,
                                                         const std::string& where);

}  // namespace echelon

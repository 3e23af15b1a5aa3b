// Text as the ids of a vocabulary, and back.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace echelon {

// What decode() writes for a token that stands for no text, such as <|endoftext|>: its name, or nothing.
enum class Special { shown, dropped };

// The const methods are safe to call from several threads.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  virtual std::int64_t vocab() const = 0;  // one above the largest id
  // The names of special tokens inside the text become their ids. Any bytes are legal: but for the bytes
  // tokenizer, what is not UTF-8 is read as U+FFFD, one for each maximal part of a character (Unicode 3.9,
  // as Python's errors="replace" does).
  virtual std::vector<std::int32_t> encode(std::string_view text) const = 0;
  // With what the tokenizer puts around a text, such as <s> before it.
  virtual std::vector<std::int32_t> encode_whole(std::string_view text) const { return encode(text); }
  // RequestError on an id that has no token.
  virtual std::string decode(std::span<const std::int32_t> ids, Special special = Special::shown) const = 0;
  virtual std::optional<std::int32_t> end_of_text() const = 0;  // what follows a document, where it is known
  virtual std::string name() const = 0;                         // "bytes", or the file it was read from
};

inline constexpr std::int64_t bytes_vocab = 257;  // the bytes tokenizer: a byte is its own id,
inline constexpr std::int32_t end_of_text = 256;  // and this follows each document (file); no text is shown

std::shared_ptr<const Tokenizer> bytes_tokenizer();

// A tokenizer.json of Hugging Face, a SentencePiece .model, a .tiktoken file, or a directory with one of
// them, in that order. RequestError naming the file and what in it is not understood. A build for planning
// alone reads none, and says so.
std::shared_ptr<const Tokenizer> read_tokenizer(const std::string& path);

// Text as it comes, token by token, cut between characters.
class TextStream {
 public:
  explicit TextStream(std::shared_ptr<const Tokenizer> tokenizer) : tokenizer_(std::move(tokenizer)) {}
  std::string next(std::int32_t id);  // what is certain of the text now and was not before; often ""
  std::string finish();               // the rest, half characters included

 private:
  std::string take(bool all);

  std::shared_ptr<const Tokenizer> tokenizer_;
  // Some decoders look at what came before: the ids from `context_` on are decoded together.
  std::vector<std::int32_t> ids_;
  std::size_t context_ = 0, written_ = 0;  // ids_[context_, written_) have been given as text
};

}  // namespace echelon

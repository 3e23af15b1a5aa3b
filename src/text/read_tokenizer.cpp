#include <filesystem>

#include "base/error.h"
#include "base/open_file.h"
#include "text/tokenizer_formats.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;

// Whether the first line is one of a rank file. Meta gives such a file the name of a SentencePiece model.
bool looks_like_ranks(const std::string& text) {
  const std::size_t gap = text.find(' '), end = text.find('\n');
  if (gap == 0 || gap == std::string::npos || gap > end) return false;
  for (std::size_t i = 0; i < std::min(end, text.size()); ++i) {
    const char c = text[i];
    const bool letter = (c | 0x20) >= 'a' && (c | 0x20) <= 'z', digit = c >= '0' && c <= '9';
    if (!letter && !digit && c != '+' && c != '/' && c != '=' && c != '\r' && i != gap) return false;
  }
  return true;
}

std::string in_directory(const std::string& directory) {
  for (const char* name : {"tokenizer.json", "tokenizer.model"})
    if (fs::is_regular_file(fs::path(directory) / name)) return (fs::path(directory) / name).string();
  std::string found;
  for (const auto& entry : fs::directory_iterator(directory))
    if (entry.path().extension() == ".tiktoken") {
      if (!found.empty()) refuse("{}: has {} and another .tiktoken file; name one", directory, found);
      found = entry.path().string();
    }
  if (found.empty())
    refuse("{}: has no tokenizer; legal: tokenizer.json, tokenizer.model, NAME.tiktoken", directory);
  return found;
}

}  // namespace

std::shared_ptr<const Tokenizer> read_tokenizer(const std::string& path) {
  std::error_code none;
  if (fs::is_directory(path, none)) return read_tokenizer(in_directory(path));
  if (path.ends_with(".json")) return read_tokenizer_json(path);
  const std::string text = read_text(path);
  if (path.ends_with(".tiktoken") || looks_like_ranks(text)) return read_tiktoken(path, text);
  if (fs::path(path).filename().string().find(".model") != std::string::npos) return read_sentencepiece(path);
  refuse(
      "{}: the name does not say what it is; legal: NAME.json (Hugging Face), NAME.model (SentencePiece), "
      "NAME.tiktoken, or a directory with one of them",
      path);
}

}  // namespace echelon

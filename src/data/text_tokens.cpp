#include "data/text_tokens.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <vector>

#include "base/error.h"
#include "base/open_file.h"
#include "data/checksum.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;

// The file that a directory's tokenizer is read from; empty where there is none.
std::string tokenizer_file(const std::string& path) {
  std::error_code none;
  if (!fs::is_directory(path, none)) return path;
  for (const char* name : {"tokenizer.json", "tokenizer.model"})
    if (fs::is_regular_file(fs::path(path) / name, none)) return (fs::path(path) / name).string();
  std::vector<std::string> others;
  for (const auto& entry : fs::directory_iterator(path, none))
    if (entry.path().extension() == ".tiktoken") others.push_back(entry.path().string());
  return others.empty() ? "" : *std::min_element(others.begin(), others.end());
}

}  // namespace

bool has_tokenizer(const std::string& directory) {
  std::error_code none;
  return fs::is_directory(directory, none) && !tokenizer_file(directory).empty();
}

TextTokens text_tokens(const std::string& path) {
  if (path == "bytes") return {};
  if (std::error_code none; !fs::exists(path, none))
    refuse("--tokenizer {}: no such file or directory; legal: bytes, or where a tokenizer's file is", path);
  TextTokens text{read_tokenizer(path), chat_template_beside(path), 0};
  const std::string file = tokenizer_file(path);
  if (!file.empty()) text.identity = std::max<std::uint64_t>(1, checksum(OpenFile(file, "--tokenizer")));
  return text;
}

}  // namespace echelon

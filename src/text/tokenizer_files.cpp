#include "text/tokenizer_files.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>

#include "base/error.h"
#include "base/open_file.h"

namespace echelon {

namespace fs = std::filesystem;

bool is_tokenizer_file(const std::string& name) {
  constexpr std::array<std::string_view, 10> known{"tokenizer.json",
                                                   "tokenizer.model",
                                                   "tokenizer_config.json",
                                                   "special_tokens_map.json",
                                                   "added_tokens.json",
                                                   "vocab.json",
                                                   "merges.txt",
                                                   "vocab.txt",
                                                   "chat_template.jinja",
                                                   "chat_template.json"};
  return std::find(known.begin(), known.end(), name) != known.end() ||
         (name.ends_with(".tiktoken") && name.find('/') == std::string::npos);
}

TokenizerFiles read_tokenizer_files(const std::string& path) {
  TokenizerFiles files;
  std::error_code none;
  const std::string name = fs::path(path).filename().string();
  if (!fs::is_directory(path, none) && !is_tokenizer_file(name)) {
    files[path.ends_with(".json") ? "tokenizer.json" : "tokenizer.model"] = read_text(path);
    return files;
  }
  std::error_code error;
  const fs::path directory = fs::is_directory(path, none) ? fs::path(path) : fs::path(path).parent_path();
  for (const auto& entry : fs::directory_iterator(directory.empty() ? "." : directory, error))
    if (is_tokenizer_file(entry.path().filename().string()) && entry.is_regular_file(none))
      files[entry.path().filename().string()] = read_text(entry.path().string());
  if (error) refuse("{}: cannot be read: {}", directory.string(), error.message());
  return files;
}

}  // namespace echelon

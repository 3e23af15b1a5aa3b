#include "text/tokenizer_files.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/error.h"
#include "base/json_text.h"
#include "base/open_file.h"
#include "text/tokenizer.h"

namespace echelon {

namespace fs = std::filesystem;

bool is_tokenizer_file(const std::string& name) {
  constexpr std::array<std::string_view, 11> known{"tokenizer.json",
                                                   "tokenizer.model",
                                                   "tokenizer_config.json",
                                                   "special_tokens_map.json",
                                                   "added_tokens.json",
                                                   "vocab.json",
                                                   "merges.txt",
                                                   "vocab.txt",
                                                   "generation_config.json",
                                                   "chat_template.jinja",
                                                   "chat_template.json"};
  return std::find(known.begin(), known.end(), name) != known.end() ||
         (name.ends_with(".tiktoken") && name.find('/') == std::string::npos);
}

TokenizerFiles read_tokenizer_files(const std::string& path) {
  TokenizerFiles files;
  std::error_code none;
  const std::string name = fs::path(path).filename().string();
  // Of a name that nobody looks for: it, under one that they do, and what is read beside it.
  const bool is_renamed = !fs::is_directory(path, none) && !is_tokenizer_file(name);
  const auto goes_along = [&](const std::string& other) {
    return is_tokenizer_file(other) &&
           (!is_renamed || other == "tokenizer_config.json" || other.starts_with("chat_template."));
  };
  if (is_renamed) files[path.ends_with(".json") ? "tokenizer.json" : "tokenizer.model"] = read_text(path);
  std::error_code error;
  const fs::path directory = fs::is_directory(path, none) ? fs::path(path) : fs::path(path).parent_path();
  for (const auto& entry : fs::directory_iterator(directory.empty() ? "." : directory, error))
    if (goes_along(entry.path().filename().string()) && entry.is_regular_file(none))
      files[entry.path().filename().string()] = read_text(entry.path().string());
  if (error) refuse("{}: cannot be read: {}", directory.string(), error.message());
  // Which models have that come without a tokenizer.
  if (files.size() == 1 && files.contains("generation_config.json")) files.clear();
  return files;
}

std::vector<std::int32_t> ends_of_generation(const TokenizerFiles& files) {
  const auto found = files.find("generation_config.json");
  if (found == files.end()) return {};
  const nlohmann::json config = parse_json(found->second, found->first);
  const char* const key = "eos_token_id";
  if (!config.is_object() || !config.contains(key) || config.at(key).is_null()) return {};
  const nlohmann::json list =
      config.at(key).is_array() ? config.at(key) : nlohmann::json::array({config.at(key)});
  std::vector<std::int32_t> ends;
  for (const nlohmann::json& id : list) {
    if (!id.is_number_integer() || id < 0 || id > std::numeric_limits<std::int32_t>::max())
      refuse("{}: {} = {} is not legal: must be a token or a list of them", found->first, key,
             config.at(key).dump());
    ends.push_back(id.get<std::int32_t>());
  }
  return ends;
}

std::vector<std::int32_t> ends_of_texts(const Tokenizer& tokenizer, const TokenizerFiles& files) {
  std::vector<std::int32_t> ends = ends_of_generation(files);
  if (const auto end = tokenizer.end_of_text();
      end && std::find(ends.begin(), ends.end(), *end) == ends.end())
    ends.insert(ends.begin(), *end);
  return ends;
}

}  // namespace echelon

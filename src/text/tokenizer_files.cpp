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

namespace {

constexpr const char* generation_file = "generation_config.json";

// A token or several: negative ones mean none to transformers, and what is no token nothing.
bool is_bound(const nlohmann::json& value) {
  const auto is_token = [](const nlohmann::json& id) {
    return id.is_number_integer() && id >= 0 && id <= std::numeric_limits<std::int32_t>::max();
  };
  return is_token(value) ||
         (value.is_array() && !value.empty() && std::all_of(value.begin(), value.end(), is_token));
}

// What a model's configuration says of where texts begin and end, as the file has it in which transformers
// looks for it first; empty where it says nothing. Of a model that sees images the text model's where the
// whole has none.
std::string bounds_in_configuration(const fs::path& config) {
  std::error_code none;
  if (!fs::is_regular_file(config, none)) return "";
  const nlohmann::json whole = parse_json(read_text(config.string()), config.string());
  if (!whole.is_object()) return "";
  const nlohmann::json text = whole.value("text_config", nlohmann::json::object());
  nlohmann::ordered_json bounds = nlohmann::ordered_json::object();
  for (const char* key : {"bos_token_id", "eos_token_id"})
    for (const nlohmann::json* from : {&whole, &text})
      if (!bounds.contains(key) && from->is_object() && from->contains(key) && is_bound(from->at(key)))
        bounds[key] = from->at(key);
  return bounds.empty() ? "" : bounds.dump(2) + "\n";
}

// What is said under `key` of the tokens at which generation begins or ends; null where nothing is.
nlohmann::json bound_of_generation(const TokenizerFiles& files, const char* key) {
  const auto found = files.find(generation_file);
  if (found == files.end()) return {};
  const nlohmann::json config = parse_json(found->second, found->first);
  const nlohmann::json said = config.is_object() ? config.value(key, nlohmann::json()) : nlohmann::json();
  return said.is_number_integer() && said < 0 ? nlohmann::json() : said;  // as in config.json
}

}  // namespace

bool is_tokenizer_file(const std::string& name) {
  constexpr std::array<std::string_view, 11> known{"tokenizer.json",
                                                   "tokenizer.model",
                                                   "tokenizer_config.json",
                                                   "special_tokens_map.json",
                                                   "added_tokens.json",
                                                   "vocab.json",
                                                   "merges.txt",
                                                   "vocab.txt",
                                                   generation_file,
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
  if (!is_renamed && !files.contains(generation_file))
    if (std::string bounds = bounds_in_configuration(directory / "config.json"); !bounds.empty())
      files[generation_file] = std::move(bounds);
  return files;
}

bool have_tokenizer(const TokenizerFiles& files) {
  return std::any_of(files.begin(), files.end(),
                     [](const auto& file) { return file.first != generation_file; });
}

std::optional<std::int32_t> begin_of_generation(const TokenizerFiles& files) {
  const nlohmann::json id = bound_of_generation(files, "bos_token_id");
  return is_bound(id) && !id.is_array() ? std::optional(id.get<std::int32_t>()) : std::nullopt;
}

std::vector<std::int32_t> ends_of_generation(const TokenizerFiles& files) {
  const char* const key = "eos_token_id";
  const nlohmann::json said = bound_of_generation(files, key);
  if (said.is_null()) return {};
  if (!is_bound(said))
    refuse("{}: {} = {} is not legal: must be a token or a list of them", generation_file, key, said.dump());
  if (said.is_array()) return said.get<std::vector<std::int32_t>>();
  return {said.get<std::int32_t>()};
}

std::vector<std::int32_t> ends_of_texts(const Tokenizer& tokenizer, const TokenizerFiles& files) {
  std::vector<std::int32_t> ends = ends_of_generation(files);
  if (const auto end = tokenizer.end_of_text();
      end && std::find(ends.begin(), ends.end(), *end) == ends.end())
    ends.insert(ends.begin(), *end);
  return ends;
}

}  // namespace echelon

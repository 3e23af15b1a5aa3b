// OpenAI's rank files: a line for each token, its bytes in base64 and its rank. The expression that cuts the
// text, and the special tokens, are not in the file: its name says whose it is.
#include <algorithm>
#include <fstream>

#include "base/error.h"
#include "base/parse_number.h"
#include "text/base64.h"
#include "text/byte_characters.h"
#include "text/json_fields.h"
#include "text/pipeline.h"
#include "text/tokenizer_formats.h"

namespace echelon {
namespace {

constexpr const char* gpt2_pattern =
    R"('(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr const char* cl100k_pattern =
    R"('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+)";
constexpr const char* llama3_pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* qwen_pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* o200k_pattern =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

struct Known {
  const char* part_of_name;
  const char* pattern;
  bool nfc;
  std::vector<std::pair<std::int32_t, std::string>>
      special;  // the first ends a text; negative: after the ranks
};

std::vector<Known> known() {
  return {{"cl100k",
           cl100k_pattern,
           false,
           {{100257, "<|endoftext|>"},
            {100258, "<|fim_prefix|>"},
            {100259, "<|fim_middle|>"},
            {100260, "<|fim_suffix|>"},
            {100276, "<|endofprompt|>"}}},
          {"o200k", o200k_pattern, false, {{199999, "<|endoftext|>"}, {200018, "<|endofprompt|>"}}},
          {"p50k", gpt2_pattern, false, {{50256, "<|endoftext|>"}}},
          {"r50k", gpt2_pattern, false, {{50256, "<|endoftext|>"}}},
          {"gpt2", gpt2_pattern, false, {{50256, "<|endoftext|>"}}},
          {"qwen",
           qwen_pattern,
           true,
           {{151643, "<|endoftext|>"}, {151644, "<|im_start|>"}, {151645, "<|im_end|>"}}},
          {"llama",
           llama3_pattern,
           false,
           {{128001, "<|end_of_text|>"},
            {128000, "<|begin_of_text|>"},
            {128006, "<|start_header_id|>"},
            {128007, "<|end_header_id|>"},
            {128009, "<|eot_id|>"}}}};
}

}  // namespace

std::shared_ptr<const Tokenizer> read_tiktoken(const std::string& path, const std::string& text) {
  std::string name = path.substr(path.find_last_of('/') + 1);
  for (char& c : name) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
  const std::vector<Known> all = known();
  const auto kind = std::find_if(
      all.begin(), all.end(), [&](const Known& k) { return name.find(k.part_of_name) != std::string::npos; });
  if (kind == all.end())
    refuse(
        "{}: the name does not say whose ranks these are, and so how a text is cut; legal: a name with "
        "cl100k, o200k, "
        "p50k, r50k, gpt2, qwen or llama in it",
        path);
  TokenIds ids;
  PipelineParts parts;
  std::int64_t line_number = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    std::string line = text.substr(at, end - at);
    at = end + 1;
    ++line_number;
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty()) continue;
    const std::string where = fmt::format("{}:{}", path, line_number);
    const std::size_t gap = line.find(' ');
    if (gap == std::string::npos)
      refuse("{}: no rank after the token; legal: base64, a space, a number", where);
    const std::string bytes = from_base64(line.substr(0, gap), where);
    const auto id = parse_plain_number<std::int32_t>(where, line.substr(gap + 1));
    if (bytes.empty() || id < 0 || id > JsonFields::largest_id)
      refuse("{}: the rank {} of {} bytes; legal: 0 to {} of at least one byte", where, id, bytes.size(),
             JsonFields::largest_id);
    if (!ids.emplace(bytes, id).second || !parts.names.emplace(id, bytes_as_characters(bytes)).second)
      refuse("{}: the token or its rank {} was there before; legal: each once", where, id);
  }
  // Two neighbours become what they are together, whatever they were made of.
  std::vector<BpePair> pairs;
  for (const auto& [bytes, id] : ids)
    for (std::size_t cut = 1; cut < bytes.size(); ++cut) {
      const auto left = ids.find(std::string_view(bytes).substr(0, cut)),
                 right = ids.find(std::string_view(bytes).substr(cut));
      if (left != ids.end() && right != ids.end())
        pairs.push_back({left->second, right->second, static_cast<std::uint32_t>(id), id});
    }
  for (int byte = 0; byte < 256; ++byte)
    if (!ids.contains(std::string(1, static_cast<char>(byte))))
      refuse("{}: the byte {} has no token; legal: ranks of all 256 bytes", path, byte);
  BpeOptions options;
  options.ignore_merges = true;
  parts.name = path;
  parts.model = make_bpe(std::move(ids), pairs, options, true);
  parts.pre_tokenizer = make_isolating_split(kind->pattern, path);
  parts.decoder = make_decoder(nlohmann::json{{"type", "ByteLevel"}}, path);
  if (kind->nfc) parts.normalizer = make_normalizer(nlohmann::json{{"type", "NFC"}}, path);
  for (const auto& [id, content] : kind->special) {
    if (parts.names.contains(id))
      refuse("{}: has a token of rank {}, which {} has; legal: ranks below", path, id, content);
    parts.added.push_back({.id = id, .content = content, .special = true});
  }
  parts.end_of_text = kind->special.front().first;
  return std::make_shared<PipelineTokenizer>(std::move(parts));
}

}  // namespace echelon

// Hugging Face's tokenizer.json (https://huggingface.co/docs/tokenizers). `truncation` and `padding` say how
// batches are made, which is not done here.
#include <filesystem>

#include "base/json_text.h"
#include "base/open_file.h"
#include "text/json_fields.h"
#include "text/pipeline.h"
#include "text/tokenizer_formats.h"

namespace echelon {
namespace {

using nlohmann::json;

struct Around {
  std::vector<std::int32_t> before, after;
};

std::vector<std::int32_t> ids_of_special(const JsonFields& specials, const std::string& name) {
  const JsonFields special(specials.at(name.c_str()), specials.where() + "." + name, {"id", "ids", "tokens"});
  std::vector<std::int32_t> ids;
  for (const json& id : special.list("ids")) {
    if (!id.is_number_unsigned() || id.get<std::uint64_t>() > JsonFields::largest_id)
      refuse("{}.ids: {}; legal: 0 to {}", special.where(), JsonFields::shortened(id),
             JsonFields::largest_id);
    ids.push_back(id.get<std::int32_t>());
  }
  return ids;
}

Around read_post_processor(const json& described, const std::string& where) {
  Around around;
  if (described.is_null()) return around;
  const std::string type = JsonFields(described, where).text("type");
  if (type == "ByteLevel")
    return JsonFields(described, where, {"add_prefix_space", "trim_offsets", "use_regex"}), around;
  if (type == "Sequence") {
    int i = 0;
    const JsonFields sequence(described, where, {"processors"});
    for (const json& step : sequence.list("processors")) {
      const Around more = read_post_processor(step, fmt::format("{}.processors[{}]", where, i++));
      around.before.insert(around.before.begin(), more.before.begin(), more.before.end());
      around.after.insert(around.after.end(), more.after.begin(), more.after.end());
    }
    return around;
  }
  if (type == "BertProcessing" || type == "RobertaProcessing") {
    const JsonFields f(described, where, {"sep", "cls", "trim_offsets", "add_prefix_space"});
    const auto id = [&](const char* name) {
      const json& pair = f.list(name);
      if (pair.size() != 2 || !pair[1].is_number_unsigned() ||
          pair[1].get<std::uint64_t>() > JsonFields::largest_id)
        refuse("{}.{}: {}; legal: [token, id]", where, name, JsonFields::shortened(pair));
      return pair[1].get<std::int32_t>();
    };
    return {{id("cls")}, {id("sep")}};
  }
  if (type == "TemplateProcessing") {
    const JsonFields f(described, where, {"single", "pair", "special_tokens"});
    bool text_seen = false;
    for (const json& part : f.list("single")) {
      const JsonFields piece(part, where + ".single", {"SpecialToken", "Sequence"});
      if (piece.has("Sequence")) {
        if (text_seen) refuse("{}.single: has the text twice; legal: once", where);
        text_seen = true;
        continue;
      }
      const JsonFields token(piece.at("SpecialToken"), where + ".single.SpecialToken", {"id", "type_id"});
      const auto ids =
          ids_of_special(JsonFields(f.at("special_tokens"), where + ".special_tokens"), token.text("id"));
      auto& side = text_seen ? around.after : around.before;
      side.insert(side.end(), ids.begin(), ids.end());
    }
    if (!text_seen) refuse("{}.single: has no Sequence, where the text would be", where);
    return around;
  }
  refuse(
      "{}: the post-processor {} is not known; legal: TemplateProcessing, ByteLevel, BertProcessing, "
      "RobertaProcessing, Sequence",
      where, type);
}

std::vector<AddedToken> read_added(const JsonFields& file, const TokenIds& ids) {
  std::vector<AddedToken> added;
  if (!file.has("added_tokens")) return added;
  for (const json& described : file.list("added_tokens")) {
    const std::string where = fmt::format("{}: added_tokens[{}]", file.where(), added.size());
    const JsonFields f(described, where,
                       {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
    AddedToken token;
    token.id = f.id("id");
    token.content = f.text("content");
    token.special = f.flag("special", false);
    token.single_word = f.flag("single_word", false);
    token.lstrip = f.flag("lstrip", false);
    token.rstrip = f.flag("rstrip", false);
    token.normalized = f.flag("normalized", !token.special);
    if (const auto known = ids.find(token.content); known != ids.end() && known->second != token.id)
      refuse("{}.id: {} is {} there and {} in model.vocab; legal: {}", where, token.content, token.id,
             known->second, known->second);
    added.push_back(std::move(token));
  }
  return added;
}

// What ends a text, by the file beside it, or by the names in use.
std::optional<std::int32_t> find_end_of_text(const std::string& path, const TokenIds& ids,
                                             const std::vector<AddedToken>& added) {
  const auto id_of = [&](const std::string& name) -> std::optional<std::int32_t> {
    for (const AddedToken& token : added)
      if (token.content == name) return token.id;
    const auto found = ids.find(name);
    return found == ids.end() ? std::nullopt : std::optional(found->second);
  };
  const std::filesystem::path beside = std::filesystem::path(path).parent_path() / "tokenizer_config.json";
  std::error_code none;
  if (std::filesystem::is_regular_file(beside, none)) {
    const json config = parse_json(read_text(beside.string()), beside.string());
    const JsonFields fields(config, beside.string());
    if (fields.has("eos_token")) {
      const json& eos = fields.at("eos_token");
      const std::string name = eos.is_string()
                                   ? eos.get<std::string>()
                                   : JsonFields(eos, beside.string() + ": eos_token").text("content");
      const auto id = id_of(name);
      if (!id)
        refuse("{}: eos_token: {} has no token {}; legal: one of its tokens", beside.string(), path, name);
      return id;
    }
  }
  for (const char* name : {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[SEP]"})
    if (const auto id = id_of(name)) return id;
  return std::nullopt;
}

}  // namespace

std::shared_ptr<const Tokenizer> read_tokenizer_json(const std::string& path) {
  const json read = parse_json(read_text(path), path);
  const JsonFields file(read, path,
                        {"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
                         "post_processor", "decoder", "model"});
  const auto part = [&](const char* name) { return file.has(name) ? file.at(name) : json(); };
  PipelineParts parts;
  parts.name = path;
  parts.normalizer = make_normalizer(part("normalizer"), path + ": normalizer");
  bool raw_bytes = false;
  parts.pre_tokenizer = make_pre_tokenizer(part("pre_tokenizer"), path + ": pre_tokenizer", raw_bytes);
  TokenIds ids;
  parts.model = make_token_model(file.at("model"), path + ": model", raw_bytes, ids);
  parts.added = read_added(file, ids);
  const Around around = read_post_processor(part("post_processor"), path + ": post_processor");
  parts.prefix = around.before;
  parts.suffix = around.after;
  parts.decoder = make_decoder(part("decoder"), path + ": decoder");
  parts.end_of_text = find_end_of_text(path, ids, parts.added);
  for (const auto& [token, id] : ids) parts.names.emplace(id, token);
  // A list may have a token twice: text becomes the last one, and what is unknown may be the first.
  if (const json& vocab = file.at("model").at("vocab"); vocab.is_array())
    for (std::size_t id = 0; id < vocab.size(); ++id)
      parts.names.emplace(static_cast<std::int32_t>(id), vocab[id][0].get<std::string>());
  return std::make_shared<PipelineTokenizer>(std::move(parts));
}

}  // namespace echelon

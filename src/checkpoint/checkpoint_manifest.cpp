#include "checkpoint/checkpoint_manifest.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <span>
#include <type_traits>

#include "base/error.h"
#include "base/json_text.h"
#include "base/open_file.h"
#include "base/shell_word.h"
#include "checkpoint/safetensors.h"
#include "data/checksum.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* format_name = "echelon-checkpoint-2";
constexpr const char* seal_field = "seal";
// The manifest has one line for each part of each tensor that each rank wrote.
constexpr std::int64_t largest_manifest = std::int64_t{1} << 30;
constexpr const char* data_field = "data";
constexpr const char* optimizer_field = "optimizer";
constexpr const char* settings_field = "settings";
constexpr const char* tokenizer_field = "tokenizer";  // checksums of its files
constexpr const char *byte_ids = "bytes", *token_ids = "tokens";

std::string seal_of(json manifest) {
  manifest.erase(seal_field);
  const std::string text = manifest.dump(-1, ' ', false, json::error_handler_t::replace);
  return fmt::format("{:016x}", checksum(std::as_bytes(std::span(text.data(), text.size()))));
}

template <class T>
T field(const json& manifest, const char* name, const std::string& where) {
  try {
    const json& value = manifest.at(name);
    // The library would convert silently: 2.5 to 2, true to 1, and -1 to a huge seed.
    const bool exact = std::is_unsigned_v<T>   ? value.is_number_unsigned()
                       : std::is_integral_v<T> ? value.is_number_integer()
                                               : true;
    if (exact) return value.get<T>();
  } catch (const json::exception&) {
  }
  refuse("{}: damaged: \"{}\" is missing or of the wrong type", where, name);
}

CheckpointInfo read_info(const json& manifest, const std::string& where) {
  CheckpointInfo info;
  info.step = field<std::int64_t>(manifest, "step", where);
  // If missing, each step was one update.
  info.updates = manifest.contains("updates") ? field<std::int64_t>(manifest, "updates", where) : info.step;
  info.seed = field<std::uint64_t>(manifest, "seed", where);
  info.tokens = field<std::int64_t>(manifest, "tokens", where);
  info.dtype = parse_dtype(field<std::string>(manifest, "dtype", where), where + ": dtype");
  if (manifest.contains(optimizer_field))
    info.optimizer = parse_choice<OptimizerKind>(field<std::string>(manifest, optimizer_field, where),
                                                 where + ": damaged: " + optimizer_field);
  info.model = model_from_toml(field<std::string>(manifest, "model", where), where + ": model");
  // If missing, the meaning of ids is known only for a vocabulary of bytes.
  const auto ids = manifest.contains("ids")          ? field<std::string>(manifest, "ids", where)
                   : info.model.vocab == bytes_vocab ? std::string(byte_ids)
                                                     : std::string(token_ids);
  if (ids != byte_ids && ids != token_ids)
    refuse("{}: damaged: ids \"{}\" are neither \"{}\" nor \"{}\"", where, ids, byte_ids, token_ids);
  info.trained_on = ids == byte_ids ? TokenData::Kind::text : TokenData::Kind::tokens;
  if (info.step < 0) refuse("{}: damaged: step {}", where, info.step);
  if (manifest.contains(data_field)) info.data = field<std::string>(manifest, data_field, where);
  if (manifest.contains(settings_field))
    info.settings = field<std::map<std::string, std::string>>(manifest, settings_field, where);
  if (manifest.contains("compress")) {
    info.compression =
        parse_compression(field<std::string>(manifest, "compress", where), where + ": compress");
    info.residual_ranks = field<int>(manifest, "residual-ranks", where);
    if (info.residual_ranks < 1) refuse("{}: damaged: residual-ranks {}", where, info.residual_ranks);
  }
  return info;
}

std::string checksum_of(const std::string& text) {
  return fmt::format("{:016x}", checksum(std::as_bytes(std::span(text.data(), text.size()))));
}

std::shared_ptr<const TokenizerFiles> read_tokenizer_beside(const json& manifest, const fs::path& path,
                                                            const std::string& where) {
  if (!manifest.contains(tokenizer_field)) return nullptr;
  auto files = std::make_shared<TokenizerFiles>();
  for (const auto& [name, sum] :
       field<std::map<std::string, std::string>>(manifest, tokenizer_field, where)) {
    if (!is_tokenizer_file(name)) refuse("{}: damaged: {} is no file of a tokenizer", where, name);
    std::string text = read_text((path / name).string());
    if (checksum_of(text) != sum) refuse("{}: damaged: its checksum is another one", (path / name).string());
    files->emplace(name, std::move(text));
  }
  return files;
}

}  // namespace

std::string seal_manifest(const std::string& text) {
  json manifest = json::parse(text);
  manifest[seal_field] = seal_of(manifest);
  return manifest.dump(1) + "\n";
}

std::string manifest_text(const CheckpointInfo& info, const Checksums& checksums) {
  json manifest{{"format", format_name},
                {"step", info.step},
                {"updates", info.updates},
                {"seed", info.seed},
                {"tokens", info.tokens},
                {"dtype", dtype_name(info.dtype)},
                {"model", to_toml(info.model)},
                {"checksums", checksums},
                {"ids", info.trained_on == TokenData::Kind::text ? byte_ids : token_ids}};
  if (info.optimizer != OptimizerKind::adamw) manifest[optimizer_field] = name_of(info.optimizer);
  if (!info.data.empty()) manifest[data_field] = info.data;
  if (!info.settings.empty()) manifest[settings_field] = info.settings;
  if (info.tokenizer != nullptr)
    for (const auto& [name, text] : *info.tokenizer) manifest[tokenizer_field][name] = checksum_of(text);
  if (info.residual_ranks > 0) {
    manifest["compress"] = compression_text(info.compression);
    manifest["residual-ranks"] = info.residual_ranks;
  }
  return seal_manifest(manifest.dump());
}

Manifest read_manifest(const fs::path& path) {
  const std::string where = (path / manifest_name).string();
  std::error_code error;
  if (fs::status(path / manifest_name, error).type() == fs::file_type::not_found)
    refuse("{}: there is no checkpoint here ({} is missing)", path.string(), manifest_name);
  const json manifest = parse_json(read_text(where, "", largest_manifest), where + ": damaged");
  if (!manifest.is_object()) refuse("{}: damaged: not a JSON object", where);
  if (field<std::string>(manifest, "format", where) != format_name)
    throw ForeignFormat(fmt::format("{}: format \"{}\" is not one that this version reads; legal: \"{}\"",
                                    where, field<std::string>(manifest, "format", where), format_name));
  Manifest read{read_info(manifest, where), field<Checksums>(manifest, "checksums", where)};
  read.info.path = path.string();
  if (field<std::string>(manifest, seal_field, where) != seal_of(manifest))
    refuse("{}: damaged: its own checksum, \"{}\", is another one", where, seal_field);
  for (const auto& [file, tensors] : read.checksums)
    if (file.find('/') != std::string::npos)
      refuse("{}: damaged: \"checksums\" has {}, which is no name of a file", where, file);
  read.info.tokenizer = read_tokenizer_beside(manifest, path, where);
  return read;
}

void refuse_without_checkpoint(std::string_view field, const std::string& path) {
  std::error_code none;
  if (fs::exists(fs::path(path) / "config.json", none))
    refuse(
        "{} {}: holds a model in Hugging Face's layout and no checkpoint; echelon checkpoint import {} --out "
        "DIR makes one",
        field, path, shell_word(path));
  refuse("{} {}: holds no checkpoint (no step-... directory with a {})", field, path, manifest_name);
}

std::string checksums_text(const Checksums& checksums) { return json(checksums).dump() + "\n"; }

Checksums parse_checksums(const std::string& text, const std::string& where) {
  return field<Checksums>(json{{"checksums", parse_json(text, where)}}, "checksums", where);
}

}  // namespace echelon

// Writes a checkpoint's model in Hugging Face's layout.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/atomic_file.h"
#include "base/error.h"
#include "base/json_text.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/hugging_face.h"
#include "checkpoint/hugging_face_shards.h"
#include "checkpoint/hugging_face_tensors.h"
#include "checkpoint/new_directory.h"
#include "checkpoint/router_biases.h"
#include "checkpoint/stored_model.h"
#include "spec/model_types.h"
#include "text/tokenizer.h"

namespace echelon {

using nlohmann::json;
using nlohmann::ordered_json;

TextBounds text_bounds(const TokenizerFiles& files, const std::string& directory) {
  TextBounds bounds{begin_of_generation(files), ends_of_generation(files)};
  std::shared_ptr<const Tokenizer> tokenizer;
  try {
    tokenizer = read_tokenizer(directory);
  } catch (const RequestError&) {
    return bounds;
  }
  bounds.ends = ends_of_texts(*tokenizer, files);
  const auto config = files.find("tokenizer_config.json");
  if (config == files.end()) return bounds;
  const json fields = parse_json(config->second, config->first);
  json name = fields.is_object() ? fields.value("bos_token", json()) : json();
  if (name.is_object()) name = name.value("content", json());
  if (!name.is_string()) return bounds;
  if (const auto ids = tokenizer->encode(name.get<std::string>()); ids.size() == 1)
    bounds.begin = ids.front();
  return bounds;
}

void export_hugging_face(const std::string& checkpoint, const std::string& directory,
                         std::int64_t shard_bytes, std::optional<DType> asked) {
  if (shard_bytes < 1) refuse("--shard-bytes {}: must be at least 1", shard_bytes);
  CheckpointReader reader(read_checkpoint_info(checkpoint).path);
  const CheckpointInfo& info = reader.info();
  const DType dtype = asked.value_or(info.dtype);
  ModelSpec model = info.model;
  model.tuning = {};  // only concerns training
  TextBounds bounds;
  if (reads_bytes(info)) bounds = {end_of_text, {end_of_text}};
  std::string config = hugging_face_config(model, dtype, bounds);
  const TransformersType& type = transformers_type(model);
  if (!has_router_biases(model, type) && !read_router_biases(reader).empty())
    refuse(
        "{}: its routers choose by biases (--bias-rate), which {} has no place for in Hugging Face's layout; "
        "legal: a checkpoint of a run without",
        info.path, info.model.name);
  NewDirectory out(directory);
  const Adapters adapters = adapters_of(info.model);
  std::vector<FileTensor> tensors = file_tensors(model, type);
  if (model.num_mtp_layers > 0)  // as in DeepSeek's published files
    for (const auto& [copy, original] : shared_with_module(model)) {
      const auto found = std::find_if(tensors.begin(), tensors.end(),
                                      [&name = original](const FileTensor& t) { return t.name == name; });
      tensors.push_back({copy, found->parts});
    }
  const auto shards = cut_into_shards(tensors, dtype, shard_bytes);
  ordered_json weights = ordered_json::object();
  std::int64_t bytes = 0;
  for (const Shard& shard : shards) {
    write_shard(reader, shard, adapters, out.path(shard.name), dtype);
    for (const FileTensor& tensor : shard.tensors) {
      weights[tensor.name] = shard.name;
      bytes += tensor.numel() * element_bytes(type_in_file(tensor, dtype));
    }
  }
  if (shards.size() > 1)
    write_file_atomically(
        out.path(index_file),
        ordered_json{{"metadata", {{"total_size", bytes}}}, {"weight_map", weights}}.dump(2) + "\n");
  if (info.tokenizer != nullptr) {
    for (const auto& [name, text] : *info.tokenizer) write_file_atomically(out.path(name), text);
    config = hugging_face_config(model, dtype, text_bounds(*info.tokenizer, out.path("")));
  }
  write_file_atomically(out.path("config.json"), config);
  out.finish("config.json");
}

}  // namespace echelon

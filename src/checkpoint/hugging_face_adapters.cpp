// Writes adapters as PEFT reads them.
#include <cmath>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "base/atomic_file.h"
#include "base/error.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/hugging_face.h"
#include "checkpoint/hugging_face_shards.h"
#include "checkpoint/hugging_face_tensors.h"
#include "checkpoint/new_directory.h"
#include "spec/fine_tuning.h"

namespace echelon {

using nlohmann::json;
using nlohmann::ordered_json;

void export_adapters(const std::string& checkpoint, const std::string& directory,
                     std::optional<DType> asked) {
  CheckpointReader reader(read_checkpoint_info(checkpoint).path);
  const ModelSpec& model = reader.info().model;
  const Lora& lora = model.tuning.lora;
  if (lora.rank == 0)
    refuse("--adapters: {} has none; legal: a checkpoint of train --lora", reader.info().path);
  const std::vector<AdaptedMatrix> all = adapted_matrices(model);
  const auto any_named = [&all](std::initializer_list<const char*> parts) {
    return std::any_of(all.begin(), all.end(), [&](const AdaptedMatrix& one) {
      return std::any_of(parts.begin(), parts.end(),
                         [&](const char* part) { return one.weight.name.find(part) != std::string::npos; });
    });
  };
  const auto refuse_as_one = [&model](const char* what) {
    refuse(
        "--adapters: {} has {} as one matrix in Hugging Face's layout, where an adapter of each part has no "
        "place; legal: without --adapters, which adds them to the weights",
        model.name, what);
  };
  if (any_named({".conv.in_proj."})) refuse_as_one("what is projected to be convolved");
  if ((model.fused_projections || model.family == Family::neox) &&
      any_named({".q_proj.", ".k_proj.", ".v_proj."}))
    refuse_as_one("queries, keys and values");
  if ((model.fused_projections || model.fused_mlp) && any_named({".gate_proj.", ".up_proj."}))
    refuse_as_one("gate and up");
  // PEFT would take these names for the matrices of all experts, which are one parameter in its model.
  if (model.experts != Experts::none && any_named({".gate_proj.", ".up_proj.", ".down_proj."}))
    refuse(
        "--adapters: {} has routed experts, to which PEFT gives the adapters of its MLPs; legal: without "
        "--adapters, which adds them to the weights",
        model.name);
  const TransformersType& type = transformers_type(model);
  std::set<std::string> names;
  for (const AdaptedMatrix& one : all)
    if (!names.insert(renamed(type, one.a.name)).second)
      refuse(
          "--adapters: {} has several matrices as one in Hugging Face's layout, {}, where an adapter of each "
          "has no "
          "place; legal: without --adapters, which adds them to the weights",
          model.name, renamed(type, one.weight.name));
  NewDirectory out(directory);
  const DType dtype = asked.value_or(reader.info().dtype);
  Shard shard{"adapter_model.safetensors", {}};
  const auto module_in_file = [&](ParamSpec weight) {
    weight.name = renamed(type, weight.name);
    return module_of(weight);
  };
  // The module's name without the layer's number.
  const auto in_layer = [](const std::string& module) {
    return module.substr(module.find('.', module.find_first_of("0123456789")) + 1);
  };
  std::map<std::string, std::set<std::string>> adapted;  // by their names in a layer
  for (const AdaptedMatrix& one : all) {
    for (const ParamSpec& factor : {one.a, one.b})
      shard.tensors.push_back({"base_model.model." + renamed(type, factor.name), {factor}});
    const std::string module = module_in_file(one.weight);
    adapted[in_layer(module)].insert(module);
  }
  // If some layers have such a matrix without an adapter, the adapted ones are listed by their full names.
  std::set<std::string> modules;
  for (const auto& [name, whole] : adapted) modules.insert(name);
  for (const ParamSpec& weight : adaptable_matrices(model)) {
    const std::string module = module_in_file(weight), name = in_layer(module);
    if (!adapted.contains(name) || adapted[name].contains(module)) continue;
    modules.erase(name);
    modules.insert(adapted[name].begin(), adapted[name].end());
  }
  write_shard(reader, shard, {}, out.path(shard.name), dtype);
  const bool is_whole = lora.alpha == std::floor(lora.alpha) && lora.alpha < 0x1p53;
  const ordered_json config{
      {"peft_type", "LORA"},
      {"task_type", "CAUSAL_LM"},
      {"base_model_name_or_path", nullptr},
      {"r", lora.rank},
      {"lora_alpha", is_whole ? json(static_cast<std::int64_t>(lora.alpha)) : json(lora.alpha)},
      {"lora_dropout", 0.0},
      {"target_modules", modules},
      {"bias", "none"},
      {"fan_in_fan_out", model.family == Family::gpt2},
      {"inference_mode", true}};
  write_file_atomically(out.path("adapter_config.json"), config.dump(2) + "\n");
  out.finish("adapter_config.json");
}

}  // namespace echelon

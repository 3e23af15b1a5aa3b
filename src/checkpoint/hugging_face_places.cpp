#include "checkpoint/hugging_face_places.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/json_text.h"
#include "base/open_file.h"
#include "checkpoint/hugging_face_tensors.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Masks and frequencies that older versions of transformers saved beside the parameters.
bool is_constant(const std::string& name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
         name.ends_with(".attn.causal_mask") || name.ends_with(".attention.bias") ||
         name.ends_with(".attention.masked_bias") || name.ends_with("rotary_emb.inv_freq") ||
         name.ends_with("rotary_pos_emb.inv_freq");
}

// Modules that predict one more token come after the last layer; transformers leaves them out.
bool is_behind_the_last(const ModelSpec& model, const std::string& name) {
  return name.starts_with(fmt::format("model.layers.{}.", model.num_layers));
}

// Modules of other types, some with names of their own (Nemotron 3's): they are left out here too.
bool is_left_out(const ModelSpec& model, const TransformersType& type, const std::string& name) {
  const std::string_view named = type.name;
  if (named == "ernie4_5_moe") return name.starts_with("model.mtp_");
  if (named == "hy_v3") return is_behind_the_last(model, name);
  return (named == "nemotron_h" || named == "exaone_moe" || named == "mellum" ||
          model.state_space.is_delta()) &&
         name.starts_with("mtp.");
}

// In models that also see images, the text model's names begin with text_model, or with inner_text_model in
// place of "model.".
const std::string text_model = "language_model.", inner_text_model = "model.language_model.";

// The tensor of this name; also without the prefix that a model without its output layer (AutoModel) is saved
// without, or in the text part of a model that sees images. nullptr if there is none.
const std::string* find_tensor(const StoredModel& stored, const std::string& name) {
  const std::string* found = stored.find(name);
  for (const std::string_view prefix : {"transformer.", "gpt_neox.", model_prefix})
    if (found == nullptr && name.starts_with(prefix)) found = stored.find(name.substr(prefix.size()));
  if (found == nullptr) found = stored.find(text_model + name);
  if (found == nullptr && name.starts_with(model_prefix))
    found = stored.find(inner_text_model + name.substr(std::string_view(model_prefix).size()));
  return found;
}

// All matrices of experts in one tensor (experts, in, out), up after gate: as Qwen3-VL is published.
FileTensor with_turned_experts(FileTensor stacked) {
  stacked.expert_parts = std::ssize(stacked.parts) / stacked.stacked;
  stacked.in_turn = false;
  stacked.stacked = 0;
  return stacked;
}

// The matrices of experts of a layer as one tensor, up after gate: as transformers holds models in memory,
// and as in Qwen3.5's files, where other types have separate matrices. For types with turned_experts,
// transformers writes and reads both orientations; the shapes tell which one it is.
std::vector<FileTensor> with_stacked_experts(const StoredModel& stored, const TransformersType& type,
                                             std::vector<FileTensor> tensors) {
  const std::string before = ".experts.";
  std::vector<FileTensor> all;
  std::map<std::string, std::size_t> places;
  for (FileTensor& tensor : tensors) {
    const auto at = tensor.name.find(before);
    if (at == std::string::npos || tensor.parts.front().expert < 0 || tensor.expert_parts > 0 ||
        tensor.stacked > 0) {
      all.push_back(std::move(tensor));
      continue;
    }
    const auto number = at + before.size(), end = tensor.name.find('.', number) + 1;
    std::string name = tensor.name.substr(0, number) + tensor.name.substr(end);
    name.erase(name.rfind(".weight"));
    bool counts = true;  // counts as its expert's first part
    const auto last = name.rfind('.') + 1;
    const std::string part = name.substr(last);
    if ((part == "gate_proj" || part == "up_proj") && find_tensor(stored, name) == nullptr) {
      name.replace(last, std::string::npos, "gate_up_proj");
      counts = part == "gate_proj";
    }
    if (find_tensor(stored, name) == nullptr) {
      all.push_back(std::move(tensor));
      continue;
    }
    const auto [place, is_new] = places.emplace(name, all.size());
    if (is_new) all.push_back({name, {}});
    all[place->second].parts.push_back(tensor.parts.front());
    if (counts) ++all[place->second].stacked;
  }
  const auto is_turned = [&](const auto& at) {
    const FileTensor& tensor = all[at.second];
    return stored.shape(*find_tensor(stored, tensor.name)) == with_turned_experts(tensor).shape();
  };
  if (type.turned_experts && std::ranges::all_of(places, is_turned))
    for (const auto& [name, place] : places) all[place] = with_turned_experts(std::move(all[place]));
  return all;
}

// The tensors of these files.
std::vector<FileTensor> stored_tensors(const StoredModel& stored, const ModelSpec& model,
                                       const TransformersType& type) {
  std::vector<FileTensor> tensors = file_tensors(model, type);
  const auto is_there = [&](const FileTensor& tensor) {
    return tensor.name.starts_with(type.prefix) && find_tensor(stored, tensor.name) != nullptr;
  };
  if (type.prefix != nullptr &&
      std::ranges::none_of(tensors, is_there))  // as transformers holds it in memory
    for (FileTensor& tensor : tensors)
      if (tensor.name.starts_with(type.prefix))
        tensor.name.replace(0, std::string(type.prefix).size(), model_prefix);
  return with_stacked_experts(stored, type, std::move(tensors));
}

// Of a tied model, its matrix under the name of the output's, which files may have too or alone; nullptr if
// they do not.
const std::string* find_tied_output(const StoredModel& stored, ModelSpec model,
                                    const TransformersType& type) {
  if (!model.tied_embedding) return nullptr;
  model.tied_embedding = false;
  return find_tensor(stored, renamed(type, output_matrix(model).name));
}

// Whether the configuration has a part for images.
bool sees_images(const std::string& directory) {
  const std::string path = (fs::path(directory) / "config.json").string();
  const json config = parse_python_json(read_text(path), path);
  return config.is_object() && config.contains("vision_config");
}

// Whether the name is of scales and zeros of quantized weights.
bool is_of_quantized(const std::string& name) {
  for (const char* end : {"_scale", "_scale_inv", ".scales", ".qweight", ".qzeros", ".absmax", "_packed"})
    if (name.ends_with(end)) return true;
  return false;
}

}  // namespace

bool predicts_more(const ModelSpec& model, const TransformersType& type, const std::string& name) {
  return type.predicts_more && is_behind_the_last(model, name);
}

bool is_for_images(const std::string& name) {
  const std::string_view inner = name.starts_with(model_prefix)
                                     ? std::string_view(name).substr(std::string_view(model_prefix).size())
                                     : name;
  return inner.starts_with("vision_tower.") || inner.starts_with("multi_modal_projector.") ||
         inner.starts_with("visual.");
}

std::map<std::string, StoredPlace> stored_places(const StoredModel& stored, const ModelSpec& model,
                                                 const TransformersType& type) {
  std::set<std::string> left = stored.names();
  std::map<std::string, StoredPlace> places;
  const ParamSpec table = embedding_parameters(model).front();
  const std::string* const output = find_tied_output(stored, model, type);
  for (const FileTensor& tensor : stored_tensors(stored, model, type)) {
    const std::string* name = find_tensor(stored, tensor.name);
    if (name == nullptr && tensor.parts.front().name == table.name) name = output;
    if (tensor.constant) {
      if (name == nullptr) continue;
      const double value = stored.numbers(*name, {}).all().front();
      if (std::abs(value - *tensor.constant) > 0x1p-8 * std::abs(*tensor.constant))
        refuse("{}: {} = {} is not supported: only {} is", stored.directory(), *name, value,
               *tensor.constant);
      left.erase(*name);
      continue;
    }
    if (name == nullptr && stored.find(tensor.name + "_blocks") != nullptr)
      refuse(
          "{}: {} is kept as MXFP4 ({}_blocks and _scales), which is not read; legal: an export that is not "
          "quantized, in F64, F32, F16 or BF16",
          stored.directory(), tensor.name, tensor.name);
    if (name == nullptr) refuse("{}: there is no tensor {}", stored.directory(), tensor.name);
    (void)stored.numbers(*name, tensor.shape());  // checks the configuration's sizes before they are used
    std::int64_t row = 0, number = 0;
    for (const ParamSpec& part : tensor.parts) {
      StoredPlace& place = places[part.name] = {*name, tensor.shape()};
      if (const std::int64_t parts = tensor.expert_parts; parts > 0) {
        place.first_row = number / parts;
        place.expert_parts = parts;
        place.part = number++ % parts;
        place.in_turn = tensor.in_turn;
        continue;
      }
      const std::int64_t in_turn = part.shape.front() / tensor.turns;
      place.first_row = row;
      if (tensor.turns > 1) place.run = in_turn, place.step = tensor.shape().front() / tensor.turns;
      row += in_turn;
    }
    left.erase(*name);
  }
  const bool sees = sees_images(stored.directory());
  const auto check_same = [&](const std::string& copy, const std::string& original, const char* key,
                              const char* legal) {
    if (left.erase(copy) > 0 && !stored.equal(copy, places[original].name, table.shape))
      refuse("{}: {}, and yet {} is not {}; legal: {} in config.json", stored.directory(), key, copy,
             original, legal);
  };
  if (output != nullptr) check_same(*output, table.name, "tie_word_embeddings", "false");
  if (model.num_mtp_layers > 0)
    for (const auto& [copy, original] : shared_with_module(model))
      check_same(copy, original, "num_nextn_predict_layers", "0");
  for (const std::string& name : left)
    if (!is_constant(name) && !predicts_more(model, type, name) && !is_left_out(model, type, name) &&
        !(sees && is_for_images(name)))
      refuse(
          "{}: {} is no tensor of its model{}", stored.directory(), name,
          is_of_quantized(name)
              ? ", but of quantized weights; legal: an export that is not quantized, in F64, F32, F16 or BF16"
              : "");
  return places;
}

}  // namespace echelon

#include "checkpoint/hugging_face_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string_view>

#include "base/error.h"
#include "checkpoint/router_biases.h"

namespace echelon {
namespace {

// For a parameter of an expert, the tensor with those of all experts, and how many parameters each expert has
// in it.
std::pair<std::string, std::int64_t> tensor_of_all_experts(const std::string& name) {
  const std::string before = ".experts.";
  const auto number = name.find(before) + before.size(), last = name.rfind('.');
  const auto end_of_number = name.find('.', number) + 1;
  const std::string what = name.substr(end_of_number, last - end_of_number);
  const bool down = what == "down_proj";
  return {name.substr(0, number) + (down ? what : "gate_up_proj") + (name.ends_with(".bias") ? "_bias" : ""),
          down ? 1 : 2};
}

// The gated delta rule: parts of names, ours and those in files, which have the projections as two matrices
// with heads of keys alternating (Qwen3-Next), or as four (Qwen3.5).
struct DeltaNames {
  const char *ours, *two, *four;
};
constexpr DeltaNames delta_names[] = {{"in_proj.z.", "in_proj_qkvz.", "in_proj_z."},
                                      {"in_proj.v.", "in_proj_qkvz.", "in_proj_qkv."},
                                      {"in_proj.k.", "in_proj_qkvz.", "in_proj_qkv."},
                                      {"in_proj.q.", "in_proj_qkvz.", "in_proj_qkv."},
                                      {"in_proj.a.", "in_proj_ba.", "in_proj_a."},
                                      {"in_proj.b.", "in_proj_ba.", "in_proj_b."},
                                      {"conv1d.v.", "conv1d.", "conv1d."},
                                      {"conv1d.k.", "conv1d.", "conv1d."},
                                      {"conv1d.q.", "conv1d.", "conv1d."}};

}  // namespace

std::vector<std::int64_t> FileTensor::shape() const {
  std::vector<std::int64_t> whole = parts.front().shape;
  if (expert_parts > 0) {
    std::reverse(whole.begin(), whole.end());
    whole.back() *= expert_parts;
    whole.insert(whole.begin(), std::ssize(parts) / expert_parts);
    return whole;
  }
  for (std::size_t i = 1; i < parts.size(); ++i) whole.front() += parts[i].shape.front();
  if (stacked > 0) {
    whole.front() /= stacked;
    whole.insert(whole.begin(), stacked);
  }
  if (depthwise) whole.insert(whole.begin() + 1, 1);
  return whole;
}

std::int64_t FileTensor::numel() const {
  std::int64_t sum = 0;
  for (const ParamSpec& part : parts) sum += part.numel();
  return sum;
}

std::string renamed(const TransformersType& type, std::string name) {
  for (const auto& [ours, theirs] : type.renamed)
    if (const auto at = name.find(ours); at != std::string::npos)
      name.replace(at, std::string(ours).size(), theirs);
  if (type.prefix != nullptr && name.starts_with(model_prefix))
    name.replace(0, std::string(model_prefix).size(), type.prefix);
  return name;
}

bool has_router_biases(const ModelSpec& model, const TransformersType& type) {
  return model.experts != Experts::none && type.router_biases;
}

std::vector<std::int64_t> biased_layers(const ModelSpec& model, const TransformersType& type) {
  return has_router_biases(model, type) ? model.routed_layers() : std::vector<std::int64_t>();
}

std::vector<FileTensor> file_tensors(const ModelSpec& model, const TransformersType& type) {
  constexpr std::array<std::pair<const char*, const char*>, 2> latent{
      {{"self_attn.kv_a_proj.", "self_attn.kv_a_proj_with_mqa."},
       {"self_attn.k_rope_proj.", "self_attn.kv_a_proj_with_mqa."}}};
  constexpr const char *convolved = "mamba.conv1d.", *short_conv = ".conv.conv.weight";
  constexpr std::array<const char*, 3> of_channels{"mamba.in_proj.", convolved, ".conv.in_proj."};
  constexpr std::array<std::pair<const char*, const char*>, 7> fused{
      {{"self_attn.q_proj.", "self_attn.qkv_proj."},
       {"self_attn.k_proj.", "self_attn.qkv_proj."},
       {"self_attn.v_proj.", "self_attn.qkv_proj."},
       {"mlp.gate_proj.", "mlp.gate_up_proj."},
       {"mlp.up_proj.", "mlp.gate_up_proj."},
       {"mlp.shared_experts.gate_proj.", "mlp.shared_experts.gate_up_proj."},
       {"mlp.shared_experts.up_proj.", "mlp.shared_experts.gate_up_proj."}}};
  constexpr std::array<const char*, 3> head_by_head{"attention.q_proj.", "attention.k_proj.",
                                                    "attention.v_proj."};
  const bool in_two = type.name == std::string_view("qwen3_next"),
             in_fours = type.name == std::string_view("codegen"),
             by_groups = type.name == std::string_view("falcon") || type.name == std::string_view("bloom") ||
                         type.name == std::string_view("internlm2");
  std::vector<FileTensor> tensors;
  std::map<std::string, std::size_t> of_experts;
  for (const ParamSpec& spec : all_parameters(model)) {
    std::string name = spec.name;
    if (model.experts == Experts::gpt_oss && spec.expert >= 0) {
      const auto [all, parts] = tensor_of_all_experts(name);
      const auto [place, is_new] = of_experts.emplace(all, tensors.size());
      if (is_new) tensors.push_back({all, {}, 1, parts});
      tensors[place->second].parts.push_back(spec);
      continue;
    }
    if (type.stacked_experts && spec.expert >= 0) {
      const auto [place, is_new] =
          of_experts.emplace(renamed(type, tensor_of_all_experts(name).first), tensors.size());
      if (is_new) tensors.push_back({place->first, {}});
      tensors[place->second].stacked = model.num_experts;
      tensors[place->second].parts.push_back(spec);
      continue;
    }
    for (const auto& [part, whole] : fused)
      if (const auto at = name.find(part);
          at != std::string::npos &&
          (model.fused_projections || (model.fused_mlp && std::string_view(part).starts_with("mlp"))))
        name.replace(at, std::string(part).size(), whole);
    for (const auto& [part, whole] : latent)
      if (const auto at = name.find(part); at != std::string::npos)
        name.replace(at, std::string(part).size(), whole);
    bool depthwise = name.ends_with(short_conv);
    for (const char* whole : of_channels)
      if (const auto at = name.find(whole); at != std::string::npos) {
        const auto part = at + std::string(whole).size();
        name.erase(part, name.find('.', part) + 1 - part);
        depthwise = spec.shape.size() > 1 && whole == convolved;
      }
    if (model.parallel_norms)
      for (const auto& [ours, theirs] :
           {std::pair{".input_layernorm.", ".ln_attn."}, {".post_attention_layernorm.", ".ln_mlp."}})
        if (const auto at = name.find(ours); at != std::string::npos)
          name.replace(at, std::string(ours).size(), theirs);
    name = renamed(type, name);
    std::int64_t turns = 1;
    for (const char* part : head_by_head)
      if (const auto at = name.find(part); model.family == Family::neox && at != std::string::npos) {
        name.replace(at, std::string(part).size(), "attention.query_key_value.");
        turns = model.num_heads;
      }
    if (in_fours && name.find(".qkv_proj.") != std::string::npos) turns = 4;
    // For each key/value head: the queries that see it, then its keys and its values.
    if (by_groups &&
        (name.find(".query_key_value.") != std::string::npos || name.find(".wqkv.") != std::string::npos))
      turns = model.num_kv_heads;
    for (const DeltaNames& names : delta_names) {
      const auto at = name.find(names.ours);
      if (at == std::string::npos || !model.state_space.is_delta()) continue;
      const bool convolves = std::string_view(names.ours).starts_with("conv1d.");
      name.replace(at, std::string(names.ours).size(), in_two ? names.two : names.four);
      turns = in_two && !convolves ? model.state_space.groups : 1;
      depthwise = convolves && spec.shape.size() > 1;
      break;
    }
    if (const auto at = name.find("self_attn.gate_proj.");
        model.state_space.is_delta() && at != std::string::npos) {
      name.replace(at + std::string("self_attn.").size(), std::string("gate").size(), "q");
      const auto queries = std::find_if(tensors.begin(), tensors.end(),
                                        [&name](const FileTensor& tensor) { return tensor.name == name; });
      check(queries != tensors.end(), "queries come before what they are gated by");
      queries->turns = model.num_heads;
      queries->parts.push_back(spec);
      continue;
    }
    if (tensors.empty() || tensors.back().name != name)
      tensors.push_back({name, {}, turns, 0, true, depthwise});
    tensors.back().parts.push_back(spec);
  }
  if (in_fours)  // a fourth for each of the devices that it was trained on: queries, values, keys
    for (FileTensor& tensor : tensors)
      if (tensor.parts.size() > 1) std::swap(tensor.parts[1], tensor.parts[2]);
  if (model.state_space.is_delta())  // files have keys after queries, and values after both
    for (FileTensor& tensor : tensors)
      if (tensor.name.find("linear_attn.") != std::string::npos)
        std::reverse(tensor.parts.begin(), tensor.parts.end());
  if (model.activation == Activation::xielu)
    for (std::int64_t layer = 0; layer < model.num_layers; ++layer)
      for (const auto& [name, value] : {std::pair{"beta", Xielu::beta}, {"eps", Xielu::largest}}) {
        ParamSpec number;
        number.name = fmt::format("model.layers.{}.mlp.act_fn.{}", layer, name);
        tensors.push_back({number.name, {number}});
        tensors.back().constant = value;
      }
  for (const std::int64_t layer : biased_layers(model, type)) {
    ParamSpec bias;
    bias.name = router_bias_name(model, layer);
    bias.shape = {model.num_experts};
    tensors.push_back({renamed(type, bias.name), {bias}});
    if (type.name == std::string_view("ernie4_5_moe")) tensors.back().stacked = 1;  // a matrix with one row
  }
  return tensors;
}

std::array<std::pair<std::string, std::string>, 2> shared_with_module(const ModelSpec& model) {
  const std::string at = fmt::format("model.layers.{}.", model.num_layers);
  return {{{at + "embed_tokens.weight", embedding_parameters(model).front().name},
           {at + "shared_head.head.weight", output_matrix(model).name}}};
}

std::vector<std::int64_t> rows_in_files(const ModelSpec& model, const ParamSpec& spec) {
  const bool latent = model.latent_attention(), back = transformers_type(model).turns_back;
  if (!latent && !model.interleaved_rope && !back) return {};
  const auto is_of = [&spec](const char* module) {
    return spec.name.find(module) != std::string::npos && !spec.name.ends_with(".lora_A.weight");
  };
  const bool whole_heads = is_of(".q_b_proj.") || is_of(".q_proj.") || (!latent && is_of(".k_proj."));
  if (!whole_heads && !is_of(".k_rope_proj.")) return {};
  const std::int64_t turned = model.turned_width(), head = whole_heads ? model.head_dim : turned,
                     first = latent ? head - turned : 0;
  std::vector<std::int64_t> rows;
  for (std::int64_t begin = 0; begin < spec.shape.front(); begin += head)
    for (std::int64_t i = 0; i < head; ++i) {
      const std::int64_t of = i - first;  // index among the rotated rows
      const std::int64_t from = back ? (of + turned / 2) % turned : of / 2 + of % 2 * (turned / 2);
      rows.push_back(begin + (of < 0 || of >= turned ? i : first + from));
    }
  return rows;
}

double less_in_files(const ModelSpec& model, const ParamSpec& spec) {
  const bool of_scan = spec.name.find(".linear_attn.") != std::string::npos;
  return model.norms_less_one && spec.init == Init::ones && !of_scan ? 1 : 0;
}

}  // namespace echelon

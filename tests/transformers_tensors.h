// Tensors of transformers' files, said independently of src/checkpoint: how each fixture names them, and in
// what order they have the numbers of parameters.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/safetensors.h"
#include "spec/model_spec.h"

namespace echelon::checks {

// All numbers of a tensor.
inline std::vector<double> values_of(const SafetensorsFile& file, const std::string& name) {
  const StoredTensor& tensor = file.at(name);
  const auto bytes = file.bytes(tensor);
  std::vector<double> values(static_cast<std::size_t>(tensor.numel()));
  const auto read = [&]<class T>(T) {
    std::vector<T> raw(values.size());
    std::memcpy(raw.data(), bytes.data(), bytes.size());
    std::copy(raw.begin(), raw.end(), values.begin());
  };
  if (tensor.type == StoredType::f64) read(double{});
  if (tensor.type == StoredType::f32) read(float{});
  if (tensor.type == StoredType::i32) read(std::int32_t{});
  return values;
}

// A GPT-NeoX's or a Falcon's queries, keys and values, one behind the other, as its files have them: of
// each head of keys and values the queries that see it, and it.
inline std::vector<double> head_by_head(const ModelSpec& model, const std::vector<double>& whole) {
  const std::ptrdiff_t heads = model.num_kv_heads, all = model.num_heads + 2 * heads,
                       head = std::ssize(whole) / all;
  std::vector<double> in_file;
  for (std::ptrdiff_t h = 0; h < heads; ++h) {
    const std::ptrdiff_t queries = model.num_heads / heads;
    for (const auto& [first, count] : {std::pair{h * queries, queries},
                                       {model.num_heads + h, std::ptrdiff_t{1}},
                                       {model.num_heads + heads + h, std::ptrdiff_t{1}}})
      in_file.insert(in_file.end(), whole.begin() + first * head, whole.begin() + (first + count) * head);
  }
  return in_file;
}

// A CodeGen's: of each a fourth, values before keys, and the other fourths likewise.
inline std::vector<double> fourth_by_fourth(const std::vector<double>& whole) {
  const auto size = std::ssize(whole) / 12;
  std::vector<double> in_file;
  for (std::ptrdiff_t fourth = 0; fourth < 4; ++fourth)
    for (const std::ptrdiff_t part : {0, 2, 1}) {
      const auto begin = whole.begin() + (part * 4 + fourth) * size;
      in_file.insert(in_file.end(), begin, begin + size);
    }
  return in_file;
}

// What is turned has the two elements of a pair side by side in some files: of DeepSeek behind what is not
// turned, of others before it.
inline std::vector<double> pairs_together(const ModelSpec& model, std::int64_t head,
                                          const std::vector<double>& rows, std::int64_t width) {
  const std::int64_t turned = model.turned_width(), plain = model.latent_attention() ? head - turned : 0;
  std::vector<double> in_file(rows.size());
  for (std::int64_t row = 0; row < std::ssize(rows) / width; ++row) {
    const std::int64_t at = row % head, half = turned / 2;
    std::int64_t there = at;
    if (at >= plain && at < plain + turned)
      there = plain + (at - plain < half ? 2 * (at - plain) : 2 * (at - plain - half) + 1);
    std::copy_n(rows.begin() + row * width, width, in_file.begin() + (row - at + there) * width);
  }
  return in_file;
}

// A parameter's numbers in the order of the file.
inline std::vector<double> as_in_file(const ModelSpec& model, const ParamSpec& spec,
                                      std::vector<double> values) {
  const bool queries = spec.name.ends_with("q_proj.weight") || spec.name.ends_with("q_b_proj.weight");
  const bool keys = spec.name.ends_with("k_rope_proj.weight");
  if (model.embedding_norm && !model.alibi &&
      (queries || spec.name.ends_with("k_proj.weight"))) {  // nanochat's turn back
    const auto half = model.head_dim / 2 * spec.shape.back();
    for (auto begin = values.begin(); begin != values.end(); begin += 2 * half)
      std::swap_ranges(begin, begin + half, begin + half);
  }
  if (model.interleaved_rope &&
      (spec.name.find(".q_proj.") != std::string::npos || spec.name.find(".k_proj.") != std::string::npos))
    return pairs_together(model, model.head_dim, values, spec.shape.size() == 1 ? 1 : spec.shape.back());
  if (!model.latent_attention() || (!queries && !keys)) return values;
  return pairs_together(model, keys ? model.rotary_dim : model.head_dim, values, spec.shape.back());
}

// Of a state space what is projected is one tensor, and what is convolved.
inline std::string name_of_hybrid(const ModelSpec& model, std::string name) {
  for (const char* whole : {"mamba.in_proj.", "mamba.conv1d."})
    if (const auto at = name.find(whole); at != std::string::npos)
      name = name.substr(0, at) + whole + name.substr(name.rfind('.') + 1);
  if (!model.layer_pattern.empty() && name.starts_with("model.")) name = "backbone" + name.substr(5);
  if (const auto at = name.find("mlp.experts."); model.fused_mlp && at != std::string::npos)
    return name.substr(0, at) + "block_sparse_moe." +
           (name.ends_with("down_proj.weight") ? "output_linear.weight" : "input_linear.weight");
  using Names = std::vector<std::pair<const char*, const char*>>;
  const Names bamba{{"post_attention_layernorm", "pre_ff_layernorm"},
                    {".mlp.", ".feed_forward."},
                    {"model.norm", "model.final_layernorm"}},
      granite{{"mlp.shared_experts.gate_proj", "shared_mlp.input_linear"},
              {"mlp.shared_experts.up_proj", "shared_mlp.input_linear"},
              {"mlp.shared_experts.down_proj", "shared_mlp.output_linear"},
              {"mlp.gate.", "block_sparse_moe.router.layer."},
              {"mlp.gate_proj", "shared_mlp.input_linear"},
              {"mlp.up_proj", "shared_mlp.input_linear"},
              {"mlp.down_proj", "shared_mlp.output_linear"}},
      nemotron{{".input_layernorm.", ".norm."}, {".mamba.", ".mixer."},
               {".self_attn.", ".mixer."},      {".mlp.", ".mixer."},
               {"embed_tokens", "embeddings"},  {"backbone.norm", "backbone.norm_f"}};
  for (const auto& [ours, theirs] : !model.layer_pattern.empty() ? nemotron
                                    : model.fused_mlp            ? granite
                                                                 : bamba)
    if (const auto at = name.find(ours); at != std::string::npos)
      return name.replace(at, std::string(ours).size(), theirs);
  return name;
}

inline std::string name_of_delta_rule(std::string_view fixture, std::string name) {
  const bool two = fixture == "qwen3-next";  // and not four as Qwen3.5's
  using Names = std::vector<std::pair<const char*, const char*>>;
  for (const auto& [ours, theirs] : Names{{"in_proj.z", two ? "in_proj_qkvz" : "in_proj_z"},
                                          {"in_proj.v", two ? "in_proj_qkvz" : "in_proj_qkv"},
                                          {"in_proj.k", two ? "in_proj_qkvz" : "in_proj_qkv"},
                                          {"in_proj.q", two ? "in_proj_qkvz" : "in_proj_qkv"},
                                          {"in_proj.a", two ? "in_proj_ba" : "in_proj_a"},
                                          {"in_proj.b", two ? "in_proj_ba" : "in_proj_b"},
                                          {"conv1d.v", "conv1d"},
                                          {"conv1d.k", "conv1d"},
                                          {"conv1d.q", "conv1d"},
                                          {"self_attn.gate_proj", "self_attn.q_proj"}})
    if (const auto at = name.find(ours); at != std::string::npos)
      return name.replace(at, std::string(ours).size(), theirs);
  return name;
}

// From parts one behind the other, as the model has them, to theirs: the last one first, and of what is
// projected a part of each for every head of keys; of attention queries and gate for every head.
inline std::vector<double> of_delta_rule(const ModelSpec& model, const std::string& name,
                                         const std::vector<double>& values) {
  const StateSpaceSpec& s = model.state_space;
  const std::int64_t W = s.width(), G = s.groups * s.state, Q = model.attention_width();
  std::vector<std::int64_t> rows;
  std::int64_t turns = s.groups;
  if (name.find("qkvz") != std::string::npos) rows = {W, W, G, G};
  if (name.find("in_proj_ba") != std::string::npos) rows = {s.heads, s.heads};
  const bool four = name.find("in_proj_qkv.") != std::string::npos;
  if (name.find("conv1d") != std::string::npos || four) rows = {W, G, G}, turns = 1;
  const bool queries = name.find("q_proj") != std::string::npos;
  if (queries) rows = {Q, Q}, turns = model.num_heads;
  if (rows.empty()) return values;
  const std::int64_t all = std::accumulate(rows.begin(), rows.end(), std::int64_t{0}),
                     width = std::ssize(values) / all;
  std::vector<double> in_file;
  for (std::int64_t turn = 0; turn < turns; ++turn)
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::size_t part = queries ? i : rows.size() - 1 - i;
      const std::int64_t begin = std::accumulate(
                             rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(part), std::int64_t{0}),
                         each = rows[part] / turns * width, first = begin * width + turn * each;
      in_file.insert(in_file.end(), values.begin() + first, values.begin() + first + each);
    }
  return in_file;
}

// LFM2's norms, projections and MLPs have names of their own, and what is projected to be convolved is one
// tensor.
inline std::string name_of_short_conv(std::string name) {
  using Names = std::vector<std::pair<const char*, const char*>>;
  for (const auto& [ours, theirs] : Names{{"in_proj.b.", "in_proj."},
                                          {"in_proj.c.", "in_proj."},
                                          {"in_proj.x.", "in_proj."},
                                          {"input_layernorm", "operator_norm"},
                                          {"post_attention_layernorm", "ffn_norm"},
                                          {"q_norm", "q_layernorm"},
                                          {"k_norm", "k_layernorm"},
                                          {"o_proj", "out_proj"},
                                          {"mlp.", "feed_forward."},
                                          {"gate_proj", "w1"},
                                          {"up_proj", "w3"},
                                          {"down_proj", "w2"},
                                          {"model.norm", "model.embedding_norm"}})
    if (const auto at = name.find(ours); at != std::string::npos)
      name.replace(at, std::string(ours).size(), theirs);
  return name;
}

// Types with names of their own: what these have in place of ours.
inline std::string name_of_its_own(const std::string& fixture, std::string name) {
  using Names = std::vector<std::pair<const char*, const char*>>;
  const auto of_gpt = [](Names all) {
    all.insert(all.end(), {{"model.embed_tokens", "transformer.wte"},
                           {"model.embed_positions", "transformer.wpe"},
                           {"model.norm", "transformer.ln_f"},
                           {"model.layers", "transformer.h"},
                           {"input_layernorm", "ln_1"},
                           {"post_attention_layernorm", "ln_2"}});
    return all;
  };
  const auto of_falcon = [](Names all) {
    all.insert(all.end(), {{"self_attn.q_proj", "self_attention.query_key_value"},
                           {"self_attn.k_proj", "self_attention.query_key_value"},
                           {"self_attn.v_proj", "self_attention.query_key_value"},
                           {"self_attn.o_proj", "self_attention.dense"},
                           {"mlp.up_proj", "mlp.dense_h_to_4h"},
                           {"mlp.down_proj", "mlp.dense_4h_to_h"},
                           {"model.embed_tokens", "transformer.word_embeddings"},
                           {"model.layers", "transformer.h"},
                           {"model.norm", "transformer.ln_f"}});
    return all;
  };
  static const Names of_bloom = of_falcon({{"model.embedding_norm", "transformer.word_embeddings_layernorm"},
                                           {"mlp.c_fc", "mlp.dense_h_to_4h"},
                                           {"mlp.c_proj", "mlp.dense_4h_to_h"}});
  static const Names of_mpt{{"self_attn.q_proj", "attn.Wqkv"},
                            {"self_attn.k_proj", "attn.Wqkv"},
                            {"self_attn.v_proj", "attn.Wqkv"},
                            {"self_attn.o_proj", "attn.out_proj"},
                            {"mlp.", "ffn."},
                            {"model.embed_tokens", "transformer.wte"},
                            {"model.layers", "transformer.blocks"},
                            {"input_layernorm", "norm_1"},
                            {"post_attention_layernorm", "norm_2"},
                            {"model.norm", "transformer.norm_f"}};
  static const Names of_gptj = of_gpt({{"self_attn.o_proj", "attn.out_proj"},
                                       {"self_attn", "attn"},
                                       {"mlp.c_fc", "mlp.fc_in"},
                                       {"mlp.c_proj", "mlp.fc_out"}});
  static const Names of_bigcode = of_gpt({{"self_attn.q_proj", "attn.c_attn"},
                                          {"self_attn.k_proj", "attn.c_attn"},
                                          {"self_attn.v_proj", "attn.c_attn"},
                                          {"self_attn.o_proj", "attn.c_proj"},
                                          {"mlp.up_proj", "mlp.c_fc"},
                                          {"mlp.down_proj", "mlp.c_proj"}});
  static const Names of_opt{{"self_attn.o_proj", "self_attn.out_proj"},
                            {"input_layernorm", "self_attn_layer_norm"},
                            {"post_attention_layernorm", "final_layer_norm"},
                            {"mlp.up_proj", "fc1"},
                            {"mlp.down_proj", "fc2"},
                            {"mlp.c_fc", "fc1"},
                            {"mlp.c_proj", "fc2"},
                            {"model.norm", "model.final_layer_norm"},
                            {"model.", "model.decoder."}};
  static const Names of_phi{{"self_attn.o_proj", "self_attn.dense"},
                            {"mlp.c_fc", "mlp.fc1"},
                            {"mlp.c_proj", "mlp.fc2"},
                            {"mlp.up_proj", "mlp.fc1"},
                            {"mlp.down_proj", "mlp.fc2"},
                            {"model.norm", "model.final_layernorm"}};
  static const std::map<std::string, Names> names{
      {"exaone",
       {{"model.embed_tokens", "transformer.wte"},
        {"model.norm", "transformer.ln_f"},
        {"model.layers", "transformer.h"},
        {"self_attn.o_proj", "attn.attention.out_proj"},
        {"self_attn", "attn.attention"},
        {"input_layernorm", "ln_1"},
        {"post_attention_layernorm", "ln_2"},
        {"gate_proj", "c_fc_0"},
        {"up_proj", "c_fc_1"},
        {"down_proj", "c_proj"}}},
      {"chatglm",
       {{"model.embed_tokens", "transformer.embedding.word_embeddings"},
        {"model.norm", "transformer.encoder.final_layernorm"},
        {"model.layers", "transformer.encoder.layers"},
        {"lm_head", "transformer.output_layer"},
        {"self_attn.q_proj", "self_attention.query_key_value"},
        {"self_attn.k_proj", "self_attention.query_key_value"},
        {"self_attn.v_proj", "self_attention.query_key_value"},
        {"self_attn.o_proj", "self_attention.dense"},
        {"gate_proj", "dense_h_to_4h"},
        {"up_proj", "dense_h_to_4h"},
        {"down_proj", "dense_4h_to_h"}}},
      {"internlm2",
       {{"embed_tokens", "tok_embeddings"},
        {"lm_head", "output"},
        {"self_attn.q_proj", "attention.wqkv"},
        {"self_attn.k_proj", "attention.wqkv"},
        {"self_attn.v_proj", "attention.wqkv"},
        {"self_attn.o_proj", "attention.wo"},
        {"input_layernorm", "attention_norm"},
        {"post_attention_layernorm", "ffn_norm"},
        {"mlp.gate_proj", "feed_forward.w1"},
        {"mlp.up_proj", "feed_forward.w3"},
        {"mlp.down_proj", "feed_forward.w2"}}},
      {"gpt-neo", of_gpt({{"self_attn.o_proj", "attn.attention.out_proj"}, {"self_attn", "attn.attention"}})},
      {"gpt-bigcode", of_bigcode},
      {"gpt-bigcode-gelu-erf", of_bigcode},
      {"opt", of_opt},
      {"opt-gelu", of_opt},
      {"phi", of_phi},
      {"phi-relu", of_phi},
      {"gpt-j", of_gptj},
      {"gpt-j-tied", of_gptj},
      {"codegen", of_gptj},
      {"falcon", of_falcon({})},
      {"falcon-serial", of_falcon({})},
      {"falcon-grouped", of_falcon({{"input_layernorm", "ln_attn"}, {"post_attention_layernorm", "ln_mlp"}})},
      {"bloom", of_bloom},
      {"bloom-untied", of_bloom},
      {"mpt", of_mpt},
      {"mpt-scaled", of_mpt},
      {"vaultgemma", {{"post_attention_layernorm", "pre_feedforward_layernorm"}}},
      {"hyperclovax",
       {{"post_attention_layernorm", "post_norm1"},
        {"pre_feedforward_layernorm", "post_attention_layernorm"},
        {"post_feedforward_layernorm", "post_norm2"}}},
      {"afmoe",
       {{"pre_feedforward_layernorm", "pre_mlp_layernorm"},
        {"post_feedforward_layernorm", "post_mlp_layernorm"},
        {"mlp.gate.", "mlp.router.gate."}}},
      {"apertus",
       {{"input_layernorm", "attention_layernorm"}, {"post_attention_layernorm", "feedforward_layernorm"}}},
      {"hy-v3", {{"mlp.gate.", "mlp.router.gate."}, {"shared_experts", "shared_mlp"}}},
      {"sarvam-moe",
       {{"embed_tokens", "word_embeddings"},
        {"self_attn.q_proj", "attention.query_key_value"},
        {"self_attn.k_proj", "attention.query_key_value"},
        {"self_attn.v_proj", "attention.query_key_value"},
        {"self_attn.o_proj", "attention.dense"},
        {"self_attn.q_norm", "attention.query_layernorm"},
        {"self_attn.k_norm", "attention.key_layernorm"}}}};
  if (const auto found = names.find(fixture); found != names.end())
    for (const auto& [ours, theirs] : found->second)
      if (const auto at = name.find(ours); at != std::string::npos)
        name.replace(at, std::string(ours).size(), theirs);
  return name;
}

// The tensor that has a parameter. Phi-3's queries, keys and values are one tensor, and gates and what they
// open.
inline std::string name_in_file(const std::string& fixture, const ModelSpec& model, std::string name) {
  if (const auto at = name.find(".experts.");
      (model.experts == Experts::gpt_oss || fixture.starts_with("mistral4")) && at != std::string::npos)
    return name.substr(0, at) + ".experts." +
           (name.find("down_proj") == std::string::npos ? "gate_up_proj" : "down_proj") +
           (name.ends_with("bias") ? "_bias" : "");
  if (fixture == "chatglm") return name_of_its_own(fixture, std::move(name));
  if (model.short_conv.kernel > 0) return name_of_short_conv(std::move(name));
  if (model.state_space.is_delta()) return name_of_delta_rule(fixture, std::move(name));
  if (model.state_space.heads > 0 || (model.fused_mlp && !model.interleaved_rope))
    return name_of_hybrid(model, std::move(name));
  for (const char* part : {"kv_a_proj.", "k_rope_proj."})
    if (const auto at = name.find(part); at != std::string::npos)
      return name.replace(at, std::string(part).size(), "kv_a_proj_with_mqa.");
  for (const char* part : {"q_proj", "k_proj", "v_proj"})
    if (const auto at = name.find(part); model.family == Family::neox && at != std::string::npos)
      return name.replace(at, std::string(part).size(), "query_key_value");
  if (model.fused_mlp) {  // GLM's, whose norms behind have other names
    for (const auto& [ours, theirs] : {std::pair{"post_attention_layernorm", "post_self_attn_layernorm"},
                                       {"pre_feedforward_layernorm", "post_attention_layernorm"},
                                       {"post_feedforward_layernorm", "post_mlp_layernorm"},
                                       {"gate_proj", "gate_up_proj"},
                                       {"up_proj", "gate_up_proj"}}) {
      const bool norm = std::string_view(ours).ends_with("norm");
      const auto at = name.find(ours);
      if (at != std::string::npos && (!norm || model.norm_place == NormPlace::both))
        return name.replace(at, std::string(ours).size(), theirs);
    }
    return name;
  }
  for (const auto& [ours, theirs] :
       {std::pair{"mlp.gate.", "mlp.gate.wg."}, {"mlp.shared_experts.", "mlp.shared_mlp."}})
    if (const auto at = name.find(ours); model.qk_norm_turned && at != std::string::npos)
      return name.replace(at, std::string(ours).size(), theirs);
  if (const auto at = name.find("q_norm."); model.qk_norm_turned && at != std::string::npos)
    return name.replace(at, 6, "query_layernorm");
  if (const auto at = name.find("k_norm."); model.qk_norm_turned && at != std::string::npos)
    return name.replace(at, 6, "key_layernorm");
  for (const auto& [ours, theirs] : {std::pair{"mlp.up_proj", "mlp.fc1"}, {"mlp.down_proj", "mlp.fc2"}})
    if (const auto at = name.find(ours); model.embedding_norm && at != std::string::npos)
      return name.replace(at, std::string(ours).size(), theirs);
  for (const char* part : {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
    if (const auto at = name.find(part); model.fused_projections && at != std::string::npos) {
      name.replace(at, std::string(part).size(),
                   name.find("self_attn") != std::string::npos ? "qkv_proj" : "gate_up_proj");
      break;
    }
  return name_of_its_own(fixture, std::move(name));
}

// Parameters of one layer's experts, one expert after another, as gpt-oss's files have them: of each a row,
// turned over, with the elements of gate and up in turn.
inline std::vector<double> of_all_experts(const ModelSpec& model, const std::string& name,
                                          const std::vector<double>& parts) {
  const bool gated = name.find("gate_up") != std::string::npos;
  const std::int64_t each = gated ? 2 : 1, out = gated ? model.expert_hidden : model.hidden,
                     in = std::ssize(parts) / (model.num_experts * each * out);
  std::vector<double> in_file(parts.size());
  for (std::int64_t i = 0; i < std::ssize(parts); ++i) {
    const std::int64_t column = i % in, row = i / in % out, part = i / (in * out) % each,
                       expert = i / (in * out * each);
    in_file[static_cast<std::size_t>(((expert * in + column) * out + row) * each + part)] =
        parts[static_cast<std::size_t>(i)];
  }
  return in_file;
}

}  // namespace echelon::checks

#include <fmt/format.h>

#include <algorithm>

#include "spec/config_experts.h"

namespace echelon {

namespace {

// Layers that have an MLP in place of experts: those of mlp_only_layers, and all but each n-th of
// decoder_sparse_step. They have to be the first ones; where all are, the model has no experts.
std::int64_t qwen_moe_dense_layers(const Config& config, const ModelSpec& m) {
  const std::int64_t step = config.integer_or("decoder_sparse_step", 1);
  std::vector<bool> dense(static_cast<std::size_t>(m.num_layers));
  for (std::int64_t layer = 0; layer < m.num_layers; ++layer)
    dense[static_cast<std::size_t>(layer)] = (layer + 1) % step != 0;
  if (config.has("mlp_only_layers")) {
    const Json& list = config.required("mlp_only_layers");
    if (!list.is_array()) config.wrong("mlp_only_layers", "a list of layers");
    for (const Json& layer : list) {
      if (!layer.is_number_unsigned()) config.wrong("mlp_only_layers", "a list of layers");
      const auto number = layer.get<std::uint64_t>();
      if (number < dense.size()) dense[number] = true;
    }
  }
  const auto first = std::find(dense.begin(), dense.end(), false);
  if (std::find(first, dense.end(), true) != dense.end())
    config.wrong(
        step > 1 ? "decoder_sparse_step" : "mlp_only_layers",
        step > 1 ? "1, or what leaves MLPs to the first layers alone," : "a list of the first layers");
  return first - dense.begin();
}

}  // namespace

std::int64_t read_dense_layers(const Config& config, std::int64_t otherwise) {
  const char* const key = "first_k_dense_replace";
  return config.has(key) && config.required(key) == 0 ? 0 : config.integer_or(key, otherwise);
}

std::int64_t read_dense_kinds(const Config& config, std::int64_t otherwise) {
  const char* const key = "mlp_layer_types";
  std::int64_t dense = otherwise;
  if (config.has(key)) {
    const Json& kinds = one_for_each_layer(config, key, config.integer("num_hidden_layers"));
    const auto sparse = [](const Json& kind) { return kind == "sparse"; };
    const auto first = std::find_if(kinds.begin(), kinds.end(), sparse);
    dense = first - kinds.begin();
    if (!std::all_of(first, kinds.end(), sparse) ||
        std::any_of(kinds.begin(), first, [](const Json& kind) { return kind != "dense"; }))
      config.wrong(key, "dense, so many times, and sparse behind them");
  }
  if (read_dense_layers(config, dense) != dense)
    config.wrong("first_k_dense_replace", fmt::format("{}, as {} has it,", dense, key));
  return dense;
}

void read_module(const Config& config, ModelSpec& m) {
  for (const char* key : {"num_nextn_predict_layers", "num_mtp_layers"})
    if (config.has(key) && config.required(key) != 0) m.num_mtp_layers = config.integer(key);
}

void read_deepseek_experts(const Config& config, std::int64_t dense, double scale, ModelSpec& m) {
  m.experts = Experts::deepseek;
  m.num_dense_layers = dense;
  m.num_experts = config.integer("n_routed_experts");
  m.num_shared_experts = config.integer("n_shared_experts");
  m.experts_per_token = config.integer("num_experts_per_tok");
  m.expert_hidden = config.integer("moe_intermediate_size");
  m.router.scale = config.real_or("routed_scaling_factor", scale);
  if (config.has("moe_layer_freq") && config.required("moe_layer_freq") != 1)
    config.wrong("moe_layer_freq", "1");
}

void read_groups(const Config& config, std::int64_t groups, std::int64_t most, std::int64_t best,
                 ModelSpec& m) {
  m.router.groups = config.integer_or("n_group", groups);
  m.router.most_groups = config.integer_or("topk_group", most);
  if (m.router.most_groups == m.router.groups) return;
  m.router.group_best = m.experts_per_token / m.router.most_groups == best ? 0 : best;
}

void read_sigmoid_routing(const Config& config, bool normalise, std::int64_t groups, std::int64_t most,
                          ModelSpec& m) {
  config.only_text("scoring_func", "sigmoid", {"sigmoid"});
  config.only_text("topk_method", "noaux_tc", {"noaux_tc"});
  m.router.scores = RouterScores::sigmoid;
  m.router.normalise = config.boolean_or("norm_topk_prob", normalise);
  read_groups(config, groups, most, 2, m);
}

void read_qwen_experts(const Config& config, ModelSpec& m) {
  const std::int64_t dense = qwen_moe_dense_layers(config, m);
  if (dense == m.num_layers) return;
  m.experts = Experts::deepseek;
  m.num_dense_layers = dense;
  m.num_experts = config.integer(config.has("num_experts") ? "num_experts" : "num_local_experts");
  m.experts_per_token = config.integer("num_experts_per_tok");
  m.expert_hidden = config.integer("moe_intermediate_size");
  m.router.normalise = config.boolean_or("norm_topk_prob", false);
}

void read_gated_shared_expert(const Config& config, ModelSpec& m) {
  const std::int64_t shared = config.integer("shared_expert_intermediate_size");
  const bool whole = shared % m.expert_hidden == 0;
  m.num_shared_experts = whole ? shared / m.expert_hidden : 1;
  m.shared_hidden = whole ? 0 : shared;
  m.shared_gate = true;
}

void read_granite_experts(const Config& config, std::int64_t shared, ModelSpec& m) {
  m.experts = Experts::deepseek;
  m.num_experts = config.integer("num_local_experts");
  config.required("num_experts_per_tok");  // transformers would take 2, or 8
  m.experts_per_token = config.integer("num_experts_per_tok");
  m.expert_hidden = config.integer("intermediate_size");
  m.num_shared_experts = shared > 0 ? 1 : 0;
  m.shared_hidden = shared == m.expert_hidden ? 0 : shared;
}

}  // namespace echelon

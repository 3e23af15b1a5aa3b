// Reads experts and routers from config.json: the parts that several model types share.
#pragma once

#include "spec/config_json.h"
#include "spec/model_spec.h"

namespace echelon {

// How many of the first layers have a dense MLP instead of experts.
std::int64_t read_dense_layers(const Config& config, std::int64_t otherwise);

// The same from mlp_layer_types, or `otherwise` where that key is missing.
std::int64_t read_dense_kinds(const Config& config, std::int64_t otherwise);

// The multi-token prediction module. Where the key is missing transformers assumes one, but only if its
// weights are there.
void read_module(const Config& config, ModelSpec& m);

// DeepSeek's keys, with `dense` layers that have MLPs before those with experts.
void read_deepseek_experts(const Config& config, std::int64_t dense, double scale, ModelSpec& m);

// Node-limited routing: each group is ranked by the sum of its `best` highest scores.
void read_groups(const Config& config, std::int64_t groups, std::int64_t most, std::int64_t best,
                 ModelSpec& m);

// Sigmoid scores with selection biases and groups (DeepSeek-V3).
void read_sigmoid_routing(const Config& config, bool normalise, std::int64_t groups, std::int64_t most,
                          ModelSpec& m);

// Qwen's experts, in every layer or after the first ones.
void read_qwen_experts(const Config& config, ModelSpec& m);

// A shared expert with a width of its own and a sigmoid gate.
void read_gated_shared_expert(const Config& config, ModelSpec& m);

// Granite's experts, whose weights are a softmax over the logits of the chosen ones.
void read_granite_experts(const Config& config, std::int64_t shared, ModelSpec& m);

}  // namespace echelon

// What config.json says of experts and their routers, where several types share it.
#pragma once

#include "spec/config_json.h"
#include "spec/model_spec.h"

namespace echelon {

// Layers with an MLP in place of experts: so many, the first ones.
std::int64_t read_dense_layers(const Config& config, std::int64_t otherwise);

// As mlp_layer_types has them, or so many.
std::int64_t read_dense_kinds(const Config& config, std::int64_t otherwise);

// A module that predicts one more token. Where the key is missing transformers would take 1, but of weights
// that are there alone.
void read_module(const Config& config, ModelSpec& m);

// As DeepSeek calls them, behind `dense` layers with MLPs.
void read_deepseek_experts(const Config& config, std::int64_t dense, double scale, ModelSpec& m);

// Of `best` of a group's scores.
void read_groups(const Config& config, std::int64_t groups, std::int64_t most, std::int64_t best,
                 ModelSpec& m);

// By sigmoids, and biases beside them, of the best groups (DeepSeek-V3).
void read_sigmoid_routing(const Config& config, bool normalise, std::int64_t groups, std::int64_t most,
                          ModelSpec& m);

// Qwen's, in every layer, or after the first ones.
void read_qwen_experts(const Config& config, ModelSpec& m);

// A shared expert of a width of its own, weighed by a gate.
void read_gated_shared_expert(const Config& config, ModelSpec& m);

// Granite's, whose weights are a softmax over the logits of those that are chosen.
void read_granite_experts(const Config& config, std::int64_t shared, ModelSpec& m);

}  // namespace echelon

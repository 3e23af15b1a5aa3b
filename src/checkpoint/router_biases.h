// The part of a checkpoint that loss-free balancing has made of the routers (spec/routing_balance.h): beside
// the parameters, in double precision whatever theirs, under the name that DeepSeek-V3 gives it in Hugging
// Face's layout:
//
//   model.layers.N.mlp.gate.e_score_correction_bias   (E)
#pragma once

#include <string>
#include <vector>

#include "checkpoint/checkpoint_parts.h"
#include "checkpoint/checkpoint_reader.h"
#include "spec/routing_balance.h"

namespace echelon {

// The router's matrix, and its bias.
std::string router_weight_name(const ModelSpec& model, std::int64_t layer);
std::string router_bias_name(const ModelSpec& model, std::int64_t layer);
bool is_router_bias(const std::string& name);

// What this rank writes of its layers' biases; over all ranks of the mesh each is there once.
std::vector<OwnedTensor> owned_router_biases(const Rank& rank, const ParameterStore& parameters,
                                             const ModelSpec& model, const RouterBiases& biases);

// The biases of all layers that have some. RequestError where one is damaged or of another shape.
RouterBiases read_router_biases(CheckpointReader& reader);

}  // namespace echelon

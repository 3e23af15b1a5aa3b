// The routers' biases that loss-free balancing learns (spec/routing_balance.h), as part of a checkpoint:
// stored beside the parameters, always in double precision, under DeepSeek-V3's name in Hugging Face's
// layout:
//
//    model.layers.N.mlp.gate.e_score_correction_bias   (E)
#pragma once

#include <string>
#include <vector>

#include "checkpoint/checkpoint_parts.h"
#include "checkpoint/checkpoint_reader.h"
#include "spec/routing_balance.h"

namespace echelon {

// The names of a router's matrix and of its bias.
std::string router_weight_name(const ModelSpec& model, std::int64_t layer);
std::string router_bias_name(const ModelSpec& model, std::int64_t layer);
bool is_router_bias(const std::string& name);

// What this rank writes of its layers' biases; over all ranks of the mesh each occurs once.
std::vector<OwnedTensor> owned_router_biases(const Rank& rank, const ParameterStore& parameters,
                                             const ModelSpec& model, const RouterBiases& biases);

// The biases of all layers that have them. RequestError if one is damaged or of another shape.
RouterBiases read_router_biases(CheckpointReader& reader);

}  // namespace echelon

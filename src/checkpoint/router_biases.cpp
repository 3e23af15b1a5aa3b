#include "checkpoint/router_biases.h"

#include <fmt/format.h>

#include <cstring>

#include "tensor/host.h"

namespace echelon {

constexpr const char* bias_suffix = ".e_score_correction_bias";

static std::string gate_name(const ModelSpec& model, std::int64_t layer, const char* what) {
  return fmt::format("model.layers.{}.{}{}", layer,
                     model.experts == Experts::mixtral   ? "block_sparse_moe.gate"
                     : model.experts == Experts::gpt_oss ? "mlp.router"
                                                         : "mlp.gate",
                     what);
}

std::string router_bias_name(const ModelSpec& model, std::int64_t layer) {
  return gate_name(model, layer, bias_suffix);
}

std::string router_weight_name(const ModelSpec& model, std::int64_t layer) {
  return gate_name(model, layer, ".weight");
}

bool is_router_bias(const std::string& name) { return name.ends_with(bias_suffix); }

std::vector<OwnedTensor> owned_router_biases(const Rank& rank, const ParameterStore& parameters,
                                             const ModelSpec& model, const RouterBiases& biases) {
  std::vector<OwnedTensor> mine;
  if (rank.dp_cp().rank() != 0 || rank.coordinate(Axis::tp) != 0) return mine;
  for (const auto& [layer, bias] : biases) {
    if (rank.coordinate(Axis::pp) != parameters.owner_of(router_weight_name(model, layer))) continue;
    const Tensor data(rank.arena(), MemoryCategory::other, DType::f64, {std::ssize(bias)});
    copy_from_host(bias, data);
    mine.push_back({{router_bias_name(model, layer), StoredType::f64, data.shape()}, data});
  }
  return mine;
}

RouterBiases read_router_biases(CheckpointReader& reader) {
  const ModelSpec& model = reader.info().model;
  RouterBiases biases;
  for (const std::int64_t layer : model.routed_layers()) {
    const std::string name = router_bias_name(model, layer);
    if (!reader.has(name)) continue;
    const auto bytes = reader.read_whole(name, {model.num_experts}, DType::f64);
    std::vector<double>& bias = biases[layer];
    bias.resize(static_cast<std::size_t>(model.num_experts));
    std::memcpy(bias.data(), bytes.data(), bytes.size());
  }
  return biases;
}

}  // namespace echelon

#include "checkpoint/checkpoint_carried.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "checkpoint/logical_tensors.h"
#include "tensor/host.h"

namespace echelon {
namespace {

// The rank's index among those that hold the same parameters.
int index_of(const Rank& rank) { return rank.mesh().dp_cp_index(rank.coordinates()); }

std::string residual_name(const ParamSpec& spec, int index) {
  return fmt::format("{}.residual.{}", spec.name, index);
}
std::string factor_name(const std::string& parameter, int slice) {
  return fmt::format("{}.factor.{}", parameter, slice);
}

// Over the whole mesh, in the order of the file: calls visit_residuals(spec) for each parameter with
// residuals on some rank, and visit_factor(spec, section) for each slice with a factor.
template <class Residuals, class Factor>
void for_each_carried(const Mesh& mesh, const std::vector<ParamSpec>& model, const Compression& compression,
                      const Residuals& visit_residuals, const Factor& visit_factor) {
  const int tp = mesh.size(Axis::tp);
  if (mesh.dp_cp_size() == 1 || !has_residuals(compression.kind)) return;
  for (const ParamSpec& spec : model) {
    if (spec.frozen) continue;
    std::vector<GradientSection> slices;  // that carry something
    for (int index = 0; index < tp; index += tp_replicas(spec, tp))
      if (const GradientSection slice = gradient_section(spec, tp, index); has_residual(compression, slice))
        slices.push_back(slice);
    if (!slices.empty()) visit_residuals(spec);
    if (compression.kind == CompressionKind::powersgd)
      for (const GradientSection& slice : slices) visit_factor(spec, slice);
  }
}

const CarriedTensor* find(const std::vector<CarriedTensor>& carried, const std::string& parameter,
                          const std::string& what) {
  const auto found = std::find_if(carried.begin(), carried.end(), [&](const CarriedTensor& c) {
    return c.parameter == parameter && c.what == what;
  });
  return found == carried.end() ? nullptr : &*found;
}

Tensor zeros(const Rank& rank, const std::vector<std::int64_t>& shape) {
  Tensor tensor(rank.arena(), MemoryCategory::other, rank.precision().gradients, shape);
  rank.kernels().fill(tensor, 0);
  return tensor;
}

bool all_zero(const Tensor& t) {
  const std::vector<double> numbers = copy_numbers_to_host(t);
  return std::all_of(numbers.begin(), numbers.end(), [](double x) { return x == 0; });
}

Tensor tensor_of(const Rank& rank, const std::vector<std::byte>& bytes,
                 const std::vector<std::int64_t>& shape) {
  Tensor tensor(rank.arena(), MemoryCategory::other, rank.precision().gradients, shape);
  copy_bytes_from_host(bytes, tensor);
  return tensor;
}

}  // namespace

std::vector<OwnedTensor> owned_carried(const Rank& rank, const ParameterStore& parameters,
                                       const Compression& compression,
                                       const std::vector<CarriedTensor>& carried) {
  const int tp = rank.size(Axis::tp);
  std::vector<OwnedTensor> mine;
  const auto is_here = [&](const ParamSpec& spec) {
    return rank.coordinate(Axis::pp) == parameters.owner_of(spec.name);
  };
  for_each_carried(
      rank.mesh(), parameters.model(), compression,
      [&](const ParamSpec& spec) {
        if (!is_here(spec)) return;
        const CarriedTensor* here = find(carried, spec.name, "residual");
        const Tensor data =
            here != nullptr ? here->tensor : zeros(rank, local_shape(spec, tp, rank.coordinate(Axis::tp)));
        if (auto slice = owned_slice(rank, spec, residual_name(spec, index_of(rank)), data))
          mine.push_back(std::move(*slice));
      },
      [&](const ParamSpec& spec, const GradientSection& slice) {
        const int index = slice.slice * tp_replicas(spec, tp);
        if (!is_here(spec) || index_of(rank) != 0 || rank.coordinate(Axis::tp) != index) return;
        const CarriedTensor* here = find(carried, spec.name, "factor");
        check(here != nullptr, "a factored matrix has its factor");
        mine.push_back({{factor_name(spec.name, slice.slice),
                         stored_type(here->tensor.dtype()),
                         {compression.rank, slice.cols}},
                        here->tensor.flat()});
      });
  return mine;
}

std::int64_t carried_bytes(const Plan& plan, const std::vector<ParamSpec>& model) {
  std::int64_t numbers = 0;
  for_each_carried(
      plan.mesh, model, plan.compression,
      [&](const ParamSpec& spec) { numbers += spec.numel() * plan.mesh.dp_cp_size(); },
      [&](const ParamSpec&, const GradientSection& slice) { numbers += plan.compression.rank * slice.cols; });
  return numbers * element_bytes(plan.precision.gradients);
}

void load_carried(const Rank& rank, const ParameterStore& parameters, CheckpointReader& reader,
                  const CheckpointInfo& info, const std::vector<CarriedTensor>& carried) {
  for (const Parameter& p : parameters.all()) {
    if (!reader.has(residual_name(p.spec, 0))) continue;
    const CarriedTensor* here = find(carried, p.spec.name, "residual");
    Tensor sum = zeros(rank, p.spec.shape);
    for (int source : residual_sources(index_of(rank), rank.mesh().dp_cp_size(), info.residual_ranks))
      rank.kernels().add(
          tensor_of(rank, reader.read(residual_name(p.spec, source), p.spec, rank.precision().gradients),
                    p.spec.shape),
          sum);
    const Tensor local =
        here != nullptr ? here->tensor
                        : zeros(rank, local_shape(p.spec, rank.size(Axis::tp), rank.coordinate(Axis::tp)));
    scatter_logical(rank, sum, p.spec, local);
    if (here == nullptr && !all_zero(local))
      refuse(
          "--resume {}: the gradient of {} has a part that --compress {} has not sent yet, and as this run "
          "compresses it would be lost; legal: --compress {}",
          info.path, p.spec.name, compression_text(info.compression), compression_text(info.compression));
  }
  for (const CarriedTensor& c : carried) {
    if (c.what != "factor") continue;
    const std::string name = factor_name(c.parameter, c.slice);
    if (reader.whole_shape(name) == c.tensor.shape())
      rank.kernels().copy(
          tensor_of(rank, reader.read_whole(name, c.tensor.shape(), rank.precision().gradients),
                    c.tensor.shape())
              .flat(),
          c.tensor.flat());
  }
}

}  // namespace echelon

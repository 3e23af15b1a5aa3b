#include "train/checkpoint_carried.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "train/logical_tensors.h"

namespace echelon {
namespace {

// Among the ranks that hold the same parameters.
int index_of(const Rank& rank) { return rank.mesh().dp_cp_index(rank.coordinates()); }

std::string residual_name(const ParamSpec& spec, int index) {
  return fmt::format("{}.residual.{}", spec.name, index);
}
std::string factor_name(const std::string& parameter, int slice) {
  return fmt::format("{}.factor.{}", parameter, slice);
}

// Of the whole mesh, in the order of the file: visit_residuals(spec) for each parameter of which a rank
// carries one, visit_factor(spec, section) for each slice that has a factor.
template <class Residuals, class Factor>
void for_each_carried(const Rank& rank, const ParameterStore& parameters, const Compression& compression,
                      const Residuals& visit_residuals, const Factor& visit_factor) {
  const int tp = rank.size(Axis::tp);
  if (rank.mesh().dp_cp_size() == 1 || !has_residuals(compression.kind)) return;
  for (const ParamSpec& spec : parameters.model()) {
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
  Tensor tensor(rank.arena(), MemoryCategory::other, rank.dtype(), shape);
  rank.kernels().fill(tensor, 0);
  return tensor;
}

// Brings the tensor of the rank at `place` to rank 0, axis by axis. Collective; `mine` is defined there and
// the result on rank 0.
Tensor bring_to_first_rank(const Rank& rank, Tensor mine, const std::vector<std::int64_t>& shape,
                           std::map<Axis, int> place) {
  for (Axis axis : {Axis::dp, Axis::cp, Axis::tp, Axis::pp}) {
    const int from = std::exchange(place[axis], 0);
    if (from == 0) continue;
    const bool beside = std::all_of(place.begin(), place.end(), [&](const auto& at) {
      return at.first == axis || rank.coordinate(at.first) == at.second;
    });
    if (!beside) continue;
    if (rank.coordinate(axis) == from) {
      rank.along(axis).send(mine, 0).wait();
      mine = {};
    } else if (rank.coordinate(axis) == 0) {
      mine = Tensor(rank.arena(), MemoryCategory::other, rank.dtype(), shape);
      rank.along(axis).recv(mine, from).wait();
    }
  }
  return mine;
}

bool all_zero(const Tensor& t) {
  const auto zero = [](auto x) { return x == 0; };
  if (t.dtype() == DType::f64) return std::all_of(t.data<double>(), t.data<double>() + t.numel(), zero);
  return std::all_of(t.data<float>(), t.data<float>() + t.numel(), zero);
}

Tensor read(const Rank& rank, const CheckpointFile& file, const std::string& name,
            const std::vector<std::int64_t>& shape) {
  const auto bytes = file.read(name, shape, rank.dtype());
  Tensor tensor(rank.arena(), MemoryCategory::other, rank.dtype(), shape);
  std::memcpy(tensor.raw(), bytes.data(), bytes.size());
  return tensor;
}

}  // namespace

std::vector<StoredTensor> carried_declarations(const Rank& rank, const ParameterStore& parameters,
                                               const Compression& compression) {
  std::vector<StoredTensor> declared;
  for_each_carried(
      rank, parameters, compression,
      [&](const ParamSpec& spec) {
        for (int k = 0; k < rank.mesh().dp_cp_size(); ++k)
          declared.push_back({residual_name(spec, k), stored_type(rank.dtype()), spec.shape});
      },
      [&](const ParamSpec& spec, const GradientSection& slice) {
        declared.push_back(
            {factor_name(spec.name, slice.slice), stored_type(rank.dtype()), {compression.rank, slice.cols}});
      });
  return declared;
}

void gather_carried(const Rank& rank, const ParameterStore& parameters, const Compression& compression,
                    const std::vector<CarriedTensor>& carried,
                    const std::function<void(const std::string& name, const Tensor& tensor)>& write) {
  const int tp = rank.size(Axis::tp), cp = rank.size(Axis::cp);
  const auto bring = [&](const std::string& name, const Tensor& mine, const std::vector<std::int64_t>& shape,
                         const std::map<Axis, int>& place) {
    const Tensor whole = bring_to_first_rank(rank, mine, shape, place);
    if (rank.index() == 0) write(name, whole);
  };
  const auto is_here = [&](const ParamSpec& spec) {
    return rank.coordinate(Axis::pp) == parameters.owner_of(spec.name);
  };
  for_each_carried(
      rank, parameters, compression,
      [&](const ParamSpec& spec) {
        for (int k = 0; k < rank.mesh().dp_cp_size(); ++k) {
          Tensor logical;
          if (is_here(spec) && index_of(rank) == k) {
            const CarriedTensor* here = find(carried, spec.name, "residual");
            const auto shape = local_shape(spec, tp, rank.coordinate(Axis::tp));
            logical = gather_logical(rank, spec, here != nullptr ? here->tensor : zeros(rank, shape));
            if (rank.coordinate(Axis::tp) > 0) logical = {};
          }
          bring(residual_name(spec, k), logical, spec.shape,
                {{Axis::dp, k / cp},
                 {Axis::cp, k % cp},
                 {Axis::tp, 0},
                 {Axis::pp, parameters.owner_of(spec.name)}});
        }
      },
      [&](const ParamSpec& spec, const GradientSection& slice) {
        const int index = slice.slice * tp_replicas(spec, tp);
        Tensor factor;
        if (is_here(spec) && index_of(rank) == 0 && rank.coordinate(Axis::tp) == index) {
          const CarriedTensor* here = find(carried, spec.name, "factor");
          check(here != nullptr, "a factored matrix has its factor");
          factor = here->tensor;
        }
        bring(factor_name(spec.name, slice.slice), factor, {compression.rank, slice.cols},
              {{Axis::dp, 0}, {Axis::cp, 0}, {Axis::tp, index}, {Axis::pp, parameters.owner_of(spec.name)}});
      });
}

void load_carried(const Rank& rank, const ParameterStore& parameters, const CheckpointFile& file,
                  const CheckpointInfo& info, const std::vector<CarriedTensor>& carried) {
  for (const Parameter& p : parameters.all()) {
    if (file.find(residual_name(p.spec, 0)) == nullptr) continue;
    const CarriedTensor* here = find(carried, p.spec.name, "residual");
    Tensor sum = zeros(rank, p.spec.shape);
    for (int source : residual_sources(index_of(rank), rank.mesh().dp_cp_size(), info.residual_ranks))
      rank.kernels().add(read(rank, file, residual_name(p.spec, source), p.spec.shape), sum);
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
    const StoredTensor* stored = file.find(name);
    if (stored != nullptr && stored->shape == c.tensor.shape())
      rank.kernels().copy(read(rank, file, name, stored->shape).flat(), c.tensor.flat());
  }
}

}  // namespace echelon

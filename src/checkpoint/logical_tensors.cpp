#include "checkpoint/logical_tensors.h"

#include <cstring>

#include "base/error.h"
#include "tensor/host.h"

namespace echelon {
namespace {

// Copies between the logical tensor and what rank `index` of `tp` holds of it.
void copy_runs(const ParamSpec& spec, int tp, int index, std::byte* logical, std::byte* local,
               std::int64_t width, bool to_logical) {
  for_each_run(spec, tp, index,
               [&](std::int64_t logical_begin, std::int64_t local_begin, std::int64_t count) {
                 std::byte* there = logical + logical_begin * width;
                 std::byte* here = local + local_begin * width;
                 std::memcpy(to_logical ? there : here, to_logical ? here : there,
                             static_cast<std::size_t>(count * width));
               });
}

// What this rank holds: the whole local tensor, or its shard; for split weights, their values.
const Tensor& held(const Parameter& p, ParameterTensor which) {
  switch (which) {
    case ParameterTensor::value:
      return p.value_stays ? p.value : p.own_value;
    case ParameterTensor::gradient:
      return p.own_gradient;
    case ParameterTensor::exp_avg:
      return p.exp_avg;
    case ParameterTensor::exp_avg_sq:
      return p.exp_avg_sq;
  }
  throw InvariantError("no such tensor of a parameter");
}

bool is_cut(const Parameter& p, ParameterTensor which) {
  return p.shard_group != nullptr && !(which == ParameterTensor::value && p.value_stays);
}

}  // namespace

Tensor local_tensor(const Rank& rank, const Parameter& parameter, ParameterTensor which) {
  const bool joins = which == ParameterTensor::value && parameter.own_remainder.defined();
  Tensor here = joins ? own_weights(rank, parameter) : held(parameter, which);
  if (rank.arena().device() == Device::cuda && here.device() == Device::cpu) {  // offloaded
    const Tensor brought(rank.arena(), MemoryCategory::other, here.dtype(), here.shape());
    copy_anywhere(rank.kernels(), here, brought);
    here = brought;
  }
  if (joins ? parameter.shard_group == nullptr : !is_cut(parameter, which))
    return here.reshape(parameter.value.shape());
  Tensor local(rank.arena(), MemoryCategory::other, here.dtype(), parameter.value.shape());
  parameter.shard_group->all_gather(here, local.flat(), parameter.shard_sizes).wait();
  return local;
}

void store_local(const Rank& rank, const Tensor& local, const Parameter& parameter, ParameterTensor which) {
  const Tensor& here = held(parameter, which);
  if (which == ParameterTensor::value && local.dtype() != here.dtype()) {
    const HostBytes weights(local, true);
    check(local.dtype() == DType::f32 && here.dtype() == DType::bf16, "weights are rounded from f32 to bf16");
    return store_values(
        std::span(reinterpret_cast<const float*>(weights.data()), static_cast<std::size_t>(local.numel())),
        {0, local.numel()}, parameter);
  }
  const Range part = is_cut(parameter, which) ? parameter.own : Range{0, local.numel()};
  if (part.size() > 0 && !local.begins_with(here))  // otherwise it is a view, changed in place
    copy_anywhere(rank.kernels(), local.flat_range(part.begin, part.end), here.flat());
}

Tensor gather_logical(const Rank& rank, const Parameter& parameter, ParameterTensor which) {
  return gather_logical(rank, parameter.spec, local_tensor(rank, parameter, which));
}

Tensor gather_logical(const Rank& rank, const ParamSpec& spec, const Tensor& local) {
  const int tp = rank.size(Axis::tp);
  check(spec.parts == 1, "a parameter that the pipeline's ranks have together is on none of them");
  Tensor logical(rank.arena(), MemoryCategory::other, local.dtype(), spec.shape);
  if (spec.shard_dim < 0 || tp == 1) {
    rank.kernels().copy(local.flat(), logical.flat());
    return logical;
  }
  std::vector<std::int64_t> counts;
  std::int64_t total = 0;
  for (int i = 0; i < tp; ++i) {
    counts.push_back(local_numel(spec, tp, i));
    total += counts.back();
  }
  const Tensor parts(rank.arena(), MemoryCategory::other, local.dtype(), {total});
  rank.along(Axis::tp).all_gather(local.flat(), parts, counts).wait();
  const std::int64_t width = element_bytes(local.dtype());
  const HostBytes gathered(parts, true), whole(logical, false);
  std::byte* from = gathered.data();
  for (int i = 0; i < tp; ++i) {
    copy_runs(spec, tp, i, whole.data(), from, width, true);
    from += counts[static_cast<std::size_t>(i)] * width;
  }
  whole.store();
  return logical;
}

void scatter_logical(const Rank& rank, const Tensor& logical, const Parameter& parameter,
                     ParameterTensor which) {
  const Tensor& here = held(parameter, which);
  const bool in_place = !is_cut(parameter, which) && here.dtype() == logical.dtype();
  const Tensor local =
      in_place ? here.reshape(parameter.value.shape())
               : Tensor(rank.arena(), MemoryCategory::other, logical.dtype(), parameter.value.shape());
  scatter_logical(rank, logical, parameter.spec, local);
  store_local(rank, local, parameter, which);
}

void scatter_logical(const Rank& rank, const Tensor& logical, const ParamSpec& spec, const Tensor& local) {
  const HostBytes whole(logical, true), here(local, false);
  copy_runs(spec, rank.size(Axis::tp), rank.coordinate(Axis::tp), whole.data(), here.data(),
            element_bytes(local.dtype()), false);
  here.store();
}

}  // namespace echelon

#include "train/parameters.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/philox.h"

namespace echelon {
namespace {

template <class T>
void fill_initial(const ParamSpec& spec, int tp, int index, std::uint64_t seed, T* out) {
  if (spec.init != Init::normal) {
    std::fill(out, out + local_numel(spec, tp, index), spec.init == Init::ones ? T(1) : T(0));
    return;
  }
  const Philox random(seed, Stream::initial_value, name_hash(spec.name.c_str()));
  constexpr std::int64_t chunk = 4096;
  double normals[chunk];
  for_each_run(spec, tp, index, [&](std::int64_t logical, std::int64_t local, std::int64_t count) {
    for (std::int64_t done = 0; done < count; done += chunk) {
      const std::int64_t n = std::min(chunk, count - done);
      random.fill_normal(static_cast<std::uint64_t>(logical + done), static_cast<std::uint64_t>(n), normals);
      for (std::int64_t i = 0; i < n; ++i) out[local + done + i] = static_cast<T>(spec.init_std * normals[i]);
    }
  });
}

// Copies between the logical tensor and what the rank `index` of `tp` holds.
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

}  // namespace

ParameterStore::ParameterStore(const Rank& rank, const Plan& plan, const PipelineLayout& pipeline,
                               std::uint64_t seed)
    : output_name_(plan.model.tied_embedding ? embedding_parameters(plan.model).front().name
                                             : "lm_head.weight"),
      model_(all_parameters(plan.model)) {
  const int tp = rank.size(Axis::tp), index = rank.coordinate(Axis::tp);
  const auto& groups = pipeline.groups_of(rank.coordinate(Axis::pp));
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (const ParamSpec& spec : groups[g]) {
      here_[spec.name] = parameters_.size();
      parameters_.emplace_back();
      parameters_.back().spec = spec;
      parameters_.back().group = static_cast<int>(g);
      parameters_.back().holders = pipeline.holders_of(spec.name);
    }
  for (const ParamSpec& spec : model_) owners_[spec.name] = pipeline.holders_of(spec.name).front();
  layout_ = flat_layout(groups, tp, index);
  const std::int64_t size = layout_.size();
  values_ = Tensor(rank.arena(), MemoryCategory::parameters, rank.dtype(), {size});
  gradients_ = Tensor(rank.arena(), MemoryCategory::gradients, rank.dtype(), {size});
  exp_avg_ = Tensor(rank.arena(), MemoryCategory::optimizer, rank.dtype(), {size});
  exp_avg_sq_ = Tensor(rank.arena(), MemoryCategory::optimizer, rank.dtype(), {size});
  for (const Tensor& t : {gradients_, exp_avg_, exp_avg_sq_}) rank.kernels().fill(t, 0.0);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = parameters_[i];
    const std::vector<std::int64_t> shape = local_shape(p.spec, tp, index);
    const std::int64_t begin = layout_.offsets[i], end = begin + local_numel(p.spec, tp, index);
    const auto view = [&](const Tensor& flat) { return flat.flat_range(begin, end).reshape(shape); };
    p.value = view(values_);
    p.gradient = view(gradients_);
    p.exp_avg = view(exp_avg_);
    p.exp_avg_sq = view(exp_avg_sq_);
    if (rank.dtype() == DType::f64)
      fill_initial(p.spec, tp, index, seed, p.value.data<double>());
    else
      fill_initial(p.spec, tp, index, seed, p.value.data<float>());
  }
  if (pipeline.ties_on(rank.coordinate(Axis::pp)) && microbatches(plan, rank.coordinate(Axis::dp)).size() > 1)
    tied_gradient_ =
        Tensor(rank.arena(), MemoryCategory::gradients, rank.dtype(), find(output_name_).gradient.shape());
}

const Parameter* ParameterStore::find_here(const std::string& name) const {
  const auto found = here_.find(name);
  return found == here_.end() ? nullptr : &parameters_[found->second];
}

const Parameter& ParameterStore::find(const std::string& name) const {
  const Parameter* parameter = find_here(name);
  if (parameter == nullptr) throw InvariantError("this rank has no parameter called " + name);
  return *parameter;
}

int ParameterStore::owner_of(const std::string& name) const {
  const auto found = owners_.find(name);
  check(found != owners_.end(), "a parameter of the model");
  return found->second;
}

Weight ParameterStore::output_weight() const {
  Weight output = weight(output_name_);
  if (tied_gradient_.defined()) output.gradient = tied_gradient_;
  return output;
}

void ParameterStore::clear_gradients(Kernels& kernels) const {
  kernels.fill(gradients_, 0.0);
  if (tied_gradient_.defined()) kernels.fill(tied_gradient_, 0.0);
}

void ParameterStore::add_tied_gradient(Kernels& kernels) const {
  if (tied_gradient_.defined()) kernels.add(tied_gradient_, find(output_name_).gradient);
}

Weight ParameterStore::weight(const std::string& name) const {
  const Parameter& p = find(name);
  return {p.value, p.gradient};
}

Weight ParameterStore::stacked(const std::vector<std::string>& names) const {
  return {stacked_view(values_, names), stacked_view(gradients_, names)};
}

Tensor ParameterStore::stacked_view(const Tensor& flat, const std::vector<std::string>& names) const {
  const auto offset_of = [&](const Parameter& p) {
    return layout_.offsets[static_cast<std::size_t>(&p - parameters_.data())];
  };
  const Parameter& first = find(names.front());
  std::int64_t end = offset_of(first), rows = 0;
  for (const std::string& name : names) {
    const Parameter& p = find(name);
    check(offset_of(p) == end && p.value.cols() == first.value.cols(), "stacked parameters lie side by side");
    end += p.value.numel();
    rows += p.value.rows();
  }
  return flat.flat_range(offset_of(first), end).reshape({rows, first.value.cols()});
}

const Tensor& tensor_of(const Parameter& parameter, ParameterTensor which) {
  switch (which) {
    case ParameterTensor::value:
      return parameter.value;
    case ParameterTensor::gradient:
      return parameter.gradient;
    case ParameterTensor::exp_avg:
      return parameter.exp_avg;
    case ParameterTensor::exp_avg_sq:
      return parameter.exp_avg_sq;
  }
  throw InvariantError("no such tensor of a parameter");
}

Tensor gather_logical(const Rank& rank, const Parameter& parameter, ParameterTensor which) {
  const Tensor& local = tensor_of(parameter, which);
  const int tp = rank.size(Axis::tp);
  Tensor logical(rank.arena(), MemoryCategory::other, rank.dtype(), parameter.spec.shape);
  if (parameter.spec.shard_dim < 0 || tp == 1) {
    rank.kernels().copy(local.flat(), logical.flat());
    return logical;
  }
  std::vector<std::int64_t> counts;
  std::int64_t total = 0;
  for (int i = 0; i < tp; ++i) {
    counts.push_back(local_numel(parameter.spec, tp, i));
    total += counts.back();
  }
  const Tensor parts(rank.arena(), MemoryCategory::other, rank.dtype(), {total});
  rank.along(Axis::tp).all_gather(local.flat(), parts, counts).wait();
  const std::int64_t width = element_bytes(rank.dtype());
  auto* from = static_cast<std::byte*>(parts.raw());
  for (int i = 0; i < tp; ++i) {
    copy_runs(parameter.spec, tp, i, static_cast<std::byte*>(logical.raw()), from, width, true);
    from += counts[static_cast<std::size_t>(i)] * width;
  }
  return logical;
}

void scatter_logical(const Rank& rank, const Tensor& logical, const Parameter& parameter,
                     ParameterTensor which) {
  const Tensor& local = tensor_of(parameter, which);
  copy_runs(parameter.spec, rank.size(Axis::tp), rank.coordinate(Axis::tp),
            static_cast<std::byte*>(logical.raw()), static_cast<std::byte*>(local.raw()),
            element_bytes(rank.dtype()), false);
}

}  // namespace echelon

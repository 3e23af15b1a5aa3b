#include "model/parameters.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "base/philox.h"
#include "spec/reduction_buckets.h"
#include "tensor/host.h"
#include "tensor/normals.h"
#include "tensor/split_weights.h"
#include "tensor/thread_team.h"

namespace echelon {
namespace {

// Elements [part.begin, part.begin + out.size()) of what rank `index` of `tp` holds.
template <class T>
void fill_initial(const ParamSpec& spec, int tp, int index, std::uint64_t seed, Range part,
                  std::span<T> out) {
  if (spec.init == Init::zeros || spec.init == Init::ones)
    return std::fill(out.begin(), out.end(), spec.init == Init::ones ? T(1) : T(0));
  if (spec.init == Init::constant) return std::fill(out.begin(), out.end(), static_cast<T>(spec.init_std));
  const Philox random(seed, Stream::initial_value, name_hash(spec.name.c_str()));
  const double bound = std::sqrt(3.0) * spec.init_std;
  for (const LogicalRun& run : logical_runs(spec, tp, index, part)) {
    const std::span<T> here = out.first(static_cast<std::size_t>(run.count));
    auto logical = static_cast<std::uint64_t>(run.begin);
    if (spec.init == Init::uniform) {
      for (T& x : here) x = static_cast<T>(bound * (2 * random.uniform(logical++) - 1));
    } else if (spec.init == Init::rate) {
      for (T& x : here) x = static_cast<T>(std::log(1 + 15 * random.uniform(logical++)));
    } else if (spec.init == Init::step) {
      for (T& x : here) {
        const double step = 0.001 * std::pow(100.0, random.uniform(logical++));
        x = static_cast<T>(std::log(std::expm1(step)));
      }
    } else if constexpr (std::is_same_v<T, float>) {
      fill_normals(random, spec.init_std, logical, here);
    } else {
      random.fill_normal(logical, here.size(), here.data());
      for (T& x : here) x *= spec.init_std;
    }
    out = out.subspan(here.size());
  }
}

// What has memory gives it back.
void release(const std::vector<Tensor>& tensors) {
  for (const Tensor& tensor : tensors)
    if (tensor.has_memory()) tensor.release_memory();
}

}  // namespace

Tensor own_weights(const Rank& rank, const Parameter& p) {
  if (!p.own_remainder.defined()) return p.own_value;
  const Tensor weights(rank.arena(), MemoryCategory::other, DType::f32, {p.own.size()});
  if (p.own.size() == 0) return weights;
  const HostBytes bytes(weights, false);
  join_weights(p.own_value, p.own_remainder,
               {reinterpret_cast<float*>(bytes.data()), static_cast<std::size_t>(p.own.size())});
  bytes.store();
  return weights;
}

namespace {

// What of elements `part` of a local tensor, which are `values`, lies in `here`, and where it does there.
template <class F>
struct CommonPart {
  CommonPart(std::span<const F> values, Range part, Range here) {
    const std::int64_t first = std::max(part.begin, here.begin), end = std::min(part.end, here.end);
    if (first >= end) return;
    place = {first - here.begin, end - here.begin};
    elements =
        values.subspan(static_cast<std::size_t>(first - part.begin), static_cast<std::size_t>(end - first));
  }
  bool empty() const { return elements.empty(); }
  Tensor of(const Tensor& flat) const { return flat.flat_range(place.begin, place.end); }

  Range place;
  std::span<const F> elements;
};

}  // namespace

void add_pieces(const Parameter& p, std::vector<ParameterPiece>& pieces) {
  constexpr std::int64_t smallest = 1 << 16, most = 256;
  const Range held = p.value_stays ? Range{0, p.value.numel()} : p.own;
  const std::int64_t count = std::clamp(held.size() / smallest, std::int64_t{1}, most);
  for (std::int64_t i = 0; i < count && held.size() > 0; ++i) {
    const Range part = split_range(held.size(), count, i);
    pieces.push_back({&p, {held.begin + part.begin, held.begin + part.end}});
  }
}

template <class F>
void store_values(std::span<const F> values, Range part, const Parameter& p) {
  const Range held = p.value_stays ? Range{0, p.value.numel()} : p.own;
  const Tensor& here = p.value_stays ? p.value : p.own_value;
  const CommonPart<F> common(values, part, held), own(values, part, p.own);
  if (here.dtype() == dtype_of<F>) {
    if (!common.empty()) copy_from_host(common.elements, common.of(here));
    return;
  }
  if constexpr (std::is_same_v<F, float>) {
    check(here.dtype() == DType::bf16, "weights are rounded from f32 to bf16");
    if (!common.empty()) split_values(common.elements, common.of(here));
    if (p.own_remainder.defined() && !own.empty()) split_remainders(own.elements, own.of(p.own_remainder));
  } else {
    throw InvariantError("weights are rounded from f32 alone");
  }
}
template void store_values(std::span<const float>, Range, const Parameter&);
template void store_values(std::span<const double>, Range, const Parameter&);
template void store_values(std::span<const bf16>, Range, const Parameter&);

// Of the gradients of all rows that a rank looks up in an update.
static std::int64_t bytes_of_lookups(const Plan& plan, const Rank& rank) {
  return looked_up_rows(plan, rank.coordinate(Axis::dp)) * plan.model.hidden *
         element_bytes(rank.precision().activations);
}

ParameterStore::ParameterStore(const Rank& rank, const Plan& plan, const PipelineLayout& pipeline,
                               std::uint64_t seed, const Faults& faults, Moments moments,
                               FirstValues first_values)
    : rank_(&rank),
      optimizer_(plan.optimizer),
      zero_(plan.zero_stage()),
      seed_(seed),
      shards_(plan.all_shards()),
      shard_(plan.shard_index(rank.coordinates())),
      output_name_(output_matrix(plan.model).name),
      output_bias_name_(plan.model.output_bias ? output_bias(plan.model).front().name : ""),
      shared_name_(embedding_parameters(plan.model).front().name),
      model_(pipeline.model()) {
  const auto& groups =
      pipeline.groups_of(rank.coordinate(Axis::pp), rank.mesh().ep_index(rank.coordinates()));
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (const ParamSpec& spec : groups[g]) {
      here_[spec.name] = parameters_.size();
      parameters_.emplace_back();
      parameters_.back().spec = spec;
      parameters_.back().index = model_->place_of(spec.name).index;
      parameters_.back().group = static_cast<int>(g);
      parameters_.back().holders = pipeline.holders_of(spec);
      parameters_.back().is_updated_whole = is_updated_whole(optimizer_, spec);
    }
  layout_ = flat_layout(groups, rank.size(Axis::tp), rank.coordinate(Axis::tp));
  buckets_ = reduction_buckets(plan, groups, rank.coordinate(Axis::tp));
  if (plan.numerics == Numerics::invariant) {
    const int all = static_cast<int>(microbatches(plan, rank.coordinate(Axis::dp)).size());
    tree_ = std::make_unique<SequenceTree>(rank.arena(), all / pipeline.stage_copies(),
                                           pipeline.stage_copies() > 1);
  }
  make_units();
  if (moments == Moments::here) make_moments(plan, shard_size(shard_units(layout_, shards_), shard_));
  if (zero_ == 3) make_gather(plan.zero_prefetch);
  for (std::size_t i = 0; i < parameters_.size(); ++i) place(parameters_[i], i, faults);
  draw_initial_values(seed, first_values);
  if (find_here(shared_name_) == nullptr || find(shared_name_).spec.frozen) return;
  const int pp_rank = rank.coordinate(Axis::pp);
  looks_next_up_ = plan.model.num_mtp_layers > 0 && pipeline.ends_on(pp_rank);
  if (keeps_tied_gradient_apart(plan, pipeline, rank.coordinate(Axis::dp), pp_rank)) {
    lookups_wait_ = !tree_ && output_name_ == shared_name_ && plan.model.num_mtp_layers == 0 &&
                    bytes_of_lookups(plan, rank) < find(shared_name_).gradient.bytes();
    if (!lookups_wait_) tied_gradient_ = gradient_apart(tied_waiting_);
  }
  // Of a microbatch the output layer adds to a tied table at another time than the next tokens' embedding.
  if (tree_ && plan.model.tied_embedding && looks_next_up_) next_gradient_ = gradient_apart(next_waiting_);
}

Tensor ParameterStore::gradient_apart(std::vector<Tensor>& waiting) const {
  const auto make = [&] {
    return Tensor::without_memory(rank_->arena(), MemoryCategory::gradients, rank_->precision().gradients,
                                  find(shared_name_).gradient.shape());
  };
  Tensor gradient = make();
  for (int i = 0; i < levels_waiting(); ++i) waiting.push_back(make());
  return gradient;
}

void ParameterStore::make_units() {
  const PrecisionRecipe& precision = rank_->precision();
  const auto make = [&](MemoryCategory category, DType dtype, std::int64_t size) {
    const Tensor flat(rank_->arena(), category, dtype, {size});
    rank_->kernels().fill(flat, 0.0);
    return flat;
  };
  const std::vector<ShardUnit> trained = shard_units(layout_, shards_),
                               frozen = frozen_units(layout_, shards_);
  trained_units_ = trained.size();
  const std::int64_t own_trained = shard_size(trained, shard_), own_frozen = shard_size(frozen, shard_);
  if (zero_ < 3) {
    values_ =
        Tensor(rank_->arena(), MemoryCategory::parameters, precision.parameters, {layout_.trained_size()});
    frozen_values_ = Tensor(rank_->arena(), MemoryCategory::parameters, precision.parameters,
                            {layout_.size() - layout_.trained_size()});
  } else {
    own_values_ = make(MemoryCategory::parameters, precision.parameters, own_trained + own_frozen);
  }
  for (const GradientBucket& bucket : buckets_) make_gradient_memory(bucket.range, bucket.experts);
  std::int64_t own_begin = 0;
  for (const auto* cuts : {&trained, &frozen})
    for (const ShardUnit& cut : *cuts) {
      units_.push_back(make_unit(cut, own_begin, cuts == &frozen));
      own_begin += cut.shard(shard_).size();
    }
}

void ParameterStore::make_gradient_memory(Range range, bool experts) {
  const auto make = [&] {
    return Tensor::without_memory(rank_->arena(), MemoryCategory::gradients, rank_->precision().gradients,
                                  {range.size()});
  };
  GradientMemory& memory = memories_.emplace_back();
  memory.range = range;
  memory.gradient = make();
  for (int i = 0; i < levels_waiting(experts); ++i) memory.waiting.push_back(make());
}

ParameterStore::GradientMemory& ParameterStore::memory_of(Range range) const {
  const auto found = std::find_if(memories_.begin(), memories_.end(), [&](const GradientMemory& m) {
    return m.range.begin <= range.begin && range.end <= m.range.end;
  });
  check(found != memories_.end(), "a range of gradients lies in one that comes as a whole");
  return *found;
}

Tensor ParameterStore::gradient_range(Range range) const {
  const GradientMemory& memory = memory_of(range);
  return memory.gradient.flat_range(range.begin - memory.range.begin, range.end - memory.range.begin);
}

ParameterStore::Unit ParameterStore::make_unit(const ShardUnit& cut, std::int64_t own_begin, bool frozen) {
  const PrecisionRecipe& precision = rank_->precision();
  const Range own = cut.shard(shard_), inside{own.begin - cut.range.begin, own.end - cut.range.begin};
  Unit unit{cut, {}, {}, {}, {}, {}, own_begin};
  if (zero_ < 3) {
    const std::int64_t first = frozen ? layout_.trained_size() : 0;
    unit.value =
        (frozen ? frozen_values_ : values_).flat_range(cut.range.begin - first, cut.range.end - first);
    unit.own_value = unit.value.flat_range(inside.begin, inside.end);
  } else {
    unit.value = Tensor::without_memory(rank_->arena(), MemoryCategory::parameters, precision.parameters,
                                        {cut.range.size()});
    unit.own_value = own_values_.flat_range(own_begin, own_begin + own.size());
  }
  if (frozen) return unit;
  if (cut.range.size() == 0) {
    unit.gradient = unit.own_gradient =
        Tensor::without_memory(rank_->arena(), MemoryCategory::gradients, precision.gradients, {0});
    return unit;
  }
  GradientMemory& memory = memory_of(cut.range);
  ++memory.units;
  const std::int64_t first = cut.range.begin - memory.range.begin;
  const auto of_unit = [&](const Tensor& flat) { return flat.flat_range(first, first + cut.range.size()); };
  unit.gradient = of_unit(memory.gradient);
  for (const Tensor& level : memory.waiting) unit.waiting.push_back(of_unit(level));
  unit.own_gradient = zero_ < 2 ? unit.gradient.flat_range(inside.begin, inside.end)
                                : Tensor::without_memory(rank_->arena(), MemoryCategory::gradients,
                                                         precision.gradients, {own.size()});
  return unit;
}

void ParameterStore::make_moments(const Plan& plan, std::int64_t own_size) {
  const PrecisionRecipe& precision = rank_->precision();
  if (precision.has_master())
    remainder_ = Tensor(rank_->arena(), MemoryCategory::optimizer, DType::i16, {own_size});
  if (plan.offloads_optimizer()) {
    offloaded_ = std::make_unique<OffloadedMoments>(*rank_, plan, own_size);
    exp_avg_ = offloaded_->exp_avg();
    exp_avg_sq_ = offloaded_->exp_avg_sq();
    return;
  }
  std::int64_t squares = 0;
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (const Parameter& p = parameters_[i]; !p.is_updated_whole && !p.spec.frozen)
      squares += own_range(i).size();
  const auto zeros = [&](std::int64_t size) {
    const Tensor moment(rank_->arena(), MemoryCategory::optimizer, precision.moments, {size});
    rank_->kernels().fill(moment, 0.0);
    return moment;
  };
  exp_avg_ = zeros(own_size);
  exp_avg_sq_ = zeros(squares);
}

void ParameterStore::with_moments(const Parameter& p, const OffloadedMoments::Update& update) const {
  if (offloaded_) return offloaded_->update(p.exp_avg, p.exp_avg_sq, update);
  update({0, p.own.size()}, p.exp_avg, p.exp_avg_sq);
}

static Range common_part(const Range& all, const Range& shard) {
  const std::int64_t begin = std::clamp(shard.begin, all.begin, all.end);
  return {begin, std::clamp(shard.end, begin, all.end)};
}

// What this rank's shard has of a parameter, in the flat order.
Range ParameterStore::own_range(std::size_t index) const {
  const Range all{layout_.offsets[index], layout_.offsets[index] + layout_.sizes[index]};
  return common_part(all, unit_of(parameters_[index]).cut.shard(shard_));
}

// Views of a parameter in its unit, and of the part of it that is this rank's own.
void ParameterStore::place(Parameter& p, std::size_t index, const Faults& faults) {
  const Range all{layout_.offsets[index], layout_.offsets[index] + layout_.sizes[index]};
  const Unit& unit = unit_of(p);
  const bool frozen = p.spec.frozen;
  const Weight views = view(p, all, local_shape(p.spec, rank_->size(Axis::tp), rank_->coordinate(Axis::tp)));
  p.value = views.value;
  p.gradient = views.gradient;
  p.waiting = views.waiting;
  p.value_stays = zero_ < 3;
  if (frozen && p.value_stays) {
    p.own = {0, p.value.numel()};
    p.shard_sizes = {p.value.numel()};
    p.own_value = p.value.flat();
    return;
  }
  const int shards = unit.cut.of(shards_);
  for (int i = 0; i < shards; ++i) p.shard_sizes.push_back(common_part(all, unit.cut.shard(i)).size());
  if (shards > 1) p.shard_group = &group_of(unit.cut);
  const Range shard = unit.cut.shard(shard_), own = own_range(index);
  p.own = {own.begin - all.begin, own.end - all.begin};
  if (own.size() == 0) p.own = {0, 0};
  const auto part = [&](const Tensor& flat, std::int64_t flat_begin) {
    const std::int64_t begin = own.size() == 0 ? 0 : flat_begin + own.begin - shard.begin;
    return flat.flat_range(begin, begin + own.size());
  };
  p.own_value = part(unit.own_value, 0);
  if (frozen) return;
  const std::int64_t shift = unit.cut.of(shard_) > 0 && own.end < shard.end ? faults.shard_shift : 0;
  p.own_gradient = part(unit.own_gradient, shift);
  if (remainder_.defined()) p.own_remainder = part(remainder_, unit.own_begin);
  if (!exp_avg_.defined()) return;
  p.exp_avg = part(exp_avg_, unit.own_begin);
  if (p.is_updated_whole) return;
  p.exp_avg_sq = exp_avg_sq_.flat_range(squares_placed_, squares_placed_ + own.size());
  squares_placed_ += own.size();
}

void ParameterStore::draw_initial_values(std::uint64_t seed, FirstValues first_values) {
  if (rank_->arena().device() == Device::none) return;
  std::vector<ParameterPiece> pieces;
  for (const Parameter& p : parameters_)
    if (first_values == FirstValues::drawn || p.spec.adapter) add_pieces(p, pieces);
  const int tp = rank_->size(Axis::tp), index = rank_->coordinate(Axis::tp);
  rank_->kernels().team().each_task_that_may_throw(std::ssize(pieces), [&](std::int64_t i, int) {
    const auto& [p, part] = pieces[static_cast<std::size_t>(i)];
    const DType dtype = p->value.dtype();
    const auto fill = [&]<class F>(F) {
      std::vector<F> values(static_cast<std::size_t>(part.size()));
      fill_initial(p->spec, tp, index, seed, part, std::span(values));
      if (dtype == dtype_of<F> || rank_->precision().has_master())
        return store_values(std::span<const F>(values), part, *p);
      std::vector<bf16> rounded(values.size());
      std::transform(values.begin(), values.end(), rounded.begin(), [](F x) { return bf16(x); });
      store_values(std::span<const bf16>(rounded), part, *p);
    };
    if (dtype == DType::f64)
      fill(double());
    else
      fill(float());
  });
}

const ParameterStore::Unit& ParameterStore::unit_of(const Parameter& p) const {
  const std::size_t first = p.spec.frozen ? trained_units_ : 0;
  const auto [cut, experts] = units_of_group(trained_units_, p.group);
  if (p.spec.expert >= 0) return units_[first + experts];
  return units_[first + (p.spec.shard_dim >= 0 ? cut : trained_units_ - 1)];
}

Communicator& ParameterStore::group_of(const ShardUnit& cut) const {
  return cut.experts ? rank_->same_experts(shards_.all) : rank_->dp_cp_block(shards_.all);
}

ShardedUnit ParameterStore::sharded(const Unit& unit) const {
  return {&group_of(unit.cut), unit.value, unit.own_value, unit.cut.counts()};
}

std::vector<Range> ParameterStore::gradient_ranges(int group) const {
  const auto g = static_cast<std::size_t>(group);
  return {layout_.cut_ranges[g], layout_.expert_ranges[g]};
}

Weight ParameterStore::view(const Parameter& first, Range range,
                            const std::vector<std::int64_t>& shape) const {
  const Unit& unit = unit_of(first);
  const auto of = [&](const Tensor& flat) {
    if (!flat.defined()) return flat;  // of what is frozen
    return flat.flat_range(range.begin - unit.cut.range.begin, range.end - unit.cut.range.begin)
        .reshape(shape);
  };
  Weight weight{of(unit.value), of(unit.gradient)};
  for (const Tensor& level : unit.waiting) weight.waiting.push_back(of(level));
  weight.all_rows = !first.spec.rows_are_sequence_sharded;
  return weight;
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

int ParameterStore::owner_of(const std::string& name) const { return model_->place_of(name).holders.front(); }

std::vector<const Parameter*> ParameterStore::in_model_order() const {
  std::vector<const Parameter*> order;
  for (const Parameter& p : parameters_) order.push_back(&p);
  std::sort(order.begin(), order.end(),
            [](const Parameter* a, const Parameter* b) { return a->index < b->index; });
  return order;
}

OutputWeights ParameterStore::output_weights() const {
  OutputWeights output{weight(output_name_)};
  if (!output_bias_name_.empty()) output.bias = weight(output_bias_name_);
  if (tied_gradient_.defined() && output_name_ == shared_name_)
    output.table.gradient = tied_gradient_, output.table.waiting = tied_waiting_;
  return output;
}

Weight ParameterStore::next_table() const {
  Weight table = weight(shared_name_);
  if (next_gradient_.defined())
    table.gradient = next_gradient_, table.waiting = next_waiting_;
  else if (tied_gradient_.defined())
    table.gradient = tied_gradient_, table.waiting = tied_waiting_;
  return table;
}

void ParameterStore::keep_gradients() {
  check(zero_ < 2, "gradients that are cut come and go");
  gradients_stay_ = true;
  need_all_gradients();
  for (const GradientMemory& memory : memories_)
    for (const Tensor& level : memory.waiting)
      if (!level.has_memory()) level.acquire_memory();
  if (!lookups_wait_) return;
  lookup_gradient_ = Tensor(rank_->arena(), MemoryCategory::gradients, rank_->precision().gradients,
                            find(shared_name_).gradient.shape());
}

void ParameterStore::add_lookups(Tensor ids, Tensor dy, std::int64_t first_id) const {
  if (lookup_gradient_.defined())
    return rank_->kernels().embedding_backward(ids, dy, first_id, lookup_gradient_);
  // In memory that stays, as it waits for longer than backward passes hold theirs.
  const Tensor waiting(rank_->arena(), MemoryCategory::gradients, dy.dtype(), dy.shape());
  rank_->kernels().copy(dy, waiting);
  lookups_.push_back({std::move(ids), waiting, first_id});
}

void ParameterStore::begin_gradients() const {
  lookups_.clear();  // of a step that was not finished
  if (lookup_gradient_.defined()) rank_->kernels().fill(lookup_gradient_, 0.0);
  drop_gradients();
  for (GradientMemory& memory : memories_) {
    if (gradients_stay_) rank_->kernels().fill(memory.gradient, 0.0);
    memory.has_begun = gradients_stay_;
    memory.ended = 0;
  }
  for (const Tensor& apart : {tied_gradient_, next_gradient_})
    if (gradients_stay_ && apart.defined()) rank_->kernels().fill(apart, 0.0);
  begin_unit(trained_units_ - 1);
}

void ParameterStore::drop_gradients() const {
  if (gradients_stay_) return;
  for (GradientMemory& memory : memories_) {
    release({memory.gradient});
    release(memory.waiting);
    memory.has_begun = false;
  }
  if (zero_ >= 2)
    for (const Unit& unit : units_) release({unit.own_gradient});
  release({tied_gradient_, next_gradient_});
  release(tied_waiting_);
  release(next_waiting_);
}

std::vector<Tensor> ParameterStore::keep_own_gradients() const {
  std::vector<Tensor> shards;
  for (const Unit& unit : units_) {
    if (!unit.own_gradient.defined()) continue;
    if (!unit.own_gradient.has_memory()) unit.own_gradient.acquire_memory();
    if (unit.own_gradient.numel() > 0) shards.push_back(unit.own_gradient);
  }
  return shards;
}

void ParameterStore::begin_unit(std::size_t index) const {
  const Range range = units_[index].cut.range;
  if (range.size() == 0) return;
  GradientMemory& memory = memory_of(range);
  if (!std::exchange(memory.has_begun, true)) acquire(memory.gradient, memory.waiting);
  check(memory.gradient.has_memory(), "gradients are added up before they are reduced");
}

void ParameterStore::acquire(const Tensor& gradient, const std::vector<Tensor>& waiting) const {
  gradient.acquire_memory();
  rank_->kernels().fill(gradient, 0.0);
  for (const Tensor& level : waiting) level.acquire_memory();
}

void ParameterStore::need_gradients(int group) const {
  for (std::size_t unit : units_of_group(trained_units_, group)) begin_unit(unit);
}

void ParameterStore::need_output_gradient() const {
  const bool is_apart = tied_gradient_.defined();
  // A bias lies in the group of its matrix.
  if (!is_apart || output_name_ != shared_name_ || !output_bias_name_.empty())
    need_gradients(find(output_name_).group);
  if (looks_next_up_ && !is_apart && !next_gradient_.defined()) need_gradients(find(shared_name_).group);
  need_apart();
}

void ParameterStore::need_apart() const {
  if (tied_gradient_.defined() && !tied_gradient_.has_memory()) acquire(tied_gradient_, tied_waiting_);
  if (next_gradient_.defined() && !next_gradient_.has_memory()) acquire(next_gradient_, next_waiting_);
}

void ParameterStore::need_all_gradients() const {
  for (std::size_t unit = 0; unit < trained_units_; ++unit)
    if (const Range range = units_[unit].cut.range; range.size() > 0 && !memory_of(range).has_begun)
      begin_unit(unit);
  need_apart();
}

int ParameterStore::levels_waiting(bool experts) const {
  // Sums of the cp groups of an expert group come apart.
  const int groups = experts ? std::max(1, rank_->size(Axis::ep) / rank_->size(Axis::cp)) : 1;
  return tree_ ? tree_->most_beside(groups) : 0;
}

void ParameterStore::end_unit(std::size_t index) const {
  const Range range = units_[index].cut.range;
  if (range.size() == 0 || gradients_stay_) return;
  GradientMemory& memory = memory_of(range);
  if (++memory.ended == memory.units) release(memory.waiting);
}

void ParameterStore::end_gradients(int group) const {
  for (std::size_t unit : units_of_group(trained_units_, group)) end_unit(unit);
}

void ParameterStore::end_whole_gradients() const { end_unit(trained_units_ - 1); }

// All lookups are summed before they are added to the output layer's sum, an eighth of the table at a time:
// each part takes a pass over all lookups, with a launch per microbatch on a device, and the memory of
// activations is free by then.
void ParameterStore::add_waiting_lookups() const {
  Kernels& kernels = rank_->kernels();
  const Tensor& gradient = find(shared_name_).gradient;
  if (lookup_gradient_.defined()) return kernels.add(lookup_gradient_, gradient);
  const Arena::BriefUse brief(rank_->arena());
  const std::int64_t rows_at_once = (gradient.rows() + 7) / 8;
  const Tensor room(rank_->arena(), MemoryCategory::other, gradient.dtype(), {rows_at_once, gradient.cols()});
  for (std::int64_t begin = 0; begin < gradient.rows(); begin += rows_at_once) {
    const std::int64_t end = std::min(begin + rows_at_once, gradient.rows());
    const Tensor sum = room.row_range(0, end - begin);
    kernels.fill(sum, 0.0);
    for (const Lookups& some : lookups_)
      kernels.embedding_backward(some.ids, some.dy, some.first_id + begin, sum);
    kernels.add(sum, gradient.row_range(begin, end));
  }
  lookups_.clear();
}

void ParameterStore::add_tied_gradient() const {
  if (lookups_wait_) return add_waiting_lookups();
  if (next_gradient_.defined())
    rank_->kernels().add(next_gradient_,
                         tied_gradient_.defined() ? tied_gradient_ : find(shared_name_).gradient);
  if (tied_gradient_.defined()) rank_->kernels().add(tied_gradient_, find(shared_name_).gradient);
  if (gradients_stay_) return;
  release({tied_gradient_, next_gradient_});
  release(tied_waiting_);
  release(next_waiting_);
}

std::vector<BucketTensors> ParameterStore::bucket_tensors() const {
  std::vector<BucketTensors> tensors;
  for (const GradientBucket& bucket : buckets_) {
    if (zero_ == 0) {
      tensors.push_back({bucket.range, gradient_range(bucket.range), {}});
      continue;
    }
    const auto unit = std::find_if(units_.begin(), units_.end(),
                                   [&](const Unit& u) { return u.cut.range == bucket.range; });
    check(unit != units_.end(), "with ZeRO a bucket is a unit");
    tensors.push_back({bucket.range, unit->gradient, unit->own_gradient, zero_ >= 2});
  }
  return tensors;
}

void ParameterStore::make_gather(int ahead) {
  std::vector<std::vector<ShardedUnit>> groups;
  std::vector<ShardedUnit> always;
  for (const std::size_t first : {std::size_t{0}, trained_units_})
    always.push_back(sharded(units_[first + trained_units_ - 1]));
  for (int group = 0; group < static_cast<int>(num_groups_of(trained_units_)); ++group) {
    std::vector<ShardedUnit>& all = groups.emplace_back();
    for (const std::size_t first : {std::size_t{0}, trained_units_})
      for (const std::size_t unit : units_of_group(trained_units_, group))
        all.push_back(sharded(units_[first + unit]));
  }
  gather_ = std::make_unique<ParameterGather>(std::move(groups), std::move(always), ahead, rank_->time());
}

void ParameterStore::begin_uses(std::vector<int> groups) const {
  if (gather_) gather_->begin(std::move(groups));
}

void ParameterStore::end_uses() const {
  if (gather_) gather_->end();
}

void ParameterStore::begin_update() const {
  for (const auto& event : std::exchange(reads_, {})) rank_->arena().stream().wait_for(*event);
}

void ParameterStore::share_values() const {
  if (zero_ == 0 || zero_ == 3) return;
  const Doing doing = rank_->doing(Activity::share_parameters);
  std::vector<ShardedUnit> units;
  for (std::size_t i = 0; i < trained_units_; ++i) units.push_back(sharded(units_[i]));
  all_gather_units(units);
}

Weight ParameterStore::weight(const std::string& name) const {
  const Parameter& p = find(name);
  return {p.value, p.gradient, p.waiting, !p.spec.rows_are_sequence_sharded};
}

Weight ParameterStore::stacked(const std::vector<std::string>& names) const {
  const auto offset_of = [&](const Parameter& p) {
    return layout_.offsets[static_cast<std::size_t>(&p - parameters_.data())];
  };
  const Parameter& first = find(names.front());
  std::vector<std::int64_t> shape = first.value.shape();
  shape.front() = 0;
  std::int64_t end = offset_of(first);
  for (const std::string& name : names) {
    const Parameter& p = find(name);
    shape.front() += p.value.dim(0);
    check(offset_of(p) == end && p.value.shape().size() == shape.size() &&
              (shape.size() == 1 || p.value.cols() == shape.back()),
          "stacked parameters lie side by side");
    end += p.value.numel();
  }
  return view(first, {offset_of(first), end}, shape);
}

}  // namespace echelon

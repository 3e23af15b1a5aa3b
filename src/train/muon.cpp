#include "train/muon.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "tensor/host.h"

namespace echelon {
namespace {

// The coefficients of Jordan et al.: the steepest at 0 with which singular values end between 0.7 and 1.2.
constexpr double linear = 3.4445, cubic = -4.7750, quintic = 2.0315;

double norm_of(Kernels& kernels, const Tensor& x) {
  const Tensor sums = x.beside(MemoryCategory::other, DType::f64, {norm_blocks(x.numel())});
  kernels.sum_squares(x, norm_block, sums);
  if (x.device() == Device::none) return 0;
  const std::vector<double> squares = copy_to_host(sums, 0.0);
  return std::sqrt(std::accumulate(squares.begin(), squares.end(), 0.0));
}

// Rows or columns of a matrix, whichever tp cuts.
Tensor cut_range(const Tensor& matrix, const ParamSpec& spec, Range range) {
  return spec.shard_dim == 0 ? matrix.row_range(range.begin, range.end)
                             : matrix.column_range(range.begin, range.end);
}

std::int64_t sum_of(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

// The exchanges of a round.
class RoundExchange {
 public:
  RoundExchange(const Rank& rank, const ParameterStore& parameters, const MuonRound& round)
      : rank_(rank), tp_(round.tp), by_shard_(static_cast<std::size_t>(round.shards)) {
    for (std::size_t k = 0; k < round.matrices.size(); ++k)
      by_shard_[k % by_shard_.size()].push_back(&parameters.all()[round.matrices[k]]);
    group_ = by_shard_.front().front()->shard_group;
    here_ = by_shard_[group_ == nullptr ? 0 : static_cast<std::size_t>(group_->rank())];
    for (const auto& of_shard : by_shard_) all_.insert(all_.end(), of_shard.begin(), of_shard.end());
    const auto place = static_cast<std::size_t>(tp_ == 1 ? 0 : rank.coordinate(Axis::tp));
    if (place < here_.size()) mine_ = here_[place];
  }

  // Calls act(parameter, its elements among the own parts, which lie one after another).
  template <class Act>
  void each_own(const Act& act) const {
    std::int64_t at = 0;
    for (const Parameter* p : all_) {
      if (p->own.size() > 0) act(*p, Range{at, at + p->own.size()});
      at += p->own.size();
    }
  }
  Tensor make_own() const {
    std::int64_t size = 0;
    for (const Parameter* p : all_) size += p->own.size();
    return make({size});
  }

  // The matrix that this rank makes, of all ranks' parts; undefined if it makes none. Takes `own`, so that it
  // need not stay.
  Tensor to_owners(Tensor own) const {
    Tensor locals = std::move(own);
    if (group_ != nullptr) {
      Tensor parts = make({sum_of(counts_of_parts())});
      group_->all_to_all(locals, counts_of_own(), parts, counts_of_parts()).wait();
      locals = parts;
      if (here_.size() > 1) {
        locals = make({parts.numel()});
        each_part([&](Range part, Range local) {
          rank_.kernels().copy(parts.flat_range(part.begin, part.end),
                               locals.flat_range(local.begin, local.end));
        });
      }
    }
    if (tp_ == 1) return mine_ == nullptr ? Tensor() : locals.reshape(mine_->value.shape());
    const Tensor slices = make({sum_of(counts_of_slices())});
    rank_.along(Axis::tp).all_to_all(locals, counts_of_locals(), slices, counts_of_slices()).wait();
    locals = {};
    if (mine_ == nullptr) return {};
    Tensor whole = make(mine_->spec.shape);
    each_slice(slices, whole,
               [&](const Tensor& slice, const Tensor& there) { rank_.kernels().copy(slice, there); });
    return whole;
  }

  // The own parts of what all ranks have made.
  Tensor from_owners(Tensor whole) const {
    Tensor locals = mine_ == nullptr ? make({0}) : whole.flat();
    if (tp_ > 1) {
      const Tensor slices = make({sum_of(counts_of_slices())});
      if (mine_ != nullptr)
        each_slice(slices, whole,
                   [&](const Tensor& slice, const Tensor& there) { rank_.kernels().copy(there, slice); });
      whole = {};
      locals = make({sum_of(counts_of_locals())});
      rank_.along(Axis::tp).all_to_all(slices, counts_of_slices(), locals, counts_of_locals()).wait();
    }
    if (group_ == nullptr) return locals;
    Tensor parts = locals;
    if (here_.size() > 1) {
      parts = make({locals.numel()});
      each_part([&](Range part, Range local) {
        rank_.kernels().copy(locals.flat_range(local.begin, local.end),
                             parts.flat_range(part.begin, part.end));
      });
    }
    Tensor own = make_own();
    group_->all_to_all(parts, counts_of_parts(), own, counts_of_own()).wait();
    return own;
  }

 private:
  Tensor make(std::vector<std::int64_t> shape) const {
    return {rank_.arena(), MemoryCategory::other, rank_.precision().activations, std::move(shape)};
  }

  // Own parts by the rank of the sharding group that makes the matrices.
  std::vector<std::int64_t> counts_of_own() const {
    std::vector<std::int64_t> counts;
    for (const auto& of_shard : by_shard_)
      counts.push_back(
          std::accumulate(of_shard.begin(), of_shard.end(), std::int64_t{0},
                          [](std::int64_t sum, const Parameter* p) { return sum + p->own.size(); }));
    return counts;
  }
  // Parts of what is made here, by the rank that owns them.
  std::vector<std::int64_t> counts_of_parts() const {
    std::vector<std::int64_t> counts(static_cast<std::size_t>(group_->size()));
    for (const Parameter* p : here_)
      for (std::size_t i = 0; i < counts.size(); ++i) counts[i] += p->shard_sizes[i];
    return counts;
  }
  // Calls act(elements among those parts, elements among the local tensors one after another).
  template <class Act>
  void each_part(const Act& act) const {
    std::vector<std::int64_t> ends;
    std::int64_t local = 0, at = 0;
    for (const Parameter* p : here_) {
      ends.push_back(local);
      local += p->value.numel();
    }
    for (std::size_t i = 0; i < static_cast<std::size_t>(group_->size()); ++i)
      for (std::size_t k = 0; k < here_.size(); ++k) {
        const std::int64_t size = here_[k]->shard_sizes[i];
        act(Range{at, at + size}, Range{ends[k], ends[k] + size});
        at += size;
        ends[k] += size;
      }
  }

  // Local tensors, by the tp rank that makes the matrix; and slices of this rank's matrix, by the tp rank
  // that has them.
  std::vector<std::int64_t> counts_of_locals() const {
    std::vector<std::int64_t> counts(static_cast<std::size_t>(tp_));
    for (std::size_t k = 0; k < here_.size(); ++k) counts[k] = here_[k]->value.numel();
    return counts;
  }
  std::vector<std::int64_t> counts_of_slices() const {
    std::vector<std::int64_t> counts(static_cast<std::size_t>(tp_));
    if (mine_ != nullptr)
      for (int i = 0; i < tp_; ++i) counts[static_cast<std::size_t>(i)] = local_numel(mine_->spec, tp_, i);
    return counts;
  }
  template <class Act>
  void each_slice(const Tensor& slices, const Tensor& whole, const Act& act) const {
    std::int64_t begin = 0;
    for (int i = 0; i < tp_; ++i) {
      const std::int64_t end = begin + local_numel(mine_->spec, tp_, i);
      const Tensor slice = slices.flat_range(begin, end).reshape(local_shape(mine_->spec, tp_, i));
      std::int64_t at = 0;
      for (const Range& range : local_ranges(mine_->spec, tp_, i)) {
        act(cut_range(slice, mine_->spec, {at, at + range.size()}), cut_range(whole, mine_->spec, range));
        at += range.size();
      }
      begin = end;
    }
  }

  const Rank& rank_;
  int tp_;
  std::vector<std::vector<const Parameter*>> by_shard_;  // that makes them, each by one of its tp ranks
  std::vector<const Parameter*> all_, here_;             // one shard's after another's; those of this shard
  Communicator* group_ = nullptr;
  const Parameter* mine_ = nullptr;
};

}  // namespace

void orthogonalize(Kernels& kernels, Tensor& x) {
  const bool wide = x.rows() <= x.cols();
  const std::int64_t side = std::min(x.rows(), x.cols());
  const Transpose no = Transpose::no, yes = Transpose::yes;
  const Tensor square = x.beside(MemoryCategory::other, x.dtype(), {side, side}),
               sum = x.beside(MemoryCategory::other, x.dtype(), {side, side});
  Tensor next = x.beside(MemoryCategory::other, x.dtype(), x.shape());
  kernels.scale(x, 1 / std::max(norm_of(kernels, x), muon_least_norm));
  for (int i = 0; i < muon_iterations; ++i) {
    kernels.matmul(x, wide ? no : yes, x, wide ? yes : no, square, false);
    kernels.matmul(square, no, square, no, sum, false);
    kernels.scale(sum, quintic);
    kernels.scale(square, cubic);
    kernels.add(square, sum);
    if (wide)
      kernels.matmul(sum, no, x, no, next, false);
    else
      kernels.matmul(x, no, sum, no, next, false);
    kernels.scale(x, linear);
    kernels.add(x, next);
    std::swap(x, next);
  }
}

double muon_scale(const ParamSpec& spec) {
  return 0.2 * std::sqrt(static_cast<double>(std::max(spec.shape[0], spec.shape[1])));
}

double orthogonalization_slope() { return std::pow(linear, muon_iterations); }

void muon_step(const Rank& rank, const ParameterStore& parameters, const OptimizerOptions& options,
               double learning_rate, std::int64_t updates, double gradient_scale) {
  std::vector<const ParamSpec*> specs;
  for (const Parameter& p : parameters.all()) specs.push_back(&p.spec);
  const MomentumStep momentum{muon_momentum, gradient_scale};
  for (const MuonRound& round :
       muon_rounds(parameters.optimizer(), specs, parameters.all_shards(), rank.size(Axis::tp))) {
    const RoundExchange exchange(rank, parameters, round);
    Tensor own = exchange.make_own();
    exchange.each_own([&](const Parameter& p, Range at) {
      rank.kernels().momentum(p.own_gradient, p.exp_avg, own.flat_range(at.begin, at.end), momentum);
    });
    Tensor x = exchange.to_owners(std::exchange(own, {}));
    if (x.defined()) orthogonalize(rank.kernels(), x);
    own = exchange.from_owners(std::exchange(x, {}));
    exchange.each_own([&](const Parameter& p, Range at) {
      const WeightRounding rounding(rank, parameters, p, p.own, updates + 1);
      rank.kernels().step_weights(p.own_value, own.flat_range(at.begin, at.end),
                                  {.lr = learning_rate,
                                   .weight_decay = p.spec.decay ? options.weight_decay : 0.0,
                                   .scale = muon_scale(p.spec),
                                   .rounding = rounding.get()},
                                  p.own_remainder);
    });
  }
}

}  // namespace echelon

#include "train/optimizer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <numeric>
#include <optional>

#include "base/error.h"
#include "comm/host_group.h"
#include "tensor/host.h"

namespace echelon {

void validate(const OptimizerOptions& o) {
  const auto positive = [](const char* flag, double value) {
    if (!(value > 0) || !std::isfinite(value)) refuse("{} {}: must be a number above 0", flag, value);
  };
  const auto not_negative = [](const char* flag, double value) {
    if (!(value >= 0) || !std::isfinite(value)) refuse("{} {}: must be a number of at least 0", flag, value);
  };
  positive("--lr", o.lr);
  not_negative("--min-lr", o.min_lr);
  if (o.min_lr > o.lr) refuse("--min-lr {}: must not be above --lr {}", o.min_lr, o.lr);
  not_negative("--warmup", static_cast<double>(o.warmup_steps));
  not_negative("--weight-decay", o.weight_decay);
  not_negative("--clip", o.clip);
}

double learning_rate(const OptimizerOptions& o, std::int64_t step) {
  if (step < o.warmup_steps)
    return o.lr * static_cast<double>(step + 1) / static_cast<double>(o.warmup_steps);
  if (step >= o.total_steps) return o.min_lr;
  const double progress =
      static_cast<double>(step - o.warmup_steps) / static_cast<double>(o.total_steps - o.warmup_steps);
  return o.min_lr + 0.5 * (o.lr - o.min_lr) * (1.0 + std::cos(std::numbers::pi * progress));
}

// The sum of squares of each parameter that this rank holds. A rank that has a part of the gradients has
// whole blocks, and zeros change no sum: the bits do not depend on how they are cut.
static std::vector<double> sums_of_squares(const Rank& rank, const ParameterStore& parameters) {
  const auto& all = parameters.all();
  std::vector<double> sums(all.size());
  for (const bool experts : {false, true}) {  // cut over different ranks
    std::vector<const Parameter*> counted;
    std::int64_t total = 0;
    for (const Parameter& p : all)
      if ((p.spec.expert >= 0) == experts && !p.spec.frozen) {
        counted.push_back(&p);
        total += norm_blocks(p.value.numel());
      }
    if (counted.empty()) continue;
    const Tensor blocks(rank.arena(), MemoryCategory::other, DType::f64, {total});
    Communicator* const group = counted.front()->shard_group;
    if (blocks.device() == Device::none) {  // millions of numbers, which nobody would read
      if (group != nullptr) group->all_reduce(blocks).wait();
      continue;
    }
    if (group != nullptr) fill_with_zero(blocks);  // those that are others'
    std::int64_t begin = 0;
    std::vector<SquaresOf> squares;
    for (const Parameter* p : counted) {
      const std::int64_t first = begin + p->own.begin / norm_block;
      squares.push_back({p->own_gradient, blocks.flat_range(first, first + norm_blocks(p->own.size()))});
      begin += norm_blocks(p->value.numel());
    }
    rank.kernels().sum_squares_of_all(squares, norm_block);
    std::vector<double> of_blocks = copy_to_host(blocks, 0.0);
    if (group != nullptr) of_blocks = HostGroup(*group).sum(of_blocks);
    const double* at = of_blocks.data();
    for (const Parameter* p : counted) {
      const std::int64_t count = norm_blocks(p->value.numel());
      sums[static_cast<std::size_t>(p - all.data())] = std::accumulate(at, at + count, 0.0);
      at += count;
    }
  }
  return sums;
}

std::vector<double> gradient_squares(const Rank& rank, const ParameterStore& parameters) {
  const int tp = rank.size(Axis::tp), index = rank.coordinate(Axis::tp);
  std::vector<double> squares(parameters.model().size());
  const std::vector<double> here = sums_of_squares(rank, parameters);
  for (std::size_t i = 0; i < squares.size(); ++i) {
    const Parameter* p = parameters.find_here(parameters.model()[i].name);
    // Only the first of ranks that hold the same elements counts them; in an expert group each its experts.
    const bool mine = p != nullptr && index % tp_replicas(p->spec, tp) == 0 &&
                      p->holders.front() == rank.coordinate(Axis::pp) &&
                      (p->spec.expert >= 0 || rank.mesh().ep_index(rank.coordinates()) == 0);
    if (mine) squares[i] = here[static_cast<std::size_t>(p - parameters.all().data())];
  }
  squares = HostGroup(rank.along(Axis::tp)).sum(squares);
  if (rank.size(Axis::ep) > 1) squares = HostGroup(rank.ep()).sum(squares);
  return squares;
}

double norm_of_squares(const std::vector<double>& squares) {
  return std::sqrt(std::accumulate(squares.begin(), squares.end(), 0.0));
}

double global_gradient_norm(const Rank& rank, const ParameterStore& parameters) {
  const Doing doing = rank.doing(Activity::gradient_norm);
  return norm_of_squares(HostGroup(rank.along(Axis::pp)).sum(gradient_squares(rank, parameters)));
}

double invariant_gradient_norm(const Rank& rank, const ParameterStore& parameters) {
  const Doing doing = rank.doing(Activity::gradient_norm);
  // Each logical element is one rank's to count.
  std::vector<Tensor> counted;
  const int tp = rank.size(Axis::tp), place = rank.mesh().dp_cp_index(rank.coordinates());
  for (const Parameter& p : parameters.all()) {
    const int holding_once =
        p.shard_group != nullptr ? parameters.shards() : p.spec.expert >= 0 ? rank.size(Axis::ep) : 1;
    const bool first = place < holding_once;
    if (first && !p.spec.frozen && p.own.size() > 0 && p.holders.front() == rank.coordinate(Axis::pp) &&
        rank.coordinate(Axis::tp) % tp_replicas(p.spec, tp) == 0)
      counted.push_back(p.own_gradient.flat());
  }
  double largest = 0;
  for (const Tensor& gradient : counted)
    if (const double here = rank.kernels().largest(gradient); !(here <= largest)) largest = here;
  const std::array axes{Axis::tp, Axis::pp};
  largest = HostGroup(rank.dp_cp()).max(largest);
  for (Axis axis : axes) largest = HostGroup(rank.along(axis)).max(largest);
  if (!std::isfinite(largest)) return largest;
  // A power of two that all of them are below.
  const int exponent = largest > 0 ? std::ilogb(largest) + 1 : 0;
  constexpr std::uint64_t digit = std::uint64_t{1} << 32;
  std::vector<double> digits(4);  // in base 2^32, the highest first; so many ranks' are exact in a double
  for (const Tensor& gradient : counted) {
    const ExactSum sum = rank.kernels().sum_squares_exactly(gradient, std::ldexp(1.0, -2 * exponent));
    digits[0] += static_cast<double>(sum.high / digit);
    digits[1] += static_cast<double>(sum.high % digit);
    digits[2] += static_cast<double>(sum.low / digit);
    digits[3] += static_cast<double>(sum.low % digit);
  }
  digits = HostGroup(rank.dp_cp()).sum(digits);
  for (Axis axis : axes) digits = HostGroup(rank.along(axis)).sum(digits);
  // The lower half of `high` and the upper one of `low` stand at the same place, 2^-32.
  auto units = static_cast<std::uint64_t>(digits[3]),
       middle = static_cast<std::uint64_t>(digits[1]) + static_cast<std::uint64_t>(digits[2]),
       top = static_cast<std::uint64_t>(digits[0]);
  middle += units / digit;
  top += middle / digit;
  const double sum = static_cast<double>(top) * static_cast<double>(digit) +
                     static_cast<double>(middle % digit) +
                     static_cast<double>(units % digit) / static_cast<double>(digit);
  return std::ldexp(std::sqrt(sum / static_cast<double>(digit)), exponent);
}

double clip_factor(double norm, double clip) { return clip > 0 && norm > clip ? clip / norm : 1.0; }

AdamWStep adamw_update(const ParamSpec& spec, const OptimizerOptions& options, double learning_rate,
                       std::int64_t updates, double gradient_scale) {
  AdamWStep update;
  update.lr = learning_rate;
  update.beta1 = options.beta1;
  update.beta2 = options.beta2;
  update.eps = options.eps;
  update.step = std::max<std::int64_t>(updates, 0) + 1;
  update.gradient_scale = gradient_scale;
  update.weight_decay = spec.decay ? options.weight_decay : 0.0;
  return update;
}

void adamw_part(const Rank& rank, const ParameterStore& parameters, const Parameter& p, Range part,
                const Updated& u, AdamWStep update) {
  std::vector<LogicalRun> runs;
  std::optional<StochasticRounding> rounding;
  if (rank.precision().rounds_stochastically()) {
    runs = logical_runs(p.spec, rank.size(Axis::tp), rank.coordinate(Axis::tp), part);
    rounding.emplace(StochasticRounding{weight_rounding(parameters.seed(), p.spec.name, update.step), runs});
    update.rounding = &*rounding;
  }
  rank.kernels().adamw(u.value, u.gradient, u.exp_avg, u.exp_avg_sq, update, u.remainder);
}

void adamw_step(const Rank& rank, const ParameterStore& parameters, const OptimizerOptions& options,
                double learning_rate, std::int64_t updates, double gradient_scale) {
  const Doing doing = rank.doing(Activity::optimizer);
  parameters.begin_update();
  // All at once, unless moments are there for one after another.
  std::vector<AdamWUpdate> together;
  for (const Parameter& p : parameters.all())
    if (p.own.size() > 0 && !p.spec.frozen)
      parameters.with_moments(p, [&](Range part, const Tensor& first, const Tensor& second) {
        const auto of = [&](const Tensor& own) { return own.flat().flat_range(part.begin, part.end); };
        const Updated u{of(p.own_value), p.own_remainder.defined() ? of(p.own_remainder) : Tensor(),
                        of(p.own_gradient), first, second};
        const AdamWStep step = adamw_update(p.spec, options, learning_rate, updates, gradient_scale);
        if (parameters.offloads_moments() || rank.precision().rounds_stochastically())
          adamw_part(rank, parameters, p, {p.own.begin + part.begin, p.own.begin + part.end}, u, step);
        else
          together.push_back({u.value, u.gradient, u.exp_avg, u.exp_avg_sq, u.remainder, step});
      });
  rank.kernels().adamw_of_all(together);
  parameters.share_values();
}

}  // namespace echelon

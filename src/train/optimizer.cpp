#include "train/optimizer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>

#include "base/error.h"
#include "comm/host_group.h"
#include "tensor/host.h"
#include "train/muon.h"

namespace echelon {

void validate(const OptimizerOptions& o) {
  const auto positive = [](const char* flag, double value) {
    if (!(value > 0) || !std::isfinite(value)) refuse("{} {}: must be a number above 0", flag, value);
  };
  const auto not_negative = [](const char* flag, double value) {
    if (!(value >= 0) || !std::isfinite(value)) refuse("{} {}: must be a number of at least 0", flag, value);
  };
  positive("--lr", o.lr);
  if (constexpr double most = std::numeric_limits<float>::max(); o.lr > most)
    refuse("--lr {}: must be at most {:.2g}, the largest number of f32", o.lr, most);
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

// Of a parameter as this rank holds it: blocks of elements, and sums of so many blocks.
static std::int64_t blocks_of(const Parameter& p) { return norm_blocks(p.value.numel()); }
static std::int64_t sums_of(const Parameter& p) {
  return (blocks_of(p) + norm_blocks_at_once - 1) / norm_blocks_at_once;
}

// A rank that has a part of the gradients has whole blocks, and zeros change no sum: the bits do not depend
// on how they are cut.
GradientSquares::GradientSquares(const Rank& rank, const ParameterStore& parameters)
    : rank_(rank), parameters_(parameters) {
  const auto numbers = [&](std::int64_t count) {
    return Tensor(rank.arena(), MemoryCategory::other, DType::f64, {count});
  };
  for (const bool experts : {false, true}) {
    Part part;
    std::int64_t num_blocks = 0, num_sums = 0;
    for (const Parameter& p : parameters.all())
      if ((p.spec.expert >= 0) == experts && !p.spec.frozen) {
        part.counted.push_back(&p);
        num_blocks += blocks_of(p);
        num_sums += sums_of(p);
      }
    if (part.counted.empty()) continue;
    part.group = part.counted.front()->shard_group;
    part.blocks = numbers(num_blocks);
    if (part.group == nullptr)
      part.sums = numbers(num_sums);
    else
      fill_with_zero(part.blocks);  // those that are others'
    std::int64_t block = 0, sum = 0;
    std::vector<SumsOf> squares, in_order;
    for (const Parameter* p : part.counted) {
      const std::int64_t first = block + p->own.begin / norm_block;
      squares.push_back({p->own_gradient, part.blocks.flat_range(first, first + norm_blocks(p->own.size()))});
      if (part.group == nullptr)
        in_order.push_back({squares.back().sums, part.sums.flat_range(sum, sum + sums_of(*p))});
      block += blocks_of(*p);
      sum += sums_of(*p);
    }
    rank.kernels().sum_squares_of_all(squares, norm_block);
    rank.kernels().sum_in_order_of_all(in_order, norm_blocks_at_once);
    parts_.push_back(std::move(part));
  }
}

// Of each parameter that this rank holds.
std::vector<double> GradientSquares::of_parameters() {
  std::vector<double> result(parameters_.all().size());
  for (const Part& part : parts_) {
    if (part.blocks.device() == Device::none) {  // millions of numbers, which nobody would read
      if (part.group != nullptr) part.group->all_reduce(part.blocks).wait();
      continue;
    }
    const bool whole = part.group == nullptr;
    std::vector<double> numbers = copy_to_host(whole ? part.sums : part.blocks, 0.0);
    if (!whole) numbers = HostGroup(*part.group).sum(numbers);
    const double* at = numbers.data();
    for (const Parameter* p : part.counted) {
      double& total = result[static_cast<std::size_t>(p - parameters_.all().data())];
      if (whole) {
        total = std::accumulate(at, at + sums_of(*p), 0.0);
        at += sums_of(*p);
        continue;
      }
      for (const double* const end = at + blocks_of(*p); at < end;) {
        const double* const next = at + std::min<std::ptrdiff_t>(norm_blocks_at_once, end - at);
        total += std::accumulate(at, next, 0.0);
        at = next;
      }
    }
  }
  parts_.clear();
  return result;
}

std::vector<double> GradientSquares::get() {
  const int tp = rank_.size(Axis::tp), index = rank_.coordinate(Axis::tp);
  std::vector<double> squares(parameters_.model().size());
  const std::vector<double> here = of_parameters();
  for (std::size_t i = 0; i < here.size(); ++i) {
    const Parameter& p = parameters_.all()[i];
    // Only the first of ranks that hold the same elements counts them; in an expert group each its experts.
    const bool mine = index % tp_replicas(p.spec, tp) == 0 &&
                      p.holders.front() == rank_.coordinate(Axis::pp) &&
                      (p.spec.expert >= 0 || rank_.mesh().ep_index(rank_.coordinates()) == 0);
    if (mine) squares[p.index] = here[i];
  }
  squares = HostGroup(rank_.along(Axis::tp)).sum(squares);
  if (rank_.size(Axis::ep) > 1) squares = HostGroup(rank_.ep()).sum(squares);
  return squares;
}

double norm_of_squares(const std::vector<double>& squares) {
  return std::sqrt(std::accumulate(squares.begin(), squares.end(), 0.0));
}

double global_gradient_norm(const Rank& rank, GradientSquares& squares) {
  const Doing doing = rank.doing(Activity::gradient_norm);
  return norm_of_squares(HostGroup(rank.along(Axis::pp)).sum(squares.get()));
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
    if (const double here = rank.kernels().largest(gradient); here > largest || std::isnan(here))
      largest = here;
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

WeightRounding::WeightRounding(const Rank& rank, const ParameterStore& parameters, const Parameter& p,
                               Range part, std::int64_t step) {
  if (!rank.precision().rounds_stochastically()) return;
  runs_ = logical_runs(p.spec, rank.size(Axis::tp), rank.coordinate(Axis::tp), part);
  rounding_.emplace(StochasticRounding{weight_rounding(parameters.seed(), p.spec.name, step), runs_});
}

void adamw_part(const Rank& rank, const ParameterStore& parameters, const Parameter& p, Range part,
                const Updated& u, AdamWStep update) {
  const WeightRounding rounding(rank, parameters, p, part, update.step);
  update.rounding = rounding.get();
  rank.kernels().adamw(u.value, u.gradient, u.exp_avg, u.exp_avg_sq, update, u.remainder);
}

void optimizer_step(const Rank& rank, const ParameterStore& parameters, const OptimizerOptions& options,
                    double learning_rate, std::int64_t updates, double gradient_scale) {
  const Doing doing = rank.doing(Activity::optimizer);
  parameters.begin_update();
  // All at once, unless moments are there for one after another.
  std::vector<AdamWUpdate> together;
  for (const Parameter& p : parameters.all())
    if (p.own.size() > 0 && !p.spec.frozen && !p.is_updated_whole)
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
  muon_step(rank, parameters, options, learning_rate, std::max<std::int64_t>(updates, 0), gradient_scale);
  parameters.share_values();
}

}  // namespace echelon

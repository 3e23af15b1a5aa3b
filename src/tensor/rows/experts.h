// Routing of tokens to experts, and the order of their copies, as specified in Kernels. F is the stored type
// of logits and weights; routing itself is in double precision (spec/router_row.h).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "spec/router_row.h"
#include "tensor/rows/check_anywhere.h"
#include "tensor/rows/team.h"

namespace echelon::rows {

// The numbers of one token, in its block's memory; only the first lane works with them.
struct RouterSpace {
  double *logits, *softmax, *scores, *wanted, *d_scores;
  ChoiceSpace choice;
  static std::size_t shared_bytes(const RouterRules& r) {
    const auto experts = static_cast<std::size_t>(r.experts),
               groups = static_cast<std::size_t>(r.spec.groups);
    return sizeof(double) * (5 * experts + groups) + 2 * experts + groups;
  }
  ECHELON_HOST_DEVICE RouterSpace(const RouterRules& r, std::byte* shared) {
    logits = reinterpret_cast<double*>(shared);
    softmax = logits + r.experts;
    scores = softmax + r.experts;
    wanted = scores + r.experts;
    d_scores = wanted + r.experts;
    choice.group_sums = d_scores + r.experts;
    choice.taken = reinterpret_cast<unsigned char*>(choice.group_sums + r.spec.groups);
    choice.seen = choice.taken + r.experts;  // (experts + groups)
  }
};

template <class F>
struct RouteToken {
  RouterRules rules;
  Matrix<F> logits;
  const double* bias;  // or null
  bool choose;         // otherwise the ids are given
  std::int32_t* ids;
  F* weights;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    if (team.lane() != 0) return;
    const std::int64_t i = team.block();
    const RouterSpace space(rules, team.shared());
    for (std::int64_t e = 0; e < rules.experts; ++e) space.logits[e] = static_cast<double>(logits[i][e]);
    score_experts(rules, space.logits, space.softmax, space.scores);
    std::int32_t* const id = ids + i * rules.k;
    if (choose) {
      for (std::int64_t e = 0; e < rules.experts; ++e)
        space.wanted[e] = bias == nullptr ? space.scores[e] : space.scores[e] + bias[e];
      check_anywhere(choose_experts(rules, space.wanted, space.choice, id),
                     "a router has at least as many experts as it must choose");
    }
    const double factor = weight_factor(rules, space.scores, id);
    for (std::int64_t j = 0; j < rules.k; ++j)
      weights[i * rules.k + j] = static_cast<F>(factor * space.scores[id[j]]);
  }
};

// The balance factors for a row's scope.
struct RowFactors {
  const double* factors;  // (scopes, E), or null
  std::int64_t rows_per_scope, first_row;
  ECHELON_HOST_DEVICE const double* of(std::int64_t row, std::int64_t experts) const {
    return factors == nullptr ? nullptr : factors + (first_row + row) / rows_per_scope * experts;
  }
};

template <class F>
struct RouteBackward {
  RouterRules rules;
  Matrix<F> logits;
  const std::int32_t* ids;
  const F* d_weights;
  RowFactors factors;
  double z_loss, loss_scale;
  Matrix<F> d_logits;
  struct WeightGradient {
    const F* of_token;
    ECHELON_HOST_DEVICE double operator()(std::int64_t j) const { return static_cast<double>(of_token[j]); }
  };
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    if (team.lane() != 0) return;
    const std::int64_t i = team.block();
    const RouterSpace space(rules, team.shared());
    for (std::int64_t e = 0; e < rules.experts; ++e) space.logits[e] = static_cast<double>(logits[i][e]);
    const RouterSums sums = score_experts(rules, space.logits, space.softmax, space.scores);
    router_gradient(rules, sums, space.scores, space.softmax, ids + i * rules.k,
                    WeightGradient{d_weights + i * rules.k}, factors.of(i, rules.experts), z_loss, loss_scale,
                    space.d_scores, space.wanted);
    for (std::int64_t e = 0; e < rules.experts; ++e) d_logits[i][e] = static_cast<F>(space.wanted[e]);
  }
};

// losses[i] = the loss of token i.
template <class F>
struct RouterLossOfRow {
  RouterRules rules;
  Matrix<F> logits;
  RowFactors factors;
  double z_loss;
  double* losses;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    if (team.lane() != 0) return;
    const std::int64_t i = team.block();
    const RouterSpace space(rules, team.shared());
    for (std::int64_t e = 0; e < rules.experts; ++e) space.logits[e] = static_cast<double>(logits[i][e]);
    const RouterSums sums = score_experts(rules, space.logits, space.softmax, space.scores);
    losses[i] = router_loss(rules, sums, space.scores, factors.of(i, rules.experts), z_loss);
  }
};

// total += the sum of the numbers, which is computed first. One block.
struct AddSum {
  const double* numbers;
  std::int64_t count;
  double* total;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t) const {
    double sum = 0;
    for (std::int64_t i = team.lane(); i < count; i += team.lanes()) sum += numbers[i];
    sum = sum_of(team, sum);
    if (team.lane() == 0) *total += sum;
  }
};

// A block for each count of each scope: of tokens for an expert; and, after these, of tokens for at least one
// expert of a group.
struct CountRouted {
  RouterRules rules;
  const std::int32_t* ids;
  std::int64_t tokens_per_scope;
  std::int32_t* counts;  // (scopes, E + groups)
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t block) const {
    const std::int64_t width = rules.experts + rules.spec.groups, what = block % width;
    const std::int64_t first = block / width * tokens_per_scope, size = rules.experts / rules.spec.groups;
    std::int32_t count = 0;
    for (std::int64_t t = first + team.lane(); t < first + tokens_per_scope; t += team.lanes()) {
      bool in_group = false;
      for (std::int64_t j = 0; j < rules.k; ++j) {
        const std::int64_t id = ids[t * rules.k + j];
        if (id == what) ++count;
        in_group = in_group || id / size == what - rules.experts;
      }
      if (what >= rules.experts && in_group) ++count;
    }
    count = sum_of(team, count);
    if (team.lane() == 0) counts[block] = count;
  }
};

// Keeps half of a weight's digits. Equal weights (with k = 1, or of equal tokens at the beginning of a
// sequence) agree up to rounding, which depends on the mesh: with fewer digits they are equal on every mesh.
template <class F>
ECHELON_HOST_DEVICE F drop_priority(F weight) {
  constexpr F digits = sizeof(F) == 8 ? F(67108864) : F(4096);  // 2^26, 2^12
  return std::nearbyint(weight * digits);
}

// Keeps a choice if fewer than `each` choices of its scope for the same expert have precedence: by weight,
// and equal ones in order; or just in order. A block for each expert of each scope finds the lowest weight
// that stays by its base-16 digits, the highest first, with one pass over the scope for each. `shared` is a
// number for each lane.
template <class F>
struct DropOverCapacity {
  const std::int32_t* ids;
  const F* weights;
  std::int64_t choices, experts, each;  // choices of a scope; copies that an expert keeps
  bool by_weight;
  std::int32_t* kept;

  static std::size_t shared_bytes(std::int64_t lanes) {
    return sizeof(std::int64_t) * static_cast<std::size_t>(lanes);
  }

  using Key = std::conditional_t<sizeof(F) == 8, std::uint64_t, std::uint32_t>;
  static constexpr int digits = 2 * sizeof(F), base = 16;
  // Greater keys have precedence. NaN comes last, so that there is an order.
  ECHELON_HOST_DEVICE Key key(std::int64_t at) const {
    if (!by_weight) return 0;
    const F weight = drop_priority(weights[at]);
    if (weight != weight) return 0;
    const F number = weight == 0 ? F(0) : weight;  // of either sign
    Key bits;
    std::memcpy(&bits, &number, sizeof bits);
    constexpr Key sign = Key{1} << (8 * sizeof(F) - 1);
    return (bits & sign) != 0 ? ~bits : bits | sign;
  }

  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const std::int64_t expert = team.block() % experts, first = team.block() / experts * choices;
    std::int64_t total = 0;
    for (std::int64_t i = team.lane(); i < choices; i += team.lanes())
      total += ids[first + i] == expert ? 1 : 0;
    total = sum_of(team, total);
    // How many choices precede those with the last key that stays; that key is 0 if all stay.
    std::int64_t before = 0;
    Key last = 0;
    for (int digit = digits - 1; digit >= 0 && total > each; --digit) {
      std::int64_t count[base] = {};
      for (std::int64_t i = team.lane(); i < choices; i += team.lanes()) {
        if (ids[first + i] != expert) continue;
        const Key of_choice = key(first + i);
        // In two shifts, since a shift by all bits of a number is undefined.
        if (of_choice >> (4 * digit) >> 4 == last >> (4 * digit) >> 4)
          ++count[static_cast<int>(of_choice >> (4 * digit)) & (base - 1)];
      }
      for (int value = 0; value < base; ++value) count[value] = sum_of(team, count[value]);
      int value = base - 1;
      while (value > 0 && before + count[value] < each) before += count[value--];
      last |= static_cast<Key>(value) << (4 * digit);
    }
    // Of the choices with that key, the first ones stay. Each lane has a run of choices.
    const std::int64_t run = (choices + team.lanes() - 1) / team.lanes();
    const std::int64_t begin = team.lane() * run, end = begin + run < choices ? begin + run : choices;
    auto* const of_lane = reinterpret_cast<std::int64_t*>(team.shared());
    std::int64_t own = 0;
    for (std::int64_t i = begin; i < end; ++i)
      own += ids[first + i] == expert && key(first + i) == last ? 1 : 0;
    of_lane[team.lane()] = own;
    team.sync();
    for (std::int64_t lane = 0; lane < team.lane(); ++lane) before += of_lane[lane];
    for (std::int64_t i = begin; i < end; ++i) {
      if (ids[first + i] != expert) continue;
      const Key of_choice = key(first + i);
      const bool stays = of_choice > last || (of_choice == last && before++ < each);
      kept[first + i] = stays ? ids[first + i] : -1;
    }
  }
};

// counts[expert] = its number of copies. A block for each expert.
struct CountCopies {
  const std::int32_t* ids;
  std::int64_t choices;
  std::int32_t* counts;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t expert) const {
    std::int32_t count = 0;
    for (std::int64_t i = team.lane(); i < choices; i += team.lanes()) count += ids[i] == expert ? 1 : 0;
    count = sum_of(team, count);
    if (team.lane() == 0) counts[expert] = count;
  }
};

// The places of an expert's copies, in order after those of the experts before it. The block after the last
// expert's handles dropped choices and the rest of `tokens`. Each lane has a run of choices; `shared` is a
// number for each lane.
struct PlaceCopies {
  const std::int32_t* ids;
  std::int64_t choices, k, experts, room;
  const std::int32_t* counts;
  std::int32_t *places, *tokens;
  static std::size_t shared_bytes(std::int64_t lanes) {
    return sizeof(std::int64_t) * static_cast<std::size_t>(lanes);
  }
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const std::int64_t expert = team.block();
    std::int64_t start = 0;
    for (std::int64_t e = 0; e < expert && e < experts; ++e) start += counts[e];
    if (expert == experts) {
      check_anywhere(start <= room, "there is room for every copy of a token");
      for (std::int64_t i = team.lane(); i < choices; i += team.lanes())
        if (ids[i] < 0) places[i] = -1;
      for (std::int64_t at = start + team.lane(); at < room; at += team.lanes()) tokens[at] = -1;
      return;
    }
    if (start + counts[expert] > room) return;  // the last block reports it
    const std::int64_t each = (choices + team.lanes() - 1) / team.lanes();
    const std::int64_t begin = team.lane() * each, end = begin + each < choices ? begin + each : choices;
    auto* const of_lane = reinterpret_cast<std::int64_t*>(team.shared());
    std::int64_t own = 0;
    for (std::int64_t i = begin; i < end; ++i) own += ids[i] == expert ? 1 : 0;
    of_lane[team.lane()] = own;
    team.sync();
    for (std::int64_t lane = 0; lane < team.lane(); ++lane) start += of_lane[lane];
    for (std::int64_t i = begin; i < end; ++i) {
      if (ids[i] != expert) continue;
      places[i] = static_cast<std::int32_t>(start);
      tokens[start++] = static_cast<std::int32_t>(i / k);
    }
  }
};

// Rows of 2 k numbers: k weights and k ids.
template <class F>
struct PackChoices {
  const std::int32_t* ids;
  const F* weights;
  std::int64_t k;
  F* packed;
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, std::int64_t j) const {
    packed[i * 2 * k + j] = j < k ? weights[i * k + j] : static_cast<F>(ids[i * k + j - k]);
  }
};
template <class F>
struct UnpackChoices {
  const F* packed;
  const std::int64_t* rows;  // or null: row i is for token i
  std::int64_t k;
  std::int32_t* ids;
  F* weights;
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, std::int64_t j) const {
    const std::int64_t to = rows == nullptr ? i : rows[i];
    weights[to * k + j] = packed[i * 2 * k + j];
    ids[to * k + j] = static_cast<std::int32_t>(packed[i * 2 * k + k + j]);
  }
};

struct TakeIds {
  const std::int32_t* from;
  const std::int64_t* rows;
  std::int64_t k;
  std::int32_t* to;
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, std::int64_t j) const {
    to[i * k + j] = from[rows[i] * k + j];
  }
};

template <class F>
struct PlaceWeights {
  const F* weights;
  const std::int32_t* places;
  F* placed;
  ECHELON_HOST_DEVICE void operator()(std::int64_t, std::int64_t i) const {
    if (places[i] >= 0) placed[places[i]] = weights[i];
  }
};

}  // namespace echelon::rows

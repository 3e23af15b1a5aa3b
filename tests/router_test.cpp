#include "spec/token_router.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "base/error.h"
#include "base/split.h"
#include "spec/routing_balance.h"
#include "tensor/kernels.h"
#include "tensor_checks.h"

namespace echelon::router_test {
namespace {

using namespace checks;

constexpr std::int64_t E = 6;

struct Routed {
  Tensor ids, weights;
};

struct RouterTest : testing::Test {
  static TokenRouter router(const RouterSpec& spec, std::int64_t k, std::int64_t experts = E) {
    return {spec, experts, k};
  }
  Routed choose(const TokenRouter& r, const Tensor& logits, std::span<const double> bias = {}) {
    Routed out{integers(arena, std::vector<std::int32_t>(
                                   static_cast<std::size_t>(logits.rows() * r.experts_per_token())))
                   .reshape({logits.rows(), r.experts_per_token()}),
               constant(arena, {logits.rows(), r.experts_per_token()}, 0)};
    kernels->route(r, logits, bias, out.ids, out.weights);
    return out;
  }
  Tensor row(std::vector<double> values) {
    const Tensor t = constant(arena, {1, static_cast<std::int64_t>(values.size())}, 0);
    std::copy(values.begin(), values.end(), t.host<double>());
    return t;
  }
  static std::vector<std::int32_t> list(const Tensor& ids) {
    return {ids.host<std::int32_t>(), ids.host<std::int32_t>() + ids.numel()};
  }
  void backward(const TokenRouter& r, const Tensor& logits, const Tensor& ids, const Tensor& d_weights,
                const RouterLosses& losses, double scale, const Tensor& d_logits) {
    kernels->route_backward(r, logits, ids, d_weights, losses, scale, d_logits);
  }
  double loss_of(const TokenRouter& r, const Tensor& logits, const RouterLosses& losses) {
    const Tensor loss = constant(arena, {1}, 0);
    kernels->add_router_losses(r, logits, losses, loss);
    return at(loss, 0);
  }
  std::vector<double> counts_of(const TokenRouter& r, const Tensor& ids, std::int64_t scopes = 1) {
    const std::int64_t width = num_routing_counts(r.num_experts(), r.spec());
    const Tensor counts =
        integers(arena, std::vector<std::int32_t>(static_cast<std::size_t>(scopes * width)));
    kernels->count_routed(r, ids, scopes, counts);
    const std::vector<std::int32_t> numbers = list(counts);
    return {numbers.begin(), numbers.end()};
  }
  Arena arena;
  std::unique_ptr<Kernels> kernels = make_reference_kernels();
};

TEST_F(RouterTest, WeightsOfMixtralAreTheSoftmaxOfTheChosenLogits) {
  const Tensor logits = random(arena, {7, E}, 1);
  const Routed routed = choose(router({}, 2), logits);
  for (std::int64_t t = 0; t < 7; ++t) {
    const std::int32_t a = routed.ids.host<std::int32_t>()[2 * t],
                       b = routed.ids.host<std::int32_t>()[2 * t + 1];
    for (std::int32_t e = 0; e < E; ++e)
      if (e != a && e != b) {
        EXPECT_LE(at(logits, t, e), at(logits, t, b));
      }
    const double share = 1 / (1 + std::exp(at(logits, t, b) - at(logits, t, a)));
    EXPECT_NEAR(at(routed.weights, t, 0), share, 4 * epsilon);
    EXPECT_NEAR(at(routed.weights, t, 1), 1 - share, 4 * epsilon);
  }
}

TEST_F(RouterTest, WeightsThatAreNotNormalisedAreScores) {
  const Routed routed = choose(router({.normalise = false, .scale = 3}, 1), row({0, 1, 0, 0, 0, 0}));
  EXPECT_NEAR(at(routed.weights, 0), 3 * std::exp(1.0) / (5 + std::exp(1.0)), 8 * epsilon);
  const Routed open =
      choose(router({.scores = RouterScores::sigmoid, .normalise = false}, 1), row({0, 1, 0, 0, 0, 0}));
  EXPECT_NEAR(at(open.weights, 0), 1 / (1 + std::exp(-1.0)), 4 * epsilon);
}

TEST_F(RouterTest, EqualScoresGoToTheLowerNumber) {
  EXPECT_EQ(list(choose(router({}, 3), row({1, 2, 1, 2, 1, 2})).ids), (std::vector<std::int32_t>{1, 3, 5}));
  EXPECT_EQ(list(choose(router({}, 4), row({0, 0, 0, 0, 0, 0})).ids),
            (std::vector<std::int32_t>{0, 1, 2, 3}));
  const RouterSpec halves{.groups = 3, .most_groups = 1};
  EXPECT_EQ(list(choose(router(halves, 2), row({0, 0, 0, 0, 0, 0})).ids), (std::vector<std::int32_t>{0, 1}));
}

TEST_F(RouterTest, WhatIsNoNumberIsRoutedSomewhere) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<std::int32_t> ids = list(choose(router({}, 2), row({nan, nan, nan, nan, nan, nan})).ids);
  EXPECT_EQ(ids, (std::vector<std::int32_t>{0, 1}));
}

TEST_F(RouterTest, BiasSteersTheChoiceAndNotTheWeights) {
  const Tensor logits = row({3, 2, 1, 0, 0, 0});
  const TokenRouter r = router({.scores = RouterScores::sigmoid, .normalise = false}, 2);
  const std::vector<double> bias{0, 0, 0, 0, 0, 1};
  const Routed routed = choose(r, logits, bias);
  EXPECT_EQ(list(routed.ids), (std::vector<std::int32_t>{5, 0}));
  EXPECT_NEAR(at(routed.weights, 0, 0), 0.5, epsilon);
}

// Scores of groups are the sums of their k / m best: here group 1 has the best expert, groups 0 and 2 the
// best pairs.
TEST_F(RouterTest, TokensReachNoMoreGroupsThanAllowed) {
  const RouterSpec spec{.scores = RouterScores::sigmoid, .groups = 3, .most_groups = 2};
  EXPECT_EQ(list(choose(router(spec, 4), row({1, 1, 1.5, -4, 0.9, 0.9})).ids),
            (std::vector<std::int32_t>{0, 1, 4, 5}));
  const RouterSpec by_best{.scores = RouterScores::sigmoid, .groups = 3, .most_groups = 2, .group_best = 1};
  EXPECT_EQ(list(choose(router(by_best, 4), row({1, 1, 1.5, -4, 0.9, 0.9})).ids),
            (std::vector<std::int32_t>{2, 0, 1, 3}));
  const Tensor logits = random(arena, {50, 12}, 2);
  const RouterSpec limited{.groups = 4, .most_groups = 2};
  const Routed routed = choose(router(limited, 3, 12), logits);
  for (std::int64_t t = 0; t < 50; ++t) {
    std::vector<bool> met(4);
    for (std::int64_t j = 0; j < 3; ++j)
      met[static_cast<std::size_t>(routed.ids.host<std::int32_t>()[3 * t + j] / 3)] = true;
    EXPECT_LE(std::count(met.begin(), met.end(), true), 2);
  }
}

struct Kind {
  RouterSpec spec;
  std::int64_t k;
};

class RouterGradient : public RouterTest, public testing::WithParamInterface<Kind> {};

// Through weights and all losses at once. Random logits stand far from a change of choice: steps are 6e-6.
TEST_P(RouterGradient, AgreesWithDifferences) {
  const auto [spec, k] = GetParam();
  const TokenRouter r = router(spec, k);
  const Tensor logits = random(arena, {6, E}, 3), wanted = random(arena, {6, k}, 4);
  RouterLosses losses{.rows_per_scope = 2, .first_row = 1, .z_loss = 0.3};
  for (int i = 0; i < 4 * E; ++i) losses.factors.push_back(std::sin(i + 0.5));
  const auto loss = [&] {
    return inner(choose(r, logits).weights, wanted) + 0.7 * loss_of(r, logits, losses);
  };
  const Tensor d_logits = constant(arena, {6, E}, 0);
  backward(r, logits, choose(r, logits).ids, wanted, losses, 0.7, d_logits);
  expect_gradient(logits, d_logits, loss, "logits");
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, RouterGradient,
    testing::Values(Kind{{}, 2}, Kind{{}, 1}, Kind{{}, E}, Kind{{.normalise = false, .scale = 1.5}, 2},
                    Kind{{.scores = RouterScores::sigmoid, .scale = 2.5}, 3},
                    Kind{{.scores = RouterScores::sigmoid, .epsilon = 0.3, .scale = 2.5}, 3},
                    Kind{{.scores = RouterScores::sigmoid, .normalise = false}, 1},
                    Kind{{.scores = RouterScores::sigmoid, .groups = 3, .most_groups = 2}, 4}));

// The only weight is the scale whatever the logits say, and factors that are all equal favour no expert: what
// rounding would leave there differs from mesh to mesh, and AdamW makes steps of it.
TEST_F(RouterTest, WhatNoLogitChangesHasAGradientOfExactlyZero) {
  const Tensor logits = random(arena, {50, E}, 12), wanted = random(arena, {50, 1}, 13);
  for (const RouterScores scores : {RouterScores::softmax, RouterScores::sigmoid}) {
    const TokenRouter r = router({.scores = scores, .scale = 2.5}, 1);
    const Tensor ids = choose(r, logits).ids, d_logits = constant(arena, {50, E}, 1);
    const RouterLosses even{.factors = std::vector<double>(E, 0.3), .rows_per_scope = 50};
    for (const RouterLosses& losses : {RouterLosses{}, even}) {
      backward(r, logits, ids, wanted, losses, 0.7, d_logits);
      for_each(d_logits, [&](std::int64_t i, std::int64_t j) { EXPECT_EQ(at(d_logits, i, j), 0); });
    }
  }
}

// The losses as the papers write them, from the choices themselves.
TEST_F(RouterTest, BalanceLossesAreThoseOfThePapers) {
  constexpr std::int64_t T = 8, k = 2;
  const RouterSpec spec{.scores = RouterScores::sigmoid, .groups = 3, .most_groups = 2};
  const TokenRouter r = router(spec, k);
  const Tensor logits = random(arena, {T, E}, 5);
  const Routed routed = choose(r, logits);
  std::vector<double> f(E), p(E), reached(3);
  for (std::int64_t t = 0; t < T; ++t) {
    double sum = 0;
    for (int e = 0; e < E; ++e) sum += 1 / (1 + std::exp(-at(logits, t, e)));
    for (int e = 0; e < E; ++e)
      p[static_cast<std::size_t>(e)] += 1 / (1 + std::exp(-at(logits, t, e))) / sum / T;
    const std::int32_t* id = routed.ids.host<std::int32_t>() + k * t;
    for (int j = 0; j < k; ++j) f[static_cast<std::size_t>(id[j])] += double(E) / (k * T);
    for (int g = 0; g < 3; ++g)
      reached[static_cast<std::size_t>(g)] += (id[0] / 2 == g || id[1] / 2 == g) ? 3.0 / (2 * T) : 0;
  }
  double expert = 0, device = 0, communication = 0;
  for (std::size_t e = 0; e < E; ++e) {
    expert += f[e] * p[e];
    device += (f[e / 2 * 2] + f[e / 2 * 2 + 1]) / 2 * p[e];
    communication += reached[e / 2] * p[e];
  }
  const std::vector<double> counts = counts_of(r, routed.ids);
  const auto loss = [&](const Balancing& balancing) {
    RouterLosses losses{.rows_per_scope = T};
    add_balance_factors(balancing, spec, E, k, T, counts, losses.factors);
    return loss_of(r, logits, losses) / T;
  };
  EXPECT_NEAR(loss({.expert_loss = 1}), expert, 100 * epsilon);
  EXPECT_NEAR(loss({.device_loss = 1}), device, 100 * epsilon);
  EXPECT_NEAR(loss({.communication_loss = 1}), communication, 100 * epsilon);
  EXPECT_NEAR(loss({.expert_loss = 0.1, .device_loss = 0.2, .communication_loss = 0.4}),
              0.1 * expert + 0.2 * device + 0.4 * communication, 100 * epsilon);
}

// Halves of a scope that know the counts of the whole have the loss and the gradient of the whole.
TEST_F(RouterTest, CountsOfPartsAddUp) {
  const TokenRouter r = router({}, 2);
  const Tensor logits = random(arena, {8, E}, 6), none = constant(arena, {8, 2}, 0);
  const Routed routed = choose(r, logits);
  const std::vector<double> whole = counts_of(r, routed.ids), halves = counts_of(r, routed.ids, 2);
  std::vector<double> parts = counts_of(r, routed.ids.row_range(0, 3));
  const std::vector<double> rest = counts_of(r, routed.ids.row_range(3, 8));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    parts[i] += rest[i];
    EXPECT_EQ(halves[i] + halves[parts.size() + i], whole[i]);
  }
  EXPECT_EQ(whole, parts);
  EXPECT_EQ(std::accumulate(whole.begin(), whole.begin() + E, 0.0), 16);
  EXPECT_EQ(whole.back(), 8);
  RouterLosses losses{.rows_per_scope = 8};
  add_balance_factors({.expert_loss = 1}, {}, E, 2, 8, whole, losses.factors);
  const Tensor together = constant(arena, {8, E}, 0), apart = constant(arena, {8, E}, 0);
  backward(r, logits, routed.ids, none, losses, 1, together);
  double loss = 0;
  for (const Range part : {Range{0, 3}, Range{3, 8}}) {
    losses.first_row = part.begin;
    const auto of = [&](const Tensor& t) { return t.row_range(part.begin, part.end); };
    backward(r, of(logits), of(routed.ids), of(none), losses, 1, of(apart));
    loss += loss_of(r, of(logits), losses);
  }
  losses.first_row = 0;
  expect_near(apart, together, 0);
  EXPECT_NEAR(loss, loss_of(r, logits, losses), 100 * epsilon);
}

TEST_F(RouterTest, BiasMovesAgainstTheLoad) {
  std::vector<double> bias{0, 0, 0.5, 0};
  update_bias(std::vector<double>{8, 2, 1, 5}, 0.25, bias);  // the mean is 4
  EXPECT_EQ(bias, (std::vector<double>{-0.25, 0.25, 0.75, -0.25}));
  update_bias(std::vector<double>{4, 4, 4, 4}, 0.25, bias);
  EXPECT_EQ(bias, (std::vector<double>{-0.25, 0.25, 0.75, -0.25}));
}

TEST(Capacity, IsTheEvenLoadTimesTheFactorRoundedUp) {
  EXPECT_EQ(expert_capacity(1, 8, 2, 4), 4);
  EXPECT_EQ(expert_capacity(1.25, 8, 2, 4), 5);
  EXPECT_EQ(expert_capacity(1.01, 8, 2, 4), 5);
  EXPECT_EQ(expert_capacity(0.7, 10, 1, 1), 7);  // 0.7 * 10 is above 7 in binary
  EXPECT_EQ(expert_capacity(100, 8, 2, 4), 8);
  EXPECT_EQ(expert_capacity(1, 0, 2, 4), 0);
}

struct CapacityTest : RouterTest {
  std::vector<std::int32_t> kept(std::vector<std::int32_t> ids, std::vector<double> weights, std::int64_t k,
                                 std::int64_t capacity, DropPolicy policy, std::int64_t dropped) {
    const auto n = static_cast<std::int64_t>(ids.size()) / k;
    const Tensor id = integers(arena, ids).reshape({n, k}), keep = integers(arena, ids).reshape({n, k});
    kernels->drop_over_capacity(id, row(weights), {1, E, capacity, policy}, keep);
    EXPECT_EQ(list(id), ids);
    const std::vector<std::int32_t> stay = list(keep);
    EXPECT_EQ(std::count(stay.begin(), stay.end(), -1), dropped);
    return stay;
  }
};

TEST_F(CapacityTest, PoliciesKeepTheLargestOrTheFirst) {
  const std::vector<std::int32_t> ids{2, 2, 2, 5};
  const std::vector<double> weights{0.5, 0.9, 0.7, 0.1};
  EXPECT_EQ(kept(ids, weights, 1, 2, DropPolicy::probability, 1), (std::vector<std::int32_t>{-1, 2, 2, 5}));
  EXPECT_EQ(kept(ids, weights, 1, 2, DropPolicy::position, 1), (std::vector<std::int32_t>{2, 2, -1, 5}));
  EXPECT_EQ(kept(ids, weights, 1, 3, DropPolicy::position, 0), ids);
  EXPECT_EQ(kept(ids, weights, 1, 0, DropPolicy::probability, 4),
            (std::vector<std::int32_t>{-1, -1, -1, -1}));
}

TEST_F(CapacityTest, OfEqualWeightsTheEarlierStays) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(kept({1, 1, 1}, {0.5, 0.5, 0.5}, 1, 2, DropPolicy::probability, 1),
            (std::vector<std::int32_t>{1, 1, -1}));
  EXPECT_EQ(kept({1, 1, 1}, {nan, 0.5, nan}, 1, 2, DropPolicy::probability, 1),
            (std::vector<std::int32_t>{1, 1, -1}));
  // What rounding tells apart is equal; what half the digits tell apart is not.
  EXPECT_EQ(kept({1, 1, 1}, {1.5, 1.5 - epsilon, 1.5 + epsilon}, 1, 2, DropPolicy::probability, 1),
            (std::vector<std::int32_t>{1, 1, -1}));
  EXPECT_EQ(kept({1, 1, 1}, {0.5, 0.5, 0.5 + 0x1p-25}, 1, 2, DropPolicy::probability, 1),
            (std::vector<std::int32_t>{1, -1, 1}));
}

TEST_F(CapacityTest, WhatIsRoutedIsKeptOrDropped) {
  const Tensor logits = random(arena, {40, E}, 8);
  const Routed routed = choose(router({}, 3), logits);
  for (DropPolicy policy : {DropPolicy::probability, DropPolicy::position})
    for (std::int64_t capacity : {0, 1, 7, 20, 40}) {
      const Tensor keep = integers(arena, list(routed.ids)).reshape({40, 3});
      kernels->drop_over_capacity(routed.ids, routed.weights, {1, E, capacity, policy}, keep);
      const std::vector<std::int32_t> before = list(routed.ids), after = list(keep);
      for (std::int32_t e = 0; e < E; ++e)
        EXPECT_EQ(std::count(after.begin(), after.end(), e),
                  std::min<std::int64_t>(std::count(before.begin(), before.end(), e), capacity));
    }
}

TEST_F(CapacityTest, CopiesAreSortedByExpertAndToken) {
  const Tensor keep = integers(arena, {4, 1, -1, 4, 1, 0}).reshape({3, 2});
  const Tensor places = integers(arena, std::vector<std::int32_t>(6)),
               tokens = integers(arena, std::vector<std::int32_t>(6));
  const Tensor counts = integers(arena, std::vector<std::int32_t>(E));
  kernels->sort_by_expert(keep, places, tokens, counts);
  EXPECT_EQ(list(counts), (std::vector<std::int32_t>{1, 2, 0, 0, 2, 0}));
  EXPECT_EQ(list(places), (std::vector<std::int32_t>{3, 1, -1, 4, 2, 0}));
  EXPECT_EQ(list(tokens), (std::vector<std::int32_t>{2, 0, 2, 0, 1, -1}));
  EXPECT_THROW(kernels->sort_by_expert(keep, places, tokens.flat_range(0, 4), counts), InvariantError);
}

// The scopes of a microbatch are each by itself; what travels packed comes back, in any order.
TEST_F(CapacityTest, ScopesAndPackedChoices) {
  const Tensor ids = integers(arena, {0, 1, 0, 2, 0, 3, 0, 4}).reshape({4, 2}),
               kept = integers(arena, list(ids)).reshape({4, 2}), weights = random(arena, {4, 2}, 30);
  kernels->drop_over_capacity(ids, weights, {2, E, 1, DropPolicy::position}, kept);
  EXPECT_EQ(list(kept), (std::vector<std::int32_t>{0, 1, -1, 2, 0, 3, -1, 4}));
  const Tensor packed = constant(arena, {4, 4}, 0), back = integers(arena, list(ids)).reshape({4, 2}),
               weights_back = constant(arena, {4, 2}, 0);
  kernels->pack_choices(ids, weights, packed);
  kernels->unpack_choices(packed, {}, back, weights_back);
  EXPECT_EQ(list(back), list(ids));
  expect_near(weights_back, weights, 0);
  const std::vector<std::int64_t> turned{3, 2, 1, 0};
  kernels->unpack_choices(packed, turned, back, weights_back);
  EXPECT_EQ(list(back), (std::vector<std::int32_t>{0, 4, 0, 3, 0, 2, 0, 1}));
  EXPECT_EQ(at(weights_back, 3, 1), at(weights, 0, 1));
  const Tensor two = integers(arena, {0, 0, 0, 0}).reshape({2, 2});
  kernels->take_ids(ids, std::vector<std::int64_t>{3, 1}, two);
  EXPECT_EQ(list(two), (std::vector<std::int32_t>{0, 4, 0, 2}));
  EXPECT_THROW(kernels->take_ids(ids, turned, two), InvariantError);
}

// What would have to happen for a choice to be the router's.
TEST_F(RouterTest, SaysHowFarAChoiceIsFromIts) {
  const auto shift = [](const RouterSpec& spec, std::vector<double> wanted, std::vector<std::int32_t> ids) {
    TokenRouter::Row row;
    row.wanted = std::move(wanted);
    return TokenRouter(spec, std::ssize(row.wanted), std::ssize(ids)).shift_to_choose(row, ids);
  };
  EXPECT_EQ(shift({}, {0.1, 0.4, 0.3, 0.2}, {1, 2}), 0);
  EXPECT_EQ(shift({}, {0.1, 0.4, 0.3, 0.2}, {2, 1}), 0);             // in any order
  EXPECT_NEAR(shift({}, {0.1, 0.4, 0.3, 0.2}, {1, 3}), 0.05, 1e-4);  // both move
  EXPECT_NEAR(shift({}, {0.1, 0.4, 0.3, 0.2}, {0, 3}), 0.15, 1e-4);
  EXPECT_LT(shift({}, {0.3, 0.3, 0.2, 0.2}, {1}), 1e-15);  // the higher number of equal ones
  // The best group is that of experts 0 and 1.
  const RouterSpec groups{.groups = 2, .most_groups = 1};
  EXPECT_EQ(shift(groups, {0.4, 0.3, 0.35, 0.3}, {0}), 0);
  EXPECT_NEAR(shift(groups, {0.4, 0.3, 0.35, 0.3}, {2}), 0.025, 1e-4);
  EXPECT_EQ(shift({}, {0.1, std::numeric_limits<double>::quiet_NaN()}, {1}),
            std::numeric_limits<double>::infinity());
}

}  // namespace
}  // namespace echelon::router_test

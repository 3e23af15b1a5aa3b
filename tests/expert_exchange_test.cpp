// Copies of tokens go to the ranks of their experts, sorted by expert, and back to where they stood.
#include "parallel/expert_exchange.h"

#include <gtest/gtest.h>

#include <mutex>

#include "mesh_runs.h"
#include "tensor_checks.h"

namespace echelon::expert_exchange_test {
namespace {

using namespace checks;

constexpr std::int64_t experts = 8, width = 3;

// So many copies of each expert on rank `rank`: uneven, and none of some experts anywhere.
ExpertBounds bounds_of(int rank, int of_others) {
  ExpertBounds bounds{0};
  for (std::int64_t e = 0; e < experts; ++e) {
    const std::int64_t count = e % 3 == 1 ? 0 : (5 * rank + 3 * e + of_others) % 4;
    bounds.push_back(bounds.back() + count);
  }
  return bounds;
}

void on_groups(int ep, const std::function<void(const Rank&, const ExpertExchange&)>& body) {
  Plan plan;
  plan.precision = DType::f64;
  plan.mesh.set(Axis::dp, 4);
  plan.mesh.ep = ep;
  on_mesh(plan, [&](const Rank& rank) { body(rank, ExpertExchange(rank, experts)); });
}

// A copy's elements name its rank and place.
double name_of(int rank, std::int64_t place, std::int64_t c) {
  return 1000.0 * rank + 10.0 * static_cast<double>(place) + static_cast<double>(c);
}

TEST(ExpertExchange, SortsByExpertAndThenByRank) {
  for (int ep : {2, 4})
    for (std::int64_t spare : {0, 2})
      on_groups(ep, [&](const Rank& rank, const ExpertExchange& exchange) {
        const int me = rank.index(), first = me / ep * ep;
        const ExpertBounds bounds = bounds_of(me, 0);
        const std::int64_t copies = bounds.back() + spare;
        const Tensor sent = constant(rank.arena(), {copies, width}, -1);
        for (std::int64_t i = 0; i < bounds.back(); ++i)
          for (std::int64_t c = 0; c < width; ++c) at(sent, i, c) = name_of(me, i, c);
        constexpr std::int64_t plenty = 100;
        const ExpertExchange::Route route = exchange.route(bounds, copies, spare == 0 ? 0 : plenty);
        const Tensor rows = exchange.dispatch(sent, route);
        EXPECT_EQ(rows.rows(), spare == 0 ? route.bounds.back() : plenty);
        const std::int64_t here = experts / ep;
        std::int64_t row = 0;
        for (std::int64_t e = 0; e < here; ++e) {
          EXPECT_EQ(route.bounds[static_cast<std::size_t>(e)], row);
          for (int from = first; from < first + ep; ++from) {
            const ExpertBounds theirs = bounds_of(from, 0);
            const auto expert = static_cast<std::size_t>((me - first) * here + e);
            for (std::int64_t i = theirs[expert]; i < theirs[expert + 1]; ++i, ++row)
              for (std::int64_t c = 0; c < width; ++c) EXPECT_EQ(at(rows, row, c), name_of(from, i, c));
          }
        }
        EXPECT_EQ(route.bounds.back(), row);
        for (; row < rows.rows(); ++row) EXPECT_EQ(at(rows, row, 0), 0);
        // And back: what stood nowhere is whatever it is.
        const Tensor back = exchange.combine(rows, route, copies);
        expect_near(back.row_range(0, bounds.back()), sent.row_range(0, bounds.back()), 0);
      });
}

TEST(ExpertExchange, CountsWhatLeaves) {
  on_groups(4, [](const Rank& rank, const ExpertExchange& exchange) {
    const ExpertBounds bounds = bounds_of(rank.index(), 1);
    const std::int64_t before = rank.traffic().bytes(Axis::ep);
    const ExpertExchange::Route route = exchange.route(bounds, bounds.back(), 0);
    const std::int64_t told = rank.traffic().bytes(Axis::ep) - before;
    EXPECT_EQ(told, (experts - 2) * 4);
    exchange.dispatch(constant(rank.arena(), {bounds.back(), width}, 1), route);
    const auto mine = static_cast<std::size_t>(2 * rank.index());
    EXPECT_EQ(route.away, bounds.back() - (bounds[mine + 2] - bounds[mine]));
    EXPECT_EQ(rank.traffic().bytes(Axis::ep) - before - told, route.away * width * 8);
  });
}

// <dispatch(v), w> = <v, combine(w)>, over all ranks.
TEST(ExpertExchange, CombineIsTheAdjointOfDispatch) {
  for (int ep : {1, 2, 4}) {
    double left = 0, right = 0, size = 0;
    std::mutex mutex;
    on_groups(ep, [&](const Rank& rank, const ExpertExchange& exchange) {
      const auto seed = static_cast<std::uint64_t>(rank.index());
      const ExpertBounds bounds = bounds_of(rank.index(), 2);
      const std::int64_t copies = bounds.back();
      const ExpertExchange::Route route = exchange.route(bounds, copies, 0);
      const Tensor v = random(rank.arena(), {copies, width}, seed),
                   w = random(rank.arena(), {route.room, width}, seed + 10);
      const Tensor sent = exchange.dispatch(clone(rank.arena(), v), route),
                   back = exchange.combine(clone(rank.arena(), w), route, copies);
      const std::lock_guard lock(mutex);
      left += inner(sent, w);
      right += inner(v, back);
      size += static_cast<double>(copies);
    });
    EXPECT_NEAR(left, right, 10 * epsilon * size * width) << ep;
    EXPECT_NE(left, 0);
  }
}

TEST(ExpertExchange, NoCopiesAtAllAreNothing) {
  on_groups(2, [](const Rank& rank, const ExpertExchange& exchange) {
    const ExpertBounds none(experts + 1, 0);
    const ExpertExchange::Route route = exchange.route(none, 0, 0);
    EXPECT_EQ(route.bounds.back(), 0);
    const Tensor rows = exchange.dispatch(constant(rank.arena(), {0, width}, 0), route);
    EXPECT_EQ(rows.numel(), 0);
    EXPECT_EQ(exchange.combine(rows, route, 0).numel(), 0);
  });
}

TEST(ExpertExchange, MoreThanThereIsRoomForIsABrokenInvariant) {
  Plan plan;
  plan.precision = DType::f64;
  plan.mesh.set(Axis::dp, 2);
  plan.mesh.ep = 2;
  EXPECT_ANY_THROW(on_mesh(plan, [&](const Rank& rank) {
    const ExpertBounds bounds = bounds_of(rank.index(), 0);
    ExpertExchange(rank, experts).route(bounds, bounds.back(), 1);
  }));
}

}  // namespace
}  // namespace echelon::expert_exchange_test

#include "spec/layout.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "base/error.h"

namespace echelon::layout_test {
namespace {

const std::array<Placement, 5> all_placements{identical, replicated, partial, sharded(0), sharded(1)};

TEST(Layout, Names) {
  EXPECT_EQ(to_string(identical), "I");
  EXPECT_EQ(to_string(replicated), "R");
  EXPECT_EQ(to_string(partial), "P");
  EXPECT_EQ(to_string(sharded(1)), "S(1)");
}

TEST(Layout, GradientPlacements) {
  EXPECT_EQ(gradient_of(identical), identical);
  EXPECT_EQ(gradient_of(replicated), partial);
  EXPECT_EQ(gradient_of(partial), replicated);
  EXPECT_EQ(gradient_of(sharded(1)), sharded(1));
  for (const Placement& placement : all_placements) EXPECT_EQ(gradient_of(gradient_of(placement)), placement);
}

struct Row {
  Placement from, to;
  Collective forward, backward;
};

// The table of the design, row by row.
const std::vector<Row> table{
    {identical, replicated, Collective::none, Collective::all_reduce},
    {partial, identical, Collective::all_reduce, Collective::none},
    {sharded(0), replicated, Collective::all_gather, Collective::reduce_scatter},
    {partial, sharded(0), Collective::reduce_scatter, Collective::all_gather},
    {sharded(0), sharded(1), Collective::all_to_all, Collective::all_to_all},
    {identical, sharded(0), Collective::slice, Collective::all_gather},
    {sharded(0), identical, Collective::all_gather, Collective::slice},
};

TEST(Layout, ConjugateTable) {
  for (const Row& row : table) {
    const Transition expected{row.forward, row.backward};
    EXPECT_EQ(transition(row.from, row.to), expected) << to_string(row.from) << " -> " << to_string(row.to);
  }
}

// The gradient travels the conjugate way, so its transition is the same row with the columns exchanged.
TEST(Layout, TheConjugateOfEveryRowIsARow) {
  for (const Row& row : table) {
    const Transition expected{row.backward, row.forward};
    EXPECT_EQ(transition(gradient_of(row.to), gradient_of(row.from)), expected)
        << to_string(row.from) << " -> " << to_string(row.to);
  }
}

TEST(Layout, StayingCostsNothing) {
  for (const Placement& placement : all_placements) EXPECT_EQ(transition(placement, placement), Transition{});
}

// No collective makes a partial value of a whole one, forward (to P) or for the gradient (from R, whose
// gradient is P).
TEST(Layout, PairsWithoutARowAreRefused) {
  EXPECT_THROW(transition(identical, partial), InvariantError);
  EXPECT_THROW(transition(replicated, partial), InvariantError);
  EXPECT_THROW(transition(sharded(0), partial), InvariantError);
  EXPECT_THROW(transition(replicated, identical), InvariantError);
  EXPECT_THROW(transition(replicated, sharded(0)), InvariantError);
}

}  // namespace
}  // namespace echelon::layout_test

// Every row of the conjugate table on thread ranks. Values are small whole numbers, so every sum is exact and
// every comparison is one of bits.
#include "parallel/redistribute.h"

#include <gtest/gtest.h>

#include <numeric>

#include "mesh_runs.h"

namespace echelon::redistribute_test {
namespace {

using Extent = std::array<std::int64_t, 2>;

struct Row {
  Placement from, to;
  Collective forward, backward;  // stated again here, not read from the library
};

const std::vector<Row>& rows() {
  using enum Collective;
  static const std::vector<Row> all{
      {identical, replicated, none, all_reduce},
      {partial, identical, all_reduce, none},
      {sharded(0), replicated, all_gather, reduce_scatter},
      {sharded(1), replicated, all_gather, reduce_scatter},
      {partial, sharded(0), reduce_scatter, all_gather},
      {partial, sharded(1), reduce_scatter, all_gather},
      {sharded(0), sharded(1), all_to_all, all_to_all},
      {sharded(1), sharded(0), all_to_all, all_to_all},
      {identical, sharded(0), slice, all_gather},
      {identical, sharded(1), slice, all_gather},
      {sharded(0), identical, all_gather, slice},
      {sharded(1), identical, all_gather, slice},
  };
  return all;
}

// Even, uneven, and smaller than the number of ranks.
constexpr std::array<Extent, 6> extents{{{12, 24}, {5, 7}, {7, 3}, {2, 9}, {3, 2}, {1, 1}}};

// The logical matrix, and what each rank holds of it under a placement.
struct Spread {
  std::vector<double> logical;
  std::vector<std::vector<double>> local;  // by rank
};

double number(std::uint64_t which, std::int64_t i) {
  const Philox random(5, Stream::test, which);
  return static_cast<double>(random.below(static_cast<std::uint64_t>(i), 33)) - 16;
}

std::vector<double> part_of(const std::vector<double>& logical, const Extent& extent,
                            const Placement& placement, int n, int rank) {
  if (placement.kind != PlacementKind::sharded) return logical;
  const Range all_rows{0, extent[0]}, all_cols{0, extent[1]};
  const Range r = placement.dim == 0 ? split_range(extent[0], n, rank) : all_rows;
  const Range c = placement.dim == 1 ? split_range(extent[1], n, rank) : all_cols;
  std::vector<double> part;
  for (std::int64_t i = r.begin; i < r.end; ++i)
    for (std::int64_t j = c.begin; j < c.end; ++j)
      part.push_back(logical[static_cast<std::size_t>(i * extent[1] + j)]);
  return part;
}

Spread spread(const Extent& extent, const Placement& placement, int n, std::uint64_t which) {
  const std::int64_t count = extent[0] * extent[1];
  Spread s;
  s.logical.resize(static_cast<std::size_t>(count));
  for (int rank = 0; rank < n; ++rank) {
    if (placement == partial) {  // terms of a sum
      std::vector<double> term;
      for (std::int64_t i = 0; i < count; ++i) {
        term.push_back(number(which, rank * count + i));
        s.logical[static_cast<std::size_t>(i)] += term.back();
      }
      s.local.push_back(term);
    } else {
      for (std::int64_t i = 0; i < count; ++i) s.logical[static_cast<std::size_t>(i)] = number(which, i);
      s.local.push_back(part_of(s.logical, extent, placement, n, rank));
    }
  }
  return s;
}

Extent local_extent(const Extent& extent, const Placement& placement, int n, int rank) {
  Extent local = extent;
  if (placement.kind == PlacementKind::sharded) {
    auto& cut = local[static_cast<std::size_t>(placement.dim)];
    cut = split_range(cut, n, rank).size();
  }
  return local;
}

struct Moved {
  std::vector<std::vector<double>> local;  // by rank
  Traffic traffic;                         // of rank 0
};

Moved move(const std::vector<std::vector<double>>& local, const Placement& from, const Placement& to,
           const Extent& extent, Axis axis) {
  const int n = static_cast<int>(local.size());
  Plan plan;
  plan.mesh.set(axis, n);
  plan.precision = DType::f64;
  Moved moved;
  moved.local.resize(local.size());
  checks::on_mesh(plan, [&](const Rank& rank) {
    const auto me = static_cast<std::size_t>(rank.index());
    const Extent shape = local_extent(extent, from, n, rank.index());
    const Tensor x(rank.arena(), MemoryCategory::activations, DType::f64, {shape[0], shape[1]});
    ASSERT_EQ(static_cast<std::size_t>(x.numel()), local[me].size());
    std::copy(local[me].begin(), local[me].end(), x.host<double>());
    const Tensor y = redistribute(rank, axis, x, from, to, extent).get();
    const Extent expected = local_extent(extent, to, n, rank.index());
    EXPECT_EQ(y.shape(), (std::vector<std::int64_t>{expected[0], expected[1]}));
    ASSERT_TRUE(y.contiguous());
    moved.local[me] = checks::as_doubles(y);
    if (me == 0) moved.traffic = rank.traffic();
  });
  return moved;
}

// <value, gradient> as the value's placement defines it. With I both are the same everywhere and count once;
// otherwise either one of the two is a sum over ranks, or both are cut alike.
double inner(const Placement& of_value, const std::vector<std::vector<double>>& value,
             const std::vector<std::vector<double>>& gradient) {
  const std::size_t n = of_value == identical ? 1 : value.size();
  double sum = 0;
  for (std::size_t rank = 0; rank < n; ++rank)
    sum += std::inner_product(value[rank].begin(), value[rank].end(), gradient[rank].begin(), 0.0);
  return sum;
}

bool does(Verb verb, Collective collective) {
  switch (collective) {
    case Collective::all_reduce:
      return verb == Verb::all_reduce;
    case Collective::all_gather:
      return verb == Verb::all_gather;
    case Collective::reduce_scatter:
      return verb == Verb::reduce_scatter;
    case Collective::all_to_all:
      return verb == Verb::all_to_all;
    default:
      return false;
  }
}

void expect_verb(const Traffic& traffic, Axis axis, Collective collective) {
  for (Axis a : all_axes)
    for (Verb verb : all_verbs) {
      const bool used = a == axis && does(verb, collective);
      EXPECT_EQ(traffic.at(a, verb).calls, used ? 1 : 0) << axis_name(a) << " " << verb_name(verb);
    }
}

void check_row(const Row& row, int n, const Extent& extent, Axis axis) {
  SCOPED_TRACE(fmt::format("{} -> {}, {} ranks, {} x {}", to_string(row.from), to_string(row.to), n,
                           extent[0], extent[1]));
  const Spread v = spread(extent, row.from, n, 1);
  const Moved fv = move(v.local, row.from, row.to, extent, axis);
  expect_verb(fv.traffic, axis, row.forward);
  for (int rank = 0; rank < n; ++rank)
    EXPECT_EQ(fv.local[static_cast<std::size_t>(rank)], part_of(v.logical, extent, row.to, n, rank))
        << "rank " << rank;

  const Spread g = spread(extent, gradient_of(row.to), n, 2);
  const Moved fg = move(g.local, gradient_of(row.to), gradient_of(row.from), extent, axis);
  expect_verb(fg.traffic, axis, row.backward);
  EXPECT_EQ(inner(row.to, fv.local, g.local), inner(row.from, v.local, fg.local));
  // Not 0 = 0.
  EXPECT_TRUE(inner(row.to, fv.local, g.local) != 0 || extent == Extent({1, 1}));
}

TEST(Redistribute, EveryRowIsRightAndItsGradientIsTheAdjoint) {
  for (const Row& row : rows())
    for (int n : {2, 3, 4})
      for (const Extent& extent : extents) check_row(row, n, extent, Axis::tp);
}

TEST(Redistribute, WorksAlongAnyAxis) {
  for (const Row& row : rows())
    for (Axis axis : {Axis::dp, Axis::cp}) check_row(row, 3, {5, 7}, axis);
}

TEST(Redistribute, OneRankGetsItsOwnTensorBack) {
  for (const Row& row : rows()) {
    const Spread v = spread({4, 3}, row.from, 1, 3);
    const Moved moved = move(v.local, row.from, row.to, {4, 3}, Axis::tp);
    EXPECT_EQ(moved.local, v.local);
    EXPECT_EQ(moved.traffic, Traffic{});
  }
}

// Two tp groups side by side do not mix.
TEST(Redistribute, StaysInsideItsGroup) {
  Plan plan;
  plan.mesh.set(Axis::dp, 2);
  plan.mesh.set(Axis::tp, 2);
  plan.precision = DType::f64;
  checks::on_mesh(plan, [](const Rank& rank) {
    const Tensor x(rank.arena(), MemoryCategory::activations, DType::f64, {1, 1});
    *x.host<double>() = rank.coordinate(Axis::dp) == 0 ? 1 : 10;
    const Tensor y = redistribute(rank, Axis::tp, x, partial, identical, {1, 1}).get();
    EXPECT_EQ(*y.host<double>(), rank.coordinate(Axis::dp) == 0 ? 2 : 20);
  });
}

TEST(Redistribute, RefusesWhatTheTableDoesNotHave) {
  const std::vector<std::pair<Placement, Placement>> none{
      {identical, partial}, {replicated, partial}, {sharded(0), partial}, {replicated, sharded(0)}};
  Plan plan;
  plan.mesh.set(Axis::tp, 2);
  plan.precision = DType::f64;
  for (const auto& [from, to] : none)
    EXPECT_THROW(checks::on_mesh(plan,
                                 [&, f = from, t = to](const Rank& rank) {
                                   const Tensor x = rank.activation({2, 2});
                                   redistribute(rank, Axis::tp, x, f, t, {2, 2}).get();
                                 }),
                 InvariantError);
}

}  // namespace
}  // namespace echelon::redistribute_test

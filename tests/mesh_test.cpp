// spec/mesh, and the arithmetic that hangs on it: what a rank holds of a parameter, what it sends.
#include "spec/mesh.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "base/error.h"
#include "spec/param_spec.h"
#include "spec/rank_groups.h"
#include "spec/traffic.h"

namespace echelon::mesh_test {
namespace {

std::vector<Mesh> meshes() {
  return {
      Mesh{},
      Mesh{{1, 1, 1, 4}},
      Mesh{{2, 3, 1, 4}},
      Mesh{{2, 2, 2, 2}},
      Mesh{{3, 2, 1, 2}, {Axis::tp, Axis::dp, Axis::pp, Axis::cp}},
  };
}

TEST(Mesh, RanksAndCoordinatesAreABijection) {
  for (const Mesh& mesh : meshes()) {
    std::set<std::array<int, 4>> seen;
    for (int rank = 0; rank < mesh.num_ranks(); ++rank) {
      std::array<int, 4> place{};
      for (Axis axis : all_axes) {
        place[static_cast<std::size_t>(axis)] = mesh.coordinate(rank, axis);
        EXPECT_GE(mesh.coordinate(rank, axis), 0);
        EXPECT_LT(mesh.coordinate(rank, axis), mesh.size(axis));
      }
      seen.insert(place);
    }
    EXPECT_EQ(seen.size(), static_cast<std::size_t>(mesh.num_ranks())) << mesh.describe();
  }
}

TEST(Mesh, GroupsPartitionTheRanks) {
  for (const Mesh& mesh : meshes())
    for (Axis axis : all_axes) {
      std::map<int, int> times_seen;
      for (int rank = 0; rank < mesh.num_ranks(); ++rank) {
        const std::vector<int> group = mesh.group(rank, axis);
        ASSERT_EQ(group.size(), static_cast<std::size_t>(mesh.size(axis)));
        EXPECT_EQ(group[static_cast<std::size_t>(mesh.coordinate(rank, axis))], rank);
        for (int i = 0; i < mesh.size(axis); ++i) {
          const int peer = group[static_cast<std::size_t>(i)];
          EXPECT_EQ(mesh.coordinate(peer, axis), i);  // in order of the coordinate
          EXPECT_EQ(mesh.group(peer, axis), group);   // and every member sees the same group
          for (Axis other : all_axes)
            if (other != axis) {
              EXPECT_EQ(mesh.coordinate(peer, other), mesh.coordinate(rank, other));
            }
        }
        if (mesh.coordinate(rank, axis) == 0)
          for (int peer : group) ++times_seen[peer];
      }
      EXPECT_EQ(times_seen.size(), static_cast<std::size_t>(mesh.num_ranks()));
      for (const auto& [rank, times] : times_seen) EXPECT_EQ(times, 1) << "rank " << rank;
    }
}

// Every group that ranks join: its members agree on it, and on who stands where.
TEST(RankGroups, MembersAgree) {
  Mesh mesh{{2, 6, 4, 2}, {Axis::tp, Axis::dp, Axis::pp, Axis::cp}};
  mesh.ep = 2;
  const std::map<GroupKind, int> sizes{
      {GroupKind::pp, 2},           {GroupKind::dp, 6},         {GroupKind::cp, 4},
      {GroupKind::tp, 2},           {GroupKind::ep, 2},         {GroupKind::tp_replicas, 2},
      {GroupKind::dp_cp, 24},       {GroupKind::dp_shards, 12}, {GroupKind::dp_replicas, 2},
      {GroupKind::same_experts, 6}, {GroupKind::cp_heads, 2},   {GroupKind::cp_ring, 2}};
  ASSERT_EQ(sizes.size(), static_cast<std::size_t>(num_group_kinds));
  for (const auto& [kind, size] : sizes) {
    EXPECT_EQ(group_named(group_name(kind)), kind);
    for (int rank = 0; rank < mesh.num_ranks(); ++rank) {
      const std::vector<int> group = group_ranks(mesh, rank, kind, size);
      ASSERT_EQ(group.size(), static_cast<std::size_t>(size)) << group_name(kind);
      const int place = place_in(mesh, mesh.coordinates(rank), kind, size);
      EXPECT_EQ(group.at(static_cast<std::size_t>(place)), rank) << group_name(kind);
      for (int peer : group) EXPECT_EQ(group_ranks(mesh, peer, kind, size), group) << group_name(kind);
    }
  }
  EXPECT_THROW((void)group_named("dp xcp"), InvariantError);
  EXPECT_THROW((void)group_ranks(mesh, 0, GroupKind::cp_heads, 3), InvariantError);
}

// Told by hand: 2 x 4 ranks of dp x cp, in blocks of 4.
TEST(RankGroups, BlocksAndWhatLiesAcrossThem) {
  Mesh mesh{{1, 2, 4, 1}};
  mesh.ep = 2;
  using Ranks = std::vector<int>;
  EXPECT_EQ(group_ranks(mesh, 6, GroupKind::dp_cp, 8), (Ranks{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(group_ranks(mesh, 6, GroupKind::dp_shards, 4), (Ranks{4, 5, 6, 7}));
  EXPECT_EQ(group_ranks(mesh, 6, GroupKind::dp_replicas, 2), (Ranks{2, 6}));
  EXPECT_EQ(group_ranks(mesh, 6, GroupKind::ep, 2), (Ranks{6, 7}));
  EXPECT_EQ(group_ranks(mesh, 6, GroupKind::same_experts, 2), (Ranks{4, 6}));
  EXPECT_EQ(group_ranks(mesh, 6, GroupKind::same_experts, 4), (Ranks{0, 2, 4, 6}));
  EXPECT_EQ(group_ranks(mesh, 7, GroupKind::cp_heads, 2), (Ranks{6, 7}));
  EXPECT_EQ(group_ranks(mesh, 7, GroupKind::cp_ring, 2), (Ranks{5, 7}));
}

TEST(Mesh, TensorParallelIsInnermostByDefault) {
  const Mesh mesh{{2, 2, 1, 4}};
  EXPECT_EQ(mesh.num_ranks(), 16);
  EXPECT_EQ(mesh.group(0, Axis::tp), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(mesh.group(5, Axis::dp), (std::vector<int>{1, 5}));
  EXPECT_EQ(mesh.group(5, Axis::pp), (std::vector<int>{5, 13}));
  EXPECT_EQ(mesh.describe(), "16 ranks = pp 2 x dp 2 x tp 4 (outermost first)");
  EXPECT_EQ(Mesh{}.describe(), "1 rank");
}

TEST(Mesh, AnotherOrderIsData) {
  const Mesh mesh{{2, 2, 1, 2}, {Axis::tp, Axis::dp, Axis::cp, Axis::pp}};
  EXPECT_EQ(mesh.group(0, Axis::pp), (std::vector<int>{0, 1}));
  EXPECT_EQ(mesh.group(0, Axis::tp), (std::vector<int>{0, 4}));
  const Mesh broken{{2, 2, 1, 2}, {Axis::tp, Axis::tp, Axis::tp, Axis::tp}};
  EXPECT_THROW(broken.coordinate(0, Axis::pp), InvariantError);
}

TEST(Mesh, EveryAxisIsSetAndRead) {
  Mesh mesh;
  for (Axis axis : {Axis::dp, Axis::tp, Axis::pp, Axis::cp, Axis::ep}) {
    const Mesh before = mesh;
    mesh.set(axis, 7);
    for (Axis other : {Axis::dp, Axis::tp, Axis::pp, Axis::cp, Axis::ep})
      EXPECT_EQ(mesh.size(other), other == axis ? 7 : before.size(other));
  }
}

TEST(Mesh, SizesBelowOneAreRefused) {
  EXPECT_NO_THROW(validate(Mesh{}));
  EXPECT_THROW(validate(Mesh{{1, 0, 1, 1}}), RequestError);
  Mesh mesh;
  mesh.set(Axis::tp, -2);
  EXPECT_THROW(validate(mesh), RequestError);
  EXPECT_THROW(validate(Mesh{.ep = 0}), RequestError);
}

ParamSpec cut(std::vector<std::int64_t> shape, int shard_dim, std::vector<Piece> pieces) {
  ParamSpec spec;
  spec.name = "test";
  spec.shape = std::move(shape);
  spec.shard_dim = shard_dim;
  spec.pieces = std::move(pieces);
  return spec;
}

// How often each index of the dimension is held, over the whole group.
std::vector<int> times_held(const ParamSpec& spec, int tp) {
  std::vector<int> times(static_cast<std::size_t>(spec.shape[static_cast<std::size_t>(spec.shard_dim)]));
  for (int index = 0; index < tp; ++index)
    for (const Range& range : local_ranges(spec, tp, index))
      for (std::int64_t i = range.begin; i < range.end; ++i) ++times.at(static_cast<std::size_t>(i));
  return times;
}

TEST(ParamSpec, RangesCoverTheDimensionOnceForEachReplica) {
  const std::vector<ParamSpec> specs{
      cut({50257, 8}, 0, {{50257, 1}}),              // vocabulary rows
      cut({8, 36}, 1, {{12, 3}, {12, 3}, {12, 3}}),  // fused c_attn, 4 heads of 3
      cut({20}, 0, {{20, 5}}),                       // a bias of 4 heads of 5
      cut({10, 4}, 0, {{10, 2}}),                    // 5 units: uneven over 2, 3 and 4
  };
  for (const ParamSpec& spec : specs)
    for (int tp : {1, 2, 3, 4}) {
      const int replicas = tp_replicas(spec, tp);
      EXPECT_EQ(replicas, 1);
      for (int times : times_held(spec, tp)) ASSERT_EQ(times, replicas) << "tp " << tp;
    }
}

TEST(ParamSpec, VocabularyThatDoesNotDivide) {
  const ParamSpec spec = cut({50257, 768}, 0, {{50257, 1}});
  const std::vector<std::int64_t> sizes{12565, 12564, 12564, 12564};
  std::int64_t begin = 0;
  for (int index = 0; index < 4; ++index) {
    const std::int64_t size = sizes[static_cast<std::size_t>(index)];
    EXPECT_EQ(local_ranges(spec, 4, index), (std::vector<Range>{{begin, begin + size}}));
    EXPECT_EQ(local_shape(spec, 4, index), (std::vector<std::int64_t>{size, 768}));
    begin += size;
  }
}

// Each rank holds its heads of q, of k and of v: three ranges, in that order.
TEST(ParamSpec, PiecesOfFusedQkv) {
  const ParamSpec spec = cut({768, 2304}, 1, {{768, 64}, {768, 64}, {768, 64}});
  EXPECT_EQ(local_ranges(spec, 4, 1), (std::vector<Range>{{192, 384}, {960, 1152}, {1728, 1920}}));
  EXPECT_EQ(local_shape(spec, 4, 1), (std::vector<std::int64_t>{768, 576}));
  // 12 heads over 5 ranks: 3 3 2 2 2, never a part of a head.
  EXPECT_EQ(local_shape(spec, 5, 0)[1], 3 * 3 * 64);
  EXPECT_EQ(local_shape(spec, 5, 4)[1], 3 * 2 * 64);
}

// 2 key/value heads over 8 ranks: ranks 0-3 hold the first, 4-7 the second, beside the query heads that read
// it.
TEST(ParamSpec, KeyValueHeadsAreReplicatedOverNeighbours) {
  const ParamSpec spec = cut({2 * 16, 64}, 0, {{2 * 16, 16, true}});
  EXPECT_EQ(tp_replicas(spec, 8), 4);
  for (int index = 0; index < 8; ++index)
    EXPECT_EQ(local_ranges(spec, 8, index), (std::vector<Range>{{index / 4 * 16, index / 4 * 16 + 16}}));
  for (int times : times_held(spec, 8)) EXPECT_EQ(times, 4);
  EXPECT_EQ(tp_replicas(spec, 2), 1);
  EXPECT_EQ(tp_replicas(spec, 1), 1);
}

TEST(ParamSpec, UncutIsWholeEverywhere) {
  ParamSpec spec;
  spec.shape = {768, 3};
  EXPECT_EQ(spec.numel(), 2304);
  EXPECT_EQ(local_ranges(spec, 4, 2), (std::vector<Range>{{0, 768}}));
  EXPECT_EQ(local_shape(spec, 4, 2), spec.shape);
  EXPECT_EQ(tp_replicas(spec, 4), 4);
}

TEST(ParamSpec, PiecesThatReplicateDifferentlyAreAnInvariantError) {
  EXPECT_THROW(tp_replicas(cut({10}, 0, {{8, 1}, {2, 1, true}}), 4), InvariantError);
}

// Hidden units, say, which would be in a sum over the ranks twice.
TEST(ParamSpec, UnitsThatDoNotRepeatAreNoFewerThanRanks) {
  const ParamSpec spec = cut({2, 64}, 0, {{2, 1}});
  EXPECT_EQ(tp_replicas(spec, 2), 1);
  EXPECT_THROW(tp_replicas(spec, 4), InvariantError);
  EXPECT_THROW(local_ranges(spec, 4, 0), InvariantError);
}

TEST(Traffic, EvenCountsGiveTheRingFormulas) {
  const std::array<std::int64_t, 4> counts{6, 6, 6, 6};
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(bytes_sent(Verb::all_gather, counts, rank, 4), 3 * 6 * 4);
    EXPECT_EQ(bytes_sent(Verb::reduce_scatter, counts, rank, 4), 3 * 6 * 4);
    EXPECT_EQ(bytes_sent(Verb::all_to_all, counts, rank, 4), 3 * 6 * 4);
    EXPECT_EQ(bytes_sent(Verb::all_reduce, counts, rank, 4), 2 * 3 * 24 * 4 / 4);  // 2(n-1)/n of the buffer
    EXPECT_EQ(all_reduce_bytes_sent(24, 4, rank, 4), 2 * 3 * 24 * 4 / 4);
  }
}

TEST(Traffic, UnevenCounts) {
  const std::array<std::int64_t, 3> counts{5, 0, 2};
  EXPECT_EQ(bytes_sent(Verb::all_gather, counts, 0, 8), 2 * 5 * 8);
  EXPECT_EQ(bytes_sent(Verb::all_gather, counts, 1, 8), 0);
  EXPECT_EQ(bytes_sent(Verb::reduce_scatter, counts, 0, 8), 2 * 8);
  EXPECT_EQ(bytes_sent(Verb::reduce_scatter, counts, 1, 8), 7 * 8);
  // 10 elements over 4 ranks: 3 3 2 2. What the group sends is 2(n-1) buffers however it is cut.
  EXPECT_EQ(all_reduce_bytes_sent(10, 4, 0, 1), 7 + 3 * 3);
  EXPECT_EQ(all_reduce_bytes_sent(10, 4, 3, 1), 8 + 3 * 2);
  std::int64_t sum = 0;
  for (int rank = 0; rank < 4; ++rank) sum += all_reduce_bytes_sent(10, 4, rank, 1);
  EXPECT_EQ(sum, 2 * 3 * 10);
}

TEST(Traffic, AllReduceIsReduceScatterAndAllGather) {
  const std::array<std::int64_t, 3> counts{5, 0, 2};
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_EQ(
        bytes_sent(Verb::all_reduce, counts, rank, 4),
        bytes_sent(Verb::reduce_scatter, counts, rank, 4) + bytes_sent(Verb::all_gather, counts, rank, 4));
  for (std::int64_t count : {0, 1, 3, 10, 1001})
    for (int n : {1, 2, 3, 4}) {
      std::vector<std::int64_t> parts;
      for (int i = 0; i < n; ++i) parts.push_back(split_range(count, n, i).size());
      for (int rank = 0; rank < n; ++rank)
        EXPECT_EQ(all_reduce_bytes_sent(count, n, rank, 4), bytes_sent(Verb::all_reduce, parts, rank, 4));
    }
}

TEST(Traffic, AGroupOfOneSendsNothing) {
  const std::array<std::int64_t, 1> counts{9};
  for (Verb verb : {Verb::all_reduce, Verb::all_gather, Verb::reduce_scatter, Verb::all_to_all})
    EXPECT_EQ(bytes_sent(verb, counts, 0, 4), 0) << verb_name(verb);
  EXPECT_THROW(bytes_sent(Verb::barrier, counts, 0, 4), InvariantError);
}

TEST(Traffic, AccountAddsTheVerbsOfAnAxis) {
  Traffic traffic;
  traffic.at(Axis::tp, Verb::all_reduce) = {2, 100};
  traffic.at(Axis::tp, Verb::send) = {1, 11};
  traffic.at(Axis::dp, Verb::all_gather) = {1, 7};
  EXPECT_EQ(traffic.bytes(Axis::tp), 111);
  EXPECT_EQ(traffic.bytes(Axis::dp), 7);
  EXPECT_EQ(traffic.bytes(Axis::pp), 0);
}

}  // namespace
}  // namespace echelon::mesh_test

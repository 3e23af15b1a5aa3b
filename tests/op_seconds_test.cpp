// What products and collectives take on a machine.
#include "plan/op_seconds.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "plan/step_model.h"
#include "priced_plans.h"

namespace echelon::op_seconds_test {
namespace {

using checks::workload;

// Rings over nodes wait at each link; all-reduce has trees, and a group inside a node crosses none.
TEST(OpSeconds, OnlyRingsOverNodesWait) {
  const Machine machine = load_machine("h100");
  Machine waiting = machine;
  waiting.tiers.back().ring_seconds = 1e-3;
  const Software software;
  const OpSeconds quick(machine, software, Precision::bf16), slow(waiting, software, Precision::bf16);
  const auto more = [&](Verb verb, std::int64_t size, std::int64_t stride) {
    return slow.collective(verb, 1e6, {size, stride}) - quick.collective(verb, 1e6, {size, stride});
  };
  EXPECT_NEAR(more(Verb::all_gather, 32, 1), 3e-3, 1e-12);  // four nodes
  EXPECT_NEAR(more(Verb::reduce_scatter, 8, 8), 7e-3, 1e-12);
  EXPECT_EQ(more(Verb::all_reduce, 32, 1), 0);
  EXPECT_EQ(more(Verb::all_gather, 8, 1), 0);
  EXPECT_NEAR(slow.ring_wait(Verb::all_gather, {32}), 3e-3, 1e-12);
}

// A ring over 4 leaves of 32 nodes leaves each leaf once; of a tree over 16 four levels of nine do.
TEST(OpSeconds, HopsTakeTheLatencyOfTheTierThatTheyCross) {
  const Software software;
  Machine machine = load_machine("h100");
  const double bandwidth = 45e9;
  machine.tiers = {{8, 360e9, 0, 1, 0}, {256, bandwidth, 1e-6, 1, 2e-6}, {8192, bandwidth, 100e-6, 1, 30e-6}};
  machine.collective_seconds = 0;
  const OpSeconds ops(machine, software, Precision::bf16);
  const auto gather = [&](std::int64_t size, std::int64_t stride) {
    return ops.collective(Verb::all_gather, 0, {size, stride, size * stride});
  };
  EXPECT_NEAR(gather(32, 8), 31 * 3e-6, 1e-12);
  EXPECT_NEAR(gather(128, 8), 127 / 128.0 * (124 * 3e-6 + 4 * 130e-6), 1e-12);
  EXPECT_NEAR(gather(4, 256), 3 * 130e-6, 1e-12);  // each in a leaf of its own
  EXPECT_NEAR(ops.ring_wait(Verb::all_gather, {128, 8, 1024}), 127 / 128.0 * (124 * 2e-6 + 4 * 30e-6), 1e-12);
  EXPECT_EQ(ops.ring_wait(Verb::all_gather, {8, 1, 8}), 0);
  EXPECT_NEAR(ops.collective(Verb::all_reduce, 0, {512, 8, 4096}), (4 * 9 + 8) * (5 * 1e-6 + 4 * 100e-6) / 9,
              1e-12);
}

// NCCL's rings go through all ranks, seven hops of eight inside a node; where hops count for more than bytes,
// trees are faster.
TEST(OpSeconds, LargeAllReducesOverNodesGoAroundAllRanks) {
  const Machine machine = load_machine("h100");
  Machine distant = machine;
  distant.tiers.back().latency_seconds += 1e-6;
  const Software software;
  const OpSeconds near(machine, software, Precision::bf16), far(distant, software, Precision::bf16);
  const auto hops_over_nodes = [&](double bytes, std::int64_t size) {
    return (far.collective(Verb::all_reduce, bytes, {size}) -
            near.collective(Verb::all_reduce, bytes, {size})) /
           1e-6;
  };
  EXPECT_NEAR(hops_over_nodes(640e6, 256), 2 * 255 / 8.0, 1e-3);
  EXPECT_NEAR(hops_over_nodes(64e6, 16), 2 * 15 / 8.0, 1e-3);
  EXPECT_NEAR(hops_over_nodes(1e6, 256), 4 * std::log2(32) + 8, 1e-3);
  EXPECT_NEAR(hops_over_nodes(64e6, 1024), 4 * std::log2(128) + 8, 1e-3);
}

// A ring moves at the rate of its slowest hop: eight links between nodes carry a node's part of it together.
TEST(OpSeconds, RingsMoveAtTheRateOfTheirSlowestLinks) {
  const Software software;
  Machine machine = load_machine("h100");
  machine.tiers.front().bandwidth = 400e9, machine.tiers.back().bandwidth = 40e9;
  machine.small_group_loss = machine.collective_seconds = 0;
  const auto rate = [&](Verb verb, std::int64_t size, std::int64_t stride) {
    const OpSeconds ops(machine, software, Precision::bf16);
    const double passes = verb == Verb::all_reduce ? 2 : 1, ranks = static_cast<double>(size);
    return passes * (ranks - 1) / ranks * (1e12 - 1e11) /
           (ops.collective(verb, 1e12, {size, stride}) - ops.collective(verb, 1e11, {size, stride}));
  };
  for (Verb verb : {Verb::all_reduce, Verb::reduce_scatter, Verb::all_gather}) {
    machine.whole_rings = true;
    EXPECT_NEAR(rate(verb, 8, 1), 400e9, 1);
    EXPECT_NEAR(rate(verb, 16, 1), 320e9, 1);
    EXPECT_NEAR(rate(verb, 64, 1), 320e9, 1);
    EXPECT_NEAR(rate(verb, 16, 4), 80e9, 1);  // two of each node
    EXPECT_NEAR(rate(verb, 16, 8), 40e9, 1);
    machine.whole_rings = false;  // 7/8 of the bytes inside at 400, then half of an eighth outside at 40
    EXPECT_NEAR(rate(verb, 16, 1), 15 / 16.0 / (7 / 8.0 / 400e9 + 1 / 16.0 / 40e9), 1);
    EXPECT_NEAR(rate(verb, 16, 8), 40e9, 1);
  }
}

// What fills a node, and no more, crosses none.
TEST(OpSeconds, MessagesInsideANodeStayThere) {
  const Software software;
  const Machine machine = load_machine("h100");
  Machine slow = machine;
  slow.tiers.back().bandwidth = 1e9;
  const OpSeconds ops(machine, software, Precision::bf16), far(slow, software, Precision::bf16);
  for (std::int64_t span : {2, 7, 8}) EXPECT_EQ(far.message(1e9, {span}), ops.message(1e9, {span})) << span;
  EXPECT_GT(far.message(1e9, {9}), ops.message(1e9, {9}));
  Workload work = workload("llama-3-8b", 64);
  work.plan.mesh.set(Axis::pp, 4);
  work.plan.mesh.set(Axis::cp, 2);
  work.plan.schedule = "1f1b";
  Workload elsewhere = work;
  elsewhere.machine = slow;
  EXPECT_EQ(StepModel(elsewhere).estimate(work.plan).seconds, StepModel(work).estimate(work.plan).seconds);
}

// Of a pipeline through two nodes the hops inside them count as well, where their links are the slower ones.
TEST(OpSeconds, MessagesWaitForTheSlowestHop) {
  const Software software;
  Machine machine = load_machine("h100");
  machine.tiers = {{8, 12e9, 0, 1, 0}, {1024, 45e9, 0, 1, 0}};
  const OpSeconds ops(machine, software, Precision::bf16);
  for (std::int64_t stride : {1, 2, 4})
    EXPECT_NEAR(ops.message(1e9, {16 / stride, stride, 16}), 1e9 / 12e9, 1e-12) << stride;
  EXPECT_NEAR(ops.message(1e9, {2, 8, 16}), 1e9 / 45e9, 1e-12);
}

// Every group of every block, member by member.
WorstPlaced counted_placement(const RankGroups& g, std::int64_t unit) {
  const std::int64_t block = g.size * g.stride;
  WorstPlaced worst{g.size, 1, 1};
  std::map<std::int64_t, std::set<std::int64_t>> leaving;  // blocks of each unit that other units hold too
  const std::int64_t num_blocks = g.count > 0 ? 1 : std::max<std::int64_t>(1, g.job / block);
  for (std::int64_t k = 0; k < num_blocks; ++k)
    for (std::int64_t j = g.first; j < g.first + g.num_neighbours(); ++j) {
      std::map<std::int64_t, std::int64_t> members;
      for (std::int64_t i = 0; i < g.size; ++i) ++members[(k * block + j + i * g.stride) / unit];
      if (members.size() == 1) continue;
      worst.across = std::max<std::int64_t>(worst.across, std::ssize(members));
      for (const auto& [at, count] : members) {
        worst.fewest = std::min(worst.fewest, count);
        worst.most = std::max(worst.most, count);
        leaving[at].insert(k);
      }
    }
  if (worst.across == 1) worst.most = g.size;
  for (const auto& [at, blocks] : leaving) worst.is_broken = worst.is_broken || blocks.size() > 1;
  return worst;
}

TEST(WorstPlaced, IsFoundAsByCountingAllGroups) {
  for (std::int64_t unit : {4, 6, 8, 9, 72})
    for (std::int64_t size : {1, 2, 3, 4, 6, 9, 16, 33, 64})
      for (std::int64_t stride : {1, 2, 3, 4, 5, 8, 12, 16, 64, 100})
        for (std::int64_t blocks : {0, 1, 2, 3, 9}) {
          const RankGroups groups{size, stride, blocks * size * stride};
          const WorstPlaced found = worst_placed(groups, unit), counted = counted_placement(groups, unit);
          ASSERT_EQ(found.fewest, counted.fewest)
              << size << " x " << stride << " x " << blocks << " / " << unit;
          ASSERT_EQ(found.most, counted.most) << size << " x " << stride << " x " << blocks << " / " << unit;
          ASSERT_EQ(found.across, counted.across)
              << size << " x " << stride << " x " << blocks << " / " << unit;
          ASSERT_LE(counted.is_broken, found.is_broken)
              << size << " x " << stride << " x " << blocks << " / " << unit;
        }
}

// Pairs of pipeline ranks are some neighbours, which begin anywhere in a unit.
TEST(WorstPlaced, IsFoundOfSomeNeighbours) {
  Placements placements;
  for (std::int64_t unit : {4, 6, 8, 9, 72})
    for (std::int64_t size : {2, 3})
      for (std::int64_t stride : {1, 2, 3, 4, 5, 8, 12, 64, 100})
        for (std::int64_t count : {1, 2, 3, 4, 12})
          for (std::int64_t first : {0, 1, 2, 4, 6, 7, 8, 60, 144}) {
            const RankGroups groups{size, stride, 1000, count, first};
            const WorstPlaced found = placements.worst(groups, unit),
                              counted = counted_placement(groups, unit);
            SCOPED_TRACE(fmt::format("{} x {}, {} from {} / {}", size, stride, count, first, unit));
            ASSERT_EQ(found.fewest, counted.fewest);
            ASSERT_EQ(found.most, counted.most);
            ASSERT_EQ(found.across, counted.across);
            ASSERT_FALSE(found.is_broken);
          }
}

// A search prices the collectives of hundreds of thousands of meshes, whose groups are few.
TEST(WorstPlaced, GroupsAreLookedAtOnce) {
  Placements placements;
  for (int again = 0; again < 3; ++again)
    for (std::int64_t unit : {8, 72})
      for (std::int64_t size : {1, 2, 3, 16})
        for (std::int64_t stride : {1, 2, 8, 100}) {
          const RankGroups groups{size, stride, 9 * size * stride};
          const WorstPlaced found = placements.worst(groups, unit), each = worst_placed(groups, unit);
          EXPECT_EQ(found.fewest, each.fewest);
          EXPECT_EQ(found.most, each.most);
          EXPECT_EQ(found.across, each.across);
          EXPECT_EQ(found.is_broken, each.is_broken);
        }
  // Of 3 apart by 1 and 2 in nodes of 8; and of 16 in 72, of which none is cut evenly.
  EXPECT_GT(placements.num_found(), 0u);
  EXPECT_LE(placements.num_found(), 8u);
}

// All wait for the group that lies worst: of tp 4 on nodes of 6 every second is cut in two, of ep 64 on
// domains of 72 all but the first.
TEST(OpSeconds, GroupsThatNodesCutArePricedAsCut) {
  const Software software;
  Machine six = load_machine("h100"), domains = load_machine("gb200");
  six.tiers.front().ranks = 6;
  six.small_group_loss = six.collective_seconds = domains.collective_seconds = 0;
  for (Machine* m : {&six, &domains})
    for (Tier& tier : m->tiers) tier.latency_seconds = 0;
  const OpSeconds ops(six, software, Precision::bf16), of_domains(domains, software, Precision::bf16);
  const double inside = six.tiers[0].bandwidth, outside = six.tiers[1].bandwidth;
  EXPECT_NEAR(ops.collective(Verb::all_gather, 1e9, {4, 1, 4}), 3 / 4.0 * 1e9 / inside, 1e-12);
  EXPECT_NEAR(ops.collective(Verb::all_gather, 1e9, {4, 1, 24}),
              1 / 2.0 * 1e9 / inside + 1 / 2.0 * 1e9 / 2 / outside, 1e-12);
  EXPECT_EQ(ops.collective(Verb::all_gather, 1e9, {2, 1, 24}),
            ops.collective(Verb::all_gather, 1e9, {2, 1, 2}));
  EXPECT_EQ(ops.collective(Verb::all_gather, 1e9, {3, 2, 24}),
            ops.collective(Verb::all_gather, 1e9, {3, 1, 3}));
  EXPECT_NEAR(ops.message(1e9, {4, 1, 4}), 1e9 / inside, 1e-12);
  EXPECT_NEAR(ops.message(1e9, {4, 1, 24}), 1e9 / outside, 1e-12);
  // Eight of the second group are in the first domain, and 56 of the bytes for 64 leave it.
  EXPECT_NEAR(of_domains.collective(Verb::all_to_all, 1e9, {64, 1, 576}),
              7 / 64.0 * 1e9 / domains.tiers[0].bandwidth + 56 / 64.0 * 1e9 / domains.tiers[1].bandwidth,
              1e-12);
  EXPECT_NEAR(of_domains.collective(Verb::all_to_all, 1e9, {64, 1, 64}),
              63 / 64.0 * 1e9 / domains.tiers[0].bandwidth, 1e-12);
  // Rows of all others come into those eight: 56 for each of them, where each reaches the eighth of experts.
  EXPECT_NEAR(of_domains.nodes_of_fewest({64, 1, 576}), 8, 1e-12);
  EXPECT_NEAR(of_domains.dispatch(1e9, 8, 8, {64, 1, 576}), 7 * 1e9 / domains.tiers[1].bandwidth, 1e-12);
}

// Leaves of 256 with a quarter of their links to the spine. Of a ring over nodes one hop crosses a leaf's
// border, as of a pipeline's messages those of the stage there: they share what all ranks of the leaf would
// fill.
TEST(OpSeconds, OnlyWhatLeavesALeafSharesItsLinks) {
  const Software software;
  Machine machine = load_machine("h100");
  machine.tiers = {{8, 360e9, 0, 1, 0}, {256, 45e9, 0, 1, 0}, {8192, 45e9, 0, 4, 0}};
  machine.collective_seconds = machine.small_group_loss = 0;
  const OpSeconds ops(machine, software, Precision::bf16);
  const double link = 45e9;
  // Seconds of each byte over its slowest link.
  const auto gather = [&](std::int64_t size, std::int64_t stride) {
    const double ranks = static_cast<double>(size);
    return ops.collective(Verb::all_gather, 1e9, {size, stride, size * stride}) * ranks / (ranks - 1) / 1e9 *
           link;
  };
  EXPECT_NEAR(gather(32, 8), 1, 1e-12);  // inside a leaf
  EXPECT_NEAR(gather(33, 8), 1, 1e-12);  // 8 rings leave it over 64 links
  EXPECT_NEAR(gather(8, 64), 1, 1e-12);
  EXPECT_NEAR(gather(4, 128), 2, 1e-12);
  EXPECT_NEAR(gather(4, 256), 4, 1e-12);  // every rank has a ring of its own that leaves it
  EXPECT_NEAR(gather(4, 512), 4, 1e-12);
  // 32 groups of 3 on nodes' first and last ranks: 96 ranks to a block, of which two share every leaf but the
  // first.
  EXPECT_NEAR(ops.collective(Verb::all_gather, 1e9, {3, 48, 48 * 3 * 4}), 2 / 3.0 * 1e9 / link * 96 / 64,
              1e-12);
  const auto message = [&](std::int64_t stages, std::int64_t ranks) {
    return ops.message(1e9, {stages, ranks, stages * ranks}) * link / 1e9;
  };
  EXPECT_NEAR(message(4, 64), 1, 1e-12);
  EXPECT_NEAR(message(8, 64), 1, 1e-12);
  EXPECT_NEAR(message(8, 128), 2, 1e-12);
  EXPECT_NEAR(message(2, 1024), 4, 1e-12);
  // All ranks send at once, and half of the bytes leave the leaf.
  EXPECT_NEAR(ops.collective(Verb::all_to_all, 1e9, {64, 8, 512}), 32 / 64.0 * 1e9 / (link / 4), 1e-12);
  EXPECT_NEAR(ops.collective(Verb::all_to_all, 1e9, {32, 8, 512}), 31 / 32.0 * 1e9 / link, 1e-12);
  EXPECT_NEAR(ops.dispatch(1e9, 8, 8, {64, 8, 512}), 8 * 32 / 64.0 * 1e9 / (link / 4), 1e-12);
  // Another 8 GPUs make a reduction over data-parallel ranks no disaster.
  const double leaf = ops.collective(Verb::all_reduce, 16e9, {32, 8, 256}),
               more = ops.collective(Verb::all_reduce, 16e9, {33, 8, 264});
  EXPECT_LT(more, 1.01 * leaf);
}

// Of tied tables one pair of stages exchanges; under DualPipe all ranks do.
TEST(OpSeconds, PairsShareALeafsLinksWithAllThatExchange) {
  const Software software;
  Machine machine = load_machine("h100");
  machine.tiers = {{8, 360e9, 0, 1, 0}, {256, 45e9, 0, 1, 0}, {8192, 45e9, 0, 4, 0}};
  machine.collective_seconds = 0;
  const OpSeconds ops(machine, software, Precision::bf16);
  // The first and the last of 16 stages of 32 ranks.
  const auto sum = [&](std::int64_t at_once) {
    return ops.collective(Verb::all_reduce, 1e9, {2, 15 * 32, 512, 32, 0, at_once});
  };
  EXPECT_NEAR(sum(0), 1e9 / 45e9, 1e-12);
  EXPECT_NEAR(sum(256), 4e9 / 45e9, 1e-12);
  EXPECT_NEAR(sum(96), 1.5 * 1e9 / 45e9, 1e-12);
}

// NVIDIA's recipes ask Slurm for as many hosts of each domain as divide the job's.
TEST(OpSeconds, JobsShareDomainsOfSeveralHostsOutEvenly) {
  const Machine domains = load_machine("gb200"), nodes = load_machine("h100");
  EXPECT_EQ(domains.node_of(256), 64);
  EXPECT_EQ(domains.node_of(128), 64);
  EXPECT_EQ(domains.node_of(576), 72);
  EXPECT_EQ(domains.node_of(64), 72);
  EXPECT_EQ(domains.node_of(4 * 20), 40);
  EXPECT_EQ(domains.node_of(4 * 19), 72);  // no even shares: 72 and 4
  EXPECT_EQ(nodes.node_of(72), 8);
  const OpSeconds ops(domains, Software(), Precision::bf16);
  EXPECT_EQ(ops.nodes_of({64, 1, 256}), 1);
  EXPECT_EQ(ops.nodes_of({64, 1, 576}), 2);
}

// As NCCL takes the faster of its algorithms, no collective gets faster by another byte, another rank in a
// node, or another whole node.
TEST(OpSeconds, CollectivesTakeNoLessForMoreRanksOrBytes) {
  const Software software;
  for (const char* name : {"h100", "a100-80", "gb200"}) {
    const Machine machine = load_machine(name);
    const OpSeconds ops(machine, software, Precision::bf16);
    for (Verb verb : {Verb::all_reduce, Verb::reduce_scatter, Verb::all_gather})
      for (std::int64_t stride : {1, 2, 8})
        for (std::int64_t node = machine.node() / stride, size = 2, before = 1; size <= 1200;
             before = size, size += size < node ? 1 : node)
          for (double bytes = 1024; bytes < 16e9; bytes *= 1.7) {
            const double seconds = ops.collective(verb, bytes, {size, stride}),
                         enough = seconds * (1 + 1e-12);
            ASSERT_LE(ops.collective(verb, bytes, {before, stride}), enough)
                << name << ' ' << size << " x " << stride << ", " << bytes;
            ASSERT_LE(ops.collective(verb, bytes / 1.7, {size, stride}), enough)
                << name << ' ' << size << " x " << stride << ", " << bytes;
          }
    // a message of 32 KiB a rank, and of a byte less
    for (std::int64_t ranks = 2 * machine.node(); ranks <= 1024; ranks *= 2) {
      const double whole = 32768 * static_cast<double>(ranks);
      EXPECT_NEAR(ops.collective(Verb::all_reduce, whole - 1, {ranks}),
                  ops.collective(Verb::all_reduce, whole, {ranks}), 1e-9);
    }
  }
}

// Of rows that begin at multiples of 8, 4 and 2 bytes the rate falls in three equal steps.
TEST(OpSeconds, RowsThatBeginOffSixteenBytesAreSlower) {
  Machine machine = load_machine("a100-80");
  machine.gemm_unaligned = 0.125;
  const Software software;
  const OpSeconds ops(machine, software, Precision::bf16), f32(machine, software, Precision::f32);
  EXPECT_EQ(ops.unaligned(50304), 1);
  EXPECT_NEAR(ops.unaligned(12564), 2, 1e-12);
  EXPECT_NEAR(ops.unaligned(50258), 4, 1e-12);
  EXPECT_NEAR(ops.unaligned(50257), 8, 1e-12);
  EXPECT_EQ(f32.unaligned(12564), 1);
  EXPECT_NEAR(f32.unaligned(50257), 4, 1e-12);
}

}  // namespace
}  // namespace echelon::op_seconds_test

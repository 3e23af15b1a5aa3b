// Plans for routers that do not balance: all ranks of an expert group wait for the one that gets most.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "plan/explain.h"
#include "plan/interval.h"
#include "plan/search.h"
#include "refusals.h"
#include "verb_test.h"
#include "workloads.h"

namespace echelon::skewed_experts_test {
namespace {

using checks::expect_refusal;

Mesh over(int ep) {
  Mesh mesh;
  mesh.set(Axis::dp, ep);
  mesh.ep = ep;
  return mesh;
}

const Machine h100 = load_machine("h100");

Workload mixtral(ExpertSkew load = {}) {
  Workload work = checks::workload_of(load_model("mixtral-8x7b"), 4096, 256, Precision::bf16,
                                      load_machine("h100"), load_software("current"));
  work.expert_load = std::move(load);
  return work;
}

Plan on(int ep, const Workload& work) {
  Plan plan = work.plan;
  plan.mesh.set(Axis::dp, 64);
  plan.mesh.ep = ep;
  plan.zero = 1;
  plan.micro_batch = 1;
  return plan;
}

TEST(SkewedExperts, TheBusiestRankFollowsFromWhereExpertsAre) {
  const ExpertSkew load{1, {4, 4, 1, 1, 1, 1, 2, 2}};  // two a rank of four: 8, 2, 2, 4
  EXPECT_DOUBLE_EQ(busiest_rank(load, over(4), h100), 2);
  EXPECT_DOUBLE_EQ(busiest_rank(load, over(2), h100), 1.25);
  EXPECT_DOUBLE_EQ(busiest_rank(load, over(8), h100), 2);
  EXPECT_DOUBLE_EQ(busiest_rank(load, over(1), h100), 1);
  EXPECT_DOUBLE_EQ(place_experts(load.shares, 4, 2).busiest, 1.25);  // 4 + 1, 4 + 1, 2 + 1, 2 + 1
  EXPECT_DOUBLE_EQ(place_experts(load.shares, 8, 1).busiest, 2);     // one expert is as large
  EXPECT_DOUBLE_EQ(busiest_rank({1.5, {}}, over(8), h100), 1.5);
  EXPECT_DOUBLE_EQ(busiest_rank({6, {}}, over(4), h100), 4);  // which has all
  EXPECT_DOUBLE_EQ(busiest_rank({1.5, {}}, over(1), h100), 1);
}

// Of two experts on each rank no placement is better.
TEST(SkewedExperts, PairsArePlacedAsWellAsCanBe) {
  std::mt19937 draw(1);
  std::exponential_distribution<double> share;
  for (int n = 0; n < 50; ++n) {
    std::vector<double> shares(6);
    for (double& one : shares) one = share(draw);
    std::vector<std::size_t> order(6);
    std::iota(order.begin(), order.end(), 0);
    double best = 1e300;
    do {
      std::vector<double> placed;
      for (std::size_t i : order) placed.push_back(shares[i]);
      best = std::min(best, busiest_rank({1, placed}, over(3), h100));
    } while (std::next_permutation(order.begin(), order.end()));
    EXPECT_NEAR(place_experts(shares, 3, 2).busiest, best, 1e-12);
  }
}

TEST(SkewedExperts, ABusyRankHoldsAllOthersUp) {
  const Workload even = mixtral(), flat = mixtral({1, std::vector<double>(8, 3.0)}), twice = mixtral({2, {}}),
                 thrice = mixtral({3, {}});
  const auto priced = [](const Workload& work, int ep) { return StepModel(work).estimate(on(ep, work)); };
  EXPECT_EQ(priced(even, 8).seconds, priced(flat, 8).seconds);
  // One rank that holds all experts computes all its tokens, whoever they go to.
  EXPECT_EQ(priced(even, 1).seconds, priced(thrice, 1).seconds);
  EXPECT_EQ(priced(even, 1).memory.total(), priced(thrice, 1).memory.total());
  const Estimate one = priced(even, 8), two = priced(twice, 8), three = priced(thrice, 8);
  EXPECT_GT(two.parts.ep_exposed, 1.8 * one.parts.ep_exposed);
  EXPECT_LT(two.parts.ep_exposed, 2 * one.parts.ep_exposed);
  EXPECT_GT(two.parts.compute, one.parts.compute);
  EXPECT_GT(three.parts.compute - two.parts.compute, 0.8 * (two.parts.compute - one.parts.compute));
  EXPECT_NEAR(one.traffic.ep, two.traffic.ep, 1);  // each rank still sends its own tokens
  // By hand: of each further copy its operand, and what the activation reads and leaves, in each of 32
  // layers; at work is most in the output layer.
  const double copies = 4096 * 2, kept = copies * (4096 * 2 + 14336 * (2 * 2 + 2));
  const double more = static_cast<double>(two.memory.total() - one.memory.total());
  const double fragments = 1 + even.software.fragmentation;
  EXPECT_NEAR(more, fragments * 32 * kept, 1e-6 * more);
}

// The example of EPLB's page: two layers of 12 experts in 4 groups, 16 slots on 8 devices of 2 nodes.
TEST(SkewedExperts, CopiesArePlacedAsDeepSeekPlacesThem) {
  const std::vector<std::vector<double>> loads{{90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86},
                                               {20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27}};
  const std::vector<std::vector<std::size_t>> published{{5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1},
                                                        {7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1}};
  for (std::size_t layer = 0; layer < 2; ++layer) {
    const ExpertPlacement placed = place_experts(loads[layer], 8, 2, 2, 4);
    std::vector<std::vector<std::size_t>> expected, held = placed.held;
    for (std::size_t slot = 0; slot < 16; slot += 2)
      expected.push_back({published[layer][slot], published[layer][slot + 1]});
    for (auto* list : {&expected, &held}) {
      for (auto& rank : *list) std::sort(rank.begin(), rank.end());
      std::sort(list->begin(), list->end());
    }
    EXPECT_EQ(held, expected);
    int copies = 0;
    for (int n : placed.copies) copies += n;
    EXPECT_EQ(copies, 16);
  }
}

// On nodes as the expert group lies that lies worst: NVL72 domains give 256 GPUs 64 each, and of groups of 8
// on nodes of 6 each has 6 and 2, or 4 and 4, where no placement keeps to nodes.
TEST(SkewedExperts, ArePlacedOnTheNodesThatGroupsLieOn) {
  std::vector<double> shares(128, 1);
  std::fill(shares.begin(), shares.begin() + 64, 3);  // the first of two groups of experts
  const ExpertSkew load{1, shares, true, 0, 2};
  const auto busiest = [&](int ep, int ranks, int etp, const Machine& machine) {
    Mesh mesh;
    mesh.set(Axis::dp, ranks / etp);
    mesh.set(Axis::tp, etp);
    mesh.ep = ep;
    return busiest_rank(load, mesh, machine);
  };
  const Machine domains = load_machine("gb200");
  EXPECT_DOUBLE_EQ(busiest(128, 256, 1, domains), 1.5);  // one expert each
  EXPECT_DOUBLE_EQ(busiest(64, 64, 1, domains), 1);
  EXPECT_DOUBLE_EQ(busiest(64, 256, 1, domains), 1);    // each in a domain of its own
  EXPECT_DOUBLE_EQ(busiest(64, 256, 2, domains), 1.5);  // over two
  Machine six = h100;
  six.tiers.front().ranks = 6;
  EXPECT_DOUBLE_EQ(busiest(4, 24, 1, six), 1.5);  // every second is two and two
  EXPECT_DOUBLE_EQ(busiest(8, 24, 1, six), 1);
  EXPECT_DOUBLE_EQ(busiest(16, 32, 1, h100), 1.5);
}

TEST(SkewedExperts, CopiesShareALoadAndCostMemoryAndTraffic) {
  const std::vector<double> shares{8, 1, 1, 1, 1, 1, 1, 2};  // one of 8 ranks has half of all
  const auto skew = [&](bool placed, std::int64_t replicas) {
    return ExpertSkew{1, shares, placed, replicas, 1};
  };
  EXPECT_DOUBLE_EQ(busiest_rank(skew(true, 0), over(8), h100), 4);
  const ExpertPlacement placed = placement_of(skew(true, 1), over(8), h100);
  EXPECT_EQ(placed.copies, (std::vector<int>{8, 1, 1, 1, 1, 1, 1, 2}));  // 1 in each slot
  EXPECT_DOUBLE_EQ(busiest_rank(skew(true, 1), over(8), h100), 1);
  EXPECT_EQ(kept_experts(skew(true, 1), over(8)), 2);

  // What was found of one load is not taken for another's.
  ExpertSkew changed = skew(true, 1);
  EXPECT_EQ(placed_experts(changed, over(8), h100).shared_slots, placed.shared_slots());
  EXPECT_EQ(placed_experts(changed, over(8), h100).most_copies, 8);
  EXPECT_DOUBLE_EQ(busiest_rank(changed, over(4), h100), placement_of(changed, over(4), h100).busiest);
  changed.replicas = 0;
  EXPECT_DOUBLE_EQ(busiest_rank(changed, over(8), h100), 4);
  changed.shares = std::vector<double>(8, 1.0);
  EXPECT_DOUBLE_EQ(busiest_rank(changed, over(8), h100), 1);

  const auto priced = [&](const Workload& work) { return StepModel(work).estimate(on(8, work)); };
  const Workload in_order = mixtral(skew(false, 0)), copies = mixtral(skew(true, 1));
  const Estimate a = priced(in_order), b = priced(copies);
  EXPECT_LT(b.seconds, 0.8 * a.seconds);
  EXPECT_EQ(not_run(copies, b.plan), std::vector<std::string>{"copies of experts"});
  // By hand: of one further expert on each rank values and gradients, and the optimizer's states over the 8
  // ranks that have the same ones.
  const double expert = 32 * 3 * 4096.0 * 14336;
  const auto more = [&](MemoryCategory c) { return static_cast<double>(b.memory[c] - a.memory[c]); };
  EXPECT_NEAR(more(MemoryCategory::parameters), 2 * expert, 1e-6 * expert);
  EXPECT_NEAR(more(MemoryCategory::gradients), 4 * expert, 1e-6 * expert);
  EXPECT_NEAR(more(MemoryCategory::optimizer), 12 * expert / 8, 1e-6 * expert);
  // Their gradients go around the eight copies, of what ZeRO leaves on a rank.
  const double slots = static_cast<double>(placed.shared_slots());
  EXPECT_NEAR(b.traffic.ep - a.traffic.ep, 2 * 7.0 / 8 * slots * expert * 4 / 8, 1e-3 * expert);
  EXPECT_GT(b.traffic.dp, a.traffic.dp);
}

// The search weighs it: what a busy rank costs makes groups smaller.
TEST(SkewedExperts, TheSearchTakesItIntoAccount) {  // long
  SearchRequest r;
  r.work = mixtral();
  r.gpus = 64;
  r.top = 1;
  const SearchResult even = search(r);
  r.work.expert_load.shares = {20, 1, 1, 1, 1, 1, 1, 1};
  const SearchResult skewed = search(r);
  ASSERT_FALSE(even.plans.empty() || skewed.plans.empty());
  EXPECT_GT(even.plans[0].plan.mesh.ep, skewed.plans[0].plan.mesh.ep);
  EXPECT_GT(skewed.plans[0].seconds, even.plans[0].seconds);
  r.pin("ep", 8);
  const SearchResult pinned = search(r);
  ASSERT_FALSE(pinned.plans.empty());
  EXPECT_GE(pinned.plans[0].seconds, skewed.plans[0].seconds);
  EXPECT_NE(
      explain_winner(pinned, r.work).find("experts: all wait for the rank with 5.93 of the mean load\n"),
      std::string::npos);
  for (const char* words :
       {"  placed by their load: the busiest rank has 5.93",
        "  with 1 further on each rank, a copy of one that has most: the busiest rank has "})
    EXPECT_NE(explain_winner(pinned, r.work).find(words), std::string::npos)
        << explain_winner(pinned, r.work);
}

// A rank holds no expert twice: two ranks of eight experts have room for four further ones each.
TEST(SkewedExperts, CopiesAreNoMoreThanThereIsRoomFor) {
  SearchRequest r;
  r.work = mixtral({1, {8, 1, 1, 1, 1, 1, 1, 2}, true, 5, 1});
  r.gpus = 64;
  r.top = 20;
  const SearchResult found = search(r);
  ASSERT_FALSE(found.plans.empty());
  for (const Estimate& e : found.plans) EXPECT_NE(e.plan.mesh.ep, 2);
  r.pin("ep", 2);
  expect_refusal([&] { search(r); }, {"--ep 2", "--expert-replicas 0 to 4 of 8 experts", "5"});
  r.work.expert_load.replicas = 4;
  EXPECT_FALSE(search(r).plans.empty());
}

// Where no group has several ranks nothing is placed.
TEST(SkewedExperts, OneRankOfAGroupIsAsFarAsWithoutPlacement) {
  const Workload even = mixtral(), placed = mixtral({1, {8, 1, 1, 1, 1, 1, 1, 2}, true, 0, 1});
  EXPECT_EQ(interval_of(placed, on(1, placed), 1).why, interval_of(even, on(1, even), 1).why);
  EXPECT_EQ(interval_of(placed, on(8, placed), 1).why,
            "wider: none was measured with experts placed by their load");
}

class PlacedCommand : public checks::VerbTest {
 protected:
  PlacedCommand() : VerbTest("plan") { write("loads.txt", "8 1 1 1 1 1 1 2\n"); }
};

// No program is started with experts where the plan has them.
TEST_F(PlacedCommand, IsNotLaunched) {
  const std::string request =
      "--model mixtral-8x7b --gpus 8 --expert-load loads.txt --launch-for megatron-core --launch-out d ";
  refused(request + "--expert-placement load", {"--launch-for", "with --expert-placement load"});
  refused(request + "--expert-replicas 1", {"--launch-for", "with --expert-replicas"});
  refused("--model mixtral-8x7b --gpus 8 --expert-load loads.txt --expert-replicas 5 --ep 2",
          {"--ep 2", "--expert-replicas 0 to 4"});
}

TEST(SkewedExperts, RefusesOtherLists) {
  EXPECT_EQ(read_expert_shares("1, 2\n3 0\n", 4, "x"), (std::vector<double>{1, 2, 3, 0}));
  expect_refusal([] { read_expert_shares("1 2 3", 4, "--expert-load f"); },
                 {"--expert-load f", "3 numbers", "4 experts"});
  expect_refusal([] { read_expert_shares("1 2 3 -4", 4, "--expert-load f"); },
                 {"--expert-load f -4: must be at least 0"});
  expect_refusal([] { read_expert_shares("1 2 3 x", 4, "--expert-load f"); }, {"--expert-load f", "x"});
  expect_refusal([] { read_expert_shares("0 0 0 0", 4, "--expert-load f"); }, {"no expert has any load"});
}

}  // namespace
}  // namespace echelon::skewed_experts_test

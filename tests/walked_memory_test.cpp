#include "plan/walked_memory.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "case_choice.h"
#include "plan/step_model.h"
#include "spec/plan_rules.h"
#include "train/dry_run.h"
#include "workloads.h"

namespace echelon {
namespace {

Workload of_this_trainer(const char* model, std::int64_t seq_len, std::int64_t batch) {
  return checks::workload_of(load_model(model), seq_len, batch, Precision::bf16, load_machine("h100"),
                             load_software("echelon"), exact_memory());
}

TEST(WalkedMemory, IsGuessedOnALineBetweenThoseThatWereWalked) {
  WalkedRanks ranks({100, 90, 90, 90, 95});
  EXPECT_EQ(ranks.first(), (std::vector<int>{0, 4}));
  EXPECT_EQ(ranks.likely(2), 90);
  ranks.set(0, 100);
  EXPECT_EQ(ranks.likely(3), 90);
  ranks.set(4, 135);  // 40 more than counted
  EXPECT_EQ(ranks.likely(1), 100);
  EXPECT_EQ(ranks.likely(3), 120);
  EXPECT_EQ(ranks.likely(4), 135);
  EXPECT_EQ(ranks.next(), 3);
  EXPECT_EQ(ranks.not_walked(), (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(ranks.between(110), 2);
  ranks.set(2, 105);
  EXPECT_EQ(ranks.between(110), 3);
  ranks.set(3, 118);
  EXPECT_EQ(ranks.between(110), -1);
  ranks.set(1, 90);
  EXPECT_EQ(ranks.next(), -1);
}

TEST(WalkedMemory, BeginsWithTheRankThatIsCountedToHoldMost) {
  EXPECT_EQ(WalkedRanks({1, 3, 2}).first(), (std::vector<int>{1, 2, 0}));
  EXPECT_EQ(WalkedRanks({5}).first(), std::vector<int>{0});
}

// By formula, in a moment, what the search looks at hundreds of thousands of times: what a pass keeps, what W
// waits for where it is apart, and what stays. No rank holds less than least_bytes(), by which plans are left
// out unwalked.
TEST(WalkedMemory, CountsOfThisTrainerWhatItIsWalkedToHold) {  // long
  struct Case {
    const char* model;
    int tp, pp, cp, ep;
    std::int64_t micro_batch;
  };
  for (const Case& one : {Case{"llama-3-70b", 2, 8, 1, 1, 1}, {"llama-3-8b", 1, 4, 2, 1, 2},
                          {"deepseek-v3", 1, 8, 2, 64, 1}, {"qwen3-30b-a3b", 1, 4, 1, 8, 1},
                          {"gpt3-175b", 4, 8, 1, 1, 1}, {"nemotron-h-8b", 1, 4, 1, 1, 1}})
    for (const char* schedule : {"1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "dualpipe", "dualpipev"})
      for (const Recompute& recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
        if (!checks::is_taken(20)) continue;
        Workload work = of_this_trainer(one.model, 4096, 64 * one.micro_batch * 16);
        Plan c = work.plan;
        c.mesh.set(Axis::tp, one.tp);
        c.mesh.set(Axis::pp, one.pp);
        c.mesh.set(Axis::cp, one.cp);
        c.mesh.set(Axis::dp, 64);
        c.mesh.ep = one.ep;
        c.micro_batch = one.micro_batch;
        c.sequence_parallel = true;
        c.schedule = schedule;
        c.zero = 1;
        c.recompute = recompute;
        SCOPED_TRACE(fmt::format("{} {}", one.model, summary(c)));
        StepModel model(work);
        ASSERT_TRUE(model.schedule_problem(c).empty()) << model.schedule_problem(c);
        const std::vector<double> counted = model.rank_bytes(c);
        const Estimate e = model.estimate(c);
        for (std::size_t r = 0; r < counted.size(); ++r)
          EXPECT_GE(counted[r], 0.97 * static_cast<double>(e.rank_memory[r].total())) << r;
        // Of two passes that run together one makes room for what the other keeps.
        const bool runs_together = std::string(schedule).starts_with("dualpipe");
        const auto walked = static_cast<double>(e.memory.total());
        EXPECT_LE(*std::max_element(counted.begin(), counted.end()), (runs_together ? 1.15 : 1.12) * walked);
        EXPECT_LE(model.least_bytes(c), walked);
      }
}

// Where a step has few microbatches gradients come when activations go, and however large a vocabulary is,
// the logits of a few tokens exist at a time.
TEST(WalkedMemory, CountsGradientsAndLogitsAsTheyComeAndGo) {
  struct Case {
    const char *model, *schedule;
    int pp;
    std::int64_t micro_batch, microbatches;
  };
  for (const Case& one : {Case{"llama-3-8b", "1f1b", 1, 4, 1},
                          {"llama-3-8b", "v-half", 2, 1, 2},
                          {"llama-3-8b", "interleaved", 2, 1, 2},
                          {"llama-3-8b", "zb-h1", 2, 2, 4},
                          {"gemma-3-1b", "1f1b", 1, 8, 1},
                          {"gemma-3-1b", "1f1b", 1, 8, 4},
                          {"gemma-2-9b", "v-half", 2, 1, 2},
                          {"nemotron-h-8b", "interleaved", 2, 1, 2}}) {
    constexpr int dp = 8;
    Workload work = of_this_trainer(one.model, 4096, dp * one.micro_batch * one.microbatches);
    Plan c = work.plan;
    c.mesh.set(Axis::pp, one.pp);
    c.mesh.set(Axis::dp, dp);
    c.micro_batch = one.micro_batch;
    c.schedule = one.schedule;
    c.chunks = c.schedule == "interleaved" ? 2 : 0;
    c.zero = 1;
    SCOPED_TRACE(fmt::format("{} {}", one.model, summary(c)));
    StepModel model(work);
    ASSERT_TRUE(model.schedule_problem(c).empty()) << model.schedule_problem(c);
    const std::vector<double> bytes = model.rank_bytes(c);
    const double counted = *std::max_element(bytes.begin(), bytes.end()),
                 walked = static_cast<double>(model.estimate(c).memory.total());
    EXPECT_GE(counted, 0.97 * walked);
    EXPECT_LE(counted, 1.07 * walked);
    EXPECT_LE(model.least_bytes(c), walked);
  }
}

// By which searches by memory leave plans out: what no rank holds less than, by what is counted, and by what
// others of the same passes were walked to hold. Where dp has one rank ZeRO 3 gathers nothing.
TEST(WalkedMemory, NoRankHoldsLessThanItsBounds) {
  struct Case {
    const char* model;
    int dp, pp;
    std::int64_t micro_batch;
    int zero;
    Recompute recompute;
  };
  for (const Case& one : {Case{"llama-3-8b", 4, 2, 4, 0, Recompute::full},
                          {"deepseek-v2-lite", 1, 8, 1, 3, Recompute::selective},
                          {"deepseek-v2-lite", 2, 4, 4, 0, Recompute::selective},
                          {"qwen3-30b-a3b", 1, 8, 4, 3, Recompute::full},
                          {"gemma-3-1b", 8, 2, 4, 1, Recompute::none},
                          {"nemotron-h-8b", 2, 4, 2, 1, Recompute::full},
                          {"lfm2-1.2b", 4, 2, 2, 1, Recompute::none}}) {
    if (!checks::is_taken(3)) continue;
    const std::int64_t microbatches = 2 * one.pp;  // of more no rank holds more
    Workload work = of_this_trainer(one.model, 4096, microbatches * one.dp * one.micro_batch);
    Plan c = work.plan;
    c.mesh.set(Axis::tp, one.pp == 2 ? 1 : 2);
    c.mesh.set(Axis::pp, one.pp);
    c.mesh.set(Axis::dp, one.dp);
    c.micro_batch = one.micro_batch;
    c.balance_layers = false;
    c.zero = one.zero;
    c.recompute = one.recompute;
    StepModel model(work);
    bool is_known = false;
    for (const auto& [schedule, chunks] : {std::pair{"1f1b", 0},
                                           {"interleaved", 2},
                                           {"interleaved", 4},
                                           {"interleaved", 3},
                                           {"zb-h1", 0},
                                           {"v-half", 0},
                                           {"dualpipev", 0}}) {
      if (one.zero == 3 && !checks::is_taken(4)) continue;  // many gathers of experts are walked
      c.schedule = schedule;
      c.chunks = chunks;
      SCOPED_TRACE(fmt::format("{} {}", one.model, summary(c)));
      if (!model.schedule_problem(c).empty()) continue;
      const double least = model.least_bytes(c), as_walked = model.least_as_walked(c);
      is_known |= as_walked > 0;
      const auto walked = static_cast<double>(model.estimate(c).memory.total());
      EXPECT_LE(least, walked);
      EXPECT_LE(as_walked, walked);
      EXPECT_GE(least, (c.schedule == "dualpipev" ? 0.5 : 0.85) * walked);
    }
    // Where each rank has as many layers in as many chunks as in one.
    EXPECT_TRUE(is_known || one.model != std::string("llama-3-8b"));
  }
}

// What a search asks for again is remembered, whichever ranks it asked for before.
TEST(WalkedMemory, WalksTheSameHoweverItIsAsked) {
  Workload work = of_this_trainer("llama-tiny", 128, 64);
  Plan c = work.plan;
  c.mesh.set(Axis::pp, 2);
  c.schedule = "zb-h1";
  c.balance_layers = false;
  StepModel model(work);
  const Estimate whole = StepModel(work).estimate(c);
  Estimate first = model.estimate_seconds(c);
  model.add_memory(first, 1);  // more than any rank may hold
  EXPECT_EQ(first.memory, first.rank_memory[static_cast<std::size_t>(first.memory_rank)]);
  EXPECT_EQ(model.estimate(c).rank_memory, whole.rank_memory);
  Plan other = c;
  other.recompute = PipelineRecompute({Recompute::full, Recompute::none});
  const Estimate of_other = model.estimate(other);
  EXPECT_EQ(of_other.rank_memory, StepModel(work).estimate(other).rank_memory);
  EXPECT_EQ(of_other.rank_memory[1], whole.rank_memory[1]);
  EXPECT_NE(of_other.rank_memory[0], whole.rank_memory[0]);
  // A limit that one rank alone is above leaves the other as it is counted.
  const std::vector<double> counted = model.rank_bytes(c);
  const auto most = static_cast<double>(whole.memory.total());
  const auto at = static_cast<std::size_t>(whole.memory_rank);
  const std::vector<double> room = model.room(c, most - 1);
  EXPECT_DOUBLE_EQ(room[at], counted[at] - 1);
  EXPECT_DOUBLE_EQ(room[1 - at], counted[1 - at]);
}

}  // namespace
}  // namespace echelon

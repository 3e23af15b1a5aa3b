#include "plan/step_model.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <set>

#include "plan/expert_reach.h"
#include "plan/explain.h"
#include "plan/interval.h"
#include "plan/memory.h"
#include "plan/op_seconds.h"
#include "plan/stages.h"
#include "priced_plans.h"
#include "schedule/schedules.h"
#include "train/dry_run.h"

namespace echelon::step_model_test {
namespace {

using checks::plans_like;
using checks::workload;

// What prunes must not be wrong: the bound is below the simulated step, and the memory is the same.
TEST(StepModel, OutlookBoundsTheEstimate) {  // long
  for (const char* name : {"llama-3-70b", "deepseek-v3", "gpt2-1.5b"}) {
    Workload work = workload(name, 1024);
    work.plan.seq_len = 1024;
    StepModel model(work);
    int looked_at = 0;
    double tightest = 0;
    for (Plan c : plans_like(work.plan)) {
      if (work.plan.model.experts != Experts::none) c.mesh.ep = 8, c.mesh.etp = 1;
      if (!shape_problem(work, c).empty() || !model.schedule_problem(c).empty()) continue;
      const Outlook look = model.outlook(c);
      const Estimate e = model.estimate(c);
      EXPECT_LE(look.seconds, e.seconds * (1 + 1e-9)) << name << " " << summary(c);
      const double scheduled = model.least_scheduled_seconds(c);
      EXPECT_LE(model.least_seconds(c), scheduled * (1 + 1e-9)) << name << " " << summary(c);
      EXPECT_LE(scheduled, look.seconds * (1 + 1e-9)) << name << " " << summary(c);
      EXPECT_DOUBLE_EQ(look.bytes, static_cast<double>(e.memory.total())) << summary(c);
      tightest = std::max(tightest, look.seconds / e.seconds);
      ++looked_at;
    }
    EXPECT_GT(looked_at, 80) << name;
    EXPECT_GT(tightest, 0.99) << name;  // and it is a bound that prunes
  }
}

// A pipeline of one stage a rank takes at least half of the bubble that equal stages have, however its layers
// are split: nearly all of it where there is one microbatch. Recomputation adds to all bounds, and of ranks
// that recompute differently the one with least counts.
TEST(StepModel, BoundsOfSchedulesKnowTheirBubbles) {
  Workload work = workload("llama-3-70b", 16);
  StepModel model(work);
  for (const int microbatches : {1, 4, 16}) {
    Plan c = work.plan;
    c.mesh.set(Axis::pp, 8);
    c.schedule = "1f1b";
    c.micro_batch = c.global_batch / microbatches;
    SCOPED_TRACE(summary(c));
    const double even = model.least_seconds(c), scheduled = model.least_scheduled_seconds(c);
    EXPECT_GT(scheduled, even * (1 + 0.5 * 7 / microbatches * 0.9));
    c.recompute = Recompute::full;
    const double all = model.least_scheduled_seconds(c);
    EXPECT_GT(all, scheduled);
    EXPECT_GT(model.least_seconds(c), even);
    c.recompute = parse_pipeline_recompute("full/none*7", "recompute");
    EXPECT_EQ(model.least_scheduled_seconds(c), scheduled);
    EXPECT_LE(model.least_seconds(c), model.outlook(c).seconds);
    c.recompute = Recompute::none;
    c.schedule = "zb-v";  // has no bubble that all splits have
    EXPECT_EQ(model.least_scheduled_seconds(c), even);
  }
}

// Where a search needs no more than that a plan holds too much or takes too long, no plan changes sides.
TEST(StepModel, OutlooksThatStopEarlySayTheSameOfTheirBounds) {
  Workload work = workload("deepseek-v3", 1024);
  work.plan.seq_len = 1024;
  StepModel model(work);
  int larger = 0, slower = 0, exact = 0;
  for (Plan c : plans_like(work.plan)) {
    c.mesh.ep = 8, c.mesh.etp = 1;
    if (!shape_problem(work, c).empty() || !model.schedule_problem(c).empty()) continue;
    const Outlook look = model.outlook(c);
    for (const double bytes : {0.5 * look.bytes, look.bytes})
      for (const double seconds : {0.5 * look.seconds, 0.999 * look.seconds, look.seconds}) {
        const Outlook some = model.outlook(c, bytes, {bytes, seconds});
        EXPECT_LE(some.bytes, look.bytes) << summary(c);
        EXPECT_EQ(some.bytes > bytes, look.bytes > bytes) << summary(c);
        if (some.bytes > bytes) {
          ++larger;
          continue;
        }
        EXPECT_EQ(some.bytes, look.bytes) << summary(c);
        EXPECT_LE(some.seconds, look.seconds * (1 + 1e-12)) << summary(c);
        EXPECT_EQ(some.seconds > seconds, look.seconds > seconds) << summary(c);
        slower += some.seconds > seconds;
        if (some.seconds > seconds) continue;
        EXPECT_EQ(some.seconds, look.seconds) << summary(c);
        ++exact;
      }
  }
  EXPECT_GT(larger, 80);
  EXPECT_GT(slower, 80);
  EXPECT_GT(exact, 80);
}

TEST(StepModel, PartsAddUpToTheStep) {
  StepModel model(workload("llama-3-70b", 512));
  for (const Plan& c : plans_like(model.workload().plan)) {
    if (!model.schedule_problem(c).empty()) continue;
    const Estimate e = model.estimate(c);
    const StepParts& p = e.parts;
    EXPECT_NEAR(p.compute + p.tp_exposed + p.pp_bubble + p.dp_exposed + p.cp_exposed + p.ep_exposed +
                    p.optimizer + p.other,
                e.seconds, 1e-9 * e.seconds)
        << summary(c);
    EXPECT_LE(e.low, e.seconds);
    EXPECT_GE(e.high, e.seconds);
    EXPECT_LT(e.mfu, 1) << summary(c);
  }
}

// Facts come from a short schedule: they are those of the long one.
TEST(ScheduleShelf, ShortSchedulesShowWhatLongOnesHave) {
  ScheduleShelf shelf;
  for (const std::string& name :
       std::vector<std::string>{"1f1b", "interleaved", "interleaved-even", "gpipe", "naive", "zb-h1", "zb-h2",
                                "zb-v", "v-half", "v-min", "dualpipe", "dualpipev"})
    for (int ranks : {2, 3, 4, 8})
      for (int microbatches : {1, 2, 5, 8, 16, 31, 40, 64, 101, 200}) {
        const int chunks = name.starts_with("interleaved") ? 3 : 0;
        const ScheduleFacts& facts = shelf.facts(name, ranks, microbatches, chunks);
        if (!facts.problem.empty()) {
          EXPECT_ANY_THROW(make_schedule(name, ranks, microbatches, chunks))
              << name << " " << ranks << " " << microbatches;
          continue;
        }
        const ScheduleFacts whole = facts_of(make_schedule(name, ranks, microbatches, chunks));
        EXPECT_EQ(facts.peak, whole.peak) << name << " " << ranks << " " << microbatches;
        for (std::size_t r = 0; r < whole.held.size(); ++r)
          EXPECT_EQ(std::set(facts.held[r].begin(), facts.held[r].end()),
                    std::set(whole.held[r].begin(), whole.held[r].end()));
        EXPECT_EQ(facts.num_stages, whole.num_stages);
        EXPECT_EQ(facts.overlaps, whole.overlaps);
        for (std::size_t r = 0; r < whole.uses.size(); ++r)
          for (std::size_t i = 0; i < whole.uses[r].size(); ++i) {
            EXPECT_EQ(facts.uses[r][i].stage, whole.uses[r][i].stage);
            EXPECT_NEAR(facts.uses[r][i].share, whole.uses[r][i].share, 1e-12);
          }
      }
}

// The textbook's reasons, as numbers.
// Tensor cores make products of f32 in TF32 alone, which most programs do not ask for.
TEST(StepModel, ProductsOfF32AreInTf32WhereAProgramHasThemSo) {
  const Machine h100 = load_machine("h100");
  Machine without = h100;
  without.peak_tf32 = 0;
  for (const char* name : {"echelon", "torchtitan", "nanotron", "fsdp"})
    EXPECT_EQ(product_peak(h100, load_software(name), Precision::f32), 66.9e12) << name;
  const Software current = load_software("current");
  EXPECT_EQ(product_peak(h100, current, Precision::f32), 494.7e12);
  EXPECT_EQ(product_peak(without, current, Precision::f32), 66.9e12);
  EXPECT_EQ(product_peak(h100, current, Precision::bf16), 989.4e12);
  const OpSeconds plain(h100, load_software("echelon"), Precision::f32), tf32(h100, current, Precision::f32);
  EXPECT_GT(plain.product(8192, 8192, 8192, 1), 5 * tf32.product(8192, 8192, 8192, 1));
}

TEST(StepModel, TensorParallelismBelongsInsideANode) {
  StepModel model(workload("llama-3-70b", 512));
  Plan inside = model.workload().plan, across = inside;
  inside.mesh.set(Axis::tp, 8), inside.mesh.set(Axis::pp, 8), inside.schedule = "1f1b";
  across.mesh.set(Axis::tp, 16), across.mesh.set(Axis::pp, 4), across.schedule = "1f1b";
  EXPECT_GT(model.estimate(across).parts.tp_exposed, 2 * model.estimate(inside).parts.tp_exposed);
}

TEST(StepModel, SequenceParallelismCutsActivations) {
  StepModel model(workload("llama-3-8b", 64));
  Plan c = model.workload().plan;
  c.mesh.set(Axis::tp, 8);
  const Estimate with = model.estimate(c);
  c.sequence_parallel = false;
  const Estimate without = model.estimate(c);
  EXPECT_LT(with.memory[MemoryCategory::activations], without.memory[MemoryCategory::activations]);
  EXPECT_GT(without.parts.compute, with.parts.compute);  // norms of all tokens on every rank
}

TEST(StepModel, ContextGrowsWithItsRanksAtTheSameMemory) {
  for (int cp : {2, 4, 8}) {
    Workload work = workload("llama-3-8b", 1);
    work.plan.seq_len = 8192 * cp;
    work.plan.model.max_seq = 1 << 20;
    StepModel model(work);
    Plan c = work.plan;
    c.mesh.set(Axis::cp, cp);
    Workload alone = work;
    alone.plan.seq_len = 8192;
    StepModel one(alone);
    EXPECT_EQ(model.estimate(c).memory[MemoryCategory::activations],
              one.estimate(alone.plan).memory[MemoryCategory::activations]);
  }
}

// What many narrow experts take longer than their products, wide ones take too, and no more.
TEST(StepModel, WideExpertsAreNotAsSlowAsNarrowOnes) {
  Workload work = workload("mixtral-8x7b", 64);
  work.plan.mesh.ep = 8;
  work.plan.mesh.set(Axis::dp, 8);
  const auto seconds = [&](double efficiency, double width) {
    work.software.expert_efficiency = efficiency, work.software.expert_width = width;
    return StepModel(work).estimate(work.plan).parts.compute;
  };
  const double whole = seconds(1, 0), half = seconds(0.5, 0), seen = seconds(0.5, 14336 / 4.0);
  EXPECT_NEAR(seen - whole, (half - whole) / 4, 1e-9 * whole);
  EXPECT_EQ(seconds(0.5, 14336), half);
  EXPECT_EQ(seconds(0.5, 1e5), half);
}

// GPT-2's vocabulary is odd: a program that does not pad it pays in the output layer alone.
TEST(StepModel, AVocabularyThatIsNotPaddedSlowsTheOutputLayer) {
  Workload work = workload("gpt2-1.5b", 8, "a100-80");
  work.plan.seq_len = 1024;
  const auto seconds = [&](bool pads, double rate) {
    work.software.pads_vocabulary = pads;
    work.machine.gemm_unaligned = rate;
    Plan c = work.plan;
    c.micro_batch = 1;
    return StepModel(work).estimate(c).seconds;
  };
  EXPECT_EQ(seconds(true, 1), seconds(true, 0.25));
  EXPECT_NEAR(seconds(false, 1) / seconds(true, 1), 1, 1e-3);
  // 50257 of 48 x 12 x 1600 columns take four times as long, and products a quarter of the step at least.
  EXPECT_GT(seconds(false, 0.25), seconds(true, 1) * (1 + 3 * 50257 / (48 * 12 * 1600 + 50257.0) / 4));
}

double step_seconds(const Workload& work, const Plan& c) { return StepModel(work).estimate(c).seconds; }

// A layer takes no less than the host: for each of its collectives the same, and as much again for each rank.
TEST(StepModel, CallsOfCollectivesHoldUpSmallLayers) {
  Workload work = workload("gpt2-124m", 8);
  work.plan.seq_len = 128;
  Plan c = work.plan;
  c.mesh.set(Axis::tp, 4);
  c.micro_batch = 8;
  const double without = step_seconds(work, c);
  work.software.collective_rank_seconds = 1e-3;
  const double with = step_seconds(work, c);
  // Ten collectives of a layer, forwards and backwards, two of the embedding and three of the output layer;
  // what the device takes is behind it.
  const double host = (12 * 10 + 5) * 4 * 1e-3;
  EXPECT_GT(with, host);
  EXPECT_LT(with, host + without);
}

// The loss alone on the last stage, with logits handed over: the output matrix stays on the stage before.
TEST(StepModel, TheLossMayBeAStageOfItsOwn) {
  Workload work = workload("llama-3-8b", 64);
  Plan c = work.plan;
  c.mesh.set(Axis::pp, 4);
  c.layers_per_stage = {11, 11, 10, 0};
  const Estimate whole = StepModel(work).estimate(c);
  work.software.loss_apart = true;
  const Estimate apart = StepModel(work).estimate(c);
  const auto total = [](const StageTimes& t) { return t.forward + t.backward_input + t.backward_weight; };
  EXPECT_GT(total(apart.costs.stages[2]), total(whole.costs.stages[2]));
  EXPECT_LT(total(apart.costs.stages[3]), total(whole.costs.stages[3]));
  EXPECT_DOUBLE_EQ(total(apart.costs.stages[1]), total(whole.costs.stages[1]));
}

TEST(StepModel, MessagesInPartsAreFaster) {
  Workload work = workload("llama-3-8b", 64);
  Plan c = work.plan;
  c.mesh.set(Axis::tp, 8);
  c.mesh.set(Axis::pp, 4);
  c.sequence_parallel = false;
  work.software.scatters_messages = false;
  const double message = StepModel(work).estimate(c).costs.message;
  work.software.scatters_messages = true;
  EXPECT_LT(StepModel(work).estimate(c).costs.message, message / 3);
  c.sequence_parallel = true;  // they are parts already
  const double parts = StepModel(work).estimate(c).costs.message;
  work.software.scatters_messages = false;
  EXPECT_EQ(StepModel(work).estimate(c).costs.message, parts);
}

// All choices that the router may make of 8 experts in 4 groups, counted.
TEST(StepModel, ReachedPartsAreThoseOfEvenChoices) {
  ModelSpec m;
  m.num_experts = 8;
  for (const auto& [k, groups, most] : {std::array{2, 1, 1}, {3, 1, 1}, {2, 4, 2}, {3, 4, 2}, {2, 4, 1}}) {
    m.experts_per_token = k;
    m.router.groups = groups;
    m.router.most_groups = most;
    for (int parts : {1, 2, 4, 8}) {
      // Open groups first, of which the experts are, each choice as likely as any other.
      double reached = 0, choices = 0;
      for (unsigned open = 0; open < 1u << groups; ++open) {
        if (std::popcount(open) != most) continue;
        for (unsigned chosen = 0; chosen < 256; ++chosen) {
          bool legal = std::popcount(chosen) == k;
          std::set<int> its_parts;
          for (int e = 0; e < 8; ++e)
            if ((chosen >> e & 1) != 0) {
              legal &= (open >> (e * groups / 8) & 1) != 0;
              its_parts.insert(e * parts / 8);
            }
          if (!legal) continue;
          reached += static_cast<double>(its_parts.size());
          choices += 1;
        }
      }
      EXPECT_NEAR(reached_parts(m, parts), reached / choices, 1e-12)
          << k << " of " << groups << " groups, " << parts << " parts";
    }
  }
}

// 128 experts on 16 ranks of two nodes, 8 for each token: a copy for each takes its way over the network
// eight times as often as a token does that crosses it once.
TEST(StepModel, TokensThatAreSentOnceAreSentLess) {
  Workload work = workload("qwen3-30b-a3b", 256);
  Plan c = work.plan;
  c.mesh.set(Axis::dp, 16);
  c.mesh.ep = 16;
  c.mesh.etp = 1;
  c.zero = 1;
  const auto seconds = [&](bool once, bool pairs) {
    work.software.sends_tokens_once = once;
    work.software.overlaps_experts = pairs;
    return StepModel(work).estimate(c);
  };
  const Estimate copies = seconds(false, false), once = seconds(true, false);
  EXPECT_LT(once.traffic.ep, 0.91 * copies.traffic.ep);  // with what nodes hand on
  EXPECT_LT(once.parts.ep_exposed, 0.35 * copies.parts.ep_exposed);
  EXPECT_LT(once.seconds, copies.seconds);
  // In pairs all-to-alls hide behind what others compute, but the host takes longer.
  work.software.expert_pair_seconds = work.software.expert_launch_seconds;
  EXPECT_LT(seconds(false, true).parts.ep_exposed, 0.2 * copies.parts.ep_exposed);
  work.software.expert_pair_seconds = 0.02;
  const double layers = static_cast<double>(c.model.num_layers), microbatches = 256.0 / 16;
  EXPECT_GT(seconds(false, true).seconds, 3 * 0.02 * layers * microbatches);
}

// Fused kernels write the weights of no head, only C B of each group: with heads half as wide, and twice as
// many, little of a scan changes for them.
TEST(StepModel, ScansOfOtherProgramsWriteNoWeightsOfHeads) {
  Workload work = workload("bamba-9b", 8);
  const double before = StepModel(work).estimate(work.plan).seconds;
  work.plan.model.state_space.heads *= 2;
  work.plan.model.state_space.head_dim /= 2;
  EXPECT_LT(StepModel(work).estimate(work.plan).seconds, 1.05 * before);
}

TEST(StepModel, IntervalsAreWiderFarFromWhatWasMeasured) {
  Workload work = workload("llama-3-8b", 64);
  Software& s = work.software;
  s.low = 0.9, s.high = 1.1;
  s.nodes_low = 0.8, s.nodes_high = 1.2;
  s.experts_low = 0.7, s.experts_high = 1.3;
  s.far_low = 0.5, s.far_high = 2;
  s.measured_on = {"h100 bf16"};
  s.measured_gpus = {8, 16};
  s.measured_parameters = {8'000'000'000, 50'000'000'000};
  s.measured_seq_len = {4096, 4096};
  const auto expect = [](const Workload& of, int gpus, double low, double high, const std::string& why) {
    Plan c = of.plan;
    c.mesh.set(Axis::dp, gpus);
    const Estimate e = StepModel(of).estimate(c);
    EXPECT_NEAR(e.low / e.seconds, low, 1e-12) << why;
    EXPECT_NEAR(e.high / e.seconds, high, 1e-12) << why;
    EXPECT_NE(interval_of(of, c, num_parameters(c.model)).why.find(why), std::string::npos)
        << interval_of(of, c, num_parameters(c.model)).why;
  };
  Workload mixture = work;
  mixture.plan.model = load_model("mixtral-8x7b");
  expect(work, 8, 0.9, 1.1, "dense models on one node");
  expect(work, 16, 0.8, 1.2, "several nodes");
  expect(mixture, 8, 0.7, 1.3, "mixtures");
  Workload hybrid = work;
  hybrid.plan.model = load_model("bamba-9b");
  expect(hybrid, 8, 0.5, 2, "of layers with a state space");
  hybrid.plan.model = load_model("qwen3-next-80b-a3b");  // whose experts alone would be a measured mixture's
  expect(hybrid, 8, 0.5, 2, "of layers of the gated delta rule");
  hybrid.plan.model = load_model("bamba-9b");
  hybrid.software.far_low = 0.9, hybrid.software.far_high = 1.1;  // whatever that was found on
  expect(hybrid, 8, 1 / unknown_scan_high, unknown_scan_high, "of layers with a state space");
  // Twice as much is near, more is far.
  expect(work, 32, 0.8, 1.2, "several nodes");
  expect(work, 64, 0.5, 2, "on about 64 GPUs");
  Workload other = work;
  other.plan.model = load_model("llama-3.2-3b");
  expect(other, 8, 0.5, 2, "3.2 billion parameters");
  other = work;
  other.plan.seq_len = 16384;
  other.plan.model.max_seq = 16384;
  expect(other, 8, 0.5, 2, "sequences of about 16384 tokens");
  other = work;
  other.precision = Precision::fp8;
  expect(other, 8, 0.5, 2, "on h100 in fp8");
  mixture.software.experts_low = mixture.software.experts_high = 0;
  expect(mixture, 8, 0.5, 2, "of mixtures of experts");
  mixture.software.far_low = 0.9, mixture.software.far_high = 1.1;
  expect(mixture, 8, 1 / unknown_expert_high, unknown_expert_high, "of mixtures of experts");
  // A file that does not say what is far is as it was; one without any rows has the widest.
  other.software.far_low = other.software.far_high = 0;
  expect(other, 8, 0.9, 1.1, "one node");
  other.software.low = other.software.high = 0;
  expect(other, 8, 1 / unknown_high, unknown_high, "no run of it was measured");
  mixture.software.far_low = mixture.software.far_high = 0;
  mixture.software.low = mixture.software.high = 0;
  expect(mixture, 8, 1 / unknown_expert_high, unknown_expert_high, "no run of it was measured");
}

// Of twice the experts on twice the ranks each rank has as many to compute: the router alone has more, in the
// same time whatever experts multiply in. So has the gate of a shared expert.
TEST(StepModel, RoutersAndGatesMultiplyIn16Bits) {
  const auto compute = [](Precision precision, int spread, bool gate) {
    Workload work = checks::workload_of(load_model("qwen1.5-moe-a2.7b"), 4096, 256, precision,
                                        load_machine("h100"), load_software("current"));
    Plan c = work.plan;
    c.model.num_experts = 60 * spread;
    c.model.shared_gate = gate;
    c.mesh.set(Axis::dp, 120);
    c.mesh.ep = 4 * spread;
    c.micro_batch = 1;
    const OpSeconds ops(work.machine, work.software, precision),
        wide(work.machine, work.software, wide_precision(precision));
    return model_seconds(work, c, Recompute::none, ops, wide, ModelPrograms(c.model))
        .layer.front()
        .forward.compute;
  };
  const auto router = [&](Precision p) { return compute(p, 8, true) - compute(p, 1, true); };
  const auto gate = [&](Precision p) { return compute(p, 1, true) - compute(p, 1, false); };
  EXPECT_GT(router(Precision::bf16), 0);
  EXPECT_NEAR(router(Precision::fp8), router(Precision::bf16), 1e-12);
  EXPECT_GT(gate(Precision::bf16), 0);
  EXPECT_NEAR(gate(Precision::fp8), gate(Precision::bf16), 1e-12);
}

// Under ZeRO 2 and 3 a program either holds whole gradients until the last microbatch, and sums them once a
// step, or sums behind each microbatch and holds shards: memory, traffic and time say the same of it.
TEST(StepModel, ShardsOfGradientsArePaidForInEveryMicrobatch) {
  for (const std::string& name : software_preset_names())
    for (int pp : {1, 2})
      for (int zero : {2, 3}) {
        Workload work = checks::workload_of(load_model("gpt2-1.5b"), 512, 32 * pp, Precision::bf16,
                                            load_machine("a100-80"), load_software(name), exact_memory());
        work.software.overlaps_gradients = work.software.overlaps_parameters = false;
        const bool walked = work.software.is_this_trainer;
        if (walked) work.plan.model = load_model("llama-tiny"), work.plan.seq_len = 64;
        if (walked) work.precision = Precision::f32;
        Plan c = work.plan;
        c.mesh.set(Axis::dp, 4);
        c.mesh.set(Axis::pp, pp);
        c.schedule = "1f1b";
        c.balance_layers = false;
        StepModel model(work);
        c.zero = 1;
        const Estimate whole = model.estimate(c);
        c.zero = zero;
        const Estimate cut = model.estimate(c);
        SCOPED_TRACE(name + " " + summary(c));
        const auto microbatches = static_cast<double>(cut.microbatches);
        ASSERT_GT(microbatches, 4);
        const auto gradients = [](const Estimate& e) {
          std::int64_t most = 0;
          for (const Memory& m : e.rank_memory) most = std::max(most, m[MemoryCategory::gradients]);
          return static_cast<double>(most);
        };
        // What ZeRO 3 gathers counts apart: once, without the gradients' sums.
        work.software.reduces_each_microbatch = false;
        const Estimate once = StepModel(work).estimate(c);
        const double width = parameter_bytes(work).reduced / parameter_bytes(work).gradient;
        const double sum = 0.75 * gradients(whole) * width;  // three quarters of them go to other ranks
        const double more = cut.traffic.dp - once.traffic.dp;
        if (gradients(cut) < 0.5 * gradients(whole)) {
          EXPECT_NEAR(more, (microbatches - 1) * sum, 1e-3 * more);
          EXPECT_GT(cut.seconds, once.seconds);
          EXPECT_NEAR(gradients(cut), gradients(whole) / 4, 1e-6 * gradients(whole));
        } else {
          EXPECT_EQ(more, 0);
          EXPECT_EQ(cut.seconds, once.seconds);
          if (!walked) {  // what this trainer holds is its own account
            EXPECT_EQ(gradients(cut), gradients(whole));
          }
          if (zero == 2) {
            EXPECT_DOUBLE_EQ(cut.seconds, whole.seconds);
            EXPECT_DOUBLE_EQ(cut.traffic.dp, whole.traffic.dp);
          }
        }
        // One microbatch: nothing to wait for, so the shards come at the price of one sum.
        c.global_batch = 4;
        const Estimate one = StepModel(work).estimate(c);
        if (!walked) {
          EXPECT_NEAR(gradients(one), gradients(whole) / 4, 1e-6 * gradients(whole));
        }
      }
}

// Interleaved pipelines may sum the gradients of a stage behind each group of microbatches: so many sums, and
// whole gradients of one stage at a time.
TEST(StepModel, GradientsMayBeSummedBehindEachGroup) {
  const auto priced = [](std::int64_t microbatches, bool each_microbatch, bool each_group) {
    Workload work = workload("gpt2-1.5b", 4 * microbatches);
    work.software.reduces_each_microbatch = each_microbatch;
    work.software.reduces_each_group = each_group;
    Plan c = work.plan;
    c.mesh.set(Axis::dp, 4);
    c.mesh.set(Axis::pp, 4);
    c.schedule = "interleaved";
    c.chunks = 3;
    c.zero = 2;
    c.balance_layers = false;
    StepModel model(work);
    const Estimate e = model.estimate(c);
    EXPECT_LE(model.outlook(c).seconds, e.seconds * (1 + 1e-9));
    return e;
  };
  // Of a rank in the middle, whose stages of four layers are alike.
  const auto gradients = [](const Estimate& e) {
    return static_cast<double>(e.rank_memory[1][MemoryCategory::gradients]);
  };
  const Estimate once = priced(16, false, false), groups = priced(16, false, true),
                 each = priced(16, true, true), one = priced(4, false, true), all = priced(4, false, false);
  EXPECT_NEAR(gradients(groups), gradients(once) * (1.0 / 3 + 1.0 / 4), 16);
  EXPECT_EQ(gradients(groups), gradients(one));
  EXPECT_NEAR(gradients(each), gradients(once) / 4, 16);
  const double sum = (each.traffic.dp - once.traffic.dp) / 15;
  EXPECT_NEAR(groups.traffic.dp - once.traffic.dp, 3 * sum, 1e-6 * sum);
  EXPECT_EQ(one.traffic.dp, all.traffic.dp);  // one group: one sum
  EXPECT_LT(one.memory.total(), all.memory.total());
  EXPECT_LT(groups.seconds, each.seconds);
}

// A stage without layers is priced where it is asked for: the ends of a pipeline that have the embedding and
// the output layer alone.
TEST(StepModel, StagesMayHaveNoLayers) {
  Workload work = workload("llama-3-405b", 16);
  Plan c = work.plan;
  c.mesh.set(Axis::tp, 8);
  c.mesh.set(Axis::pp, 16);
  c.schedule = "interleaved";
  c.chunks = 8;
  StepModel model(work);
  EXPECT_NE(model.schedule_problem(c), "");
  c.layers_per_stage.assign(128, 1);
  c.layers_per_stage.front() = c.layers_per_stage.back() = 0;
  ASSERT_EQ(model.schedule_problem(c), "");
  const Estimate e = model.estimate(c);
  EXPECT_LE(model.outlook(c).seconds, e.seconds * (1 + 1e-9));
  // Seven layers and an end.
  EXPECT_LT(e.rank_memory[0].total(), e.rank_memory[1].total());
  EXPECT_LT(e.rank_memory[15][MemoryCategory::parameters], e.rank_memory[14][MemoryCategory::parameters]);
}

// Nothing is made again for nothing: what keeps less takes longer.
TEST(StepModel, WhatIsMadeAgainTakesItsTime) {
  const auto compute = [](StepModel& model, const Recompute& recompute) {
    Plan c = model.workload().plan;
    c.mesh.set(Axis::dp, 8);
    c.recompute = recompute;
    return model.estimate_seconds(c).parts.compute;
  };
  for (const char* name : {"llama-3-8b", "gpt3-175b", "deepseek-v3", "gemma-2-9b"}) {
    StepModel model(workload(name, 8));
    const double none = compute(model, Recompute::none);
    for (const Recompute& kind : model.recompute_kinds()) {
      if (kind == Recompute::none) continue;
      EXPECT_GT(compute(model, kind), none) << name << " " << recompute_name(kind);
    }
  }
  // Gate and up of 8B, of one sequence: between what they take at the peak and at half of it.
  StepModel model(workload("llama-3-8b", 8));
  const double flops = 32 * 4096 * 2.0 * 4096 * 2 * 14336,
               least = flops / model.workload().machine.peak(Precision::bf16);
  const double mlp = compute(model, Recompute({"mlp_in"})) - compute(model, Recompute::none);
  EXPECT_GT(mlp, least);
  EXPECT_LT(mlp, 2 * least);
}

// Collectives beside products are hidden for as long as those take: over nodes most of them are not.
TEST(StepModel, NoMoreIsHiddenThanProductsTake) {
  Workload work = workload("llama-3-8b", 64);
  work.software.tensor_overlap = 1;
  const auto exposed = [&](int tp) {
    Plan c = work.plan;
    c.mesh.set(Axis::tp, tp);
    const StepParts parts = StepModel(work).estimate_seconds(c).parts;
    return parts.tp_exposed / parts.compute;
  };
  EXPECT_LT(exposed(8), 0.03);  // what the embedding and the loss sum up
  EXPECT_GT(exposed(32), 0.5);
}

// Of each axis what the rank sends that sends most: in the middle of a pipeline twice what its ends send, and
// nothing where a V turns on one rank.
TEST(StepModel, PipelineTrafficIsThatOfTheBusiestRank) {
  Workload work = checks::workload_of(load_model("llama-tiny"), 64, 16, Precision::f32, load_machine("h100"),
                                      load_software("echelon"), exact_memory());
  work.plan.model.num_layers = 8;
  StepModel model(work);
  for (const std::string schedule :
       {"1f1b", "1f1b cut", "interleaved", "zb-h1", "zb-v", "zb-v cut", "v-half", "dualpipev"})
    for (int pp : {2, 4})
      for (bool sequence_parallel : {true, false}) {
        Plan c = work.plan;
        c.mesh.set(Axis::pp, pp);
        c.mesh.set(Axis::tp, 2);
        c.sequence_parallel = sequence_parallel;
        c.schedule = schedule.substr(0, schedule.find(' '));
        c.vocabulary_parallel = schedule.ends_with("cut");
        c.chunks = c.schedule == "interleaved" ? 2 : 1;
        c.balance_layers = false;
        SCOPED_TRACE(summary(c));
        ASSERT_EQ(model.schedule_problem(c), "");
        const Estimate e = model.estimate(c);
        const Plan plan = trained_plan(e, work);
        const PipelineLayout pipeline(plan);
        std::int64_t most = 0;
        for (int r = 0; r < pp; ++r)
          most = std::max(most, predict_traffic(plan, pipeline, {.pp = r}).at(Axis::pp, Verb::send).bytes);
        EXPECT_DOUBLE_EQ(e.traffic.pp, static_cast<double>(most));
      }
}

// The output layer of 8B is worth 2.4 layers, for which seven of eight ranks wait; cut over all of them it is
// an eighth of that on each. The step is what its schedule's own V and VW take.
TEST(StepModel, VocabularyParallelismSharesTheOutputLayer) {
  Workload work = checks::workload_of(load_model("llama-3-8b"), 2048, 32, Precision::bf16,
                                      load_machine("h100"), load_software("echelon"), exact_memory());
  StepModel model(work);
  for (const char* schedule : {"1f1b", "zb-h1", "zb-v", "interleaved"}) {
    Plan c = work.plan;
    c.mesh.set(Axis::pp, 8);
    c.schedule = schedule;
    c.chunks = c.schedule == "interleaved" ? 2 : 0;
    c.balance_layers = false;
    const Estimate whole = model.estimate_seconds(c);
    c.vocabulary_parallel = true;
    SCOPED_TRACE(summary(c));
    ASSERT_EQ(model.schedule_problem(c), "");
    EXPECT_LE(model.least_seconds(c), model.outlook(c).seconds);
    const double bound = model.outlook(c).seconds;
    const Estimate cut = model.estimate_seconds(c);
    EXPECT_LE(bound, cut.seconds * (1 + 1e-9));
    EXPECT_LT(cut.seconds, 0.85 * whole.seconds);
    const StepParts& p = cut.parts;
    EXPECT_NEAR(p.compute + p.tp_exposed + p.pp_bubble + p.dp_exposed + p.cp_exposed + p.ep_exposed +
                    p.optimizer + p.other,
                cut.seconds, 1e-9 * cut.seconds);
    int parts = 0;
    const Timeline timeline = model.timeline(c);
    for (const Span& span : timeline.ranks[3]) parts += is_of_head(span.instruction.op);
    EXPECT_EQ(parts, 2 * 32);
  }
  Plan c = work.plan;
  c.mesh.set(Axis::pp, 8);
  c.vocabulary_parallel = true;
  for (const char* schedule : {"dualpipe", "dualpipev"}) {
    c.schedule = schedule;
    EXPECT_NE(model.schedule_problem(c).find("with vocabulary parallelism"), std::string::npos);
  }
}

// Ranks that hold the same parameters exchange where they are: stages of 2 ranks on nodes of 4, of which
// DualPipe's middle pair crosses a border, and on nodes of 6, which hold a whole pipeline of three.
TEST(StepModel, PipelineRanksWithTheSameParametersMeetWhereTheyLie) {
  const auto seconds = [](std::int64_t node, int pp, const char* schedule, std::size_t rank, double outside) {
    Workload work = workload("gpt2-1.5b", 64);
    work.machine.tiers = {{node, 360e9, 0, 1, 0}, {8192, outside, 0, 1, 0}};
    work.plan.mesh.set(Axis::pp, pp);
    work.plan.mesh.set(Axis::dp, 2);
    work.plan.schedule = schedule;
    Stages stages(work, std::make_shared<ScheduleShelf>());
    return stages.in_pipeline(work.plan, stages.shape(work.plan), rank).seconds;
  };
  const auto leaves = [&](std::int64_t node, int pp, const char* schedule, std::size_t rank) {
    return seconds(node, pp, schedule, rank, 1e9) > 2 * seconds(node, pp, schedule, rank, 100e9);
  };
  for (const std::size_t rank : {0, 1, 2, 3}) EXPECT_TRUE(leaves(4, 4, "dualpipe", rank)) << rank;
  for (const std::size_t rank : {0, 1, 2, 3}) EXPECT_FALSE(leaves(8, 4, "dualpipe", rank)) << rank;
  EXPECT_TRUE(leaves(4, 3, "1f1b", 0));
  EXPECT_FALSE(leaves(6, 3, "1f1b", 0));
  EXPECT_EQ(seconds(6, 3, "1f1b", 1, 1e9), 0);
}

// Passes that run together hide the experts' exchanges, but not what they wait for the host, which launches
// both: a slower link never makes a step faster.
TEST(StepModel, PairsOfPassesWaitForTheHostOfBoth) {
  Workload work = checks::workload_of(load_model("qwen3-30b-a3b"), 2048, 64, Precision::fp8,
                                      load_machine("h100"), load_software("deepseek-v3"));
  Plan c = work.plan;
  c.mesh.set(Axis::dp, 2);
  c.mesh.set(Axis::tp, 4);
  c.mesh.set(Axis::pp, 6);
  c.mesh.ep = 8;
  c.mesh.etp = 1;
  c.micro_batch = 2;
  c.zero = 1;
  for (const char* schedule : {"dualpipe", "dualpipev"})
    for (const Recompute& recompute : {Recompute::none, Recompute::full}) {
      c.schedule = schedule;
      c.recompute = recompute;
      double last = 0;
      for (double slower : {1.0, 2.0, 4.0, 8.0}) {
        Workload one = work;
        one.machine.tiers[0].bandwidth /= slower;
        const double seconds = StepModel(one).estimate(c).seconds;
        EXPECT_GE(seconds, last) << schedule << ", 1/" << slower << " of the bandwidth";
        last = seconds;
      }
    }
}

Workload hybrid_workload() {
  Workload work = workload("nemotron-h-tiny", 16);
  work.plan.seq_len = 1024;
  return work;
}
Plan in_two_stages(const Workload& work) {
  Plan c = work.plan;
  c.mesh.set(Axis::pp, 2);
  c.micro_batch = 1;
  c.schedule = "1f1b";
  c.zero = 0;
  return c;
}

// Where kinds of layers lie mixed a stage has its own: parameters of each rank are those of its layers, and
// so is the rest.
TEST(StepModel, AStageOfAHybridHasItsOwnLayers) {
  const Workload work = hybrid_workload();
  const ModelSpec& m = work.plan.model;
  for (std::int64_t first : {2, 3, 7}) {
    Plan c = in_two_stages(work);
    c.layers_per_stage = {first, m.num_layers - first};
    c.balance_layers = false;
    StepModel model(work);
    const Estimate e = model.estimate(c);
    for (int rank = 0; rank < 2; ++rank) {
      std::int64_t held = 0;
      const auto add = [&](const std::vector<ParamSpec>& list) {
        for (const ParamSpec& p : list) held += p.numel();
      };
      for (std::int64_t layer = rank == 0 ? 0 : first; layer < (rank == 0 ? first : m.num_layers); ++layer)
        add(block_parameters(m, layer));
      add(rank == 0 ? embedding_parameters(m) : head_parameters(m));
      EXPECT_NEAR(
          static_cast<double>(e.rank_memory[static_cast<std::size_t>(rank)][MemoryCategory::parameters]),
          2.0 * static_cast<double>(held), 2)
          << first << " " << rank;
    }
    double counted = 0;
    for (const MemoryTerm& term : e.memory_terms) counted += term.total();
    EXPECT_NEAR(counted, static_cast<double>(e.memory.total()), 8) << first;
  }
}

// Of a V a rank takes what its two stages take together: no layer that moves makes the slowest rank faster.
TEST(StepModel, OfAVRanksAreEvened) {
  for (const char* name : {"llama-3-8b", "nemotron-h-tiny"})
    for (const char* schedule : {"zb-v", "v-half", "dualpipev", "dualpipe"}) {
      Workload work = workload(name, 64);
      Plan c = work.plan;
      c.mesh.set(Axis::pp, 4);
      c.micro_batch = 1;
      c.schedule = schedule;
      c.balance_layers = true;
      SCOPED_TRACE(fmt::format("{} {}", name, schedule));
      StepModel model(work);
      if (!model.schedule_problem(c).empty()) continue;
      const auto slowest = [&](const Plan& plan) {
        const std::vector<StageTimes> stages = model.estimate(plan).costs.stages;
        double most = 0;
        for (std::size_t s = 0; s < stages.size(); ++s) {
          double sum = 0;
          for (const StageTimes& t : {stages[s], stages[stages.size() - 1 - s]})
            sum += t.forward + t.backward_input + t.backward_weight;
          most = std::max(most, sum);
        }
        return most;
      };
      Plan moved = c;
      moved.layers_per_stage = model.estimate(c).layers;
      moved.balance_layers = false;
      const double found = slowest(moved);
      const std::size_t stages = moved.layers_per_stage.size();
      for (std::size_t from = 0; from < stages; ++from)
        for (std::size_t to = 0; to < stages; ++to) {
          if (from == to || moved.layers_per_stage[from] == 1) continue;
          --moved.layers_per_stage[from], ++moved.layers_per_stage[to];
          EXPECT_GE(slowest(moved), found * (1 - 1e-9)) << from << " to " << to;
          ++moved.layers_per_stage[from], --moved.layers_per_stage[to];
        }
    }
}

// No split has a faster slowest stage than the one that is chosen, and the bound stays below the step.
TEST(StepModel, AHybridIsSplitByWhatItsLayersTake) {
  Workload work = hybrid_workload();
  work.plan.model.layer_pattern = "MEMEEEM*-M";  // costs lie unevenly
  Plan c = in_two_stages(work);
  c.balance_layers = true;
  StepModel model(work);
  const auto slowest = [&](const Plan& plan) {
    double most = 0;
    for (const StageTimes& t : model.estimate(plan).costs.stages)
      most = std::max(most, t.forward + t.backward_input + t.backward_weight);
    return most;
  };
  const double balanced = slowest(c);
  EXPECT_LE(model.outlook(c).seconds, model.estimate(c).seconds * (1 + 1e-9));
  EXPECT_LE(model.least_seconds(c), model.estimate(c).seconds * (1 + 1e-9));
  c.balance_layers = false;
  double least = 1e300;
  for (std::int64_t first = 1; first < work.plan.model.num_layers; ++first) {
    c.layers_per_stage = {first, work.plan.model.num_layers - first};
    least = std::min(least, slowest(c));
  }
  EXPECT_NEAR(balanced, least, 1e-6 * least);
}

// A scan's bytes by hand, on a device that multiplies in no time: of each token 16-bit numbers of z, x, B, C
// and the outputs, and 32-bit ones of states and of C B, forwards 2 mixed + 4 width + 4 group and 4 states +
// 2 pairs, backwards 5, 14, 10 and 10, 6, with two gradients of a group in 32 bits.
TEST(StepModel, AScanMovesItsKernelsBytes) {
  Workload work = hybrid_workload();
  work.machine.peak_flops[static_cast<std::size_t>(Precision::bf16)] = 1e30;
  const Plan& c = work.plan;
  const auto seconds = [&](double efficiency) {
    work.software.scan_efficiency = efficiency;
    return StepModel(work).estimate(c).parts.compute;
  };
  const double width = 8 * 16, groups = 2, group = groups * 16, mixed = width + 2 * group,
               states = width * 16 / 32, pairs = groups * 32;
  const double bytes = 2 * (7 * mixed + 18 * width + 14 * group) + 4 * (14 * states + 8 * pairs + 2 * group);
  const double tokens = 16 * 1024, layers = 4;
  EXPECT_NEAR(
      seconds(0.001) - seconds(0.0005),
      -1000 * layers * tokens * bytes / (work.machine.memory_bandwidth * work.machine.memory_efficiency),
      1e-3 * seconds(0.001));
}

// The first rank has a layer less and ends last, as backward passes do: a quarter of its step is waiting for
// the others, while these hardly wait.
TEST(StepModel, SecondsAreOfTheRankThatWaitsLeast) {
  const Workload work = workload("llama-3-405b", 512);
  Plan c = work.plan;
  c.mesh.set(Axis::pp, 32);
  c.mesh.set(Axis::tp, 8);
  c.zero = 1;
  c.layers_per_stage.assign(32, 4);
  c.layers_per_stage.front() = c.layers_per_stage.back() = 3;
  const Estimate e = StepModel(work).estimate(c);
  EXPECT_NEAR(e.parts.total(), e.seconds, 1e-9 * e.seconds);
  EXPECT_LT(e.parts.pp_bubble / e.seconds, e.bubble_fraction);
  EXPECT_GT(e.parts.pp_bubble / e.seconds, 0.5 * 31 / (512 + 31));
}

}  // namespace
}  // namespace echelon::step_model_test

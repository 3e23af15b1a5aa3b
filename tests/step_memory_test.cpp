// What the ranks of a plan hold, as the planner says.
#include "plan/memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>

#include "plan/step_model.h"
#include "priced_plans.h"
#include "schedule/schedules.h"
#include "train/dry_run.h"

namespace echelon::step_memory_test {
namespace {

using checks::plans_like;
using checks::workload;

// For this repository's trainer a plan says what the trainer's own prediction says, to the byte, for every
// pipeline rank; that this is what a run holds, tests/prediction_test.cpp shows.
TEST(StepMemory, MemoryOfThisTrainerIsItsOwnAccount) {  // long
  Workload work = checks::workload_of(load_model("llama-tiny"), 64, 32, Precision::f32, load_machine("h100"),
                                      load_software("echelon"), exact_memory());
  StepModel model(work);
  int looked_at = 0;
  for (Plan c : plans_like(work.plan)) {
    c.mesh.set(Axis::dp, std::min(c.mesh.dp(), 4));
    c.mesh.set(Axis::tp, std::min(c.mesh.tp(), 2));
    if (!shape_problem(work, c).empty() || !model.schedule_problem(c).empty()) continue;
    const Estimate e = model.estimate(c);
    const Plan plan = trained_plan(e, work);
    const PipelineLayout pipeline(plan);
    Memory largest;
    for (int r = 0; r < c.mesh.pp(); ++r) {
      const Memory own = exact_memory()(plan, pipeline, {.pp = r}, work.machine.device());
      EXPECT_EQ(e.rank_memory[static_cast<std::size_t>(r)], own) << summary(c);
      if (own.total() > largest.total()) largest = own;
    }
    EXPECT_EQ(e.memory, largest) << summary(c);
    ++looked_at;
  }
  EXPECT_GT(looked_at, 30);
}

// What --explain prints of the memory is what it is the sum of.
TEST(StepMemory, MemoryIsTheSumOfItsCount) {
  int looked_at = 0;
  for (const char* name : {"llama-3-70b", "deepseek-v3"}) {
    Workload work = workload(name, 1024);
    work.plan.seq_len = 1024;
    StepModel model(work);
    for (Plan c : plans_like(work.plan)) {
      if (work.plan.model.experts != Experts::none) c.mesh.ep = 8, c.mesh.etp = 1;
      if (!shape_problem(work, c).empty() || !model.schedule_problem(c).empty()) continue;
      const Estimate e = model.estimate(c);
      std::array<double, all_memory_categories.size()> sums{};
      for (const MemoryTerm& term : e.memory_terms) {
        EXPECT_DOUBLE_EQ(term.total(), term.count * term.bytes / term.ranks);
        sums[static_cast<std::size_t>(term.category)] += term.total();
      }
      for (MemoryCategory category : all_memory_categories)  // each term to a byte
        EXPECT_NEAR(sums[static_cast<std::size_t>(category)], static_cast<double>(e.memory[category]), 6)
            << summary(c) << " " << memory_category_name(category);
      ++looked_at;
    }
  }
  EXPECT_GT(looked_at, 100);
}

// Llama 3 by hand, from its paper's sizes and nothing else: what a rank in the middle of a pipeline holds.
// Hidden h, MLP f, a heads of h/a, 8 of keys; bytes of a token and layer that Megatron-Core keeps.
TEST(StepMemory, LlamaCountedByHand) {
  struct Case {
    const char* model;
    double h, f, a, layers;
    int dp, tp, pp, chunks, zero;
    std::int64_t batch, seq_len;
    bool mlp_again;
  };
  for (const Case& k : {Case{"llama-3-70b", 8192, 28672, 64, 80, 16, 8, 4, 10, 1, 1024, 4096, false},
                        Case{"llama-3-70b", 8192, 28672, 64, 80, 32, 2, 1, 1, 3, 512, 8192, true},
                        Case{"llama-3-405b", 16384, 53248, 128, 126, 128, 8, 14, 3, 1, 3584, 8192, true}}) {
    Workload work = workload(k.model, k.batch);
    work.plan.seq_len = k.seq_len;
    Plan c = work.plan;
    c.mesh.set(Axis::dp, k.dp);
    c.mesh.set(Axis::tp, k.tp);
    c.mesh.set(Axis::pp, k.pp);
    c.schedule = k.chunks > 1 ? "interleaved" : "1f1b";
    c.chunks = k.chunks;
    c.zero = k.zero;
    c.balance_layers = false;
    if (k.mlp_again) c.recompute = parse_recompute("mlp", "recompute");
    const Estimate e = StepModel(work).estimate(c);
    const int rank = k.pp > 1 ? 1 : 0;
    const Memory& m = e.rank_memory[static_cast<std::size_t>(rank)];
    SCOPED_TRACE(summary(c));
    const double kv = 8 * k.h / k.a, here = k.layers / k.pp;
    // Matrices over tp, two norms of each layer whole; one rank alone has the ends too: vocabulary 128,256.
    double parameters = here * ((2 * k.h * k.h + 2 * k.h * kv + 3 * k.h * k.f) / k.tp + 2 * k.h);
    if (k.pp == 1) parameters += 2 * 128256 * k.h / k.tp + k.h;
    const double shards = k.dp;
    const auto bytes = [&](MemoryCategory category) { return static_cast<double>(m[category]); };
    const double close = 1e-6 * parameters;
    EXPECT_NEAR(bytes(MemoryCategory::parameters), 2 * parameters / (k.zero == 3 ? shards : 1), close);
    EXPECT_NEAR(bytes(MemoryCategory::gradients), 4 * parameters / (k.zero == 3 ? shards : 1), close);
    EXPECT_NEAR(bytes(MemoryCategory::optimizer), 12 * parameters / shards, close);
    // Two inputs of norms and two outputs; queries, keys, values; attention's output, and the log of its sums
    // in 4 bytes; of the MLP gate, up and their product.
    const double kept =
        (4 * 2 * k.h + 2 * (k.h + 2 * kv) + 2 * k.h + 4 * k.a + (k.mlp_again ? 0 : 3 * 2 * k.f)) / k.tp;
    // Narayanan et al. 2021: 2(p - r - 1) + (v - 1) p + 1 chunks.
    const double chunks = k.pp == 1 ? 1 : 2 * (k.pp - rank - 1) + (k.chunks - 1) * k.pp + 1;
    const double held = chunks * here / k.chunks * kept * static_cast<double>(k.seq_len);
    // And what comes and goes: two gradients of the residual stream, gate and up and their gradients, or the
    // output layer's logits.
    const double token = 2 * 2 * k.h + 2 * 2 * k.f / k.tp + (k.mlp_again ? 3 * 2 * k.f / k.tp : 0),
                 logits = k.pp == 1 ? 128256.0 / k.tp * work.software.logit_bytes + 2 * 2 * k.h : 0;
    const double working = std::max(token, logits) * static_cast<double>(k.seq_len);
    EXPECT_NEAR(bytes(MemoryCategory::activations), held + working, 1e-6 * held);
    EXPECT_LT(static_cast<double>(e.memory.total()), work.machine.memory_bytes - work.machine.reserved_bytes);
  }
}

// 70B on 64 H100 as dp 8, tp 2, pp 4, v-half: ZeRO 1 does not fit, and ZeRO 2 does not by magic.
TEST(StepMemory, ZeroTwoDoesNotMake70BFitForNothing) {
  Workload work = workload("llama-3-70b", 512);
  work.plan.seq_len = 8192;
  Plan c = work.plan;
  c.mesh.set(Axis::dp, 8);
  c.mesh.set(Axis::tp, 2);
  c.mesh.set(Axis::pp, 4);
  c.schedule = "v-half";
  c.zero = 1;
  const Estimate one = StepModel(work).estimate(c);
  c.zero = 2;
  const Estimate each = StepModel(work).estimate(c);
  EXPECT_GT(each.traffic.dp, 30 * one.traffic.dp);  // 64 microbatches, and one gather
  EXPECT_GT(each.seconds, one.seconds);
  work.software.reduces_each_microbatch = false;
  const Estimate once = StepModel(work).estimate(c);
  EXPECT_EQ(once.memory.total(), one.memory.total());
  EXPECT_EQ(once.seconds, one.seconds);
  EXPECT_EQ(once.traffic.dp, one.traffic.dp);
}

TEST(StepMemory, ZeroStatesAreThePapers) {
  Workload work = workload("llama-2-7b", 64, "a100-80");
  work.software.gradient_bytes = 2;
  StepModel model(work);
  const double parameters = static_cast<double>(num_parameters(work.plan.model));
  const auto states = [&](int zero) {
    Plan c = work.plan;
    c.mesh.set(Axis::dp, 64);
    c.zero = zero;
    const Memory m = model.estimate(c).memory;
    return static_cast<double>(m[MemoryCategory::parameters] + m[MemoryCategory::gradients] +
                               m[MemoryCategory::optimizer]);
  };
  EXPECT_NEAR(states(0) / parameters, 16, 1e-6);
  EXPECT_NEAR(states(1) / parameters, 4 + 12.0 / 64, 1e-6);
  EXPECT_NEAR(states(2) / parameters, 2 + 14.0 / 64, 1e-6);
  EXPECT_NEAR(states(3) / parameters, 16.0 / 64, 1e-6);
}

double kept_by_layer(const Workload& work, const Plan& c) {
  return saved_bytes(work, c, c.recompute.of(0)).layer.front() / static_cast<double>(c.seq_len);
}

// Of Qwen3-Next 80B by hand: z, what is convolved, decays and betas, and the output; behind the convolution
// values, a key and a query of 128 numbers for each of 32 heads, the heads' squares of chunks of 64, and what
// the norm is given; of attention its output times its gate. This trainer makes all but the first again, and
// keeps queries, keys and values before the norm of their heads too.
TEST(StepMemory, WhatTheDeltaRuleAndGatesKeep) {
  Workload work = workload("qwen3-next-80b-a3b", 8);
  work.plan.model.experts = Experts::none;
  work.plan.model.shared_gate = false;
  const auto kept = [&](bool is_this_trainer) {
    work.software.is_this_trainer = is_this_trainer;
    PerKind layer = saved_bytes(work, work.plan, Recompute::none).layer;
    for (double& bytes : layer) bytes /= static_cast<double>(work.plan.seq_len);
    return layer;
  };
  const PerKind others = kept(false), ours = kept(true);
  const double before_norm = 2.0 * (16 + 2 * 2) * 256;
  EXPECT_DOUBLE_EQ(others[0] - ours[0], 2.0 * 4096 - before_norm);
  EXPECT_DOUBLE_EQ(others[1] - ours[1], 2.0 * (4096 + 32 * (2 * 128 + 64) + 4096));
  const double layers = ours[1] - ours[0];  // whose MLPs are alike
  EXPECT_DOUBLE_EQ(layers, 2.0 * (4096 + 8192 + 2 * 32 + 4096) -
                               (2.0 * ((16 + 2 * 2) * 256 + 16 * 256 + 16 * 256) + 4 * 16) - before_norm);
}

// torchtitan's per-op checkpointing, of Llama 3 8B: what a layer begins with, the outputs of the queries',
// the values', the gate's and the last product, attention's output and its log-sum-exp of 32 heads.
TEST(StepMemory, EverySecondProductIsKept) {
  Workload work = workload("llama-3-8b", 8);
  work.software = load_software("torchtitan");
  Plan c = work.plan;
  c.recompute = Recompute::selective;
  EXPECT_DOUBLE_EQ(kept_by_layer(work, c), 2.0 * (4096 + 4096 + 1024 + 14336 + 4096 + 4096) + 4 * 32);
  const double selective = StepModel(work).estimate(c).seconds;
  // Made again are keys, attention's output matrix and the MLP's second: 95 of 218 million numbers of a
  // layer.
  c.recompute = Recompute::none;
  const double none = StepModel(work).estimate(c).seconds;
  c.recompute = Recompute::full;
  const double full = StepModel(work).estimate(c).seconds;
  EXPECT_GT(selective, none);
  EXPECT_LT(selective, none + 0.55 * (full - none));
  // Two of tp have half of it, but for what all tokens are whole in.
  c.recompute = Recompute::selective;
  c.mesh.set(Axis::tp, 2);
  EXPECT_DOUBLE_EQ(kept_by_layer(work, c),
                   2.0 * (4096 / 2 + 4096 / 2 + 1024 / 2 + 14336 / 2 + 4096 + 4096 / 2) + 4 * 16);
}

TEST(StepMemory, APipelineMayKeepWhatItGathered) {
  Workload work = workload("llama-3-8b", 64);
  work.software = load_software("torchtitan");
  Plan c = work.plan;
  c.mesh.set(Axis::dp, 4);
  c.mesh.set(Axis::pp, 2);
  c.zero = 3;
  const Estimate keeps = StepModel(work).estimate(c);
  work.software.pipelines_keep_gathered = false;
  const Estimate lets_go = StepModel(work).estimate(c);
  const auto communication = [](const Estimate& e) {
    return static_cast<double>(e.memory[MemoryCategory::communication]);
  };
  const double all = 2 * 8.03e9;  // of the parameters, in 16 bits
  EXPECT_GT(communication(keeps), all / 2);
  EXPECT_LT(communication(keeps), 1.2 * all / 2);
  EXPECT_LT(communication(lets_go), 0.2 * all);
  // A microbatch gathers each layer for its forward and for its backward pass: of 16, 32 gathers in place of
  // one.
  const double whole = communication(keeps) - 4 * 2.0 * 4096 * 4096;  // but for what stages hand on
  EXPECT_NEAR(lets_go.traffic.dp - keeps.traffic.dp, 31 * 0.75 * whole, 0.01 * 31 * 0.75 * whole);
  EXPECT_LT(keeps.seconds, lets_go.seconds);
  c.mesh.set(Axis::pp, 1);
  work.software.pipelines_keep_gathered = true;
  const Estimate alone = StepModel(work).estimate(c);
  EXPECT_LT(communication(alone), 0.2 * all);
}

// What products read in 8 bits is kept so: two norms' outputs and the activation's; of attention's output,
// which its own backward pass reads in 16, a copy is made.
TEST(StepMemory, OperandsAreKeptInTheirBits) {
  Workload work = workload("llama-3-8b", 8);
  work.precision = Precision::fp8;
  const Plan& c = work.plan;
  work.software.keeps_operands = true;
  const double wide = kept_by_layer(work, c);
  work.software.keeps_operands = false;
  EXPECT_DOUBLE_EQ(wide - kept_by_layer(work, c), 4096 + 4096 + 14336 - 4096);
  work.software.activation_input_bytes = 1;
  EXPECT_DOUBLE_EQ(wide - kept_by_layer(work, c), 4096 + 4096 + 14336 - 4096 + 2 * 14336);
  work.software = load_software("current");
  work.precision = Precision::bf16;
  const double bf16 = kept_by_layer(work, c);
  work.software.keeps_operands = true;
  EXPECT_EQ(kept_by_layer(work, c), bf16);
}

TEST(StepMemory, ExpertsOutputsAndLatentHeadsNeedNotBeKept) {
  Workload work = workload("deepseek-v3", 8);
  const Plan& c = work.plan;
  const auto kept = [&](const Recompute& recompute) {
    return saved_bytes(work, c, recompute).layer[1] / static_cast<double>(c.seq_len);
  };
  work.software.keeps_expert_outputs = true;
  const double all = kept(Recompute::none);
  work.software.keeps_expert_outputs = false;
  EXPECT_DOUBLE_EQ(all - kept(Recompute::none), 8 * 7168 * 2);
  // Queries, keys and values of 128 heads, from their compressed forms.
  EXPECT_DOUBLE_EQ(kept(Recompute::none) - kept(parse_recompute("mla_up_proj", "recompute")),
                   2 * 128 * (192 + 192 + 128));
}

// Stages of unequal size: the peak is that of the schedule walked with their layers.
TEST(StepMemory, UnequalStagesAreHeldAsTheScheduleHoldsThem) {
  for (const auto& [schedule, chunks] :
       {std::pair{"interleaved", 4}, {"interleaved", 2}, {"zb-v", 1}, {"1f1b", 1}, {"dualpipe", 1}}) {
    Workload work = workload("llama-3-405b", 64);
    Plan c = work.plan;
    c.mesh.set(Axis::pp, 8);
    c.micro_batch = 1;
    c.schedule = schedule;
    c.chunks = chunks;
    StepModel model(work);
    ASSERT_TRUE(model.schedule_problem(c).empty());
    const Estimate e = model.estimate(c);
    const Schedule walked = make_schedule(schedule, 8, 64, chunks > 1 ? chunks : 0);
    const double layer = saved_bytes(work, c, Recompute::none).layer.front();
    std::set<std::int64_t> sizes(e.layers.begin(), e.layers.end());
    EXPECT_GT(sizes.size(), 1u);
    for (std::size_t r = 0; r < 8; ++r) {
      std::int64_t held = 0, peak = 0;
      for (const Instruction& i : walked.ranks[r]) {
        const auto layers = [&](const Value& v) {
          return v.kind == ValueKind::saved ? e.layers[static_cast<std::size_t>(v.stage)] : 0;
        };
        each_write(walked, i, [&](const Value& v) { held += layers(v); });
        peak = std::max(peak, held);
        each_release(i, [&](const Value& v) { held -= layers(v); });
      }
      const double working = static_cast<double>(e.rank_memory[r][MemoryCategory::activations]) -
                             static_cast<double>(peak) * layer;
      EXPECT_GT(working, 0) << schedule << r;
      EXPECT_LT(working, 4 * layer) << schedule << r;  // of one layer, or of the output layer
    }
  }
}

}  // namespace
}  // namespace echelon::step_memory_test

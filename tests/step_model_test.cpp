#include "plan/step_model.h"

#include <gtest/gtest.h>

#include "plan/explain.h"
#include "plan/memory.h"
#include "plan/op_seconds.h"
#include "schedule/schedules.h"
#include "train/dry_run.h"
#include "workloads.h"

namespace echelon::step_model_test {
namespace {

Workload workload(const char* model, std::int64_t batch, const char* machine = "h100") {
  return checks::workload_of(load_model(model), 4096, batch, Precision::bf16, load_machine(machine),
                             load_software("current"));
}

std::vector<Plan> plans_like(const Plan& base) {
  std::vector<Plan> list;
  for (const char* schedule : {"1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipev"})
    for (int pp : {1, 2, 4, 8})
      for (int tp : {1, 8})
        for (int zero : {0, 1, 3})
          for (bool even : {true, false}) {
            Plan c = base;
            c.mesh.set(Axis::pp, pp);
            c.mesh.set(Axis::tp, tp);
            c.mesh.set(Axis::dp, 64 / pp / tp);
            c.zero = zero;
            c.schedule = schedule;
            c.chunks = c.schedule == "interleaved" && pp > 1 ? 2 : 1;
            c.balance_layers = !even;
            c.recompute = zero == 1 ? Recompute::full : Recompute::none;
            list.push_back(c);
          }
  return list;
}

// What prunes must not be wrong: the bound is below the simulated step, and the memory is the same.
TEST(StepModel, OutlookBoundsTheEstimate) {
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
      EXPECT_LE(model.least_seconds(c), e.seconds * (1 + 1e-9)) << name << " " << summary(c);
      EXPECT_DOUBLE_EQ(look.bytes, static_cast<double>(e.memory.total())) << summary(c);
      tightest = std::max(tightest, look.seconds / e.seconds);
      ++looked_at;
    }
    EXPECT_GT(looked_at, 80) << name;
    EXPECT_GT(tightest, 0.99) << name;  // and it is a bound that prunes
  }
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

// Rings over nodes wait at each link; all-reduce has trees, and a group inside a node crosses none.
TEST(OpSeconds, OnlyRingsOverNodesWait) {
  const Machine machine = load_machine("h100");
  Machine waiting = machine;
  waiting.tiers.back().ring_seconds = 1e-3;
  const Software software;
  const OpSeconds quick(machine, software, Precision::bf16), slow(waiting, software, Precision::bf16);
  const auto more = [&](Verb verb, std::int64_t size, std::int64_t stride) {
    return slow.collective(verb, 1e6, size, stride) - quick.collective(verb, 1e6, size, stride);
  };
  EXPECT_NEAR(more(Verb::all_gather, 32, 1), 3e-3, 1e-12);  // four nodes
  EXPECT_NEAR(more(Verb::reduce_scatter, 8, 8), 7e-3, 1e-12);
  EXPECT_EQ(more(Verb::all_reduce, 32, 1), 0);
  EXPECT_EQ(more(Verb::all_gather, 8, 1), 0);
  EXPECT_NEAR(slow.ring_wait(Verb::all_gather, 32, 1), 3e-3, 1e-12);
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
  // Ten collectives of a layer, forwards and backwards; what the device takes is behind it.
  const double host = 12 * 10 * 4 * 1e-3;
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

TEST(StepModel, IntervalsAreOfAKindOfConfiguration) {
  const auto interval = [](Workload work, int gpus) {
    work.software.low = 0.9, work.software.high = 1.1;
    work.software.nodes_low = 0.8, work.software.nodes_high = 1.2;
    work.software.experts_low = 0.7, work.software.experts_high = 1.3;
    Plan c = work.plan;
    c.mesh.set(Axis::dp, gpus);
    const Estimate e = StepModel(work).estimate(c);
    return std::pair{e.low / e.seconds, e.high / e.seconds};
  };
  const auto expect = [](std::pair<double, double> is, double low, double high) {
    EXPECT_NEAR(is.first, low, 1e-12);
    EXPECT_NEAR(is.second, high, 1e-12);
  };
  expect(interval(workload("llama-3-8b", 64), 8), 0.9, 1.1);
  expect(interval(workload("llama-3-8b", 64), 16), 0.8, 1.2);
  expect(interval(workload("mixtral-8x7b", 64), 8), 0.7, 1.3);
}

// For this repository's trainer a plan says what the trainer's own prediction says, to the byte, for every
// pipeline rank; that this is what a run holds, tests/prediction_test.cpp shows.
TEST(StepModel, MemoryOfThisTrainerIsItsOwnAccount) {
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
      const Memory own = exact_memory()(plan, pipeline, {.pp = r});
      EXPECT_EQ(e.rank_memory[static_cast<std::size_t>(r)], own) << summary(c);
      if (own.total() > largest.total()) largest = own;
    }
    EXPECT_EQ(e.memory, largest) << summary(c);
    ++looked_at;
  }
  EXPECT_GT(looked_at, 30);
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

// 70B on 64 H100 as dp 8, tp 2, pp 4, v-half: ZeRO 1 does not fit, and ZeRO 2 does not by magic.
TEST(StepModel, ZeroTwoDoesNotMake70BFitForNothing) {
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

// Of each axis what the rank sends that sends most: in the middle of a pipeline twice what its ends send, and
// nothing where a V turns on one rank.
TEST(StepModel, PipelineTrafficIsThatOfTheBusiestRank) {
  Workload work = checks::workload_of(load_model("llama-tiny"), 64, 16, Precision::f32, load_machine("h100"),
                                      load_software("echelon"), exact_memory());
  work.plan.model.num_layers = 8;
  StepModel model(work);
  for (const char* schedule : {"1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "dualpipev"})
    for (int pp : {2, 4})
      for (bool sequence_parallel : {true, false}) {
        Plan c = work.plan;
        c.mesh.set(Axis::pp, pp);
        c.mesh.set(Axis::tp, 2);
        c.sequence_parallel = sequence_parallel;
        c.schedule = schedule;
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

TEST(StepModel, ZeroStatesAreThePapers) {
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

}  // namespace
}  // namespace echelon::step_model_test

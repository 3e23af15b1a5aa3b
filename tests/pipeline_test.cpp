// Every schedule that flushes computes what one rank computes: to the last bit where no sum is regrouped,
// whatever the order of instructions, the number of stages and the split of the layers.
#include <gtest/gtest.h>

#include <mutex>

#include "mesh_runs.h"
#include "schedule/schedules.h"
#include "schedule/simulate.h"
#include "schedule/text.h"
#include "train/checkpoint.h"
#include "train/verify.h"

namespace echelon {
namespace {

using namespace checks;

std::vector<std::string> flushing_schedules() {
  std::vector<std::string> names;
  for (const std::string& name : schedule_names())
    if (name != "pipedream" && name != "2bw") names.push_back(name);
  return names;
}

Plan pipeline_plan(const ModelSpec& model, const std::string& schedule, int pp, int dp, int tp,
                   std::int64_t microbatches) {
  Plan plan = odd_plan(model, dp, tp, tp > 1);
  plan.mesh.set(Axis::pp, pp);
  plan.schedule = schedule;
  plan.micro_batch = 1;
  plan.global_batch = microbatches * dp;
  plan.seq_len = 5;
  return plan;
}

VerifyReport verified(const Plan& plan, std::int64_t steps = 1) {
  VerifyRequest request;
  request.plan = plan;
  request.optimizer.warmup_steps = 0;
  request.optimizer.clip = 0.1;
  request.run.timeout = patience;
  request.steps = steps;
  return verify(request);
}

// DualPipe adds the gradients of its two directions at the end: another grouping.
bool keeps_grouping(const std::string& schedule) { return schedule != "dualpipe"; }

TEST(Pipeline, EveryScheduleGivesTheBitsOfOneRank) {
  for (const std::string& schedule : flushing_schedules())
    for (int pp : {2, 3, 4})
      for (const ModelSpec& model : {odd_gpt2(true, 8), odd_llama(pp == 3, 2, 8 + pp % 3)}) {
        if (schedule == "dualpipe" && pp == 3) continue;  // an even number of ranks
        const Plan plan = pipeline_plan(model, schedule, pp, 1, 1, 8);
        SCOPED_TRACE(fmt::format("{} {} pp {}", schedule, model.name, pp));
        const VerifyReport report = verified(plan);
        EXPECT_TRUE(report.pass) << to_json(report, plan);
        EXPECT_TRUE(report.bitwise || !keeps_grouping(schedule)) << to_json(report, plan);
      }
}

TEST(Pipeline, ComposesWithDataTensorAndSequenceParallel) {
  for (const std::string& schedule : flushing_schedules())
    for (auto [dp, tp] : {std::pair{2, 1}, {1, 2}, {2, 2}})
      for (const ModelSpec& model : {odd_gpt2(true, 4), odd_llama(false, 2, 4)}) {
        const Plan plan = pipeline_plan(model, schedule, 2, dp, tp, 4);
        SCOPED_TRACE(fmt::format("{} {} dp {} tp {}", schedule, model.name, dp, tp));
        const VerifyReport report = verified(plan);
        EXPECT_TRUE(report.pass) << to_json(report, plan);
        EXPECT_LE(report.grad_max_rel_diff, 1e-10);
      }
}

// What is computed again is computed the same: the bits of one rank that keeps everything.
TEST(Pipeline, RecomputedActivationsGiveTheSameBits) {
  for (Recompute recompute : {Recompute::selective, Recompute::full})
    for (const char* schedule : {"1f1b", "zb-h2", "zb-v", "dualpipev"})
      for (const ModelSpec& model : {odd_gpt2(true, 4), odd_llama(false, 2, 4)}) {
        Plan plan = pipeline_plan(model, schedule, 2, 1, 1, 5);
        plan.recompute = recompute;
        const VerifyReport report = verified(plan);
        EXPECT_TRUE(report.pass && report.bitwise) << schedule << to_json(report, plan);
        plan.mesh.set(Axis::tp, 2);
        plan.sequence_parallel = true;
        EXPECT_TRUE(verified(plan).pass) << schedule;
      }
}

TEST(Pipeline, AnyNumberOfMicrobatches) {
  for (const std::string& schedule : flushing_schedules())
    for (int microbatches = 1; microbatches <= 9; ++microbatches) {
      const int pp = schedule.starts_with("dualpipe") ? 2 : 3;
      if (schedule.starts_with("dualpipe") &&
          (microbatches < 4 || (schedule == "dualpipe" && microbatches % 2 == 1)))
        continue;
      const Plan plan = pipeline_plan(odd_gpt2(true, 6), schedule, pp, 1, 1, microbatches);
      SCOPED_TRACE(fmt::format("{} {} microbatches", schedule, microbatches));
      const VerifyReport report = verified(plan);
      EXPECT_TRUE(report.pass && (report.bitwise || !keeps_grouping(schedule))) << to_json(report, plan);
    }
}

TEST(Pipeline, ASchedulesOwnTextRuns) {
  Plan plan = pipeline_plan(odd_gpt2(true, 6), "mine", 3, 1, 1, 5);
  plan.schedule_text = to_text(zb_h1(3, 5));
  const VerifyReport report = verified(plan);
  EXPECT_TRUE(report.pass && report.bitwise) << to_json(report, plan);
  plan.global_batch = 6;
  expect_contains(message_of<RequestError>([&] { verified(plan); }),
                  {"--schedule mine", "5 microbatches", "makes 6"});
  plan.mesh.set(Axis::pp, 2);
  expect_contains(message_of<RequestError>([&] { verified(plan); }),
                  {"--schedule mine", "3 ranks", "--pp is 2"});
}

TEST(Pipeline, UnevenLayersAndRaggedMicrobatches) {
  for (const char* schedule : {"1f1b", "zb-h1", "gpipe"}) {
    Plan plan = pipeline_plan(odd_llama(false, 2, 7), schedule, 4, 2, 1, 4);
    plan.micro_batch = 2;
    plan.global_batch = 13;  // 7 and 6 samples: 4 and 3 microbatches, the last one smaller
    EXPECT_TRUE(verified(plan).pass) << schedule;  // 2, 2, 2 and 1 layers
    plan.layers_per_stage = {1, 3, 0, 3};
    EXPECT_TRUE(verified(plan).pass) << schedule;
  }
}

// The output layer of this one costs as much as several layers.
TEST(Pipeline, BalancedLayersTakeTheOutputLayerIntoAccount) {
  ModelSpec model = odd_llama(false, 2, 12);
  model.vocab = 600;
  for (const char* schedule : {"1f1b", "zb-v", "interleaved", "dualpipe", "zb-auto"}) {
    Plan plan = pipeline_plan(model, schedule, 2, 1, 1, 4);
    const auto slowest = [&] {
      const PipelineLayout pipeline(plan);
      std::vector<double> flops(2, 0.0);
      for (int r = 0; r < 2; ++r)
        for (int s : pipeline.stages_of(r)) {
          const StageTimes t = stage_flops(plan, pipeline.slices()[static_cast<std::size_t>(s)]);
          flops[static_cast<std::size_t>(r)] += t.forward + t.backward_input + t.backward_weight;
        }
      return std::max(flops[0], flops[1]);
    };
    const double even = slowest();
    plan.balance_layers = true;
    EXPECT_LE(slowest(), even) << schedule;
    if (plan.schedule == "1f1b") {
      EXPECT_LT(slowest(), even);
    }
    const VerifyReport report = verified(plan);
    EXPECT_TRUE(report.pass && (report.bitwise || !keeps_grouping(schedule)))
        << schedule << to_json(report, plan);
    EXPECT_EQ(plan_from_toml(to_toml(plan), "it").balance_layers, true);
  }
}

TEST(Pipeline, ExecutedPeaksAndMessagesAreTheSimulatedOnes) {
  for (const std::string& schedule : flushing_schedules()) {
    const Plan plan = pipeline_plan(odd_gpt2(true, 8), schedule, 4, 1, 1, 8);
    const Schedule on_paper = PipelineLayout(plan).programs(0).schedule();
    const Simulation simulated = simulate(on_paper, {});
    std::mutex mutex;
    std::int64_t messages = 0;
    on_mesh(plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, {}, 1);
      trainer.compute_gradients(0, random_samples(plan));
      const std::lock_guard lock(mutex);
      messages += trainer.last_run().messages;
      EXPECT_DOUBLE_EQ(trainer.last_run().peak_saved * on_paper.stage_fraction(),
                       simulated.peak_activations[static_cast<std::size_t>(rank.coordinate(Axis::pp))])
          << schedule << " rank " << rank.index();
    });
    EXPECT_EQ(messages, simulated.messages) << schedule;
  }
}

// PipeDream and 2BW against a one-rank emulation of their delay, as one stream of four steps.
TEST(Pipeline, StreamsEqualTheEmulationOfTheirDelay) {
  for (int pp : {2, 3, 4})
    for (auto [schedule, microbatches] :
         {std::pair{"pipedream", 1}, {"pipedream", 2}, {"pipedream", 6}, {"2bw", pp}, {"2bw", 7}})
      for (auto [dp, tp] : {std::pair{1, 1}, {2, 1}, {1, 2}, {2, 2}})
        for (const ModelSpec& model : {odd_gpt2(false, 5), odd_llama(false, 2, 4)}) {
          if (pp > 2 && (dp * tp > 1 || (pp == 3) != (model.family == Family::gpt2))) continue;
          Plan plan = pipeline_plan(model, schedule, pp, dp, tp, microbatches);
          VerifyRequest request;
          request.plan = plan;
          request.optimizer.warmup_steps = 0;
          request.optimizer.clip = 0;
          request.optimizer.eps = 1e-5;
          request.run.timeout = patience;
          request.steps = 4;
          const VerifyReport report = verify(request);
          EXPECT_TRUE(report.pass) << describe(plan) << schedule << to_json(report, plan);
          // Where no sum is regrouped, the same bits; the loss is a mean of updates there and of targets
          // here.
          if (dp * tp == 1) {
            EXPECT_EQ(report.grad_max_rel_diff, 0) << describe(plan) << schedule;
            EXPECT_EQ(report.param_max_rel_diff, 0) << describe(plan) << schedule;
          }
          EXPECT_LE(report.grad_max_rel_diff, 1e-10);
        }
}

TEST(Pipeline, StreamsEqualTheEmulationWithASmallerLastMicrobatch) {
  for (const char* schedule : {"pipedream", "2bw"}) {
    Plan plan = pipeline_plan(odd_llama(false, 2, 4), schedule, 2, 1, 1, 3);
    plan.micro_batch = 2;
    plan.global_batch = 5;
    VerifyRequest request;
    request.plan = plan;
    request.optimizer.warmup_steps = 0;
    request.optimizer.clip = 0;
    request.optimizer.eps = 1e-5;
    request.run.timeout = patience;
    const VerifyReport report = verify(request);
    EXPECT_TRUE(report.pass) << schedule << to_json(report, plan);
    EXPECT_LE(report.grad_max_rel_diff, 1e-10);
  }
}

// What the emulation would not see if the delay were nothing: the same weights for every microbatch.
TEST(Pipeline, StreamsAreNotSynchronous) {
  const auto losses = [](const char* schedule, double learning_rate) {
    VerifyRequest request;
    request.plan = pipeline_plan(odd_llama(false, 2, 4), schedule, 3, 1, 1, 6);
    request.optimizer.warmup_steps = 0;
    request.optimizer.clip = 0;
    request.optimizer.lr = request.optimizer.min_lr = learning_rate;
    request.run.timeout = patience;
    return verify(request).mesh_losses;
  };
  EXPECT_NE(losses("1f1b", 1e-3), losses("2bw", 1e-3));
  EXPECT_NE(losses("1f1b", 1e-3), losses("pipedream", 1e-3));
}

TEST(Pipeline, StreamsRefuseWhatTheyCannotDo) {
  Plan plan = pipeline_plan(odd_gpt2(true, 6), "pipedream", 2, 1, 1, 4);
  expect_contains(message_of<RequestError>([&] { PipelineLayout layout(plan); }), {"ties", "legal"});
  plan = pipeline_plan(odd_gpt2(false, 6), "2bw", 4, 1, 1, 3);
  expect_contains(message_of<RequestError>([&] { PipelineLayout layout(plan); }), {"2bw", "at least P = 4"});
  plan = pipeline_plan(odd_gpt2(false, 6), "pipedream", 2, 2, 1, 4);
  plan.global_batch = 7;
  expect_contains(message_of<RequestError>([&] { PipelineLayout layout(plan); }), {"same number", "4 and 3"});
  plan.global_batch = 8;
  VerifyRequest request;
  request.plan = plan;
  expect_contains(message_of<RequestError>([&] { verify(request); }), {"--clip 1", "legal: 0"});
}

// Pieces of a stream, put together again, are the stream: every instruction once, in order, and each message
// received in the step in which it is sent.
TEST(Pipeline, ProgramsOfAStreamAreItsPieces) {
  for (auto [name, ranks, microbatches] : {std::tuple{"pipedream", 4, 1},
                                           {"pipedream", 5, 2},
                                           {"pipedream", 3, 8},
                                           {"2bw", 4, 4},
                                           {"2bw", 3, 9}}) {
    const StepPrograms programs(name, ranks, microbatches);
    for (int steps : {1, 2, 3, 9}) {
      const Schedule whole = make_schedule(name, ranks, microbatches, 0, steps);
      std::vector<std::vector<Instruction>> joined(static_cast<std::size_t>(ranks));
      for (int step = 0; step < steps; ++step) {
        const StepPrograms::Program program = programs.program(step, steps - step);
        EXPECT_EQ(program.drains, step + 1 == steps);
        std::map<std::pair<int, int>, int> under_way;  // by sender and receiver
        for (int r = 0; r < ranks; ++r)
          for (Instruction i : program.lowered->ranks[static_cast<std::size_t>(r)]) {
            i.microbatch += program.first_microbatch;
            i.version += program.first_version;
            if (i.op == Op::send) ++under_way[{r, i.peer}];
            if (i.op == Op::recv) --under_way[{i.peer, r}];
            if (is_compute(i.op) || i.op == Op::step) joined[static_cast<std::size_t>(r)].push_back(i);
          }
        for (const auto& [pair, count] : under_way) EXPECT_EQ(count, 0);
      }
      EXPECT_EQ(joined, whole.ranks) << name << " " << ranks << " ranks, " << microbatches << " x " << steps;
    }
  }
}

struct StepRun {
  std::vector<StepResult> results;     // of rank 0
  std::vector<LogicalTensors> states;  // values and moments, by rank
};

// Eight steps by Trainer::step(), with a pause (an evaluation, a checkpoint) after the fifth.
StepRun run_on(const Plan& plan, double clip) {
  StepRun run;
  run.states.resize(static_cast<std::size_t>(plan.mesh.num_ranks()));
  OptimizerOptions options;
  options.clip = clip;
  options.warmup_steps = 0;
  options.lr = 1e-2;
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, options, 1);
    for (int step = 0; step < 8; ++step)
      for (const StepResult& r : trainer.step(step, random_samples(plan), step < 5 ? 5 - step : 8 - step))
        if (rank.index() == 0) run.results.push_back(r);
    auto& state = run.states[static_cast<std::size_t>(rank.index())];
    for (ParameterTensor which :
         {ParameterTensor::value, ParameterTensor::exp_avg, ParameterTensor::exp_avg_sq})
      for (auto& [name, values] : gather(rank, trainer, which))
        state[fmt::format("{} {}", name, static_cast<int>(which))] = values;
  });
  return run;
}

// The same bits as with the barrier, whether guesses are right, wrong, or now this and now that.
TEST(Pipeline, OptimizerWithoutABarrierGivesTheSameBits) {
  int right = 0, wrong = 0;
  for (const char* schedule : {"zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "1f1b", "interleaved"})
    for (auto [pp, dp, tp, microbatches] :
         {std::tuple{2, 1, 1, 4}, {4, 1, 1, 8}, {4, 1, 1, 2}, {3, 1, 1, 1}, {2, 2, 2, 3}})
      for (const ModelSpec& model : {odd_gpt2(true, 8), odd_llama(false, 2, 8)})
        for (DType dtype : {DType::f64, DType::f32}) {
          const bool is_zero_bubble = schedule[0] == 'z' || schedule[0] == 'v';
          if (dtype == DType::f32 ? (pp != 4 || !have_cpu_kernels()) : (pp == 4 && is_zero_bubble)) continue;
          if (!is_zero_bubble && pp != 4) continue;
          Plan plan = pipeline_plan(model, schedule, pp, dp, tp, microbatches);
          plan.dtype = dtype;
          Plan without = plan;
          without.optimizer_barrier = false;
          const double clip = run_on(plan, 0).results.at(4).gradient_norm;  // above and below it
          SCOPED_TRACE(fmt::format("{} pp {} {}", schedule, pp, describe(plan)));
          const StepRun expected = run_on(plan, clip), run = run_on(without, clip);
          ASSERT_EQ(run.results.size(), 8u);
          for (std::size_t step = 0; step < 8; ++step) {
            EXPECT_EQ(run.results[step].step, expected.results[step].step);
            EXPECT_EQ(run.results[step].loss, expected.results[step].loss);
            EXPECT_EQ(run.results[step].gradient_norm, expected.results[step].gradient_norm);
            EXPECT_TRUE(!run.results[step].taken_back || run.results[step].gradient_norm > clip);
            (run.results[step].taken_back ? wrong : right) += 1;
          }
          EXPECT_EQ(run.states, expected.states);
        }
  EXPECT_GT(right, 50);
  EXPECT_GT(wrong, 50);
}

TEST(Pipeline, VerifyProvesTheOptimizerWithoutABarrier) {
  for (auto [dp, tp] : {std::pair{1, 1}, {2, 2}}) {
    Plan plan = pipeline_plan(odd_llama(false, 2, 8), "zb-v", 2, dp, tp, 4);
    plan.optimizer_barrier = false;
    VerifyRequest request;
    request.plan = plan;
    request.optimizer.warmup_steps = 0;
    request.optimizer.clip = 0.1;
    request.optimizer.eps = 1e-5;
    request.run.timeout = patience;
    request.steps = 5;
    const VerifyReport report = verify(request);
    EXPECT_TRUE(report.pass && (report.bitwise || dp * tp > 1)) << to_json(report, plan);
    EXPECT_LE(report.grad_max_rel_diff, 1e-10);
  }
  Plan plan = pipeline_plan(odd_llama(false, 2, 8), "dualpipe", 2, 1, 1, 4);
  plan.optimizer_barrier = false;
  expect_contains(message_of<RequestError>([&] { PipelineLayout layout(plan); }),
                  {"--optimizer-barrier off", "legal"});
  plan.mesh.set(Axis::pp, 1);
  expect_contains(message_of<RequestError>([&] { PipelineLayout layout(plan); }),
                  {"--optimizer-barrier off", "--pp"});
}

// A checkpoint of one pipeline holds logical tensors: it loads on another, and on none.
TEST(Pipeline, CheckpointsLoadOnAnotherPipeline) {
  const TemporaryDirectory directory;
  const ModelSpec model = odd_gpt2(true, 6);
  const auto bits_after = [&](Plan plan, bool load, bool save) {
    LogicalTensors tensors;
    std::mutex mutex;
    on_mesh(plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, {}, load ? 99 : 1);
      CheckpointInfo info;
      info.model = model;
      info.dtype = plan.dtype;
      if (load) load_checkpoint(rank, trainer.parameters(), read_checkpoint_info(directory.path()), false);
      trainer.compute_gradients(load ? 1 : 0, random_samples(plan));
      trainer.apply_gradients(load ? 1 : 0);
      info.step = 1;
      if (save) save_checkpoint(rank, trainer.parameters(), directory.path(), info);
      for (const Parameter& p : trainer.parameters().all()) {
        const Tensor logical = gather_logical(rank, p, ParameterTensor::value);
        const std::lock_guard lock(mutex);
        tensors[p.spec.name] = checks::as_doubles(logical);
      }
    });
    return tensors;
  };
  bits_after(pipeline_plan(model, "zb-v", 2, 1, 1, 6), false, true);
  const LogicalTensors expected = bits_after(pipeline_plan(model, "1f1b", 1, 1, 1, 6), true, false);
  EXPECT_EQ(bits_after(pipeline_plan(model, "gpipe", 3, 1, 1, 6), true, false), expected);
  EXPECT_EQ(bits_after(pipeline_plan(model, "interleaved", 3, 1, 1, 6), true, false), expected);
}

}  // namespace
}  // namespace echelon

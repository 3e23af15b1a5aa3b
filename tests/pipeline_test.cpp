// Every schedule that flushes computes what one rank computes: to the last bit where no sum is regrouped,
// whatever the order of instructions, the number of stages and the split of the layers.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "checkpoint/checkpoint.h"
#include "pipeline_runs.h"
#include "schedule/simulate.h"
#include "schedule/text.h"
#include "train/generate.h"

namespace echelon::pipeline_test {
namespace {

using namespace checks;

// Here every second combination or so; all of them in pipeline_slow_test.cpp.
TEST(Pipeline, EveryScheduleGivesTheBitsOfOneRank) {
  for (const std::string& schedule : flushing_schedules()) {
    expect_bits_of_one_rank(pipeline_plan(odd_gpt2(true, 8), schedule, 4, 1, 1, 8));
    expect_bits_of_one_rank(pipeline_plan(odd_llama(false, 2, 10), schedule, 2, 1, 1, 8));
  }
}

TEST(Pipeline, ComposesWithDataTensorAndSequenceParallel) {
  for (const std::string& schedule : flushing_schedules()) {
    expect_passes(pipeline_plan(odd_gpt2(true, 4), schedule, 2, 2, 2, 4));
    expect_passes(pipeline_plan(odd_llama(false, 2, 4), schedule, 2, 1, 2, 4));
  }
}

// What is computed again is computed the same: the bits of one rank that keeps everything.
TEST(Pipeline, RecomputedActivationsGiveTheSameBits) {  // long
  for (const PipelineRecompute& recompute :
       {PipelineRecompute(Recompute::selective), PipelineRecompute(Recompute::full),
        parse_pipeline_recompute("full/none", ""), parse_pipeline_recompute("mlp_in/selective", "")})
    for (const char* schedule : {"1f1b", "interleaved", "zb-h2", "zb-v", "dualpipev"})
      for (const ModelSpec& model : {odd_gpt2(true, 4), odd_llama(false, 2, 4)}) {
        if (!is_taken()) continue;
        Plan plan = pipeline_plan(model, schedule, 2, 1, 1, 5);
        plan.recompute = recompute;
        const VerifyReport report = verified(plan);
        EXPECT_TRUE(report.pass && report.bitwise) << schedule << to_json(report, plan);
        plan.mesh.set(Axis::tp, 2);
        plan.sequence_parallel = true;
        EXPECT_TRUE(verified(plan).pass) << schedule;
        plan.mesh.set(Axis::tp, 1);
        plan.mesh.set(Axis::dp, 2);
        plan.global_batch = 10;
        plan.zero = 3;
        EXPECT_TRUE(verified(plan).pass) << schedule;
      }
}

TEST(Pipeline, AnyNumberOfMicrobatches) {
  for (const std::string& schedule : flushing_schedules())
    for (int microbatches : {1, 7})  // the others in pipeline_slow_test.cpp
      if (has_microbatches(schedule, microbatches))
        expect_bits_of_one_rank(pipeline_plan(odd_gpt2(true, 6), schedule,
                                              schedule.starts_with("dualpipe") ? 2 : 3, 1, 1, microbatches));
}

TEST(Pipeline, ASchedulesOwnTextRuns) {
  const PlanCheck check = [](const Plan& plan, const std::string&) { check_whole(plan); };
  Plan plan = pipeline_plan(odd_gpt2(true, 6), "mine", 3, 1, 1, 5);
  plan.schedule_text = to_text(zb_h1(3, 5));
  const VerifyReport report = verified(plan);
  EXPECT_TRUE(report.pass && report.bitwise) << to_json(report, plan);
  plan.global_batch = 6;
  expect_contains(message_of<RequestError>([&] { verified(plan); }),
                  {"--schedule mine: ", "5 microbatches", "makes 6; legal: --global-batch 5"});
  // What is named as legal is: here a micro-batch too, whose last one is smaller.
  plan.global_batch = 9;
  const std::string either = message_of<RequestError>([&] { check_with_remedies(plan, check); });
  expect_contains(either, {"makes 9; legal: --global-batch 5, or --micro-batch 2"});
  plan.micro_batch = 2;
  check(plan, "");
  plan.micro_batch = 1;
  plan.mesh.set(Axis::pp, 2);
  expect_contains(message_of<RequestError>([&] { verified(plan); }),
                  {"--schedule mine", "3 ranks", "--pp is 2"});
}

// By its file's name, once.
TEST(Pipeline, ASchedulesOwnTextIsNamedWhereItNeverEnds) {
  Plan plan = pipeline_plan(odd_gpt2(true, 6), "mine", 2, 1, 1, 1);
  plan.schedule_text = "0BW0 0F0\n1F0 1BW0\n";
  EXPECT_TRUE(message_of<RequestError>([&] { PipelineLayout layout(plan); }).starts_with("schedule mine: "));
  plan.schedule_text = "0F0 0BW0\n1F0 1B\n";
  EXPECT_TRUE(
      message_of<RequestError>([&] { PipelineLayout layout(plan); }).starts_with("--schedule mine, line 2"));
}

// Ranks that take microbatches in orders of their own need inputs that are sent later.
TEST(Pipeline, ASchedulesOwnOrderRunsWithoutABarrier) {
  Guesses guesses;
  Plan plan = pipeline_plan(odd_llama(false, 2, 6), "mine", 3, 1, 1, 3);
  plan.schedule_text = "0F0 0F1 0F2 0BW0 0BW1 0BW2\n1F2 1F0 1BW0 1F1 1BW1 1BW2\n2F0 2BW0 2F1 2BW1 2F2 2BW2\n";
  expect_bits_without_barrier(plan, guesses);
}

TEST(Pipeline, ATableThatThreeRanksWouldShareIsRefused) {
  Plan plan = pipeline_plan(odd_gpt2(true, 4), "mine", 4, 1, 1, 2);
  plan.schedule_text = "0F0 0BW0 1F1 1BW1\n1F0 1BW0 2F1 2BW1\n2F0 2BW0 3F1 3BW1\n0F1 3F0 3BW0 0BW1\n";
  expect_contains(message_of<RequestError>([&] { PipelineLayout layout(plan); }),
                  {"--schedule mine", "share a table", "3 ranks", "legal"});
  plan.model = odd_llama(false, 2, 4);
  EXPECT_TRUE(verified(plan).pass);
}

// It has no part in what the two ends of the model share, and waits for the others.
TEST(Pipeline, ASchedulesOwnTextMayLeaveARankIdle) {
  for (const bool tied : {true, false}) {
    Plan plan = pipeline_plan(odd_llama(tied, 2, 2), "mine", 3, 1, 1, 2);
    plan.model.num_mtp_layers = tied ? 0 : 1;
    for (const char* text :
         {"0F0 1F0 1BW0 0BW0 0F1 1F1 1BW1 0BW1\n.\n.\n", "0F0 0F1 0BW0 0BW1\n.\n1F0 1BW0 1F1 1BW1\n"}) {
      plan.schedule_text = text;
      const PipelineLayout pipeline(plan);
      EXPECT_FALSE(pipeline.ends_on(1) || pipeline.ties_on(1)) << text;
      expect_passes(plan);
    }
  }
}

TEST(Pipeline, UnevenLayersAndRaggedMicrobatches) {
  for (const char* schedule : {"1f1b", "zb-h1", "gpipe", "zb-auto"}) {
    if (!is_taken(6)) continue;
    Plan plan = pipeline_plan(odd_llama(false, 2, 7), schedule, 4, 2, 1, 4);
    plan.micro_batch = 2;
    plan.global_batch = 13;  // 7 and 6 samples: 4 and 3 microbatches, the last one smaller
    EXPECT_TRUE(verified(plan).pass) << schedule;  // 2, 2, 2 and 1 layers
    plan.layers_per_stage = {1, 3, 0, 3};
    EXPECT_TRUE(verified(plan).pass) << schedule;
  }
}

// The output layer of this one costs as much as several layers.
TEST(Pipeline, BalancedLayersTakeTheOutputLayerIntoAccount) {  // long
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

TEST(Pipeline, StreamsEqualTheEmulationOfTheirDelay) {  // long
  for (auto [schedule, microbatches] :
       {std::pair{"pipedream", 1}, {"pipedream", 6}, {"2bw", 3}, {"2bw", 7}}) {
    expect_emulation(pipeline_plan(odd_llama(false, 2, 4), schedule, 2, 2, 2, microbatches), 4);
    expect_emulation(pipeline_plan(odd_gpt2(false, 5), schedule, 3, 1, 1, microbatches), 4);
  }
}

TEST(Pipeline, StreamsEqualTheEmulationWithASmallerLastMicrobatch) {
  for (const char* schedule : {"pipedream", "2bw"}) {
    Plan plan = pipeline_plan(odd_llama(false, 2, 4), schedule, 2, 1, 1, 3);
    plan.micro_batch = 2;
    plan.global_batch = 5;
    expect_emulation(plan, 3);
  }
}

// What the emulation would not see if the delay were nothing: the same weights for every microbatch.
TEST(Pipeline, StreamsAreNotSynchronous) {
  const auto losses = [](const char* schedule, double learning_rate) {
    VerifyRequest request = verify_request(pipeline_plan(odd_llama(false, 2, 4), schedule, 3, 1, 1, 6), 3, 0);
    request.optimizer.lr = request.optimizer.min_lr = learning_rate;
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

TEST(Pipeline, OptimizerWithoutABarrierGivesTheSameBits) {  // long
  Guesses guesses;
  for (auto [schedule, pp, dp, tp, microbatches] : {std::tuple{"zb-h1", 2, 1, 1, 4},
                                                    {"zb-h2", 3, 1, 1, 1},
                                                    {"zb-v", 2, 2, 2, 3},
                                                    {"v-half", 2, 1, 1, 4},
                                                    {"v-min", 3, 1, 1, 1},
                                                    {"1f1b", 4, 1, 1, 2},
                                                    {"interleaved", 4, 1, 1, 8}})
    for (const ModelSpec& model : {odd_gpt2(true, 8), odd_llama(false, 2, 8)})
      expect_bits_without_barrier(pipeline_plan(model, schedule, pp, dp, tp, microbatches), guesses);
  EXPECT_GT(guesses.right, 15);
  EXPECT_GT(guesses.wrong, 15);
}

TEST(Pipeline, VerifyProvesTheOptimizerWithoutABarrier) {  // long
  for (auto [dp, tp] : {std::pair{1, 1}, {2, 2}}) {
    Plan plan = pipeline_plan(odd_llama(false, 2, 8), "zb-v", 2, dp, tp, 4);
    plan.optimizer_barrier = false;
    VerifyRequest request = verify_request(plan, 5);
    request.optimizer.eps = 1e-5;
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

// AdamW amplifies the rounding of a tiny gradient, and of two updates that are compared at once the first
// one's may be tiny where the second one's is not.
TEST(Pipeline, EachOfTwoUpdatesMayRoundInItsOwnWay) {  // long
  Plan plan;
  plan.model = load_model("gpt2-tiny");
  plan.precision = DType::f64;
  plan.mesh.set(Axis::tp, 2);
  plan.mesh.set(Axis::pp, 2);
  plan.sequence_parallel = true;
  plan.global_batch = 7;
  plan.micro_batch = 4;
  plan.seq_len = 4;
  plan.optimizer_barrier = false;
  VerifyRequest request = verify_request(plan, 2, 1);
  request.optimizer.eps = 1e-5;
  request.optimizer.total_steps = 2;
  request.optimizer.min_lr = request.optimizer.lr / 10;
  request.seed = 1;
  const VerifyReport report = verify(request);
  EXPECT_TRUE(report.pass) << to_json(report, plan);
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
      info.dtype = plan.precision.master;
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

// The output layer's parts are saved as they lie, and loaded where it is whole or in other parts.
TEST(Pipeline, PartsOfTheOutputLayerAreSavedAndLoaded) {
  const auto plan_of = [](int pp, int tp, bool cut) {
    Plan plan = pipeline_plan(odd_llama(false, 2, 8), "1f1b", pp, 1, tp, 4);
    plan.model.output_bias = true;
    plan.vocabulary_parallel = cut;
    return plan;
  };
  // The weights' elements by parameter, put together from what the ranks have of them.
  const auto load = [](const Plan& plan, const std::string& path) {
    std::map<std::string, std::vector<double>> tensors;
    std::mutex mutex;
    on_mesh(plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, {}, 99);
      load_checkpoint(rank, trainer.parameters(), read_checkpoint_info(path), false);
      const std::lock_guard lock(mutex);
      for (const Parameter& p : trainer.parameters().all()) {
        auto& all = tensors[p.spec.name];
        all.resize(static_cast<std::size_t>(p.spec.numel()));
        const std::vector<double> here = checks::as_doubles(p.value);
        for_each_run(p.spec, rank.size(Axis::tp), rank.coordinate(Axis::tp),
                     [&](std::int64_t logical, std::int64_t local, std::int64_t n) {
                       std::copy_n(here.begin() + local, n, all.begin() + logical);
                     });
      }
    });
    return tensors;
  };
  const TemporaryDirectory directory;
  const Plan cut = plan_of(2, 2, true);
  on_mesh(cut, [&](const Rank& rank) {
    Trainer trainer(rank, cut, {}, 1);
    trainer.compute_gradients(0, random_samples(cut));
    trainer.apply_gradients(0);
    CheckpointInfo info;
    info.model = cut.model;
    info.dtype = cut.precision.master;
    info.step = 1;
    save_checkpoint(rank, trainer.parameters(), directory.path(), info);
  });
  const auto expected = load(plan_of(1, 1, false), directory.path());
  EXPECT_EQ(load(plan_of(2, 2, false), directory.path()), expected);
  EXPECT_EQ(load(plan_of(4, 1, true), directory.path()), expected);
  EXPECT_EQ(load(plan_of(2, 2, true), directory.path()), expected);
}

TEST(Pipeline, EvaluatesAndGeneratesWithPartsOfTheOutputLayer) {
  const auto run = [](int pp, int tp, bool cut) {
    Plan plan = pipeline_plan(odd_llama(false, 2, 8), "1f1b", pp, 1, tp, 4);
    plan.model.output_bias = true;
    plan.vocabulary_parallel = cut;
    double loss = 0;
    std::vector<std::int32_t> text;
    on_mesh(plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, {}, 1);
      if (const Parameter* bias = trainer.parameters().find_here("lm_head.bias"))  // as if it were trained
        for_each_run(bias->spec, tp, rank.coordinate(Axis::tp),
                     [&](std::int64_t logical, std::int64_t local, std::int64_t n) {
                       for (std::int64_t i = 0; i < n; ++i)
                         bias->value.host<double>()[local + i] = std::sin(static_cast<double>(logical + i));
                     });
      const double mean = trainer.evaluate(5, random_samples(plan));
      GenerateOptions options;
      options.max_tokens = 4;
      options.temperature = 0;
      const auto tokens = generate(rank, plan, trainer.parameters(), {}, {1, 2, 3}, options, {});
      if (rank.index() != 0) return;
      loss = mean;
      text = tokens;
    });
    return std::pair{loss, text};
  };
  const auto [loss, text] = run(1, 1, false);
  for (auto [pp, tp] : {std::pair{2, 1}, {2, 2}, {4, 1}}) {
    const auto [mean, tokens] = run(pp, tp, true);
    EXPECT_NEAR(mean, loss, 1e-12 * loss);
    EXPECT_EQ(tokens, text);
  }
}

TEST(Pipeline, PartsOfTheOutputLayerThatCannotBeAreRefused) {
  Plan plan = pipeline_plan(odd_gpt2(true, 6), "1f1b", 2, 1, 1, 4);
  plan.vocabulary_parallel = true;
  const auto refused = [&](const std::string& why) {
    expect_contains(message_of<RequestError>([&] { check_whole(plan); }),
                    {"--vocabulary-parallel on", why, "legal: off"});
  };
  refused("ties its output layer to its embedding");
  plan.model = odd_llama(false, 2, 8);
  plan.schedule = "dualpipe";
  refused("it runs each stage on two ranks");
  plan.schedule = "2bw";
  refused("it does not flush");
  plan.schedule = "1f1b";
  plan.optimizer_barrier = false;
  refused("passes are taken back");
}

}  // namespace
}  // namespace echelon::pipeline_test

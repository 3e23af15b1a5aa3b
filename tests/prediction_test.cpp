// Predicted and measured are one type, so a test subtracts them: traffic and memory of a step, on every rank.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <set>

#include "case_choice.h"
#include "context_runs.h"
#include "expert_runs.h"
#include "plan/memory.h"
#include "predicted_runs.h"
#include "schedule/schedules.h"
#include "schedule/validate.h"
#include "temporary_directory.h"
#include "train/dry_run.h"
#include "train/session.h"
#include "untimed.h"

namespace echelon::prediction_test {
namespace {

using namespace checks;

TEST(Prediction, IsExactForGpt2OnEveryMesh) {
  for_each_mesh([](int dp, int tp, bool sp) { expect_predicted(odd_plan(odd_gpt2(), dp, tp, sp)); });
}

TEST(Prediction, IsExactForLlamaOnEveryMesh) {
  for_each_mesh([](int dp, int tp, bool sp) { expect_predicted(odd_plan(odd_llama(), dp, tp, sp)); });
}

TEST(Prediction, IsExactForEveryKindOfContextParallelism) {
  for (int cp : {2, 3, 4})
    for (const ContextCase& c : context_cases(cp))
      for (AttentionMask mask : {AttentionMask::causal, AttentionMask::document}) {
        if (!is_taken(3)) continue;
        Plan plan = context_plan(mask == AttentionMask::causal ? Family::gpt2 : Family::llama, c);
        plan.mask = mask;
        SCOPED_TRACE(describe_context(plan));
        expect_predicted(plan);
        if (cp > 2) continue;
        for (const Plan& combined : combined_with_the_other_axes(plan)) expect_predicted(combined);
        for (const Recompute& recompute : {Recompute::selective, Recompute::full}) {
          plan.recompute = recompute;
          expect_predicted(plan);
        }
        plan.mesh.set(Axis::pp, 2);
        plan.schedule = "zb-h1";
        expect_predicted(plan);
      }
}

// Each pipeline rank makes again what is its own; with ZeRO, with experts on several ranks.
TEST(Prediction, IsExactForRecomputationByRank) {  // long
  for (const char* recompute : {"full/none", "none/full", "selective/mlp_in"})
    for (const char* schedule : {"1f1b", "interleaved", "zb-v", "zb-h1"})
      for (int zero : {0, 1, 2, 3}) {
        Plan plan = odd_plan(zero == 1 ? even_mixtral(8, 4) : odd_llama(false, 2, 5), 2, 1, false);
        plan.mesh.set(Axis::pp, 2);
        if (zero == 1) plan.mesh.ep = 2;
        plan.schedule = schedule;
        plan.global_batch = 24;
        plan.zero = zero;
        plan.recompute =
            parse_pipeline_recompute(zero == 1 && recompute[0] == 's' ? "selective/linear" : recompute, "");
        SCOPED_TRACE(fmt::format("{} {}", schedule, recompute_name(plan.recompute)));
        expect_predicted(plan);
      }
}

// What the planner takes a rank to hold, of a step without what it repeats, is what the whole one is walked
// to. Whether passes of it were left out.
bool expect_peak_without_repeats(const Plan& plan, int pp_rank) {
  const PipelineLayout whole(plan), steady(plan, StepLength::steady);
  const Coordinates at = with_largest_shard(plan, whole, {.pp = pp_rank});
  expect_same(exact_memory()(plan, steady, {.pp = pp_rank}, Device::cpu), predict_memory(plan, whole, at));
  return steady.of_rank(pp_rank).programs(0).microbatches() < whole.programs(0).microbatches();
}

// A rank holds as much in a step of few microbatches, with the batch of all of them, as in the whole one.
TEST(Prediction, ASteadyStepHasThePeak) {
  int shorter = 0;
  for (const std::string& schedule : schedule_names()) {
    if (is_stream(schedule)) continue;
    for (int pp : {1, 2, 3, 4, 8})
      for (int zero : {0, 2, 3})
        for (std::int64_t batch : {37, 64, 74, 130}) {
          const std::int64_t layers = pp == 8 && batch % 37 == 0 ? 16 : 8;
          Plan plan = odd_plan(zero == 3 ? odd_gpt2(true, layers) : odd_llama(false, 2, layers), 2, 1, false);
          plan.mesh.set(Axis::pp, pp);
          plan.schedule = schedule;
          plan.micro_batch = 2;
          plan.global_batch = 2 * batch;
          plan.zero = zero;
          plan.recompute =
              pp == 2 ? parse_pipeline_recompute(schedule == "dualpipe" ? "full/full" : "full/none", "")
                      : PipelineRecompute(Recompute::selective);
          SCOPED_TRACE(fmt::format("{} pp {} zero {} batch {}", schedule, pp, zero, batch));
          if (!is_taken(40)) continue;
          try {
            for (int r = 0; r < pp; ++r) shorter += expect_peak_without_repeats(plan, r);
          } catch (const RequestError&) {
            // Two directions; two stages a rank.
            EXPECT_TRUE((schedule == "dualpipe" && (pp == 3 || batch % 4 != 0)) || (pp == 8 && layers == 8));
          }
        }
  }
  EXPECT_GT(shorter, so_many(2, 20));
}

// Where both ends of a tied table are on one rank what lookups add waits, of each microbatch, for the end of
// the step, as long as it is less than a table of its own.
TEST(Prediction, LookupsThatWaitAreThoseOfAllMicrobatches) {
  std::set<std::int64_t> gradients;
  for (const char* schedule : {"1f1b", "zb-v"})
    for (std::int64_t batch : {4, 6, 9, 12, 24, 60}) {
      ModelSpec model = odd_gpt2(true, 4);
      model.vocab = 100;
      Plan plan = odd_plan(model, 1, 1, false);
      if (std::string(schedule) == "zb-v") plan.mesh.set(Axis::pp, 2);
      plan.schedule = schedule;
      plan.micro_batch = 1;
      plan.global_batch = batch;
      SCOPED_TRACE(fmt::format("{} batch {}", schedule, batch));
      expect_peak_without_repeats(plan, 0);
      const PipelineLayout whole(plan);
      gradients.insert(predict_memory(plan, whole, {})[MemoryCategory::gradients]);
    }
  EXPECT_GT(gradients.size(), 4U);
}

// With the output layer cut the order of a step is that of all its microbatches, less what it repeats.
TEST(Prediction, AStepWithItsOutputLayerCutHasThePeakWithoutItsRepeats) {
  int shorter = 0, all = 0;
  for (const char* schedule : {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min"})
    for (int pp : {2, 4})
      for (std::int64_t batch : {40, 61}) {
        Plan plan = odd_plan(odd_llama(false, 2, 8), 1, 1, false);
        plan.mesh.set(Axis::pp, pp);
        plan.schedule = schedule;
        plan.vocabulary_parallel = true;
        plan.micro_batch = 1;
        plan.global_batch = batch / pp * pp;
        SCOPED_TRACE(fmt::format("{} pp {} batch {}", schedule, pp, plan.global_batch));
        if (!is_taken(5)) continue;
        all += pp;
        for (int r = 0; r < pp; ++r) shorter += expect_peak_without_repeats(plan, r);
      }
  EXPECT_GT(shorter, all / 2);
}

// Every schedule that flushes, both ends of a tied embedding on two ranks, uneven layers and ragged
// microbatches.
TEST(Prediction, IsExactForEverySchedule) {
  for (const std::string& schedule : schedule_names()) {
    if (schedule == "pipedream" || schedule == "2bw") continue;
    for (auto [dp, tp, sp] : {std::tuple{1, 1, false}, {1, 2, false}, {2, 2, true}})
      for (ModelSpec model : {odd_gpt2(true, 4), odd_llama(false, 2, 5)}) {
        Plan plan = odd_plan(model, dp, tp, sp);
        plan.mesh.set(Axis::pp, 2);
        plan.schedule = schedule;
        plan.global_batch = 11 * dp;
        plan.micro_batch = 2;
        if (schedule.starts_with("dualpipe")) plan.global_batch = 12 * dp;
        SCOPED_TRACE(schedule);
        expect_predicted(plan);
      }
  }
}

TEST(Prediction, IsExactForVocabularyParallelism) {
  for (const char* schedule : {"1f1b", "zb-v"})
    for (auto [dp, tp, sp] : {std::tuple{1, 1, false}, {1, 2, false}, {2, 2, true}})
      for (int zero : {0, 3}) {
        Plan plan = odd_plan(odd_llama(false, 2, 5), dp, tp, sp);
        plan.mesh.set(Axis::pp, 2);
        plan.schedule = schedule;
        plan.vocabulary_parallel = true;
        plan.global_batch = 11 * dp;
        plan.micro_batch = 2;
        plan.zero = dp == 1 ? 0 : zero;
        SCOPED_TRACE(fmt::format("{} zero {}", schedule, plan.zero));
        expect_predicted(plan);
      }
}

TEST(Prediction, IsExactForMixturesOfExperts) {
  for (const ModelSpec& model : {odd_mixtral(), odd_deepseek()})
    for (const Balancing& balancing : balancings(model))
      for (auto [dp, tp, sp] : {std::tuple{1, 1, false}, {1, 2, false}, {2, 2, true}})
        for (const Recompute& recompute : {Recompute::none, Recompute::full}) {
          if (!is_taken(3)) continue;
          Plan plan = odd_plan(model, dp, tp, sp);
          plan.balancing = balancing;
          plan.recompute = recompute;
          if (balancing.scope == BalanceScope::microbatch) plan.global_batch = 4 * dp;
          SCOPED_TRACE(describe_experts(plan));
          expect_predicted(plan);
          plan.mesh.set(Axis::pp, 2);
          for (const char* schedule : {"1f1b", "zb-h1"}) {
            plan.schedule = schedule;
            SCOPED_TRACE(schedule);
            expect_predicted(plan);
          }
          plan.zero = 3;
          expect_predicted(plan);
        }
  Plan plan = odd_plan(odd_deepseek(), 1, 1, false);
  plan.mesh.set(Axis::cp, 2);
  plan.seq_len = 12;
  plan.balancing = all_losses();
  expect_predicted(plan);
}

// One sum of counts a layer and step, over all ranks of its tokens.
TEST(Prediction, IsExactForLossesOfTheGlobalBatch) {
  for (auto [dp, tp, pp, cp] : {std::tuple{2, 1, 1, 1}, {2, 2, 1, 2}, {1, 2, 2, 1}, {2, 1, 2, 1}}) {
    Plan plan = odd_plan(odd_deepseek(4), dp, tp, tp > 1);
    plan.mesh.set(Axis::pp, pp);
    plan.mesh.set(Axis::cp, cp);
    plan.seq_len = 12;
    plan.global_batch = 8;
    plan.micro_batch = pp > 1 ? 2 : 8;
    plan.schedule = "gpipe";
    plan.balancing = all_losses();
    plan.balancing.scope = BalanceScope::batch;
    SCOPED_TRACE(describe_experts(plan));
    expect_predicted(plan);
  }
}

constexpr std::array zero_stages{1, 2, 3};

// DualPipe's forward and backward passes that run together change places while tokens travel.
TEST(Prediction, IsExactForPassesThatRunTogether) {
  for (const char* schedule : {"dualpipe", "dualpipev"})
    for (const Recompute& recompute : {Recompute::none, Recompute::full})
      for (int zero : {0, 1, 2, 3})
        for (bool routed : {false, true}) {
          Plan plan = odd_plan(routed ? even_deepseek(2, 5) : even_mixtral(8, 4), 2, 1, false);
          plan.mesh.set(Axis::pp, 2);
          plan.mesh.ep = 2;
          plan.schedule = schedule;
          plan.global_batch = 24;
          plan.recompute = recompute;
          plan.zero = zero;
          if (routed) plan.balancing = {.expert_loss = 0.1, .capacity = 0.8};
          SCOPED_TRACE(describe_experts(plan));
          expect_predicted(plan);
        }
}

// With a capacity there is room for what it allows; without one, an even load is where tokens go to all
// experts.
TEST(Prediction, IsExactForExpertGroups) {
  for (auto [dp, cp, tp, ep] : {std::tuple{2, 1, 1, 2}, {4, 1, 1, 2}, {2, 2, 1, 4}, {2, 1, 2, 2}})
    for (const Recompute& recompute : {Recompute::none, Recompute::full})
      for (bool routed : {false, true}) {
        if (!is_taken(3)) continue;
        Plan plan = odd_plan(routed ? even_deepseek(2) : even_mixtral(8), dp, tp, tp > 1);
        plan.mesh.set(Axis::cp, cp);
        plan.mesh.ep = ep;
        plan.seq_len = 12;
        if (!routed) plan.global_batch = 8;
        plan.recompute = recompute;
        if (routed) plan.balancing = {.expert_loss = 0.1, .capacity = 0.8};
        const auto check_plan = [&] {
          SCOPED_TRACE(describe_experts(plan));
          expect_predicted(plan);
        };
        check_plan();
        for (int zero : zero_stages) {
          plan.zero = zero;
          check_plan();
        }
        plan.zero = 0;
        plan.mesh.set(Axis::pp, 2);
        for (const char* schedule : {"1f1b", "zb-v"}) {
          plan.schedule = schedule;
          if (schedule == std::string("zb-v")) plan.model.num_layers = 4;
          check_plan();
        }
      }
}

// Every stage of ZeRO, with and without replicas: one microbatch and several, tied and not.
TEST(Prediction, IsExactForZero) {
  for (int zero : zero_stages)
    for (auto [dp, tp, hsdp] : {std::tuple{2, 1, 1}, {3, 2, 1}, {4, 1, 1}, {4, 2, 2}, {2, 1, 2}})
      for (const ModelSpec& model : {odd_gpt2(true, 4), odd_llama(false, 2, 3), odd_llama(true, 4, 1)})
        for (std::int64_t micro_batch : {1, 2, 7}) {
          if (!is_taken(3)) continue;
          Plan plan = odd_plan(model, dp, tp, tp > 1);
          plan.micro_batch = micro_batch;
          plan.zero = zero;
          plan.hsdp = hsdp;
          plan.zero_prefetch = static_cast<int>(2 * micro_batch % 5);  // 2, 4, 4
          if (zero == 3 && micro_batch == 7) plan.zero_prefetch = 0;
          SCOPED_TRACE(fmt::format("zero {} hsdp {}", zero, hsdp));
          expect_predicted(plan);
        }
}

TEST(Prediction, IsExactForZeroUnderEverySchedule) {  // long
  for (const std::string& schedule : schedule_names()) {
    if (schedule == "pipedream" || schedule == "2bw") continue;
    for (int zero : zero_stages)
      for (const ModelSpec& model : {odd_gpt2(true, 4), odd_llama(false, 2, 5)}) {
        Plan plan = odd_plan(model, 2, 1, false);
        plan.mesh.set(Axis::pp, 2);
        plan.schedule = schedule;
        plan.global_batch = schedule.starts_with("dualpipe") ? 24 : 21;  // a microbatch more on one rank
        plan.zero = zero;
        plan.recompute = zero == 2 ? Recompute::full : Recompute::none;
        SCOPED_TRACE(fmt::format("zero {} {}", zero, schedule));
        expect_predicted(plan);
      }
  }
}

// What is packed and what is carried over are part of the predictions. The second step is predicted:
// PowerSGD's first one may be uncompressed.
TEST(Prediction, IsExactForCompression) {
  for (const char* compress : {"bf16", "fp16", "int8", "topk:0.05", "powersgd:2", "powersgd:3:1"})
    for (auto [dp, tp, pp, zero] : {std::tuple{2, 1, 1, 0},
                                    {3, 2, 1, 0},
                                    {1, 2, 1, 0},
                                    {2, 1, 2, 0},
                                    {3, 1, 1, 1},
                                    {2, 2, 1, 2},
                                    {2, 1, 2, 2}})
      for (const ModelSpec& model : {odd_gpt2(true, 3), odd_llama(false, 2, 4)}) {
        Plan plan = odd_plan(model, dp, tp, tp > 1);
        plan.mesh.set(Axis::pp, pp);
        plan.zero = zero;
        plan.compression = parse_compression(compress, "--compress");
        SCOPED_TRACE(fmt::format("{} zero {} pp {}", compress, zero, pp));
        expect_predicted(plan);
      }
}

// A stream of so many steps, from empty to empty: its largest memory, and its traffic spread over its steps.
void expect_predicted_stream(const Plan& plan, const PipelineLayout& pipeline, int steps) {
  const StepPrograms& programs = pipeline.programs(0);
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, {}, 1);
    const Traffic before = rank.traffic();
    std::vector<StepResult> results;
    int staleness_seen = 0;
    for (int step = 0; step < steps; ++step) {
      for (const StepResult& r : trainer.step(step, random_samples(plan), steps - step)) results.push_back(r);
      staleness_seen = std::max(staleness_seen, trainer.last_run().max_staleness);
    }
    const int pp = rank.coordinate(Axis::pp);
    SCOPED_TRACE(fmt::format("{} steps, pipeline rank {}", steps, pp));
    expect_same(predict_traffic(plan, pipeline, rank.coordinates()), (rank.traffic() - before) / steps);
    expect_same(predict_memory(plan, pipeline, rank.coordinates(), {.steps = steps}), rank.arena().peak());
    if (steps > programs.shown_steps()) {
      EXPECT_EQ(staleness_seen, staleness(programs.schedule())[static_cast<std::size_t>(pp)]);
    }
    ASSERT_EQ(static_cast<int>(results.size()), steps);  // all are known when the pipeline is empty
    for (int step = 0; step < steps; ++step) EXPECT_EQ(results[static_cast<std::size_t>(step)].step, step);
  });
}

TEST(Prediction, IsExactForStreams) {  // long
  for (auto [schedule, microbatches] :
       {std::pair{"pipedream", 1}, {"pipedream", 2}, {"pipedream", 5}, {"2bw", 3}, {"2bw", 7}})
    for (auto [dp, tp, sp, compress] : {std::tuple{1, 1, false, "none"},
                                        {2, 2, true, "none"},
                                        {2, 1, false, "int8"},
                                        {2, 1, false, "topk:0.1"}}) {
      Plan plan = odd_plan(odd_llama(false, 2, 5), dp, tp, sp);
      plan.mesh.set(Axis::pp, 3);
      plan.schedule = schedule;
      plan.compression = parse_compression(compress, "--compress");
      plan.global_batch = 2 * microbatches * dp - (dp == 1 ? 1 : 0);  // the last microbatch may be smaller
      plan.micro_batch = 2;
      SCOPED_TRACE(fmt::format("{} {} microbatches, {}", schedule, microbatches, describe(plan)));
      const PipelineLayout pipeline(plan);
      expect_predicted_stream(plan, pipeline, pipeline.programs(0).shown_steps() + 2);
      if (dp * tp > 1) continue;
      for (int steps : {1, 2, 3}) expect_predicted_stream(plan, pipeline, steps);
    }
}

// Every guess is right where nothing is clipped. Where all steps are, each is taken back, and the passes
// before that are run again.
TEST(Prediction, IsExactWithoutTheOptimizersBarrier) {  // long
  for (const bool mixture : {false, true})
    for (const double clip : {0.0, 1e-3}) {
      Plan plan = odd_plan(mixture ? odd_deepseek(5) : odd_llama(false, 2, 5), 1, 2, true);
      if (mixture) plan = odd_plan(even_deepseek(2, 5), 2, 1, false);
      plan.mesh.set(Axis::pp, 2);
      plan.mesh.ep = mixture ? 2 : 1;
      if (mixture) plan.balancing.capacity = 0.8;
      plan.schedule = "zb-h2";
      plan.optimizer_barrier = false;
      const PipelineLayout pipeline(plan);
      on_mesh(plan, [&](const Rank& rank) {
        OptimizerOptions options;
        options.clip = clip;
        Trainer trainer(rank, plan, options, 1);
        for (int step = 0; step < 4; ++step) {
          SCOPED_TRACE(fmt::format("mixture {} clip {} step {}", mixture, clip, step));
          const Traffic before = rank.traffic();
          trainer.step(step, random_samples(plan), 4 - step);
          const DecidedByData decided = trainer.take_decided();
          EXPECT_EQ(decided.passes_again, clip > 0 && step > 0);
          const Traffic sent = rank.traffic() - before;
          expect_same(predict_traffic(plan, pipeline, rank.coordinates(), many_updates, decided), sent);
          if (clip == 0 && !mixture) expect_same(predict_traffic(plan, pipeline, rank.coordinates()), sent);
        }
        expect_same(predict_memory(plan, pipeline, rank.coordinates()), rank.arena().peak());
      });
    }
}

// What a prediction takes for granted is said, and nothing else is.
TEST(Prediction, SaysWhatItAssumes) {
  using List = std::vector<Assumption>;
  const List nothing, even{Assumption::even_expert_load}, right{Assumption::no_step_taken_back};
  Plan plan = odd_plan(even_mixtral(2), 2, 1, false);
  EXPECT_EQ(traffic_assumptions(plan), nothing);  // all experts are on every rank
  plan.mesh.ep = 2;
  EXPECT_EQ(traffic_assumptions(plan), even);
  EXPECT_EQ(memory_assumptions(plan), even);
  plan.balancing.capacity = 1;
  EXPECT_EQ(traffic_assumptions(plan), even);
  EXPECT_EQ(memory_assumptions(plan), nothing);  // there is room for all that may come
  plan.balancing.capacity = 0;
  plan.model = even_mixtral(8);
  EXPECT_EQ(traffic_assumptions(plan), nothing);  // every token goes to every expert
  EXPECT_EQ(memory_assumptions(plan), nothing);
  plan.optimizer_barrier = false;
  EXPECT_EQ(traffic_assumptions(plan), right);
  EXPECT_EQ(memory_assumptions(plan), nothing);
}

// Less than an even load is kept of a sequence, and the ranks of a cp group have equal parts of that.
TEST(Prediction, IsExactForCapacitiesOverContextParallelExperts) {
  for (auto [dp, cp, ep] : {std::tuple{1, 2, 2}, {2, 2, 4}, {1, 4, 2}})
    for (const BalanceScope scope : {BalanceScope::sequence, BalanceScope::microbatch}) {
      Plan plan = odd_plan(even_mixtral(2), dp, 1, false);
      plan.mesh.set(Axis::cp, cp);
      plan.mesh.ep = ep;
      plan.global_batch = 2 * dp;
      plan.seq_len = 8;
      plan.balancing.capacity = 0.3;
      plan.balancing.scope = scope;
      expect_predicted(plan);
    }
}

// Ranks that have no sequence in the last microbatch compute for those that have.
TEST(Prediction, IsExactByTheDataWhereRanksOfAnExpertGroupHaveFewerMicrobatches) {
  Plan plan = odd_plan(even_mixtral(2), 4, 1, false);
  plan.mesh.ep = 4;
  plan.global_batch = 5;
  plan.micro_batch = 1;
  expect_predicted(plan);
}

// Tensor-parallel ranks sum columns of copies' rows, of which they have different numbers.
TEST(Prediction, IsExactByTheDataWhereRowsOfCopiesAreCutUnevenly) {
  Plan plan = odd_plan(even_mixtral(2), 2, 2, false);
  plan.model.hidden = 23;
  plan.mesh.ep = 2;
  plan.numerics = Numerics::invariant;
  plan.global_batch = 4;
  plan.micro_batch = 1;
  expect_predicted(plan);
}

// The scratch that sums of sequences take is the same in each step, though layers make larger gradients than
// the head, which the backward pass begins with.
TEST(Prediction, IsExactInLaterStepsOfInvariantNumerics) {
  for (const bool mixture : {false, true}) {
    Plan plan = odd_plan(mixture ? odd_mixtral() : odd_llama(), 1, 1, false);
    plan.model.vocab = 5;
    plan.numerics = Numerics::invariant;
    plan.global_batch = plan.micro_batch = 2;
    expect_predicted(plan);
  }
}

// Of a whole run: rank 0's numbers as its summary has them, and as programs read them.
TEST(Prediction, OfARunIsExactOrSaysWhatItAssumes) {  // long
  const TemporaryDirectory directory;
  {
    std::ofstream text(directory / "text");
    for (int i = 0; i < 4000; ++i) text << static_cast<char>('a' + i * i % 23);
  }
  const TokenData data({directory / "text"}, bytes_vocab);
  const auto summary_of = [&](Plan plan, double clip, std::int64_t steps = 4) {
    plan.model.vocab = bytes_vocab;
    TrainRequest request = untimed();
    request.plan = plan;
    request.run.timeout = patience;
    request.optimizer.total_steps = steps;
    request.optimizer.warmup_steps = 0;
    request.optimizer.clip = clip;
    return train(request, data, {});
  };
  Plan stream = odd_plan(odd_llama(false, 2, 4), 1, 2, true);
  stream.mesh.set(Axis::pp, 2);
  stream.schedule = "2bw";
  const TrainSummary streamed = summary_of(stream, 0);
  EXPECT_EQ(streamed.predicted_traffic, streamed.measured_traffic);
  EXPECT_EQ(streamed.predicted_memory, streamed.measured_memory);
  EXPECT_EQ(to_json(streamed).find("assumes"), std::string::npos);

  // One step, whose first passes are the first to use the kernels' scratch.
  if (has_cpu_kernels()) {
    Plan single = odd_plan(odd_llama(false, 2, 6), 1, 2, true, DType::f32);
    single.mesh.set(Axis::pp, 2);
    single.seq_len = 8;
    single.global_batch = 6;
    single.micro_batch = 3;
    const TrainSummary first = summary_of(single, 1, 1);
    EXPECT_EQ(first.predicted_memory, first.measured_memory);
  }

  // Nor does the pass over what was held out hold more, where layers keep next to nothing.
  Plan held = odd_plan(odd_llama(), 2, 1, false);
  held.zero = 1;
  held.recompute = Recompute::full;
  const TrainSummary evaluated = summary_of(held, 1);
  EXPECT_GT(evaluated.validation_loss, 0);
  EXPECT_EQ(evaluated.predicted_memory, evaluated.measured_memory);

  Plan mixture = odd_plan(even_mixtral(2), 2, 1, false);
  mixture.mesh.ep = 2;
  mixture.balancing.capacity = 0.8;
  const TrainSummary routed = summary_of(mixture, 1);
  EXPECT_NE(routed.predicted_traffic, routed.measured_traffic);
  EXPECT_EQ(routed.traffic_by_data, routed.measured_traffic);
  EXPECT_EQ(routed.predicted_memory, routed.measured_memory);
  EXPECT_NE(to_json(routed).find(R"("assumes":["even_expert_load"])"), std::string::npos) << to_json(routed);
  EXPECT_NE(traffic_table(routed).find("predicted assuming an even load of the experts"), std::string::npos);

  // What leaves narrower experts is made again too, for the weight behind them.
  mixture.model = even_deepseek(2);
  mixture.model.expert_latent = 10;
  mixture.balancing = {};
  mixture.recompute = Recompute::full;
  const TrainSummary narrower = summary_of(mixture, 1);
  EXPECT_EQ(narrower.traffic_by_data, narrower.measured_traffic);

  stream.schedule = "zb-h2";
  stream.optimizer_barrier = false;
  const TrainSummary again = summary_of(stream, 1e-3);
  EXPECT_EQ(again.taken_back, 3);
  EXPECT_NE(again.predicted_traffic, again.measured_traffic);
  EXPECT_EQ(again.traffic_by_data, again.measured_traffic);
  EXPECT_EQ(again.predicted_memory, again.measured_memory);
  EXPECT_NE(to_json(again).find(R"("assumes":["no_step_taken_back"])"), std::string::npos);
}

TEST(Prediction, IsExactForEveryRecompute) {
  for (const Recompute& recompute : {Recompute::selective, Recompute::full})
    for (auto [pp, tp, sp] : {std::tuple{1, 1, false}, {1, 2, false}, {1, 4, true}, {2, 2, true}})
      for (const char* schedule : {"1f1b", "zb-h1", "gpipe"})
        for (ModelSpec model : {odd_gpt2(true, 4), odd_llama(false, 2, 4)}) {
          Plan plan = odd_plan(model, 1, tp, sp);
          plan.mesh.set(Axis::pp, pp);
          plan.schedule = schedule;
          plan.recompute = recompute;
          SCOPED_TRACE(fmt::format("{} {}", recompute_name(recompute), schedule));
          expect_predicted(plan);
        }
}

// Sizes that move the peak from one place of the step to another: a wide MLP, a large vocabulary, one layer,
// many.
TEST(Prediction, IsExactForOtherShapes) {
  for (int tp : {1, 2, 4})
    for (bool sp : {false, true}) {
      expect_predicted(odd_plan(odd_gpt2(false, 1), 2, tp, sp));
      expect_predicted(odd_plan(odd_llama(true, 1, 5), 1, tp, sp));
      expect_predicted(odd_plan(odd_llama(true, 4, 1), 3, tp, sp));
      for (ModelSpec model : {odd_gpt2(true, 1), odd_llama(false, 2, 1)}) {
        model.mlp_hidden = 301;
        expect_predicted(odd_plan(model, 1, tp, sp));
        model.vocab = 1009;
        expect_predicted(odd_plan(model, 1, tp, sp));
        model.mlp_hidden = 9;
        expect_predicted(odd_plan(model, 1, tp, sp));
      }
      Plan plan = odd_plan(odd_llama(), 2, tp, sp);
      plan.micro_batch = 3;  // of 4 and 3 samples
      expect_predicted(plan);
      plan.micro_batch = 100;  // a single, smaller one
      expect_predicted(plan);
      plan.bucket_bytes = 20'000;  // about a layer
      expect_predicted(plan);
    }
}

// More tokens than one chunk of logits.
TEST(Prediction, IsExactForSeveralChunksOfLogits) {
  for (int tp : {1, 2}) {
    Plan plan = odd_plan(odd_llama(false, 2, 1), 1, tp, tp > 1);
    plan.model.max_seq = 400;
    plan.seq_len = 301;
    plan.global_batch = 3;
    ASSERT_GT(plan.micro_batch * plan.seq_len,
              logits_chunk_rows(Device::cpu, element_bytes(plan.precision.activations)));
    expect_predicted(plan);
  }
}

// Bytes that all ranks send in a step, or in its compute_gradients alone, together.
Traffic group_traffic(const Plan& plan, bool whole_step = false) {
  Traffic sum;
  std::mutex mutex;
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, {}, 1);
    trainer.compute_gradients(0, random_samples(plan));
    if (whole_step) trainer.apply_gradients(0);
    const std::lock_guard lock(mutex);
    for (Axis axis : all_axes)
      for (Verb verb : all_verbs) {
        sum.at(axis, verb).calls += rank.traffic().at(axis, verb).calls;
        sum.at(axis, verb).bytes += rank.traffic().at(axis, verb).bytes;
      }
  });
  return sum;
}

// The textbook: a layer sends 2 all_reduces of N C elements in each direction, 2 (t-1)/t N C elements a rank
// each, or their reduce_scatter and all_gather halves. Two layers more send that much more.
TEST(Textbook, TensorParallelTrafficOfALayer) {
  for (const bool gpt2 : {true, false})
    for (int t : {2, 4})
      for (bool sp : {false, true}) {
        const auto plan_of = [&](std::int64_t layers) {
          return odd_plan(gpt2 ? odd_gpt2(true, layers) : odd_llama(true, 4, layers), 1, t, sp);
        };
        const Plan plan = plan_of(1);
        SCOPED_TRACE(describe(plan));
        const Traffic one = group_traffic(plan), three = group_traffic(plan_of(3));
        // All ranks and both layers together; N adds up to the tokens of the step over its microbatches.
        const std::int64_t tokens = plan.global_batch * plan.seq_len, width = 8;
        const std::int64_t directions = 2, layers = 2, microbatches = 4;
        const std::int64_t volume =
            layers * directions * 2 * (2 * (t - 1) * tokens * plan.model.hidden * width);
        const std::int64_t calls = layers * directions * 2 * microbatches * t;
        const auto more = [&](Verb verb) {
          return VerbTraffic{three.at(Axis::tp, verb).calls - one.at(Axis::tp, verb).calls,
                             three.at(Axis::tp, verb).bytes - one.at(Axis::tp, verb).bytes};
        };
        if (sp) {
          // The inputs of attention and MLP are gathered once more, for the gradients of their weights.
          EXPECT_EQ(more(Verb::all_gather), (VerbTraffic{calls * 3 / 2, volume * 3 / 4}));
          EXPECT_EQ(more(Verb::reduce_scatter), (VerbTraffic{calls, volume / 2}));
          // The norms' gradients, in the one all_reduce that there is in any case.
          const std::int64_t norms =
              gpt2 ? 2 * 2 + 2 : 2;  // vectors of C in a layer, row-parallel biases too
          EXPECT_EQ(more(Verb::all_reduce),
                    (VerbTraffic{0, layers * 2 * (t - 1) * norms * plan.model.hidden * width}));
        } else {
          EXPECT_EQ(more(Verb::all_reduce), (VerbTraffic{calls, volume}));
          EXPECT_EQ(more(Verb::all_gather), VerbTraffic{});
          EXPECT_EQ(more(Verb::reduce_scatter), VerbTraffic{});
        }
        EXPECT_EQ(three.bytes(Axis::dp), 0);
      }
}

// Bytes that rank 0 keeps of a layer from its forward to its backward pass: what each of two more layers adds
// to the peak, which is in a backward pass.
std::int64_t kept_of_a_layer(Plan plan) {
  const auto activations = [&](std::int64_t layers) {
    plan.model.num_layers = layers;
    const std::int64_t predicted = predict_memory(plan, PipelineLayout(plan))[MemoryCategory::activations];
    EXPECT_EQ(predicted, measure(plan).front().peak[MemoryCategory::activations]);
    return predicted;
  };
  return (activations(5) - activations(3)) / 2;
}

// Korthikanti et al. 2022, table 2, for what this trainer keeps (no masks, no scores, norms computed again):
// tp cuts what lies inside its regions, sequence parallelism the residual stream too, so all of it.
TEST(Textbook, ActivationsOfALayer) {  // long
  for (const bool gpt2 : {true, false})
    for (const Recompute& recompute : {Recompute::none, Recompute::selective, Recompute::full})
      for (const int t : {2, 4}) {
        Plan plan = odd_plan(gpt2 ? odd_gpt2(true) : odd_llama(true, 4), 1, t, false);
        plan.seq_len = 12;
        plan.model.mlp_hidden = 40;
        plan.global_batch = plan.micro_batch = 2;
        plan.recompute = recompute;
        const std::int64_t rows = 24, width = 8, c = plan.model.hidden, h = plan.model.num_heads,
                           f = plan.model.mlp_hidden;
        // The layer's input and the stream after attention, with mean and deviation or the latter alone.
        const std::int64_t outside = recompute == Recompute::full ? c : 2 * c + (gpt2 ? 4 : 2);
        std::int64_t inside = 0;  // q, k, v and the MLP's hidden values; attention's output and log-sum-exp
        if (recompute != Recompute::full) inside += 3 * c + (gpt2 ? f : 2 * f);
        if (recompute == Recompute::none) inside += c + h;
        SCOPED_TRACE(fmt::format("{} {}", describe(plan), recompute_name(recompute)));
        EXPECT_EQ(kept_of_a_layer(plan), rows * width * (outside + inside / t));
        plan.sequence_parallel = true;
        EXPECT_EQ(kept_of_a_layer(plan), rows * width * (outside + inside) / t);
      }
}

// With it a rank never holds more, whatever is recomputed and however the pipeline runs, wherever the peak
// is.
TEST(Textbook, SequenceParallelismHoldsLess) {  // long
  for (const ModelSpec& model : {odd_gpt2(true, 4), odd_llama(false, 2, 5), odd_mixtral(4), odd_deepseek(5)})
    for (const int t : {2, 4})
      for (const Recompute& recompute : {Recompute::none, Recompute::selective, Recompute::full})
        for (const char* schedule : {"1f1b", "gpipe", "zb-h1", "zb-v"}) {
          Plan plan = odd_plan(model, 1, t, false);
          plan.mesh.set(Axis::pp, 2);
          plan.global_batch = 16;
          plan.schedule = schedule;
          plan.recompute = recompute;
          const PipelineLayout pipeline(plan);
          for (int pp : {0, 1}) {
            plan.sequence_parallel = false;
            const std::int64_t without =
                predict_memory(plan, pipeline, {.pp = pp})[MemoryCategory::activations];
            plan.sequence_parallel = true;
            EXPECT_LT(predict_memory(plan, pipeline, {.pp = pp})[MemoryCategory::activations], without)
                << describe(plan) << " " << schedule << " " << recompute_name(recompute) << " rank " << pp;
          }
        }
}

// One all_reduce of the gradients, 2 (d-1)/d of them a rank, however many microbatches; and the loss.
TEST(Textbook, DataParallelTrafficOfAStep) {
  for (const ModelSpec& model : {odd_gpt2(), odd_llama(false, 4)})
    for (int d : {2, 3, 4})
      for (std::int64_t micro_batch : {1, 7}) {
        Plan plan = odd_plan(model, d, 1, false);
        plan.micro_batch = micro_batch;
        const Traffic sent = group_traffic(plan);
        EXPECT_EQ(sent.at(Axis::dp, Verb::all_reduce).bytes,
                  2 * (d - 1) * (num_parameters(model) + 2) * 8);  // and two numbers: targets and loss
        EXPECT_EQ(sent.bytes(Axis::dp), sent.at(Axis::dp, Verb::all_reduce).bytes);
        EXPECT_EQ(sent.bytes(Axis::tp), 0);
      }
}

// ZeRO 1 and 2 send what plain data parallelism sends, as a reduce_scatter of the gradients and an all_gather
// of the values. ZeRO 3 gathers the values for each use: each block in the forward and in the backward pass,
// lookup table and output layer once each, so nearly half as much again.
TEST(Textbook, ZeroTrafficOfAStep) {
  for (int d : {2, 3, 4})
    for (std::int64_t layers : {2, 6}) {
      const ModelSpec model = odd_llama(false, 4, layers);
      Plan plan = odd_plan(model, d, 1, false);
      plan.micro_batch = 7;
      plan.zero_prefetch = 0;
      const auto verbs = [&](int zero) {
        plan.zero = zero;
        const Traffic sent = group_traffic(plan, true);
        return std::pair{sent.at(Axis::dp, Verb::reduce_scatter).bytes,
                         sent.at(Axis::dp, Verb::all_gather).bytes};
      };
      const std::int64_t all = (d - 1) * num_parameters(model) * 8;
      const std::int64_t table = (d - 1) * model.vocab * model.hidden * 8;
      const std::int64_t norms = (d - 1) * (2 * layers + 1) * model.hidden * 8;
      EXPECT_EQ(verbs(0), std::pair(std::int64_t{0}, std::int64_t{0}));
      EXPECT_EQ(verbs(1), std::pair(all, all));
      EXPECT_EQ(verbs(2), std::pair(all, all));
      EXPECT_EQ(verbs(3), std::pair(all, 2 * (all - 2 * table - norms) + 2 * table + norms));
    }
}

void expect_no_allocations(const Plan& plan) {
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, {}, 1);
    std::int64_t asked = 0;
    for (std::int64_t step = 0; step < 6; ++step) {
      trainer.compute_gradients(step, random_samples(plan));
      trainer.apply_gradients(step);
      if (step == 1) asked = rank.arena().system_allocations();
    }
    EXPECT_EQ(rank.arena().system_allocations(), asked)
        << "zero " << plan.zero << " " << describe(plan) << " rank " << rank.index();
  });
}

TEST(SteadyState, AsksTheSystemForNoMemory) {
  for (const ModelSpec& model : {odd_gpt2(), odd_llama()})
    for (auto [dp, tp, sp] : {std::tuple{1, 1, false}, {3, 2, true}, {1, 4, false}, {2, 4, true}}) {
      expect_no_allocations(odd_plan(model, dp, tp, sp));
    }
}

TEST(SteadyState, AsksTheSystemForNoMemoryUnderZero) {
  for (int zero : zero_stages)
    for (auto [dp, tp, pp] : {std::tuple{3, 2, 1}, {2, 1, 1}, {2, 1, 2}})
      for (const ModelSpec& model : {odd_gpt2(true, 4), odd_llama(false, 2, 4)})
        for (std::int64_t micro_batch : {1, 7}) {
          if (!is_taken(6)) continue;
          Plan plan = odd_plan(model, dp, tp, tp > 1);
          plan.mesh.set(Axis::pp, pp);
          plan.micro_batch = micro_batch;
          plan.zero = zero;
          expect_no_allocations(plan);
        }
}

TEST(SteadyState, AsksTheSystemForNoMemoryUnderCompression) {  // long
  for (const char* compress : {"bf16", "int8", "topk:0.1", "powersgd:2"})
    for (int zero : {0, 1, 2}) {
      Plan plan = odd_plan(odd_gpt2(true, 4), 3, 1, false);
      plan.zero = zero;
      plan.compression = parse_compression(compress, "--compress");
      expect_no_allocations(plan);
    }
}

}  // namespace
}  // namespace echelon::prediction_test

// Asynchronous training: with staleness 0 the synchronous run to the last bit, a bound that holds, and a
// planted straggler that holds up only those who must wait for it.
#include "train/asynchronous.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <thread>

#include "mesh_runs.h"
#include "plan/memory.h"
#include "train/dry_run.h"

namespace echelon::asynchronous_test {
namespace {

using namespace checks;

struct ServedOutcome {
  std::vector<ServedStep> steps;
  StalenessMeasures staleness;
  std::int64_t updates = 0;
  std::vector<LogicalTensors> worker_values;   // by worker, at the end
  LogicalTensors values, exp_avg, exp_avg_sq;  // of the servers
  std::vector<std::int64_t> batches;           // by worker
  Traffic traffic;                             // of worker 0 and its last batch
  Memory worker_memory;                        // peak of worker 0
  std::vector<Memory> server_memory;           // peak, by server
};

ServedOutcome run_served(const Plan& plan, const OptimizerOptions& optimizer, const AsynchronousRun& run,
                         const SampleSource& samples, Straggler straggler = {-1, 1},
                         const TimedJob& timed = {}) {
  const int workers = plan.mesh.size(Axis::dp), servers = run.options.servers;
  ServedOutcome o;
  o.worker_values.resize(static_cast<std::size_t>(workers));
  o.batches.resize(static_cast<std::size_t>(workers));
  o.server_memory.resize(static_cast<std::size_t>(servers));
  ThreadWorld world(workers + servers, timed.timeout, timed.hooks, timed.time);
  const Beside beside(timed, world);
  run_ranks(world, [&](int index) {
    Arena arena;
    const auto kernels = make_kernels(arena, plan.precision, 1);
    if (index < workers) {
      const Rank rank(world, plan.mesh, index, plan.precision, arena, *kernels);
      const auto all = join_all(rank, workers, servers);
      const TrainerHooks hooks{.slowdown = index == straggler.rank ? straggler.factor : 1};
      Trainer trainer(rank, plan, optimizer, 1, hooks, nullptr, Moments::elsewhere);
      Traffic before = rank.traffic();
      const auto me = static_cast<std::size_t>(index);
      run_worker(*all, trainer, run, samples, [&] {
        ++o.batches[me];
        if (index == 0) o.traffic = rank.traffic() - std::exchange(before, rank.traffic());
      });
      if (index == 0) o.worker_memory = arena.peak();
      o.worker_values[me] = gather(rank, trainer, ParameterTensor::value);
      return;
    }
    const Plan served = server_plan(plan, servers);
    const Rank rank(world, served.mesh, index - workers, plan.precision, arena, *kernels, Collectives::direct,
                    workers);
    const auto all = join_all(rank, workers, servers);
    ParameterServerRank server(rank, plan, optimizer, 1, run);
    const bool leads = rank.index() == 0;
    const StalenessMeasures staleness = server.serve(*all, [&](const ServedStep& step) {
      if (leads) o.steps.push_back(step);
      o.server_memory[static_cast<std::size_t>(rank.index())] = arena.peak();
    });
    const auto gathered = [&](ParameterTensor which) {
      LogicalTensors tensors;
      for (const Parameter& p : server.parameters().all())
        tensors[p.spec.name] = as_doubles(gather_logical(rank, p, which));
      return tensors;
    };
    const LogicalTensors values = gathered(ParameterTensor::value),
                         first = gathered(ParameterTensor::exp_avg),
                         second = gathered(ParameterTensor::exp_avg_sq);
    if (!leads) return;
    o.staleness = staleness;
    o.updates = server.updates();
    o.values = values;
    o.exp_avg = first;
    o.exp_avg_sq = second;
  });
  return o;
}

AsynchronousRun a_run(std::optional<std::int64_t> staleness, int servers, std::int64_t steps) {
  return {{staleness, servers}, 0, steps};
}

OptimizerOptions clipping_options(std::int64_t steps) {
  OptimizerOptions options;
  options.lr = 1e-2;
  options.warmup_steps = 2;
  options.total_steps = steps;
  options.clip = 0.3;
  return options;
}

std::vector<StepResult> results_of(const Plan& plan, const OptimizerOptions& optimizer, std::int64_t steps) {
  std::vector<StepResult> results;
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, optimizer, 1);
    for (std::int64_t step = 0; step < steps; ++step) {
      const StepResult result = trainer.step(step, random_samples(plan), steps - step).back();
      if (rank.index() == 0) results.push_back(result);
    }
  });
  return results;
}

TEST(Asynchronous, StalenessZeroIsSynchronousToTheLastBit) {
  constexpr std::int64_t steps = 4;
  std::vector<DType> dtypes{DType::f64};
  if (has_cpu_kernels()) dtypes.push_back(DType::f32);
  for (DType dtype : dtypes)
    for (const auto& [workers, servers] : {std::pair{1, 1}, {2, 1}, {3, 2}, {4, 3}}) {
      const ModelSpec model = workers % 2 == 0 ? odd_gpt2() : odd_llama();
      const Plan plan = odd_plan(model, workers, 1, false, dtype);
      SCOPED_TRACE(fmt::format("{}, servers {}", describe(plan), servers));
      const OptimizerOptions options = clipping_options(steps);
      const Outcome expected = run_steps(plan, options, steps, random_samples(plan))[0];
      const ServedOutcome served = run_served(plan, options, a_run(0, servers, steps), random_samples(plan));
      ASSERT_EQ(served.steps.size(), static_cast<std::size_t>(steps));
      bool clipped = false;
      for (std::size_t i = 0; i < served.steps.size(); ++i) {
        EXPECT_EQ(served.steps[i].result.loss, expected.losses[i]);
        EXPECT_EQ(served.steps[i].result.gradient_norm, expected.norms[i]);
        EXPECT_EQ(served.steps[i].sequences, plan.global_batch);
        clipped = clipped || expected.norms[i] > options.clip;
      }
      EXPECT_TRUE(clipped);
      EXPECT_TRUE(served.values == expected.values);
      EXPECT_TRUE(served.exp_avg == expected.exp_avg);
      EXPECT_TRUE(served.exp_avg_sq == expected.exp_avg_sq);
      for (const LogicalTensors& values : served.worker_values) EXPECT_TRUE(values == expected.values);
      EXPECT_EQ(served.updates, steps);
      EXPECT_EQ(served.staleness.histogram, std::vector<std::int64_t>{workers * steps});
      EXPECT_EQ(served.staleness.max_updates_late, 0);
    }
}

// Of the token behind the next one where a model predicts it, too.
TEST(Asynchronous, BothLossesAreThoseOfTheWorkers) {
  ModelSpec model = odd_llama();
  model.num_mtp_layers = 1;
  for (const auto& [workers, bound] : {std::pair{2, 0}, {1, 1}}) {
    const Plan plan = odd_plan(model, workers, 1, false);
    const OptimizerOptions options = clipping_options(3);
    const std::vector<StepResult> expected = results_of(plan, options, 3);
    const ServedOutcome served = run_served(plan, options, a_run(bound, 2, 3), random_samples(plan));
    ASSERT_EQ(served.steps.size(), 3u);
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_GT(expected[i].mtp_loss, 0);
      EXPECT_EQ(served.steps[i].result.loss, expected[i].loss);
      EXPECT_EQ(served.steps[i].result.mtp_loss, expected[i].mtp_loss);
    }
    EXPECT_TRUE(served.traffic ==
                predict_worker_traffic(plan, PipelineLayout(plan), a_run(bound, 2, 3).options));
  }
  // With a bound the mean over the targets of a step's pushes. The last of 11 tokens has nothing to predict.
  const Plan plan = odd_plan(model, 2, 1, false);
  const ServedOutcome served = run_served(plan, clipping_options(3), a_run(1, 1, 3), random_samples(plan));
  for (const ServedStep& step : served.steps) EXPECT_NEAR(step.result.mtp_loss, std::log(53) * 10 / 11, 0.1);
}

// One worker is never late: every push is an update with the gradient of the values that it changes.
TEST(Asynchronous, OneWorkerWithoutABoundIsOneRank) {
  const Plan plan = odd_plan(odd_llama(), 1, 1, false);
  const OptimizerOptions options = clipping_options(5);
  const Outcome expected = run_steps(plan, options, 5, random_samples(plan))[0];
  const ServedOutcome served = run_served(plan, options, a_run({}, 2, 5), random_samples(plan));
  EXPECT_TRUE(served.values == expected.values);
  EXPECT_TRUE(served.exp_avg_sq == expected.exp_avg_sq);
  EXPECT_EQ(served.staleness.max_updates_late, 0);
}

// Samples whose worker `late` begins its first batch only when the others have begun `batches` in all, so
// that what follows depends on no clock of the machine.
class LateWorker {
 public:
  LateWorker(const Plan& plan, int late, std::int64_t batches)
      : inner_(random_samples(plan)), late_(dp_samples(plan, late).begin), batches_(batches) {
    for (int w = 0; w < plan.mesh.size(Axis::dp); ++w) firsts_.push_back(dp_samples(plan, w).begin);
  }
  SampleSource source() {
    return [this](std::int64_t step, std::int64_t sample, std::int32_t* tokens, std::int32_t* targets) {
      if (sample == late_ && step == 0) {
        wait_until([&] { return begun_ >= batches_; });
      } else if (sample != late_ && std::find(firsts_.begin(), firsts_.end(), sample) != firsts_.end()) {
        ++begun_;
      }
      inner_(step, sample, tokens, targets);
    };
  }

 private:
  SampleSource inner_;
  std::int64_t late_, batches_;
  std::vector<std::int64_t> firsts_;  // the first sample of each worker
  std::atomic<std::int64_t> begun_{0};
};

std::int64_t sum_of(const std::vector<std::int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

TEST(Asynchronous, TheBoundHoldsUnderAStraggler) {
  constexpr std::int64_t steps = 6;
  const Plan plan = odd_plan(odd_gpt2(), 3, 1, false);
  for (const auto& [bound, servers] : {std::pair{1, 1}, {3, 2}}) {
    SCOPED_TRACE(fmt::format("bound {}, servers {}", bound, servers));
    LateWorker late(plan, 1, 2 * (bound + 1));  // as far as the other two may go
    const ServedOutcome served =
        run_served(plan, clipping_options(steps), a_run(bound, servers, steps), late.source(), {1, 10});
    EXPECT_EQ(served.staleness.histogram.size(), static_cast<std::size_t>(bound) + 1);  // reached, not passed
    EXPECT_EQ(sum_of(served.staleness.histogram), 3 * steps);
    EXPECT_EQ(sum_of(served.batches), 3 * steps);
    // Between a worker's pull and its push each other one goes at most from `bound` behind it to `bound`
    // ahead.
    EXPECT_LE(served.staleness.max_updates_late, 2 * (2 * bound + 1));
    EXPECT_EQ(served.updates, 3 * steps);
    EXPECT_EQ(served.steps.size(), static_cast<std::size_t>(steps));
    for (const LogicalTensors& values : served.worker_values) EXPECT_TRUE(values == served.values);
  }
}

TEST(Asynchronous, WithoutABoundTheOthersDoTheWorkOfAStraggler) {
  constexpr std::int64_t steps = 5;
  const Plan plan = odd_plan(odd_gpt2(), 3, 1, false);
  LateWorker late(plan, 2, 3 * steps - 1);
  const ServedOutcome served = run_served(plan, clipping_options(steps), a_run({}, 2, steps), late.source());
  EXPECT_LE(served.batches[2], 1);
  EXPECT_EQ(sum_of(served.batches), 3 * steps);
  EXPECT_EQ(sum_of(served.staleness.histogram), 3 * steps);
  // Before the late worker's push the faster of the two others was at batch half of theirs.
  EXPECT_GE(served.staleness.histogram.size(), static_cast<std::size_t>((3 * steps - 1) / 2));
  std::int64_t sequences = 0;
  for (const ServedStep& step : served.steps) sequences += step.sequences;
  EXPECT_EQ(sequences, 3 * served.batches[0] + 2 * (served.batches[1] + served.batches[2]));
}

TEST(Asynchronous, AStragglerSleepsInProportionToItsWork) {
  const Plan plan = odd_plan(odd_gpt2(), 1, 1, false);
  Time time = time_of_each_thread(std::chrono::milliseconds(1));
  double slept = 0;
  time.sleep = [&](Clock::duration d) { slept += std::chrono::duration<double>(d).count(); };
  ThreadWorld world(1, patience, {}, time);
  run_ranks(world, [&](int index) {
    Arena arena;
    const auto kernels = make_kernels(arena, plan.precision, 1);
    const Rank rank(world, plan.mesh, index, plan.precision, arena, *kernels);
    Trainer trainer(rank, plan, {}, 1, {.slowdown = 20});
    trainer.compute_gradients(0, random_samples(plan));
    double passes = 0;
    for (const Span& span : trainer.last_run().spans) passes += span.end - span.begin;
    EXPECT_GT(passes, 0);
    EXPECT_NEAR(slept, 19 * passes, 1e-9);
  });
}

// Batches of 1 second, of worker 0 `factor` seconds, given out under the bound until none is left: seconds
// until the last is done.
double play(double factor, int workers, std::int64_t steps, std::optional<std::int64_t> bound) {
  struct Worker {
    double free_at = 0;
    std::int64_t done = 0;
    bool busy = false;
  };
  std::vector<Worker> all(static_cast<std::size_t>(workers));
  double now = 0;
  for (std::int64_t left = steps * workers;;) {
    std::int64_t slowest = all[0].done;
    for (const Worker& w : all) slowest = std::min(slowest, w.done);
    for (Worker& w : all)
      if (!w.busy && left > 0 && (!bound || w.done - slowest <= *bound)) {
        w.busy = true;
        w.free_at = now + (&w == &all[0] ? factor : 1.0);
        --left;
      }
    Worker* next = nullptr;
    for (Worker& w : all)
      if (w.busy && (next == nullptr || w.free_at < next->free_at)) next = &w;
    if (next == nullptr) return now;
    now = next->free_at;
    next->busy = false;
    ++next->done;
  }
}

// To within the batches that are under way when the last one is given out.
TEST(Asynchronous, AStragglersSlowdownIsPredicted) {
  for (int workers : {1, 2, 4, 7})
    for (double factor : {1.0, 1.5, 4.0, 10.0})
      for (std::optional<std::int64_t> bound :
           {std::optional<std::int64_t>(), std::optional<std::int64_t>(0), std::optional<std::int64_t>(1),
            std::optional<std::int64_t>(5), std::optional<std::int64_t>(100)}) {
        constexpr std::int64_t steps = 200;
        const double predicted = straggler_slowdown(factor, workers, steps, {bound, 1});
        EXPECT_NEAR(play(factor, workers, steps, bound), predicted * steps, 2 * factor)
            << workers << " workers, " << factor << " times, bound " << bound.value_or(-1);
      }
}

TEST(Asynchronous, TrafficAndMemoryAreThoseThatWerePredicted) {
  for (std::optional<std::int64_t> bound : {std::optional<std::int64_t>(0), std::optional<std::int64_t>(1)})
    for (int servers : {1, 3, 24}) {
      SCOPED_TRACE(fmt::format("servers {}, bound {}", servers, *bound));
      const Plan plan = odd_plan(odd_llama(), 2, 1, false);
      const PipelineLayout pipeline(plan);
      const AsynchronousRun run = a_run(bound, servers, 4);
      const ServedOutcome served = run_served(plan, clipping_options(4), run, random_samples(plan));
      EXPECT_TRUE(served.traffic == predict_worker_traffic(plan, pipeline, run.options));
      Memory predicted = predict_memory(plan, pipeline, {}, {.is_worker = true});
      predicted[MemoryCategory::other] = served.worker_memory[MemoryCategory::other];
      EXPECT_EQ(served.worker_memory, predicted);
      for (int server = 0; server < servers; ++server) {
        Memory memory = predict_server_memory(plan, pipeline, run.options, server);
        const Memory& measured = served.server_memory[static_cast<std::size_t>(server)];
        memory[MemoryCategory::other] = measured[MemoryCategory::other];
        EXPECT_EQ(measured, memory) << server;
      }
    }
}

// Nobody waits for ever: neither for a worker that fails, nor for one that never comes.
TEST(Asynchronous, AFailingWorkerEndsTheJob) {
  const Plan plan = odd_plan(odd_gpt2(), 2, 1, false);
  const SampleSource good = random_samples(plan);
  // With a bound, worker 0 is certain to come to these steps.
  for (std::int64_t bound : {0, 1})
    expect_contains(message_of<RunError>([&] {
                      run_served(plan, clipping_options(50), a_run(bound, 2, 50),
                                 [&](std::int64_t step, std::int64_t sample, std::int32_t* tokens,
                                     std::int32_t* targets) {
                                   if (step == 2 && sample == 0) fail("planted");
                                   good(step, sample, tokens, targets);
                                 });
                    }),
                    {"planted"});
  // Worker 0 stays in its second batch until the others have been given up.
  TurnedClock clock;
  std::atomic<bool> is_stuck{false}, given_up{false};
  const SampleSource stuck = [&](std::int64_t step, std::int64_t sample, std::int32_t* tokens,
                                 std::int32_t* targets) {
    if (step == 1 && sample == 0) {
      is_stuck = true;
      wait_until([&] { return given_up.load(); });
    }
    good(step, sample, tokens, targets);
  };
  TimedJob timed{std::chrono::milliseconds(150), clock.time(), {}, {}};
  timed.hooks.last_resort = [&] { given_up = true; };
  timed.beside = [&](ThreadWorld&) {
    wait_until([&] { return is_stuck.load(); });
    wait_until([&] {
      clock.turn(std::chrono::milliseconds(10));
      return given_up.load();
    });
  };
  expect_contains(message_of<CommError>([&] {
                    run_served(plan, clipping_options(50), a_run(1, 1, 50), stuck, {-1, 1}, timed);
                  }),
                  {"waited 150 ms for rank"});
}

TEST(Asynchronous, WhatAServerCannotServeIsRefused) {
  const Plan good = odd_plan(odd_gpt2(), 2, 1, false);
  EXPECT_NO_THROW(refuse_asynchronous(good, {}));
  const auto refused = [](const Plan& plan, const AsynchronousOptions& options,
                          const std::vector<std::string>& words) {
    expect_contains(message_of<RequestError>([&] { refuse_asynchronous(plan, options); }), words);
  };
  refused(odd_plan(odd_gpt2(), 2, 2, false), {}, {"--staleness inf", "--tp 1"});
  Plan plan = good;
  plan.mesh.set(Axis::pp, 2);
  refused(plan, {4, 1}, {"--staleness 4", "--pp 1"});
  plan = good;
  plan.zero = 2;
  refused(plan, {}, {"--zero 0"});
  plan = good;
  plan.optimizer_barrier = false;
  refused(plan, {}, {"--optimizer-barrier on"});
  plan = good;
  plan.mesh.ep = 2;
  for (std::optional<std::int64_t> bound : {0, 1})
    refused(plan, {bound, 1}, {"--staleness", "legal: --ep 1"});
  refused(good, {-1, 1}, {"--staleness -1", "inf"});
  refused(good, {{}, 0}, {"--servers 0", "1 to 1022"});
  refused(good, {{}, 1023}, {"--servers 1023"});
}

}  // namespace
}  // namespace echelon::asynchronous_test

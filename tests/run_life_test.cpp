#include "plan/run_life.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "base/error.h"
#include "refusals.h"

namespace echelon::run_life_test {
namespace {

constexpr double hour = 3600, day = 24 * hour;

// Grattafiori et al. 2024, section 3.3.4: 54 days on 16,384 H100, 419 interruptions that nobody had planned,
// more than 90% of the time effective.
constexpr std::int64_t llama_gpus = 16384;
Failures llama3() {
  Failures f;
  f.device_mtbf_seconds = 54 * day * static_cast<double>(llama_gpus) / 419;
  return f;
}

TEST(RunLife, TheBestIntervalIsTheMinimumOfTheFormula) {
  for (double save : {0.5, 10.0, 60.0, 300.0}) {
    Failures f = llama3();
    f.restart_seconds = 300;
    f.save_seconds = save;
    const double best = best_checkpoint_seconds(f, llama_gpus);
    const double reached = expected_goodput(f, llama_gpus, best);
    double most = 0;
    for (double interval = 1; interval < 20'000; interval *= 1.01)
      most = std::max(most, expected_goodput(f, llama_gpus, interval));
    EXPECT_NEAR(reached / most, 1, 1e-4) << save;
    EXPECT_LT(expected_goodput(f, llama_gpus, best / 2), reached) << save;
    EXPECT_LT(expected_goodput(f, llama_gpus, best * 2), reached) << save;
  }
}

// Of every length, with writes beside training and failures while the others restart.
TEST(RunLife, TheFormulaIsTheSimulation) {
  for (double save : {1.0, 30.0})
    for (double write : {0.0, 120.0})
      for (double restart : {0.0, 600.0, 5000.0})
        for (double interval : {200.0, 1500.0, 8000.0}) {
          Failures f = llama3();
          f.save_seconds = save;
          f.write_seconds = write;
          f.restart_seconds = restart;
          const double mtbf = f.mtbf_seconds(llama_gpus);
          const SimulatedRun run = simulate_run(f, llama_gpus, interval, 100'000 * mtbf, 7);
          EXPECT_NEAR(run.goodput / expected_goodput(f, llama_gpus, interval), 1, 0.02)
              << save << " " << write << " " << restart << " " << interval;
          EXPECT_EQ(run.waited_seconds, 0);
        }
}

// What its authors do not say, how long a restart and a save take, is held to what they can be: with the best
// interval more than 90% is reached where the two are short, and cannot be where a restart takes half an
// hour.
TEST(RunLife, Llama3IsAboveNinetyPercent) {
  Failures f = llama3();
  EXPECT_NEAR(f.device_mtbf_seconds / hour, 50'677, 1);
  f.save_seconds = 5;
  f.restart_seconds = 600;
  const double interval = best_checkpoint_seconds(f, llama_gpus);
  EXPECT_GT(expected_goodput(f, llama_gpus, interval), 0.90);
  const SimulatedRun run = simulate_run(f, llama_gpus, interval, 54 * day, 1);
  fmt::print("Llama 3: a checkpoint each {:.0f} s, expected {:.1f}%, simulated {:.1f}% with {} failures\n",
             interval, 100 * expected_goodput(f, llama_gpus, interval), 100 * run.goodput, run.failures);
  EXPECT_GT(run.goodput, 0.90);
  // Devices do not fail while the others restart more often than Poisson's spread allows.
  EXPECT_NEAR(static_cast<double>(run.failures), 419, 4 * std::sqrt(419.0));
  f.restart_seconds = 1800;
  EXPECT_LT(expected_goodput(f, llama_gpus, best_checkpoint_seconds(f, llama_gpus)), 0.90);
}

// A save that is written beside training costs less than one that halts it as long.
TEST(RunLife, AsynchronousSavesGain) {
  Failures halting = llama3(), beside = llama3();
  halting.save_seconds = 120;
  beside.save_seconds = 2;
  beside.write_seconds = 118;
  const auto best = [](const Failures& f) {
    return expected_goodput(f, llama_gpus, best_checkpoint_seconds(f, llama_gpus));
  };
  EXPECT_GT(best(beside), best(halting) + 0.05);
  EXPECT_GE(best_checkpoint_seconds(beside, llama_gpus), 118);
}

// Erlang: with n devices in repair on average, a handful of spares above n and nothing waits; without any,
// each failure waits for its repair.
TEST(RunLife, SparesRunOut) {
  Failures f = llama3();
  f.repair_seconds = 10 * hour;  // 3.2 in repair
  f.save_seconds = 5;
  const double seconds = 3000 * f.mtbf_seconds(llama_gpus), interval = 500;
  double before = seconds;
  for (int spares : {0, 2, 4, 16}) {
    f.spares = spares;
    const SimulatedRun run = simulate_run(f, llama_gpus, interval, seconds, 3);
    EXPECT_LT(run.waited_seconds, before) << spares;
    before = run.waited_seconds;
    if (spares == 0) {
      EXPECT_NEAR(run.waited_seconds / static_cast<double>(run.failures), 10 * hour, 60);
    }
    if (spares == 16) {
      EXPECT_EQ(run.waited_seconds, 0);
    }
  }
}

Estimate steps_of(double seconds, int gpus) {
  Estimate e;
  e.seconds = seconds;
  e.plan.global_batch = 1000;
  e.plan.seq_len = 100;
  e.plan.mesh.set(Axis::dp, gpus);
  return e;
}

// A short run has its spares from the start. With repairs that outlast it each of two failures takes one, and
// only the third waits; what a run waits for follows from the gamma distribution of when that comes.
TEST(RunLife, AShortRunBeginsWithItsSpares) {
  RunRequest request{1e8};
  Failures& f = request.failures;
  f.device_mtbf_seconds = 64 * 1e6;
  f.save_seconds = 10;
  f.spares = 2;
  f.repair_seconds = 1e7;
  // In steps of a second, or of a thousandth of the run.
  const auto life = [&](double work, double step = 0) {
    return run_cost(steps_of(step > 0 ? step : work / 1000, 64), Workload{},
                    {step > 0 ? work / step * 1e5 : 1e8, 0, f});
  };
  const double work = 1e6, third = 1 - std::exp(-1.0) * 2.5;  // probability of three failures within it
  const RunCost cost = life(work);
  f.spares.reset();
  const double plain = run_cost(steps_of(work / 1000, 64), Workload{}, request).wall_seconds;
  f.spares = 2;
  // Until the first device is back: from 9e6 to 1e7 seconds, for each third failure.
  EXPECT_GT(cost.wall_seconds, plain + 0.9 * third * 9e6);
  EXPECT_LT(cost.wall_seconds, plain + 1.2 * third * 1e7);
  EXPECT_NEAR(cost.failures, 1, 0.1);
  // With spares for all of them nothing waits, and it is as if there were always one.
  f.spares = 20;
  EXPECT_NEAR(life(work).wall_seconds / plain, 1, 2e-3);
  EXPECT_EQ(life(work).wall_seconds, life(work).wall_seconds);
  // In the long run spares that are in repair are what counts, not those of its start.
  f.spares = 2, f.repair_seconds = 3e6;
  const SimulatedRun steady = simulate_run(f, 64, best_checkpoint_seconds(f, 64), 1e11, 5);
  EXPECT_NEAR(life(1e9, 1).goodput / steady.goodput, 1, 0.02);
  EXPECT_GT(life(1e6).goodput, steady.goodput * 1.1);
}

TEST(RunLife, SaysHowManyDevicesFail) {
  Failures f;
  f.device_mtbf_seconds = hour;
  f.restart_seconds = 1e9;
  checks::expect_refusal([&] { validate(f, 1); }, {"--restart-time", "1 device fails every 3600 s"});
  checks::expect_refusal([&] { validate(f, 64); }, {"--restart-time", "64 devices fail every 56.25 s"});
}

TEST(RunLife, TheSameSeedIsTheSameRun) {
  Failures f = llama3();
  f.save_seconds = 5;
  const SimulatedRun one = simulate_run(f, 100'000, 100, 90 * day, 11),
                     again = simulate_run(f, 100'000, 100, 90 * day, 11),
                     other = simulate_run(f, 100'000, 100, 90 * day, 12);
  EXPECT_EQ(one.goodput, again.goodput);
  EXPECT_NE(one.goodput, other.goodput);
  // One draw a failure and one a restart, whatever the number of devices: 4,262 expected.
  EXPECT_NEAR(static_cast<double>(one.failures), 4262, 4 * std::sqrt(4262.0));
}

TEST(RunLife, StepsBecomeDaysHoursMoneyAndEnergy) {
  Estimate e;
  e.seconds = 10;
  e.low = 9;
  e.high = 12;
  e.plan.global_batch = 1000;
  e.plan.seq_len = 100;
  e.plan.mesh.set(Axis::dp, 8);
  Workload work;
  work.machine.watts = 700;
  RunRequest request{1e8 + 1, 2};
  const RunCost cost = run_cost(e, work, request);
  EXPECT_EQ(cost.steps, 1001);
  EXPECT_DOUBLE_EQ(cost.wall_seconds, 10'010);
  EXPECT_DOUBLE_EQ(cost.gpu_hours, 10'010 * 8 / hour);
  EXPECT_DOUBLE_EQ(cost.money, 2 * cost.gpu_hours);
  EXPECT_DOUBLE_EQ(cost.joules, 10'010.0 * 8 * 700);
  // 10'010 s are 0.11586 days; 22.244 hours of 8 devices at 2 an hour cost 44.489.
  EXPECT_NE(
      run_text(cost, request).find("80% between 0.1043 and 0.139 days, a cost between 40.04 and 53.39\n"),
      std::string::npos)
      << run_text(cost, request);
  request.failures.device_mtbf_seconds = 8 * 1000;
  request.failures.save_seconds = 5;
  request.failures.restart_seconds = 20;
  const RunCost failing = run_cost(e, work, request);
  EXPECT_LT(failing.goodput, 0.9);
  EXPECT_DOUBLE_EQ(failing.wall_seconds, 10'010 / failing.goodput);
  EXPECT_NEAR(failing.failures, failing.wall_seconds / 1000, 1e-9);
  request.failures.spares = 100;  // simulated: as if there were always one, and paid for
  const RunCost spared = run_cost(e, work, request);
  EXPECT_NEAR(spared.goodput, failing.goodput, 0.005);
  EXPECT_DOUBLE_EQ(spared.gpu_hours, spared.wall_seconds * 108 / hour);
}

TEST(RunLife, RefusesWhatNeverEnds) {
  Failures f = llama3();
  f.restart_seconds = 30 * f.mtbf_seconds(100'000);
  validate(f, 16);
  EXPECT_THROW(validate(f, 100'000), RequestError);
  f = llama3();
  f.spares = -1;
  EXPECT_THROW(validate(f, 16), RequestError);
}

}  // namespace
}  // namespace echelon::run_life_test

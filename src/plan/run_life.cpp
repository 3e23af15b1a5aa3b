#include "plan/run_life.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <queue>
#include <vector>

#include <fmt/format.h>

#include "base/error.h"
#include "base/philox.h"
#include "base/units.h"

namespace echelon {

void validate(const Failures& f, std::int64_t gpus) {
  const auto at_least_0 = [](const char* flag, double value) {
    if (!std::isfinite(value) || value < 0) refuse("{} {}: must be at least 0", flag, value);
  };
  if (!std::isfinite(f.device_mtbf_seconds) || f.device_mtbf_seconds <= 0)
    refuse("--mtbf-hours {}: must be above 0", f.device_mtbf_seconds / 3600);
  at_least_0("--restart-time", f.restart_seconds);
  at_least_0("--save-time", f.save_seconds);
  at_least_0("--write-time", f.write_seconds);
  at_least_0("--repair-hours", f.repair_seconds / 3600);
  if (f.spares && *f.spares < 0) refuse("--spares {}: must be at least 0", *f.spares);
  const double mtbf = f.mtbf_seconds(gpus);
  // Above this a run on so many devices makes no progress for years, and its formulas overflow a double.
  const double most = 20 * mtbf;
  for (const auto& [flag, value] : {std::pair{"--restart-time", f.restart_seconds},
                                    {"--save-time", f.save_seconds},
                                    {"--write-time", f.write_seconds}})
    if (value > most)
      refuse("{} {}: {} fail{} every {:.4g} s, so such a run never ends; at most {:.4g}", flag, value,
             counted(gpus, "device"), gpus == 1 ? "s" : "", mtbf, most);
}

double best_checkpoint_seconds(const Failures& f, std::int64_t gpus) {
  const double mtbf = f.mtbf_seconds(gpus), save = f.save_seconds, part = save / (2 * mtbf);
  const double best =
      part < 1 ? std::sqrt(2 * save * mtbf) * (1 + std::sqrt(part) / 3 + part / 9) - save : mtbf;
  return std::max({best, f.write_seconds, 1.0});  // a save that costs nothing: one each second
}

double expected_goodput(const Failures& f, std::int64_t gpus, double interval) {
  const double mtbf = f.mtbf_seconds(gpus);
  return interval / mtbf * std::exp(-(f.restart_seconds + f.write_seconds) / mtbf) /
         std::expm1((interval + f.save_seconds) / mtbf);
}

SimulatedRun simulate_run(const Failures& f, std::int64_t gpus, double interval, double seconds,
                          std::uint64_t seed) {
  return simulate_work(f, gpus, interval, std::numeric_limits<double>::infinity(), seconds, seed);
}

SimulatedRun simulate_work(const Failures& f, std::int64_t gpus, double interval, double wanted,
                           double seconds, std::uint64_t seed) {
  const Philox random(seed, Stream::sampling, 0);
  const double mtbf = f.mtbf_seconds(gpus), cycle = interval + f.save_seconds;
  std::uint64_t draws = 0;
  const auto until_failure = [&] { return -mtbf * std::log1p(-random.uniform(draws++)); };
  SimulatedRun run;
  std::int64_t spares = f.spares.value_or(0);
  // When each device in repair returns.
  std::priority_queue<double, std::vector<double>, std::greater<>> repaired;
  double now = 0, work = 0;
  const auto replace_device = [&] {
    ++run.failures;
    if (!f.spares) return;
    repaired.push(now + f.repair_seconds);
    for (; !repaired.empty() && repaired.top() <= now; repaired.pop()) ++spares;
    if (spares == 0) {
      const double back = repaired.top();
      run.waited_seconds += std::min(back, seconds) - now;
      now = back;
      repaired.pop();
    } else {
      --spares;
    }
  };
  bool is_done = false;
  while (now < seconds) {
    const double fails = until_failure(), left_work = wanted - work;
    // Nothing is saved after the last interval.
    const double needed =
        std::isinf(wanted) ? wanted : left_work + f.save_seconds * (std::ceil(left_work / interval) - 1);
    is_done = fails >= needed && now + needed <= seconds;
    if (is_done) {
      now += needed;
      work = wanted;
      break;
    }
    if (now + fails >= seconds) {
      const double left = seconds - now, whole = std::floor(left / cycle);
      work += whole * interval + std::min(left - whole * cycle, interval);
      break;
    }
    work += interval * std::max(0.0, std::floor((fails - f.write_seconds) / cycle));
    now += fails;
    // A device that fails during the restart starts the restart again.
    for (bool restarted = false; !restarted && now < seconds;) {
      replace_device();
      const double again = until_failure();
      restarted = again >= f.restart_seconds;
      now += std::min(again, f.restart_seconds);
    }
  }
  run.seconds = is_done ? now : seconds;
  run.goodput = work / run.seconds;
  return run;
}

namespace {

struct MeanLife {
  double goodput = 0, failures = 0;
};

// The mean over runs that together have enough failures to know the mean to about a tenth of a percent. Short
// runs start with all spares, and may end before all of them are in repair; for a run that has all these
// failures by itself the start does not matter.
MeanLife mean_life(const Failures& f, std::int64_t gpus, double interval, double work) {
  constexpr double enough = 100'000;  // failures
  const double mtbf = f.mtbf_seconds(gpus), most_seconds = enough * mtbf;
  const auto of_one = [&] {
    const SimulatedRun run = simulate_run(f, gpus, interval, most_seconds, 0);
    return MeanLife{run.goodput, static_cast<double>(run.failures) * work / (run.goodput * run.seconds)};
  };
  const double failures_of_one = std::max(1.0, work / mtbf / expected_goodput(f, gpus, interval));
  if (!(failures_of_one < enough)) return of_one();
  const auto lives = static_cast<std::uint64_t>(enough / failures_of_one);
  double seconds = 0, failures = 0;
  for (std::uint64_t seed = 0; seed < lives; ++seed) {
    const SimulatedRun one = simulate_work(f, gpus, interval, work, most_seconds, seed);
    if (one.seconds >= most_seconds) return of_one();  // such runs do not end
    seconds += one.seconds, failures += static_cast<double>(one.failures);
  }
  const auto n = static_cast<double>(lives);
  return {work / (seconds / n), failures / n};
}

}  // namespace

RunCost run_cost(const Estimate& e, const Workload& work, const RunRequest& request) {
  const Failures& f = request.failures;
  const std::int64_t gpus = e.plan.mesh.num_ranks();
  const double step_tokens = static_cast<double>(e.plan.global_batch) * static_cast<double>(e.plan.seq_len);
  RunCost cost;
  cost.steps = static_cast<std::int64_t>(std::ceil(request.tokens / step_tokens));
  cost.training_seconds = static_cast<double>(cost.steps) * e.seconds;
  const bool fails = f.device_mtbf_seconds > 0;
  if (fails) {
    validate(f, gpus);
    const double mtbf = f.mtbf_seconds(gpus);
    // After a whole step, and no later than the last one.
    const double steps = std::ceil(best_checkpoint_seconds(f, gpus) / e.seconds);
    cost.checkpoint_seconds = std::min(steps * e.seconds, cost.training_seconds);
    MeanLife life{expected_goodput(f, gpus, cost.checkpoint_seconds)};
    if (f.spares)
      life = mean_life(f, gpus, cost.checkpoint_seconds, cost.training_seconds);
    else
      life.failures = cost.training_seconds / life.goodput / mtbf;
    cost.goodput = life.goodput;
    if (!(cost.goodput > 0))
      refuse("--mtbf-hours {}: {} fail{} every {:.4g} s, and such a run never ends",
             f.device_mtbf_seconds / 3600, counted(gpus, "device"), gpus == 1 ? "s" : "", mtbf);
    cost.failures = life.failures;
  }
  cost.wall_seconds = cost.training_seconds / cost.goodput;
  const double hours = cost.wall_seconds / 3600;
  cost.gpu_hours = hours * static_cast<double>(gpus + f.spares.value_or(0));
  cost.money = cost.gpu_hours * request.price;
  cost.joules = cost.wall_seconds * static_cast<double>(gpus) * work.machine.watts;
  cost.low = e.low / e.seconds;
  cost.high = e.high / e.seconds;
  return cost;
}

std::string run_text(const RunCost& cost, const RunRequest& request) {
  constexpr double day = seconds_a_day;
  std::string text = fmt::format("\n{:.4g} tokens are {}: {:.4g} days of training without a failure\n",
                                 request.tokens, counted(cost.steps, "step"), cost.training_seconds / day);
  if (cost.checkpoint_seconds > 0)
    text += fmt::format("goodput {:.1f}%, {}: {}, a checkpoint after each {} of work{}; {:.4g} days in all\n",
                        100 * cost.goodput, request.failures.spares ? "simulated" : "expected",
                        counted(std::llround(cost.failures), "failure"),
                        format_whole_seconds(cost.checkpoint_seconds),
                        request.failures.save_seconds > 0 ? "" : " that takes no time (--save-time 0)",
                        cost.wall_seconds / day);
  text += fmt::format("{:.4g} GPU-hours", cost.gpu_hours);
  if (request.price > 0) text += fmt::format(", {:.4g} at {:.4g} an hour", cost.money, request.price);
  if (cost.joules > 0)
    text += fmt::format(", {:.4g} MWh of the GPUs at their design power", cost.joules / 3.6e9);
  const auto between = [&](double value) {
    return fmt::format("{:.4g} and {:.4g}", cost.low * value, cost.high * value);
  };
  text += fmt::format("\n80% between {} days", between(cost.wall_seconds / day));
  if (request.price > 0) text += fmt::format(", a cost between {}", between(cost.money));
  return text + "\n";
}

}  // namespace echelon

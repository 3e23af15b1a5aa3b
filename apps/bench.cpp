// `bench`: the measurements in docs/performance.md, as ratios to the machine's own limits, which are measured
// in the same run. `bench train`.
#include <fmt/core.h>
#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "apps/bench.h"
#include "apps/flags.h"
#include "apps/help.h"
#include "apps/progress_line.h"
#include "base/error.h"
#include "base/json_text.h"
#include "base/units.h"
#include "tensor/prepare_kernels.h"
#include "train/metrics.h"
#include "train/random_tokens.h"
#include "train/refuse_request.h"
#include "train/this_machine.h"
#include "train/trainer.h"

namespace echelon {
namespace {

using nlohmann::ordered_json;

double peak_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024.0;
}

struct BenchTrainFlags {
  PlanFlags plan;
  RunFlags run;
  std::int64_t steps = 5;
  bool json = false;
};

Plan bench_defaults() {
  Plan plan;
  plan.model = load_model("gpt2-124m");
  plan.global_batch = 4;
  plan.micro_batch = 4;
  plan.seq_len = 1024;
  return plan;
}

int bench_train(BenchTrainFlags& f) {
  const Plan plan = f.plan.plan();
  if (f.steps < 1 || f.steps > most_repeats)
    refuse("--steps {}: must be from 1 to {}", f.steps, most_repeats);
  const RunOptions run = f.run.options(plan);
  refuse_on_device(plan, run);
  DeviceDriver* const driver = run.driver.get();
  refuse_beyond_memory(plan, plan.mesh.num_ranks() * predicted_bytes(plan), run);
  const SampleSource random = random_tokens(plan, 1);
  OptimizerOptions optimizer;
  optimizer.lr = 3e-4;
  optimizer.warmup_steps = 0;
  optimizer.total_steps = f.steps + 1;
  if (driver == nullptr) prepare_kernels(plan.precision);
  std::vector<double> step_seconds, peaks;
  double loss = 0, resident = 0;
  std::int64_t memory = 0, held = 0, allocations = 0;
  const int ranks = plan.mesh.num_ranks();
  const int cores = available_cores(), threads = std::min(run.threads_per_rank, cores);
  const int workers = std::min(cores, ranks * run.threads_per_rank),
            teams = std::clamp(cores / threads, 1, ranks);
  ThreadWorld world(ranks, run.timeout);
  std::optional<ProgressLine> line(std::in_place, "bench train", f.json);
  const Progress progress = line->progress();
  const auto body = [&](int index) {
    Arena arena(driver, run.device_of(index));
    const auto kernels = make_kernels(arena, plan.precision, run.threads_per_rank, plan.numerics);
    const Rank rank(world, plan.mesh, index, plan.precision, arena, *kernels, run.collectives);
    Trainer trainer(rank, plan, optimizer, 1);
    const auto meet = [&] {
      for (Axis axis : all_axes) rank.along(axis).barrier().wait();
    };
    for (std::int64_t step = 0; step <= f.steps; ++step) {
      if (index == 0)
        report(progress, static_cast<double>(step) / static_cast<double>(f.steps + 1),
               step == 0 ? "warming up" : fmt::format("step {} of {}", step, f.steps));
      meet();
      const std::int64_t allocations_before = arena.system_allocations();
      const auto begin = Clock::now();
      const std::vector<StepResult> known = trainer.step(step, random, f.steps + 1 - step);
      arena.synchronize();
      meet();
      const double seconds = seconds_since(begin);
      if (index == 0 && step > 0) {  // the first step allocates
        step_seconds.push_back(seconds);
        allocations += arena.system_allocations() - allocations_before;
        // The limit is measured between the steps, while the other ranks wait, in separate memory.
        if (step == 1) resident = peak_resident_bytes();
        peaks.push_back(driver != nullptr
                            ? measure_device_matmul_flops(*driver, run.device_of(0), plan.precision) *
                                  run.devices_in_use(ranks)
                            : measure_matmul_flops(plan.precision, teams, threads, 2048) / (teams * threads) *
                                  workers);
      }
      if (index == 0 && !known.empty()) loss = known.back().loss;
    }
    if (index == 0) {
      memory = arena.peak().total();
      held = static_cast<std::int64_t>(arena.held_bytes());
    }
  };
  run_ranks(world, naming_lost_ranks(run, ranks, body));
  line.reset();
  const Spread seconds = spread_of(step_seconds), peak = spread_of(peaks);
  const auto tokens = static_cast<double>(plan.global_batch * plan.seq_len);
  const double flops = tokens * model_flops_per_token(plan.model, plan.seq_len);
  Utilization utilization(peak.most);
  utilization.raise(flops / seconds.least);
  const double mfu = utilization.of(flops / seconds.median);
  std::FILE* out = f.json ? stderr : stdout;
  fmt::print(out, "{}\n", cpu_name());
  fmt::print(out, "{} {}, {}, {} a rank, batch {} x {} ({} at once on a rank)\n", plan.model.name,
             plan.precision.name, plan.mesh.describe(), counted(run.threads_per_rank, "thread"),
             plan.global_batch, counted(plan.seq_len, "token"), sequences_at_once(plan));
  fmt::print(out, "{:.0f} tokens/s (median of {}; step {:.3f} s, {:.3f} to {:.3f})\n",
             tokens / seconds.median, counted(f.steps, "step"), seconds.median, seconds.least, seconds.most);
  if (driver != nullptr)
    fmt::print(out,
               "MFU {:.1f}% of the {:.1f} TFLOP/s that {} x {} reach{} (best of {}, measured between "
               "steps)\n",
               100 * mfu, utilization.peak_flops() / 1e12, run.devices_in_use(ranks),
               driver->properties(0).name, run.devices_in_use(ranks) == 1 ? "es" : "", peaks.size());
  else
    fmt::print(out,
               "MFU {:.1f}% of the {:.1f} GFLOP/s that {} reach{} on 2048^3 by {} (best of {}, measured "
               "between steps; median {:.1f})\n",
               100 * mfu, utilization.peak_flops() / 1e9, counted(workers, "thread"),
               workers == 1 ? "es" : "", products_by(plan.precision), peaks.size(), peak.median / 1e9);
  fmt::print(out,
             "memory of rank 0: {} at the peak, {} held; of the process: {} resident at most; {} "
             "in the measured steps\n",
             format_bytes(static_cast<double>(memory)), format_bytes(static_cast<double>(held)),
             format_bytes(resident), counted(allocations, "allocation"));
  if (f.json)
    fmt::print(
        "{}\n",
        json_text(ordered_json{
            {"cpu", cpu_name()},
            {"device", driver != nullptr ? driver->properties(0).name : "cpu"},
            {"model", plan.model.name},
            {"dtype", plan.precision.name},
            {"ranks", ranks},
            {"threads_per_rank", run.threads_per_rank},
            {"tokens_per_second", tokens / seconds.median},
            {"step_seconds", {{"min", seconds.least}, {"median", seconds.median}, {"max", seconds.most}}},
            {"matmul_flops", utilization.peak_flops()},
            {"mfu", mfu},
            {"memory_bytes", memory},
            {"peak_resident_bytes", resident},
            {"steady_state_allocations", allocations},
            {"final_loss", loss}}));
  return 0;
}

}  // namespace

Spread spread_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {values.front(), values[values.size() / 2], values.back()};
}

std::string processor_name() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown CPU";
}

std::string cpu_name() {
  std::ifstream in("/proc/cpuinfo");
  std::string line;
  bool avx512 = false, avx2 = false;
  while (std::getline(in, line)) {
    if (line.starts_with("flags")) {
      avx512 = line.find(" avx512f") != std::string::npos;
      avx2 = line.find(" avx2") != std::string::npos;
      break;
    }
  }
  return fmt::format("{} ({}), {}", processor_name(),
                     avx512 ? "AVX-512"
                     : avx2 ? "AVX2"
                            : "no AVX2",
                     counted(available_cores(), "core"));
}

void add_bench(CLI::App& program, int& status) {
  CLI::App& app = *program.add_subcommand("bench", "Measure speeds, as docs/performance.md shows them");
  app.require_subcommand(0, 1);
  app.callback([&app] {
    if (app.get_subcommands().empty())
      refuse("bench: what to measure is missing; legal: train, kernels, comm, context");
  });

  auto train_flags = std::make_shared<BenchTrainFlags>();
  CLI::App& train = *app.add_subcommand("train", "Training steps on random tokens: tokens/s, MFU, memory");
  heading(train, common_flags);
  add_number(train, "--steps", train_flags->steps, "Measured steps, after one to warm up");
  train.add_flag("--json", train_flags->json, "One JSON object on standard output");
  train_flags->plan.add_to(train, bench_defaults());
  train_flags->run.add_to(train);
  train.callback([train_flags, &status] { status = bench_train(*train_flags); });

  add_bench_kernels(app, status);
  add_bench_comm(app, status);
  add_bench_context(app, status);
}

}  // namespace echelon

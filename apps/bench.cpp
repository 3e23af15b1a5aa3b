// The measurements in docs/performance.md. Speeds are ratios to the machine's own limits, measured in the
// same run.
#include <fmt/core.h>
#include <sys/resource.h>

#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <thread>

#include "apps/flags.h"
#include "base/error.h"
#include "base/philox.h"
#include "base/units.h"
#include "train/trainer.h"

namespace echelon {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::ordered_json;
double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

struct Spread {
  double least, median, most;
};
Spread spread_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {values.front(), values[values.size() / 2], values.back()};
}

std::string cpu_name() {
  std::ifstream in("/proc/cpuinfo");
  std::string line, name = "unknown CPU";
  bool avx512 = false, avx2 = false;
  while (std::getline(in, line)) {
    if (line.starts_with("model name")) name = line.substr(line.find(':') + 2);
    if (line.starts_with("flags")) {
      avx512 = line.find(" avx512f") != std::string::npos;
      avx2 = line.find(" avx2") != std::string::npos;
      break;
    }
  }
  return fmt::format("{} ({}), {} cores", name,
                     avx512 ? "AVX-512"
                     : avx2 ? "AVX2"
                            : "no AVX2",
                     available_cores());
}

double peak_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024.0;
}

// FLOP/s of all threads together on a 2048 x 2048 x 2048 product, best of a few tries.
double matmul_flops(Kernels& kernels, Arena& arena, DType dtype) {
  const std::int64_t n = dtype == DType::f64 ? 192 : 2048;
  const auto matrix = [&] {
    const Tensor t(arena, MemoryCategory::other, dtype, {n, n});
    kernels.fill(t, 0.5);
    return t;
  };
  const Tensor a = matrix(), b = matrix(), c = matrix();
  double best = 0;
  for (int i = 0; i < 8; ++i) {
    const auto begin = Clock::now();
    kernels.matmul(a, Transpose::no, b, Transpose::no, c, false);
    best = std::max(best, 2.0 * static_cast<double>(n * n * n) / seconds_since(begin));
  }
  return best;
}

constexpr int most_repeats = 1'000'000;

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
  refuse_beyond_memory(plan, plan.mesh.num_ranks() * predicted_bytes(plan));
  const SampleSource random = [vocab = static_cast<std::uint64_t>(plan.model.vocab), seq_len = plan.seq_len](
                                  std::int64_t step, std::int64_t sample, std::int32_t* tokens,
                                  std::int32_t* targets) {
    const Philox draw(1, Stream::test, static_cast<std::uint64_t>(step));
    for (std::int64_t t = 0; t < seq_len; ++t) {
      const auto place = static_cast<std::uint64_t>(sample * (seq_len + 1) + t);
      tokens[t] = static_cast<std::int32_t>(draw.below(place, vocab));
      targets[t] = static_cast<std::int32_t>(draw.below(place + 1, vocab));
    }
  };
  OptimizerOptions optimizer;
  optimizer.lr = 3e-4;
  optimizer.warmup_steps = 0;
  optimizer.total_steps = f.steps + 1;
  std::vector<double> step_seconds, peaks;
  double loss = 0;
  std::int64_t memory = 0, held = 0, allocations = 0;
  const int ranks = plan.mesh.num_ranks();
  const int workers = std::min(available_cores(), ranks * run.threads_per_rank);
  ThreadWorld world(ranks, run.timeout);
  run_ranks(world, [&](int index) {
    Arena arena, probe_arena;
    const auto kernels = make_kernels(arena, plan.dtype, run.threads_per_rank);
    const Rank rank(world, plan.mesh, index, plan.dtype, arena, *kernels);
    Trainer trainer(rank, plan, optimizer, 1);
    const auto meet = [&] {
      for (Axis axis : all_axes) rank.along(axis).barrier().wait();
    };
    for (std::int64_t step = 0; step <= f.steps; ++step) {
      meet();
      const std::int64_t allocations_before = arena.system_allocations();
      const auto begin = Clock::now();
      const double step_loss = trainer.compute_gradients(step, random);
      trainer.apply_gradients(step);
      meet();
      const double seconds = seconds_since(begin);
      if (index == 0 && step > 0) {  // the first step allocates
        step_seconds.push_back(seconds);
        allocations += arena.system_allocations() - allocations_before;
        // The limit is measured between the steps, while the other ranks wait.
        std::exception_ptr error;
        std::thread([&] {
          try {
            Arena other;
            const auto probe = make_kernels(other, plan.dtype, workers);
            peaks.push_back(matmul_flops(*probe, other, plan.dtype));
          } catch (...) {
            error = std::current_exception();
          }
        }).join();
        if (error) std::rethrow_exception(error);
      }
      if (index == 0) loss = step_loss;
    }
    if (index == 0) {
      memory = arena.peak().total();
      held = static_cast<std::int64_t>(arena.held_bytes());
    }
  });
  const Spread seconds = spread_of(step_seconds), peak = spread_of(peaks);
  const auto tokens = static_cast<double>(plan.global_batch * plan.seq_len);
  const double flops = tokens * model_flops_per_token(plan.model, plan.seq_len);
  const double mfu = flops / seconds.median / peak.most;
  std::FILE* out = f.json ? stderr : stdout;
  fmt::print(out, "{}\n", cpu_name());
  fmt::print(out, "{} {}, {}, {} thread{} a rank, batch {} x {} tokens ({} at once on a rank)\n",
             plan.model.name, dtype_name(plan.dtype), plan.mesh.describe(), run.threads_per_rank,
             run.threads_per_rank == 1 ? "" : "s", plan.global_batch, plan.seq_len, plan.micro_batch);
  fmt::print(out, "{:.0f} tokens/s (median of {} steps; step {:.3f} s, {:.3f} to {:.3f})\n",
             tokens / seconds.median, f.steps, seconds.median, seconds.least, seconds.most);
  fmt::print(out,
             "MFU {:.1f}% of the {:.1f} GFLOP/s that {} thread{} reach{} on 2048^3 (best of {}, measured "
             "between steps; median {:.1f})\n",
             100 * mfu, peak.most / 1e9, workers, workers == 1 ? "" : "s", workers == 1 ? "es" : "",
             peaks.size(), peak.median / 1e9);
  fmt::print(out,
             "memory of rank 0: {} at the peak, {} held; of the process: {} resident at most; {} allocations "
             "in the measured steps\n",
             format_bytes(static_cast<double>(memory)), format_bytes(static_cast<double>(held)),
             format_bytes(peak_resident_bytes()), allocations);
  if (f.json)
    fmt::print("{}\n",
               ordered_json{{"cpu", cpu_name()},
                            {"model", plan.model.name},
                            {"dtype", dtype_name(plan.dtype)},
                            {"ranks", ranks},
                            {"threads_per_rank", run.threads_per_rank},
                            {"tokens_per_second", tokens / seconds.median},
                            {"step_seconds",
                             {{"min", seconds.least}, {"median", seconds.median}, {"max", seconds.most}}},
                            {"matmul_flops", peak.most},
                            {"mfu", mfu},
                            {"memory_bytes", memory},
                            {"peak_resident_bytes", peak_resident_bytes()},
                            {"steady_state_allocations", allocations},
                            {"final_loss", loss}}
                   .dump());
  return 0;
}

struct BenchCommFlags {
  int ranks = 2;
  double mebibytes = 64;
  int repeats = 15;
  bool json = false;
};

// All ranks copy `bytes` at the same time, as the limit that memory sets; then each verb on the same number
// of bytes.
int bench_comm(const BenchCommFlags& f) {
  if (f.ranks < 1 || f.ranks > 256) refuse("--ranks {}: must be from 1 to 256", f.ranks);
  if (!(f.mebibytes > 0) || f.mebibytes > 16384)
    refuse("--size {}: must be above 0 and at most 16384 MiB", f.mebibytes);
  if (f.repeats < 1 || f.repeats > most_repeats)
    refuse("--repeats {}: must be from 1 to {}", f.repeats, most_repeats);
  const auto count = std::max<std::int64_t>(f.ranks, static_cast<std::int64_t>(f.mebibytes * (1 << 20) / 4));
  const double held = 3.0 * 4.0 * static_cast<double>(count) * f.ranks;  // at most three buffers a rank
  if (held > memory_limit())
    refuse("--size {}: {} ranks need {}, and this machine has {}; take a smaller --size or fewer --ranks",
           f.mebibytes, f.ranks, format_bytes(held), format_bytes(memory_limit()));
  ThreadWorld world(f.ranks, std::chrono::seconds(300));
  std::vector<int> everyone;
  std::vector<std::int64_t> parts;
  for (int i = 0; i < f.ranks; ++i) {
    everyone.push_back(i);
    parts.push_back(split_range(count, f.ranks, i).size());
  }
  const std::vector<std::string> names{"memory copy", "all_reduce", "all_gather", "reduce_scatter",
                                       "broadcast"};
  std::vector<std::vector<double>> times(names.size());
  run_ranks(world, [&](int index) {
    Arena arena;
    const auto group = world.join(index, everyone, "bench");
    const auto tensor = [&](std::int64_t n) {
      const Tensor t(arena, MemoryCategory::communication, DType::f32, {n});
      std::fill_n(t.data<float>(), n, 1.0f);
      return t;
    };
    const Tensor a = tensor(count), b = tensor(count), own = tensor(parts[static_cast<std::size_t>(index)]);
    const std::vector<std::function<void()>> works{
        [&] { std::memcpy(b.raw(), a.raw(), static_cast<std::size_t>(a.bytes())); },
        [&] { group->all_reduce(a).wait(); },
        [&] { group->all_gather(own, b, parts).wait(); },
        [&] { group->reduce_scatter(a, own, parts).wait(); },
        [&] { group->broadcast(a, 0).wait(); },
    };
    for (int repeat = -1; repeat < f.repeats;
         ++repeat)  // one to warm up; the works take turns, so that noise hits all alike
      for (std::size_t w = 0; w < works.size(); ++w) {
        group->barrier().wait();
        const auto begin = Clock::now();
        works[w]();
        group->barrier().wait();
        if (index == 0 && repeat >= 0) times[w].push_back(seconds_since(begin));
      }
  });
  std::FILE* out = f.json ? stderr : stdout;
  fmt::print(out, "{}\n{} thread ranks, {} each; medians of {}, in turns\n", cpu_name(), f.ranks,
             format_bytes(static_cast<double>(count * 4)), f.repeats);
  const double copy = spread_of(times[0]).median;
  ordered_json rows = ordered_json::array();
  fmt::print(out, "  {:<16}{:>10}{:>12}{:>22}\n", "", "median", "GB/s", "copy time / this time");
  for (std::size_t w = 0; w < names.size(); ++w) {
    const double median = spread_of(times[w]).median, rate = static_cast<double>(count * 4) / median / 1e9;
    fmt::print(out, "  {:<16}{:>10}{:>12.2f}{:>21.0f}%\n", names[w], format_seconds(median), rate,
               100 * copy / median);
    rows.push_back({{"name", names[w]},
                    {"seconds", median},
                    {"gigabytes_per_second", rate},
                    {"copy_ratio", copy / median}});
  }
  if (f.json)
    fmt::print(
        "{}\n",
        ordered_json{{"cpu", cpu_name()}, {"ranks", f.ranks}, {"bytes", count * 4}, {"rows", rows}}.dump());
  return 0;
}

}  // namespace

void add_bench(CLI::App& program, int& status) {
  CLI::App& app = *program.add_subcommand("bench", "The measurements in docs/performance.md");
  app.require_subcommand(0, 1);
  app.callback([&app] {
    if (app.get_subcommands().empty()) refuse("bench: what to measure is missing; legal: train, comm");
  });

  auto train_flags = std::make_shared<BenchTrainFlags>();
  CLI::App& train = *app.add_subcommand("train", "Training steps on random tokens: tokens/s, MFU, memory");
  train_flags->plan.add_to(train, bench_defaults());
  train_flags->run.add_to(train);
  add_number(train, "--steps", train_flags->steps, "Measured steps, after one to warm up");
  train.add_flag("--json", train_flags->json, "One JSON object on standard output");
  train.callback([train_flags, &status] { status = bench_train(*train_flags); });

  auto comm_flags = std::make_shared<BenchCommFlags>();
  CLI::App& comm = *app.add_subcommand("comm", "Collectives of thread ranks against memory copy");
  add_number(comm, "--ranks", comm_flags->ranks, "Thread ranks");
  add_number(comm, "--size", comm_flags->mebibytes, "MiB of each rank's buffer");
  add_number(comm, "--repeats", comm_flags->repeats, "Measured times");
  comm.add_flag("--json", comm_flags->json, "One JSON object on standard output");
  comm.callback([comm_flags, &status] { status = bench_comm(*comm_flags); });
}

}  // namespace echelon

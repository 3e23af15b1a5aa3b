// `bench comm`: every collective on thread ranks, the direct forms beside the algorithms of
// comm/collectives.h; and beside each, the time that latency and memory allow, measured in the same run.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "apps/bench.h"
#include "apps/bench_comm_operations.h"
#include "apps/flags.h"
#include "apps/help.h"
#include "apps/progress_line.h"
#include "base/error.h"
#include "base/json_text.h"
#include "base/units.h"
#include "comm/exchange.h"
#include "comm/host_group.h"
#include "comm/threads.h"
#include "tensor/host.h"

namespace echelon {
namespace {

using nlohmann::ordered_json;

struct BenchCommFlags {
  int ranks = 2;
  std::optional<double> mebibytes;
  std::optional<int> repeats;
  bool json = false;
};

// For each size, unless --repeats is given.
constexpr int default_repeats = 101;
constexpr double default_seconds = 6;

struct OperationRow {
  const CommOperation* operation;
  CommWork work;
  double seconds, bound_seconds, bus_bytes_per_second;
};

struct Size {
  std::int64_t bytes = 0;
  std::size_t repeats = 0;
  double copy_seconds = 0;  // median of the first operation
  std::vector<OperationRow> rows;
};

// Seconds of each operation. Operations take turns, so that noise affects all alike.
std::vector<std::vector<double>> measure(const BenchCommFlags& f, std::int64_t count,
                                         const Progress& progress) {
  ThreadWorld world(f.ranks, std::chrono::seconds(300));
  const std::vector<CommOperation>& all = comm_operations();
  std::vector<std::vector<double>> times(all.size());
  // Several in a row for sizes at which one takes no longer than the barriers around it.
  const int in_a_row = static_cast<int>(std::clamp<std::int64_t>((1 << 17) / count, 1, 64));
  run_ranks(world, [&](int index) {
    Arena arena;
    const auto group = world.join(index, everyone(f.ranks), "bench");
    const auto tensor = [&](std::int64_t n) {
      const Tensor t(arena, MemoryCategory::communication, DType::f32, {n});
      copy_from_host(std::vector<float>(static_cast<std::size_t>(n)),
                     t);  // every sum is a normal number
      return t;
    };
    std::vector<std::int64_t> counts = even_counts(count, f.ranks);
    const std::vector<std::int64_t> equal(static_cast<std::size_t>(f.ranks), count / f.ranks);
    const Tensor a = tensor(count), b = tensor(count),
                 place = cut(b, counts)[static_cast<std::size_t>(index)];
    const std::int64_t used = count / f.ranks * f.ranks;
    CommBuffers buffers{*group, std::move(counts),     a,
                        b,      tensor(place.numel()), place,
                        equal,  a.flat_range(0, used), b.flat_range(0, used)};
    const auto start = Clock::now();
    for (int repeat = -1;; ++repeat) {  // the first is a warm-up
      const int most = f.repeats.value_or(seconds_since(start) < default_seconds ? default_repeats : 3);
      std::vector<double> more{repeat < most ? 1.0 : 0.0};
      if (index == 0)
        report(progress, static_cast<double>(repeat + 1) / (most + 1),
               format_bytes(4 * static_cast<double>(count)));
      HostGroup(*group).broadcast(more, 0);
      if (more.front() == 0) return;
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (all[i].ranks > f.ranks) continue;
        group->barrier().wait();
        const auto begin = Clock::now();
        if (all[i].ranks == 0 || index < all[i].ranks)
          for (int k = 0; k < in_a_row; ++k) all[i].run(buffers);
        group->barrier().wait();
        if (index == 0 && repeat >= 0) times[i].push_back(seconds_since(begin) / (in_a_row * all[i].times));
      }
    }
  });
  return times;
}

double measure_message(const BenchCommFlags& f, const Progress& progress) {
  BenchCommFlags of_messages = f;
  of_messages.repeats = f.repeats.value_or(default_repeats);
  const auto times = measure(of_messages, f.ranks, progress);
  for (std::size_t i = 0; i < times.size(); ++i)
    if (comm_operations()[i].ranks == 2 && !times[i].empty()) return spread_of(times[i]).least;
  return 0;
}

// `message_seconds`: the time of a message with one number.
Size measure_size(const BenchCommFlags& f, std::int64_t count, double message_seconds,
                  const Progress& progress) {
  const auto times = measure(f, count, progress);
  const double bytes = 4 * static_cast<double>(count);
  const double copy_seconds = std::min(spread_of(times[0]).least, spread_of(times[1]).least);
  const double seconds_per_element = copy_seconds / static_cast<double>(f.ranks * count);
  Size size{4 * count, times[0].size(), spread_of(times[0]).median, {}};
  for (std::size_t i = 0; i < times.size(); ++i) {
    if (times[i].empty()) continue;
    const CommOperation& operation = comm_operations()[i];
    const CommWork work = operation.work(f.ranks, count);
    const double seconds = spread_of(times[i]).median;
    size.rows.push_back({&operation, work, seconds,
                         work.steps * message_seconds + work.copied * seconds_per_element,
                         operation.bus(f.ranks) * bytes / seconds});
  }
  return size;
}

void print_table(std::FILE* out, const Size& size) {
  fmt::print(out, "\n{:<29}{:>10}{:>7}{:>6}{:>11}{:>10}{:>7}\n",
             fmt::format("{} (medians of {})", format_bytes(static_cast<double>(size.bytes)), size.repeats),
             "time, us", "GB/s", "steps", "sent", "bound, us", "ratio");
  for (const OperationRow& row : size.rows)
    fmt::print(out, "{:<29}{:>10.1f}{:>7.2f}{:>6}{:>11}{:>10.1f}{:>6.0f}%\n", row.operation->name,
               1e6 * row.seconds, row.bus_bytes_per_second / 1e9, row.work.steps,
               format_bytes(4 * row.work.sent), 1e6 * row.bound_seconds,
               100 * row.bound_seconds / row.seconds);
}

ordered_json to_json(const Size& size) {
  ordered_json rows = ordered_json::array();
  for (const OperationRow& row : size.rows)
    rows.push_back({{"name", row.operation->name},
                    {"seconds", row.seconds},
                    {"gigabytes_per_second", static_cast<double>(size.bytes) / row.seconds / 1e9},
                    {"copy_ratio", size.copy_seconds / row.seconds},
                    {"bus_gigabytes_per_second", row.bus_bytes_per_second / 1e9},
                    {"steps", row.work.steps},
                    {"sent_bytes", 4 * row.work.sent},
                    {"bound_seconds", row.bound_seconds}});
  return rows;
}

std::vector<std::int64_t> counts_to_measure(const BenchCommFlags& f) {
  if (!f.mebibytes) return {256, 8 << 10, 256 << 10, 16 << 20};  // 1 KiB, 32 KiB, 1 MiB, 64 MiB
  return {static_cast<std::int64_t>(*f.mebibytes * (1 << 20) / 4)};
}

int bench_comm(const BenchCommFlags& f) {
  if (f.ranks < 1 || f.ranks > most_bench_ranks)
    refuse("--ranks {}: must be from 1 to {}", f.ranks, most_bench_ranks);
  if (f.mebibytes && (!(*f.mebibytes > 0) || *f.mebibytes > 16384))
    refuse("--size {}: must be above 0 and at most 16384 MiB", *f.mebibytes);
  if (f.repeats && (*f.repeats < 1 || *f.repeats > most_repeats))
    refuse("--repeats {}: must be from 1 to {}", *f.repeats, most_repeats);
  std::vector<Size> sizes;
  std::vector<std::int64_t> counts = counts_to_measure(f);
  for (std::int64_t& count : counts) {
    count = std::max<std::int64_t>(f.ranks, count);
    // Two buffers and a part for each rank, the algorithms' receive buffers, and messages in flight.
    const double held = 4.5 * 4.0 * static_cast<double>(count) * f.ranks;
    if (held > memory_limit())
      refuse("--size {}: {} ranks need {}, and this machine has {}; take a smaller --size or fewer --ranks",
             static_cast<double>(count) * 4 / (1 << 20), f.ranks, format_bytes(held),
             format_bytes(memory_limit()));
  }
  std::FILE* out = f.json ? stderr : stdout;
  ProgressLine line("bench comm", f.json);
  const double message_seconds = measure_message(f, line.progress());
  line.clear();
  fmt::print(out, "{}\n{} thread rank{}, buffers of f32, operations in turns\n", cpu_name(), f.ranks,
             f.ranks == 1 ? "" : "s");
  fmt::print(out,
             "GB/s   the least that a rank must send, over the time\n"
             "sent   by the rank that sends most\n"
             "bound  steps x {:.1f} us (a message of one number), and what is read and\n"
             "       written at the rate of the faster copy; ratio: bound over time\n",
             1e6 * message_seconds);
  for (std::int64_t count : counts) {
    sizes.push_back(measure_size(f, count, message_seconds, line.progress()));
    line.clear();
    print_table(out, sizes.back());
  }
  if (!f.json) return 0;
  ordered_json by_size = ordered_json::array();
  for (const Size& size : sizes) by_size.push_back({{"bytes", size.bytes}, {"rows", to_json(size)}});
  fmt::print("{}\n", json_text(ordered_json{{"cpu", cpu_name()},
                                            {"ranks", f.ranks},
                                            {"message_seconds", message_seconds},
                                            {"bytes", sizes.back().bytes},
                                            {"rows", to_json(sizes.back())},
                                            {"sizes", by_size}}));
  return 0;
}

}  // namespace

void add_bench_comm(CLI::App& bench, int& status) {
  auto flags = std::make_shared<BenchCommFlags>();
  CLI::App& comm =
      *bench.add_subcommand("comm", "Collectives of thread ranks against latency and memory copy");
  heading(comm, common_flags);
  add_number(comm, "--ranks", flags->ranks, "Thread ranks");
  add_number(comm, "--size", flags->mebibytes,
             "Size of each rank's buffer in MiB (default: 1 KiB to 64 MiB)");
  add_number(comm, "--repeats", flags->repeats,
             fmt::format("How often to measure (default: {}, or as often as {:.0f} seconds allow)",
                         default_repeats, default_seconds));
  comm.add_flag("--json", flags->json, "One JSON object on standard output");
  comm.callback([flags, &status] { status = bench_comm(*flags); });
}

}  // namespace echelon

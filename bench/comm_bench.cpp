// Collectives of thread ranks against plain memory copies. Every iteration times, one after the other on all
// ranks at once, a memcpy of 64 MiB by each rank and the collective; `memcpy_ratio` is memcpy time /
// collective time, so that a busy machine slows both. 1 means: as fast as every rank copying the buffer once.
#include <benchmark/benchmark.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "base/split.h"
#include "comm/threads.h"

namespace echelon {
namespace {

constexpr std::int64_t large = 64 << 20;  // bytes

double seconds_of(Communicator& all, const std::function<void()>& body) {
  all.barrier().wait();
  const auto begin = std::chrono::steady_clock::now();
  body();
  all.barrier().wait();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// One rank's buffers and communicator, and the collective to time.
struct Bench {
  Communicator& all;
  std::vector<std::int64_t> counts;  // even cut of `whole`
  Tensor whole, part;
};
using Collective = void (*)(Bench&);

void all_reduce(Bench& b) { b.all.all_reduce(b.whole).wait(); }
void all_gather(Bench& b) { b.all.all_gather(b.part, b.whole, b.counts).wait(); }
void reduce_scatter(Bench& b) { b.all.reduce_scatter(b.whole, b.part, b.counts).wait(); }
void all_to_all(Bench& b) {
  // Two halves of `whole`: what is sent, and room for what comes.
  const std::int64_t half = b.whole.numel() / 2, n = b.all.size();
  std::vector<std::int64_t> counts(static_cast<std::size_t>(n), half / n);
  const std::int64_t used = half / n * n;
  b.all.all_to_all(b.whole.flat_range(0, used), counts, b.whole.flat_range(half, half + used), counts).wait();
}
void broadcast(Bench& b) { b.all.broadcast(b.whole, 0).wait(); }

void against_memcpy(benchmark::State& state, Collective collective) {
  const int num_ranks = static_cast<int>(state.range(0));
  const std::int64_t bytes = state.range(1);
  double memcpy_seconds = 0, collective_seconds = 0;
  for (auto _ : state) {
    ThreadWorld world(num_ranks, std::chrono::seconds(60));
    std::vector<int> ranks(static_cast<std::size_t>(num_ranks));
    std::iota(ranks.begin(), ranks.end(), 0);
    double copying = 0, communicating = 0;
    run_ranks(world, [&](int rank) {
      const auto all = world.join(rank, ranks, "all");
      Arena arena;
      const std::int64_t length = bytes / 4;
      std::vector<std::int64_t> counts;
      for (int i = 0; i < num_ranks; ++i) counts.push_back(split_range(length, num_ranks, i).size());
      const auto make = [&](std::int64_t count) {
        Tensor x(arena, MemoryCategory::other, DType::f32, {count});
        std::memset(x.raw(), 0, static_cast<std::size_t>(x.bytes()));
        return x;
      };
      Bench bench{*all, counts, make(length), make(counts[static_cast<std::size_t>(rank)])};
      const Tensor from = make(length), to = make(length);
      constexpr int rounds = 20;
      for (int i = -2; i < rounds; ++i) {  // two to warm up
        const double copy =
            seconds_of(*all, [&] { std::memcpy(to.raw(), from.raw(), static_cast<std::size_t>(bytes)); });
        const double communication = seconds_of(*all, [&] { collective(bench); });
        if (rank != 0 || i < 0) continue;
        copying += copy / rounds;
        communicating += communication / rounds;
      }
    });
    memcpy_seconds += copying;
    collective_seconds += communicating;
    state.SetIterationTime(communicating);
  }
  state.counters["memcpy_ratio"] = memcpy_seconds / collective_seconds;
  state.counters["GB/s"] =
      static_cast<double>(bytes) * static_cast<double>(state.iterations()) / collective_seconds / 1e9;
}

// Time of a small all_reduce: what every tensor-parallel layer pays.
void latency(benchmark::State& state) {
  const int num_ranks = static_cast<int>(state.range(0));
  for (auto _ : state) {
    ThreadWorld world(num_ranks, std::chrono::seconds(60));
    std::vector<int> ranks(static_cast<std::size_t>(num_ranks));
    std::iota(ranks.begin(), ranks.end(), 0);
    constexpr int rounds = 2000;
    run_ranks(world, [&](int rank) {
      const auto all = world.join(rank, ranks, "all");
      std::vector<float> data(static_cast<std::size_t>(state.range(1)));
      const Tensor x = Tensor::view_of(data.data(), DType::f32, {state.range(1)});
      const double seconds = seconds_of(*all, [&] {
        for (int i = 0; i < rounds; ++i) all->all_reduce(x).wait();
      });
      if (rank == 0) state.SetIterationTime(seconds / rounds);
    });
  }
}

#define ECHELON_BENCH(verb)                     \
  BENCHMARK_CAPTURE(against_memcpy, verb, verb) \
      ->ArgsProduct({{2, 4}, {large}})          \
      ->UseManualTime()                         \
      ->Iterations(5)
ECHELON_BENCH(all_reduce);
ECHELON_BENCH(all_gather);
ECHELON_BENCH(reduce_scatter);
ECHELON_BENCH(all_to_all);
ECHELON_BENCH(broadcast);
BENCHMARK(latency)
    ->ArgsProduct({{2, 4, 8}, {1024}})
    ->UseManualTime()
    ->Iterations(5)
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace echelon

BENCHMARK_MAIN();

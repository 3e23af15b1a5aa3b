// What the tests of communicators share: bodies run on thread ranks, what each saw when they fail, and values
// whose sums show the order in which they were taken.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

#include "comm/algorithm_communicator.h"
#include "comm/threads.h"
#include "turned_clock.h"

namespace echelon::checks {

using Counts = std::vector<std::int64_t>;

inline std::int64_t total(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

// Runs body(communicator of all ranks) on n ranks.
inline void with_ranks(int n, const std::function<void(Communicator&)>& body,
                       std::chrono::milliseconds timeout = patience) {
  ThreadWorld world(n, timeout);
  run_ranks(world, [&](int rank) { body(*world.join(rank, everyone(n), "tp")); });
}

// The same with one communicator whose collectives are `collectives`.
inline std::unique_ptr<Communicator> join(ThreadWorld& world, int rank, const std::vector<int>& ranks,
                                          Collectives collectives) {
  auto messages = world.join(rank, ranks, "tp");
  if (collectives == Collectives::direct) return messages;
  return with_algorithms(std::move(messages), world.join(rank, ranks, "tp collectives"), collectives);
}
inline void with_ranks(Collectives collectives, int n, const std::function<void(Communicator&)>& body) {
  ThreadWorld world(n, patience);
  run_ranks(world, [&](int rank) { body(*join(world, rank, everyone(n), collectives)); });
}
inline constexpr std::array<Collectives, 4> every_collectives{
    Collectives::direct, Collectives::ring, Collectives::halving_doubling, Collectives::automatic};

// Runs ranks that must fail, catches what each of them saw, and returns it with what run_ranks threw at the
// end.
struct FailedJob {
  std::vector<std::string> seen;  // by rank; "" when it did not fail
  std::string thrown;
};
inline FailedJob failing(int n, const std::function<void(int, ThreadWorld&)>& body,
                         const TimedJob& timed = {}) {
  FailedJob outcome{std::vector<std::string>(static_cast<std::size_t>(n)), ""};
  ThreadWorld world(n, timed.timeout, timed.hooks, timed.time);
  const Beside beside(timed, world);
  try {
    run_ranks(world, [&](int rank) {
      try {
        body(rank, world);
      } catch (const std::exception& error) {
        outcome.seen[static_cast<std::size_t>(rank)] = error.what();
        throw;
      }
    });
  } catch (const std::exception& error) {
    outcome.thrown = error.what();
  }
  return outcome;
}

template <class T>
Tensor view(std::vector<T>& data) {
  static T none;
  return Tensor::view_of(data.empty() ? &none : data.data(), dtype_of<T>,
                         {static_cast<std::int64_t>(data.size())});
}

// Element i of what rank r brings: no sum of these is exact in f32, so the order of a sum shows.
template <class T>
T value(int rank, std::int64_t i) {
  const std::uint32_t mixed =
      (static_cast<std::uint32_t>(i) * 2654435761u) ^ (static_cast<std::uint32_t>(rank) * 40503u);
  if constexpr (std::is_integral_v<T>) return static_cast<T>(mixed % 2001) - 1000;
  constexpr std::array<double, 5> scales{1.0 / 3e9, 1.0 / 7e6, 1.0 / 11e5, 1.0 / 13e4, 1.0 / 17e8};
  return static_cast<T>(static_cast<double>(static_cast<std::int32_t>(mixed)) *
                        scales[mixed % scales.size()]);
}
template <class T>
std::vector<T> values(int rank, std::int64_t count, std::int64_t from = 0) {
  std::vector<T> data(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) data[static_cast<std::size_t>(i)] = value<T>(rank, from + i);
  return data;
}

}  // namespace echelon::checks

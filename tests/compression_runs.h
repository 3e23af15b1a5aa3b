// What the tests of compressed reductions share: ranks that reduce made-up gradients.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/philox.h"
#include "comm/recording.h"
#include "comm/threads.h"
#include "compression_buckets.h"
#include "parallel/compression.h"
#include "patience.h"

namespace echelon::compression_tests {

using Counts = std::vector<std::int64_t>;

inline const std::vector<std::string> every_method{"none",     "bf16",       "fp16",        "int8",
                                                   "topk:0.1", "powersgd:2", "powersgd:3:2"};

// Blocks of a scale that are whole, broken and single; matrices that gain from factors and that do not.
inline const Shapes odd_shapes{{17, 31}, {1, 5}, {40, 26}, {300, 1}, {3, 2}, {1, 1}};

// The gradient of one rank in one step, element by element of a parameter: the same however it is bucketed.
// Magnitudes differ from element to element by a factor of up to 2^11.
inline double gradient_at(const std::string& name, std::int64_t i, int rank, std::int64_t step) {
  const Philox random(41, Stream::test,
                      name_hash(name.c_str()) + static_cast<std::uint64_t>(step * 16 + rank));
  const auto at = static_cast<std::uint64_t>(i);
  return std::ldexp(random.normal(at), -static_cast<int>(random.below(at, 12)));
}

inline void fill_gradient(const GradientBucket& bucket, int rank, std::int64_t step, const Tensor& x) {
  for (const GradientSection& s : bucket.sections)
    for (std::int64_t i = 0; i < s.range.size(); ++i) {
      const double value = gradient_at(s.name, i, rank, step);
      const std::int64_t at = s.range.begin + i;
      if (x.dtype() == DType::f32)
        x.host<float>()[at] = static_cast<float>(value);
      else
        x.host<double>()[at] = value;
    }
}

inline std::vector<double> numbers(const Tensor& x) {
  std::vector<double> all;
  for (std::int64_t i = 0; i < x.numel(); ++i)
    all.push_back(x.dtype() == DType::f32 ? static_cast<double>(x.host<float>()[i]) : x.host<double>()[i]);
  return all;
}

inline bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

// One rank of a job: its communicator, memory and buckets.
struct Worker {
  Worker(ThreadWorld& world, int rank, int n, const std::string& compress, DType type,
         const std::vector<GradientBucket>& all, std::uint64_t seed = 1, bool reference = true)
      : buckets(all), dtype(type) {
    std::vector<int> everyone(static_cast<std::size_t>(n));
    std::iota(everyone.begin(), everyone.end(), 0);
    group = record_traffic(world.join(rank, everyone, "dp"), Axis::dp, traffic);
    kernels = reference ? make_reference_kernels() : make_kernels(arena, dtype, 1);
    for (const GradientBucket& bucket : buckets) {
      gradients.emplace_back(arena, MemoryCategory::gradients, dtype, Counts{bucket.numel()});
      shards.emplace_back();
      if (!bucket.shards.empty())
        shards.back() =
            Tensor(arena, MemoryCategory::gradients, dtype, {bucket.shards[static_cast<std::size_t>(rank)]});
    }
    before = arena.live();
    reducer = std::make_unique<GradientReducer>(ReductionGroups{*group, *group}, *kernels, arena, dtype,
                                                method(compress), seed, buckets);
  }

  // What is in `gradients` becomes the sums.
  void reduce(std::int64_t step) {
    for (std::size_t i = 0; i < buckets.size(); ++i) {
      reducer->begin(i, step, gradients[i], shards[i]);
      reducer->progress();
    }
    reducer->finish();
  }
  void step(std::int64_t number) {
    for (std::size_t i = 0; i < buckets.size(); ++i)
      fill_gradient(buckets[i], group->rank(), number, gradients[i]);
    reduce(number);
  }
  // All buckets, or their shards, one after another.
  std::vector<double> result() const {
    std::vector<double> all;
    for (std::size_t i = 0; i < buckets.size(); ++i)
      for (double x : numbers(buckets[i].shards.empty() ? gradients[i] : shards[i])) all.push_back(x);
    return all;
  }

  Traffic traffic;
  Arena arena;
  std::vector<GradientBucket> buckets;
  DType dtype;
  std::unique_ptr<Kernels> kernels;
  std::unique_ptr<Communicator> group;
  std::vector<Tensor> gradients, shards;
  Memory before;
  std::unique_ptr<GradientReducer> reducer;
};

inline void on_ranks(int n, const std::function<void(ThreadWorld&, int)>& body) {
  ThreadWorld world(n, checks::patience);
  run_ranks(world, [&](int rank) { body(world, rank); });
}

using Results = std::vector<std::vector<double>>;  // [rank * steps + step]

inline Results results(int n, const std::string& compress, DType dtype,
                       const std::vector<GradientBucket>& buckets, std::int64_t steps,
                       std::uint64_t seed = 1) {
  Results all(static_cast<std::size_t>(n * steps));
  on_ranks(n, [&](ThreadWorld& world, int rank) {
    Worker worker(world, rank, n, compress, dtype, buckets, seed);
    for (std::int64_t step = 0; step < steps; ++step) {
      worker.step(step);
      all[static_cast<std::size_t>(rank * steps + step)] = worker.result();
    }
  });
  return all;
}

inline GradientBucket with_shards(GradientBucket bucket, int n) {
  // Uneven, one of them empty, and cut within blocks and matrices.
  std::int64_t left = bucket.numel();
  for (int rank = 0; rank < n; ++rank) {
    const std::int64_t shard = rank + 1 == n ? left : rank == 1 ? 0 : left / 3 + 1;
    bucket.shards.push_back(shard);
    left -= shard;
  }
  return bucket;
}

}  // namespace echelon::compression_tests

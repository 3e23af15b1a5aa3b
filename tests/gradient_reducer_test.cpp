// Compressed reductions on thread ranks: the bytes they send and hold, and the sums they give.
#include <gtest/gtest.h>

#include <limits>

#include "base/error.h"
#include "compression_runs.h"
#include "reduction_predictions.h"
#include "tensor/codecs.h"

namespace echelon::gradient_reducer_test {
namespace {

using namespace compression_tests;

TEST(GradientReducer, SendsAndHoldsWhatIsPredicted) {  // long
  for (int n = 1; n <= 5; ++n)
    for (const std::string& compress : every_method)
      for (DType dtype : {DType::f32, DType::f64})
        for (bool sharded : {false, true}) {
          std::vector<GradientBucket> buckets{bucket_of(odd_shapes), bucket_of({{7, 1}}, 10),
                                              bucket_of({{64, 48}, {257, 3}}, 20)};
          if (sharded)
            for (GradientBucket& bucket : buckets) bucket = with_shards(bucket, n);
          on_ranks(n, [&](ThreadWorld& world, int rank) {
            Worker worker(world, rank, n, compress, dtype, buckets);
            Memory held = worker.before;
            for (const GradientBucket& bucket : buckets) {
              const Memory of = reduction_memory(method(compress), bucket, dtype, n, rank);
              for (MemoryCategory category : all_memory_categories) held[category] += of[category];
            }
            ASSERT_EQ(worker.arena.live(), held) << compress;
            Traffic predicted;
            for (std::int64_t step = 0; step < 4; ++step) {
              std::int64_t bytes = 0;
              for (const GradientBucket& bucket : buckets) {
                add_reduction_traffic(method(compress), bucket, dtype, n, rank, step, Axis::dp, predicted);
                bytes += compressed_bytes_sent(method(compress), bucket, dtype, n, rank, step);
              }
              const std::int64_t sent = worker.traffic.bytes(Axis::dp);
              worker.step(step);
              ASSERT_EQ(worker.traffic.bytes(Axis::dp) - sent, bytes) << compress << " step " << step;
              ASSERT_EQ(worker.traffic, predicted) << compress << " of " << n << " step " << step;
            }
            ASSERT_EQ(worker.arena.live(), held) << compress;
            ASSERT_EQ(worker.arena.peak(), held) << compress;
          });
        }
}

TEST(GradientReducer, WithoutItTheSumIsTheCommunicators) {
  const std::vector<GradientBucket> buckets{bucket_of(odd_shapes), bucket_of({{64, 48}}, 10)};
  for (const char* compress : {"none", "topk:1", "powersgd:2:5", "powersgd:1000"})
    on_ranks(3, [&](ThreadWorld& world, int rank) {
      Worker worker(world, rank, 3, compress, DType::f32, buckets),
          plain(world, rank, 3, "none", DType::f32, buckets);
      for (std::int64_t step = 0; step < 3; ++step) {
        worker.step(step);
        for (std::size_t i = 0; i < buckets.size(); ++i) {
          fill_gradient(buckets[i], rank, step, plain.gradients[i]);
          plain.group->all_reduce(plain.gradients[i]).wait();
        }
        ASSERT_TRUE(same_bits(worker.result(), plain.result())) << compress << " step " << step;
      }
    });
}

TEST(GradientReducer, EveryRankAndEveryRerunHasTheSameBits) {
  const std::vector<GradientBucket> buckets{bucket_of(odd_shapes), bucket_of({{64, 48}}, 10)};
  for (DType dtype : {DType::f32, DType::f64})
    for (const std::string& compress : every_method) {
      const Results first = results(4, compress, dtype, buckets, 4),
                    again = results(4, compress, dtype, buckets, 4);
      for (std::size_t i = 0; i < first.size(); ++i) {
        ASSERT_TRUE(same_bits(first[i], again[i])) << compress;
        ASSERT_TRUE(same_bits(first[i], first[i % 4])) << compress << " rank " << i / 4 << " step " << i % 4;
      }
    }
}

// The law in spec/compression.h: neighbours, buckets and their order change nothing.
TEST(GradientReducer, DoesNotDependOnBuckets) {
  const std::vector<GradientBucket> together{bucket_of(odd_shapes)};
  std::vector<GradientBucket> apart;
  for (std::size_t i = 0; i < odd_shapes.size(); ++i)
    apart.push_back(bucket_of({odd_shapes[i]}, static_cast<int>(i)));
  const std::vector<GradientBucket> reversed(apart.rbegin(), apart.rend());
  for (DType dtype : {DType::f32, DType::f64})
    for (const std::string& compress : every_method) {
      const Results whole = results(3, compress, dtype, together, 4),
                    parts = results(3, compress, dtype, apart, 4),
                    backwards = results(3, compress, dtype, reversed, 4);
      for (std::size_t i = 0; i < whole.size(); ++i) {
        ASSERT_TRUE(same_bits(whole[i], parts[i])) << compress;
        std::vector<double> turned;
        std::ptrdiff_t offset = together[0].numel();
        for (const GradientBucket& bucket : apart) {
          offset -= bucket.numel();
          const auto begin = backwards[i].begin() + offset;
          turned.insert(turned.end(), begin, begin + bucket.numel());
        }
        ASSERT_TRUE(same_bits(whole[i], turned)) << compress;
      }
    }
}

// Shards: top-k and PowerSGD give the bits of the all-reduce; packed elements are rounded once instead of
// twice, and where the cuts lie changes nothing.
TEST(GradientReducer, ShardsAreTheSum) {
  constexpr int n = 4;
  constexpr std::int64_t steps = 3;
  const GradientBucket whole = bucket_of(odd_shapes);
  GradientBucket even = whole;
  for (int rank = 0; rank < n; ++rank) even.shards.push_back(split_range(whole.numel(), n, rank).size());
  for (const std::string& compress : every_method) {
    const Results sums = results(n, compress, DType::f32, {whole}, steps),
                  uneven = results(n, compress, DType::f32, {with_shards(whole, n)}, steps),
                  evenly = results(n, compress, DType::f32, {even}, steps);
    for (std::size_t step = 0; step < steps; ++step) {
      std::vector<double> shards, others;
      for (std::size_t rank = 0; rank < n; ++rank) {
        const auto& part = uneven[rank * steps + step];
        const auto& other = evenly[rank * steps + step];
        shards.insert(shards.end(), part.begin(), part.end());
        others.insert(others.end(), other.begin(), other.end());
      }
      ASSERT_TRUE(same_bits(shards, others)) << compress;
      const bool packed = compress == "fp16" || compress == "int8" || compress == "bf16";
      ASSERT_EQ(same_bits(shards, sums[step]), !packed) << compress;
      if (compress == "bf16") {
        std::vector<std::byte> bytes(2 * shards.size());
        encode_bf16(shards.data(), whole.numel(), bytes.data());
        decode_bf16(bytes.data(), whole.numel(), false, shards.data());
        ASSERT_TRUE(same_bits(shards, sums[step]));
      }
    }
  }
}

// |error| of the sum of n packed gradients: each is rounded once, and so is their sum.
TEST(GradientReducer, PackedSumsAreWithinTheirBounds) {
  constexpr int n = 5;
  const GradientBucket bucket = bucket_of(odd_shapes);
  std::vector<std::vector<double>> gradient(n, std::vector<double>(static_cast<std::size_t>(bucket.numel())));
  for (int rank = 0; rank < n; ++rank)
    fill_gradient(
        bucket, rank, 0,
        Tensor::view_of(gradient[static_cast<std::size_t>(rank)].data(), DType::f64, {bucket.numel()}));
  for (const char* compress : {"bf16", "fp16", "int8"}) {
    const std::vector<double> sum = results(n, compress, DType::f64, {bucket}, 1)[0];
    double largest_error = 0;
    for_each_block(bucket, {0, bucket.numel()}, [&](const GradientSection&, Range block, Range) {
      std::vector<double> largest(n + 1);  // by rank, and of the sum
      for (std::int64_t i = block.begin; i < block.end; ++i) {
        for (std::size_t rank = 0; rank < n; ++rank)
          largest[rank] = std::max(largest[rank], std::abs(gradient[rank][static_cast<std::size_t>(i)]));
        largest[n] = std::max(largest[n], std::abs(sum[static_cast<std::size_t>(i)]));
      }
      for (std::int64_t i = block.begin; i < block.end; ++i) {
        const auto at = static_cast<std::size_t>(i);
        double exact = 0, bound = 0;
        const auto rounded = [&](double x, double m) {
          bound += compress == std::string("bf16")   ? 0x1p-8 * std::abs(x)
                   : compress == std::string("fp16") ? std::max(0x1p-11 * std::abs(x), 0x1p-39 * m)
                                                     : (1 + 0x1p-16) * m / 127;
        };
        for (std::size_t rank = 0; rank < n; ++rank) {
          exact += gradient[rank][at];
          rounded(gradient[rank][at], largest[rank]);
        }
        // The owner rounds what the ranks' roundings have left of the sum; its largest element, 127 scales,
        // comes out as 126 at least.
        rounded(std::abs(exact) + bound, largest[n] * 127 / 126);
        ASSERT_LE(std::abs(sum[at] - exact), bound) << compress << " " << i;
        largest_error = std::max(largest_error, std::abs(sum[at] - exact));
      }
    });
    EXPECT_GT(largest_error, 0) << compress;
  }
}

// The mean over many steps of the sum of the same gradients. Each of n + 1 roundings (the ranks' and the
// owner's) has a variance of at most scale^2 / 4 and a bias of at most 2^-16 scale.
TEST(GradientReducer, Int8IsUnbiased) {
  constexpr int n = 3;
  constexpr std::int64_t steps = 3000;
  const GradientBucket bucket = bucket_of({{9, 1}, {13, 2}});
  std::vector<double> exact(static_cast<std::size_t>(bucket.numel())), mean(exact.size());
  double largest = 0;
  on_ranks(n, [&](ThreadWorld& world, int rank) {
    Worker worker(world, rank, n, "int8", DType::f64, {bucket});
    for (std::int64_t step = 0; step < steps; ++step) {
      fill_gradient(bucket, rank, 0, worker.gradients[0]);
      worker.reduce(step);
      if (rank != 0) continue;
      const std::vector<double> sum = worker.result();
      for (std::size_t i = 0; i < sum.size(); ++i) mean[i] += sum[i] / steps;
    }
  });
  for (int rank = 0; rank < n; ++rank) {
    std::vector<double> g(exact.size());
    fill_gradient(bucket, rank, 0, Tensor::view_of(g.data(), DType::f64, {bucket.numel()}));
    for (std::size_t i = 0; i < g.size(); ++i) {
      exact[i] += g[i];
      largest = std::max(largest, std::abs(g[i]));
    }
  }
  const double rank_scale = largest / 127, sum_scale = n * (largest + rank_scale) / 127;
  const double deviation = std::sqrt((n * rank_scale * rank_scale + sum_scale * sum_scale) / 4 / steps);
  for (std::size_t i = 0; i < exact.size(); ++i)
    EXPECT_NEAR(mean[i], exact[i], 5 * deviation + 0x1p-16 * (n * rank_scale + sum_scale)) << i;
}

TEST(GradientReducer, Int8RoundsAnewEachStepAndForEachSeed) {
  const std::vector<GradientBucket> buckets{bucket_of({{40, 40}})};
  std::vector<std::vector<double>> sums;
  for (auto [seed, number] : {std::pair{1, 0}, {1, 1}, {2, 0}, {1, 0}})
    on_ranks(2, [&, seed = seed, number = number](ThreadWorld& world, int rank) {
      Worker worker(world, rank, 2, "int8", DType::f32, buckets, static_cast<std::uint64_t>(seed));
      fill_gradient(buckets[0], 0, 0, worker.gradients[0]);  // the same on both ranks
      worker.reduce(number);
      if (rank == 0) sums.push_back(worker.result());
    });
  EXPECT_NE(sums[0], sums[1]);
  EXPECT_NE(sums[0], sums[2]);
  EXPECT_EQ(sums[0], sums[3]);
  // Two ranks round the same gradient each in its own way: were it one way, their decoded sum would be even.
  std::vector<double> shard;
  GradientBucket cut = buckets[0];
  cut.shards = {1600, 0};
  on_ranks(2, [&](ThreadWorld& world, int rank) {
    Worker worker(world, rank, 2, "int8", DType::f64, {cut});
    fill_gradient(cut, 0, 0, worker.gradients[0]);
    const std::vector<double> before = numbers(worker.gradients[0]);
    worker.reduce(0);
    if (rank != 0) return;
    std::int64_t odd = 0;
    for_each_block(cut, {0, 1600}, [&](const GradientSection&, Range block, Range) {
      const auto scale =
          static_cast<double>(int8_scale(largest_magnitude(before.data() + block.begin, block.size())));
      for (std::int64_t i = block.begin; i < block.end; ++i)
        odd += std::llround(numbers(worker.shards[0])[static_cast<std::size_t>(i)] / scale) % 2 != 0;
    });
    EXPECT_GT(odd, 100);
  });
}

TEST(GradientReducer, ABadGradientStaysBadAndInItsParameter) {
  const GradientBucket bucket = bucket_of({{17, 31}, {40, 26}});
  for (const std::string& compress : every_method)
    for (double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()})
      on_ranks(3, [&](ThreadWorld& world, int rank) {
        Worker worker(world, rank, 3, compress, DType::f32, {bucket});
        fill_gradient(bucket, rank, 0, worker.gradients[0]);
        if (rank == 1) worker.gradients[0].host<float>()[100] = static_cast<float>(bad);
        worker.reduce(0);
        for (const GradientSection& s : bucket.sections)
          ASSERT_EQ(worker.kernels->all_finite(worker.gradients[0].flat_range(s.range.begin, s.range.end)),
                    s.name != "p0")
              << compress;
      });
}

TEST(GradientReducer, RefusesMisuse) {
  on_ranks(2, [&](ThreadWorld& world, int rank) {
    const GradientBucket bucket = bucket_of({{4, 4}});
    Worker worker(world, rank, 2, "int8", DType::f32, {bucket});
    const auto make = [&](const GradientBucket& of) {
      GradientReducer({*worker.group, *worker.group}, *worker.kernels, worker.arena, DType::f32,
                      method("int8"), 1, {of});
    };
    GradientBucket gap = bucket, short_shards = bucket, few_shards = bucket;
    gap.sections[0].range.begin = 1;
    short_shards.shards = {8, 7};
    few_shards.shards = {16};
    EXPECT_THROW(make(gap), InvariantError);
    EXPECT_THROW(make(short_shards), InvariantError);
    EXPECT_THROW(make(few_shards), InvariantError);

    const Tensor other(worker.arena, MemoryCategory::other, DType::f64, {16});
    EXPECT_THROW(worker.reducer->begin(0, 0, other), InvariantError);
    EXPECT_THROW(worker.reducer->begin(0, 0, worker.gradients[0].flat_range(0, 15)), InvariantError);
    worker.step(0);
    worker.reducer->begin(0, 1, worker.gradients[0]);
    EXPECT_THROW(worker.reducer->begin(0, 1, worker.gradients[0]), InvariantError);
    worker.reducer->finish();
  });
}

TEST(GradientReducer, TopKRefusesWhatAnIndexCannotReach) {
  on_ranks(2, [&](ThreadWorld& world, int rank) {
    Arena arena;
    const auto group = world.join(rank, {0, 1}, "dp");
    const auto kernels = make_reference_kernels();
    std::string why;
    try {
      GradientReducer({*group, *group}, *kernels, arena, DType::f32, method("topk:0.5"), 1,
                      {bucket_of({{65536, 32768}})});
    } catch (const RequestError& error) {
      why = error.what();
    }
    EXPECT_EQ(why,
              "--compress topk:0.5: the gradients from p0 to p0 are reduced as one bucket of 2147483648 "
              "elements, more than the 2147483647 that an index of 32 bits reaches; legal: a larger --tp or "
              "--pp, or another method");
  });
}

}  // namespace
}  // namespace echelon::gradient_reducer_test

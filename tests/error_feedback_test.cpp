// Top-k and PowerSGD: what they send, and what they carry from step to step.
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "base/error.h"
#include "compression_runs.h"

namespace echelon::error_feedback_test {
namespace {

using namespace compression_tests;

TEST(ErrorFeedback, TopKSendsTheLargestOfEachParameter) {
  const GradientBucket bucket = bucket_of({{10, 10}, {5, 1}, {3, 1}});
  on_ranks(2, [&](ThreadWorld& world, int rank) {
    Worker worker(world, rank, 2, "topk:0.02", DType::f64, {bucket});
    double* const x = worker.gradients[0].host<double>();
    for (std::int64_t i = 0; i < bucket.numel(); ++i) x[i] = 1;
    x[40] = rank == 0 ? -7 : 3;
    x[50 + rank] = 5;
    x[104] = 0.5;
    worker.reduce(0);
    // Two of the first parameter, one of each of the others, the first of equal ones.
    std::vector<double> expected(108);
    expected[40] = -7 + 3;
    expected[50] = expected[51] = 5;
    expected[100] = expected[105] = 2;
    EXPECT_EQ(worker.result(), expected);
  });
}

// What was handed out and what is carried over add up to the gradients: sum over steps of the result + sum
// over ranks of the residuals = sum of all gradients.
TEST(ErrorFeedback, NothingIsLost) {
  constexpr int n = 3;
  constexpr std::int64_t steps = 12;
  const std::vector<GradientBucket> buckets{bucket_of(odd_shapes), bucket_of({{64, 48}}, 10)};
  for (DType dtype : {DType::f32, DType::f64})
    for (const char* compress : {"topk:0.02", "topk:0.3", "powersgd:1", "powersgd:2:4"}) {
      std::map<std::string, std::vector<double>> sent, carried, given, size;
      std::mutex mutex;
      on_ranks(n, [&](ThreadWorld& world, int rank) {
        Worker worker(world, rank, n, compress, dtype, buckets);
        const auto add = [&](std::map<std::string, std::vector<double>>& to, const std::string& name,
                             const std::vector<double>& values, bool magnitude = false) {
          const std::lock_guard lock(mutex);
          std::vector<double>& sum = to[name];
          sum.resize(values.size());
          for (std::size_t i = 0; i < values.size(); ++i)
            sum[i] += magnitude ? std::abs(values[i]) : values[i];
        };
        for (std::int64_t step = 0; step < steps; ++step) {
          worker.step(step);
          for (std::size_t b = 0; b < buckets.size(); ++b) {
            const Tensor original(worker.arena, MemoryCategory::other, dtype, {buckets[b].numel()});
            fill_gradient(buckets[b], rank, step, original);
            for (const GradientSection& s : buckets[b].sections) {
              const auto part = [&](const Tensor& of) {
                return numbers(of.flat_range(s.range.begin, s.range.end));
              };
              add(given, s.name, part(original));
              add(size, s.name, part(original), true);
              if (rank == 0) add(sent, s.name, part(worker.gradients[b]));
            }
          }
        }
        for (const CarriedTensor& c : worker.reducer->carried())
          if (c.what == "residual") add(carried, c.parameter, numbers(c.tensor));
      });
      EXPECT_FALSE(carried.empty());
      const double eps = dtype == DType::f32 ? 0x1p-23 : 0x1p-52;
      for (const auto& [name, sum] : given) {
        double largest = 0, outstanding = 0;
        for (double x : size[name]) largest = std::max(largest, x);
        for (std::size_t i = 0; i < sum.size(); ++i) {
          const double left = carried.contains(name) ? carried[name][i] : 0;
          outstanding = std::max(outstanding, std::abs(left));
          // A step rounds each number it adds once (top-k), or the products of P and Q (R additions, twice:
          // in the sum and in what is taken from the residual) of numbers no larger than a row's norm.
          const double row = std::sqrt(static_cast<double>(64)) * largest;
          ASSERT_NEAR(sent[name][i] + left, sum[i], steps * (n + 4) * eps * row) << compress << " " << name;
        }
        if (carried.contains(name) && sum.size() > 100) {
          EXPECT_GT(outstanding, 0.01 * largest) << name;
        }
      }
    }
}

// How far PowerSGD may be from a sum M = U S V^T of rank R or less. P is off by the rounding of products of
// `cols` terms of the ranks' matrices, and M by that over the least singular value of V^T Q: 1 once Q spans
// V, and for a random Q above 1e-4, but for about one draw in a thousand.
double low_rank_bound(DType dtype, double squares, std::int64_t cols, bool random_q) {
  const double eps = dtype == DType::f32 ? 0x1p-23 : 0x1p-52;
  return eps * std::sqrt(squares) * std::sqrt(static_cast<double>(cols)) * (random_q ? 1e4 : 4);
}

// Sums of rank R or less come out whole, step after step, though the ranks' own matrices have full rank.
TEST(ErrorFeedback, PowerSgdIsExactOnSumsOfItsRank) {
  constexpr int n = 3;
  const std::vector<GradientBucket> buckets{bucket_of({{50, 70}, {64, 33}})};
  const auto element = [](const GradientSection& s, std::int64_t i, int rank, std::int64_t step,
                          int true_rank) {
    double sum = 0;  // right vectors are common to the ranks, so their sum has no higher rank
    for (int k = 0; k < true_rank; ++k)
      sum += gradient_at(s.name + "u", i / s.cols * 8 + k, rank, step) *
             gradient_at(s.name + "v", i % s.cols * 8 + k, 0, 0);
    // What cancels over the ranks.
    const double noise = gradient_at(s.name + "w", i, 0, step);
    return rank == 0 ? sum + noise : rank == 1 ? sum - noise : sum;
  };
  for (int true_rank : {0, 1, 3})
    for (DType dtype : {DType::f32, DType::f64})
      on_ranks(n, [&](ThreadWorld& world, int rank) {
        Worker worker(world, rank, n, "powersgd:3", dtype, buckets);
        double squares = 0;  // of all steps: what is left of one cancels in the next only up to rounding
        for (std::int64_t step = 0; step < 3; ++step) {
          std::vector<double> exact(static_cast<std::size_t>(buckets[0].numel()));
          for (const GradientSection& s : buckets[0].sections)
            for (std::int64_t i = 0; i < s.range.size(); ++i)
              for (int other = 0; other < n; ++other) {
                const double x = element(s, i, other, step, true_rank);
                const std::int64_t at = s.range.begin + i;
                exact[static_cast<std::size_t>(at)] += x;
                squares += x * x;
                if (other != rank) continue;
                if (dtype == DType::f32)
                  worker.gradients[0].host<float>()[at] = static_cast<float>(x);
                else
                  worker.gradients[0].host<double>()[at] = x;
              }
          worker.reduce(step);
          const double bound = low_rank_bound(dtype, squares, 70, step == 0);
          const std::vector<double> sum = worker.result();
          for (std::size_t i = 0; i < sum.size(); ++i) ASSERT_NEAR(sum[i], exact[i], bound) << true_rank;
        }
      });
}

// Gradients so small that the square of one underflows, and a step of zeros before them, leave Q directions
// to start from: matrices of rank 2 still come out whole.
TEST(ErrorFeedback, PowerSgdOutlivesTinyGradients) {
  const GradientBucket bucket = bucket_of({{20, 40}});
  on_ranks(2, [&](ThreadWorld& world, int rank) {
    Worker worker(world, rank, 2, "powersgd:2", DType::f32, {bucket});
    double squares = 0;
    for (std::int64_t step = 0; step < 4; ++step) {
      std::vector<double> exact(800);
      for (std::int64_t i = 0; i < 800; ++i) {
        double x = 0;
        for (int k = 0; k < 2; ++k)
          x += step == 0 ? 0
                         : 1e-30 * gradient_at("u", i / 40 * 2 + k, 0, step) *
                               gradient_at("v", i % 40 * 2 + k, 0, 0);
        squares += 2 * x * x;
        exact[static_cast<std::size_t>(i)] = 2 * x;
        worker.gradients[0].host<float>()[i] = static_cast<float>(x);
      }
      worker.reduce(step);
      const double bound = low_rank_bound(DType::f32, squares, 40, step == 1);
      const std::vector<double> sum = worker.result();
      for (std::size_t i = 0; i < sum.size(); ++i) ASSERT_NEAR(sum[i], exact[i], bound) << step;
    }
  });
}

// The same gradient again and again: subspace iteration turns P to the leading singular vectors, and the
// error falls to that of the best approximation of rank R (Eckart & Young). Here that is known: singular
// values 8, 4, 1, 0.5 on coordinate axes.
TEST(ErrorFeedback, PowerSgdFindsTheBestApproximation) {
  const GradientBucket bucket = bucket_of({{30, 20}});
  on_ranks(2, [&](ThreadWorld& world, int rank) {
    Worker worker(world, rank, 2, "powersgd:2", DType::f64, {bucket});
    for (const CarriedTensor& c : worker.reducer->carried())
      ASSERT_EQ(c.tensor.numel(), c.what == "factor" ? 40 : 600);
    double error = 0;
    for (std::int64_t step = 0; step < 25; ++step) {
      for (const CarriedTensor& c : worker.reducer->carried())
        if (c.what == "residual") worker.kernels->fill(c.tensor, 0);  // without error feedback
      worker.kernels->fill(worker.gradients[0], 0);
      for (auto [axis, value] : {std::pair{0, 8.0}, {1, 4.0}, {2, 1.0}, {3, 0.5}})
        worker.gradients[0].host<double>()[axis * 20 + axis] = value / 2;
      const std::vector<double> before = numbers(worker.gradients[0]);
      worker.reduce(step);
      error = 0;
      for (std::size_t i = 0; i < before.size(); ++i)
        error += std::pow(2 * before[i] - worker.result()[i], 2);
    }
    // The wrong part of P shrinks by (1/4)^2 a step.
    EXPECT_NEAR(error, 1.0 + 0.25, 1e-12);
  });
}

// ---- training

// Each rank has its own quadratic 1/2 |D (x - goal)|^2 with curvatures from 1/2 to 3/2; all share the goal,
// so that gradient descent on the sum converges to it linearly, and every method must too.
TEST(ErrorFeedback, AToyProblemConvergesByEveryMethod) {  // long
  constexpr int n = 3;
  // Error feedback sends a gradient late, by up to about 1/R steps or rows/R: the rate leaves room for that.
  struct Run {
    const char* compress;
    double rate;
    std::int64_t steps;
  };
  const std::vector<GradientBucket> buckets{bucket_of({{20, 30}, {7, 1}})};
  for (const auto& [compress, rate, steps] : {Run{"none", 0.1, 100},
                                              {"bf16", 0.1, 100},
                                              {"fp16", 0.1, 100},
                                              {"int8", 0.1, 100},
                                              {"topk:0.05", 0.02, 500},
                                              {"powersgd:1", 0.01, 600},
                                              {"powersgd:4:10", 0.03, 400}}) {
    std::vector<double> loss(static_cast<std::size_t>(steps));
    on_ranks(n, [&, compress = compress, rate = rate, steps = steps](ThreadWorld& world, int rank) {
      Worker worker(world, rank, n, compress, DType::f32, buckets);
      const std::int64_t numel = buckets[0].numel();
      std::vector<double> x(static_cast<std::size_t>(numel));
      const Philox random(6, Stream::test, 1);
      for (std::int64_t step = 0; step < steps; ++step) {
        for (std::int64_t i = 0; i < numel; ++i) {
          const double goal = random.normal(static_cast<std::uint64_t>(i)),
                       curvature = 0.5 + random.uniform(static_cast<std::uint64_t>(1000000 * (rank + 1) + i)),
                       distance = x[static_cast<std::size_t>(i)] - goal;
          worker.gradients[0].host<float>()[i] = static_cast<float>(curvature * distance);
          if (rank == 0) loss[static_cast<std::size_t>(step)] += distance * distance;
        }
        worker.reduce(step);
        const std::vector<double> sum = worker.result();
        for (std::size_t i = 0; i < x.size(); ++i) x[i] -= rate * sum[i];
      }
    });
    EXPECT_LT(loss.back(), 1e-6 * loss.front()) << compress;
  }
}

// On the kernels that training runs on, too, the bits do not depend on where in a bucket a matrix lies.
TEST(ErrorFeedback, FactorsDoNotDependOnTheAddressOfAMatrix) {
  Arena arena;
  std::unique_ptr<Kernels> kernels;
  try {
    kernels = make_kernels(arena, DType::f32, 1);
  } catch (const RequestError& error) {
    GTEST_SKIP() << error.what();
  }
  const Shapes shapes{{192, 257}, {65, 300}};
  std::vector<std::vector<double>> results;
  for (int ahead : {0, 1, 3, 7, 16})
    on_ranks(2, [&](ThreadWorld& world, int rank) {
      GradientBucket bucket = bucket_of(shapes);
      for (GradientSection& s : bucket.sections) s.range = {s.range.begin + ahead, s.range.end + ahead};
      if (ahead > 0)
        bucket.sections.insert(bucket.sections.begin(),
                               {.name = "ahead", .range = {0, ahead}, .rows = ahead, .cols = 1});
      Worker worker(world, rank, 2, "powersgd:4", DType::f32, {bucket}, 1, false);
      for (std::int64_t step = 0; step < 3; ++step) worker.step(step);
      const std::vector<double> all = worker.result();
      if (rank == 0) results.emplace_back(all.begin() + ahead, all.end());
    });
  for (const auto& other : results) EXPECT_TRUE(same_bits(other, results.front()));
}

// ---- what is carried over

TEST(ErrorFeedback, ResidualSourcesShareTheSavedOnes) {
  EXPECT_EQ(residual_sources(2, 4, 4), std::vector<int>{2});
  EXPECT_EQ(residual_sources(1, 2, 5), (std::vector<int>{1, 3}));
  EXPECT_EQ(residual_sources(0, 2, 5), (std::vector<int>{0, 2, 4}));
  EXPECT_EQ(residual_sources(4, 5, 3), std::vector<int>{});
  for (int size = 1; size <= 5; ++size)
    for (int saved = 1; saved <= 5; ++saved) {
      std::vector<int> count(static_cast<std::size_t>(saved));
      for (int rank = 0; rank < size; ++rank)
        for (int source : residual_sources(rank, size, saved)) ++count[static_cast<std::size_t>(source)];
      EXPECT_EQ(count, std::vector<int>(static_cast<std::size_t>(saved), 1));
    }
}

// A new reducer that is given what the old one carried goes on with the same bits; one without it does not.
TEST(ErrorFeedback, GoesOnFromWhatIsCarried) {
  constexpr int n = 3;
  const std::vector<GradientBucket> buckets{bucket_of(odd_shapes), bucket_of({{64, 48}}, 10)};
  for (const char* compress : {"topk:0.1", "powersgd:2"})
    on_ranks(n, [&](ThreadWorld& world, int rank) {
      Worker worker(world, rank, n, compress, DType::f32, buckets),
          resumed(world, rank, n, compress, DType::f32, buckets),
          fresh(world, rank, n, compress, DType::f32, buckets);
      for (std::int64_t step = 0; step < 3; ++step) worker.step(step);
      const auto from = worker.reducer->carried(), to = resumed.reducer->carried();
      ASSERT_EQ(from.size(), to.size());
      ASSERT_FALSE(from.empty());
      for (std::size_t i = 0; i < from.size(); ++i) {
        ASSERT_EQ(from[i].parameter, to[i].parameter);
        ASSERT_EQ(from[i].what, to[i].what);
        worker.kernels->copy(from[i].tensor, to[i].tensor);
      }
      for (std::int64_t step = 3; step < 6; ++step) {
        worker.step(step);
        resumed.step(step);
        fresh.step(step);
        ASSERT_TRUE(same_bits(worker.result(), resumed.result())) << compress;
        ASSERT_FALSE(same_bits(worker.result(), fresh.result())) << compress;
      }
    });
}

TEST(ErrorFeedback, NothingIsCarriedWhereNothingIsLost) {
  on_ranks(2, [&](ThreadWorld& world, int rank) {
    for (const char* compress : {"none", "bf16", "fp16", "int8", "powersgd:1000"})
      EXPECT_TRUE(
          Worker(world, rank, 2, compress, DType::f32, {bucket_of(odd_shapes)}).reducer->carried().empty());
  });
  on_ranks(1, [&](ThreadWorld& world, int rank) {
    EXPECT_TRUE(
        Worker(world, rank, 1, "topk:0.1", DType::f32, {bucket_of(odd_shapes)}).reducer->carried().empty());
  });
}

}  // namespace
}  // namespace echelon::error_feedback_test

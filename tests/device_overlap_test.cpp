// What crosses between ranks runs beside a device's kernels, and waits for what it must: on the clock of a
// fake device, which is decided by the order of its streams alone (fake_driver.h).
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "fake_driver.h"
#include "mesh_runs.h"
#include "tensor/host.h"

namespace echelon::device_overlap_test {
namespace {

using namespace checks;

// One after another the collective would take its time whenever it was called: before it is waited for it is
// looked at, which is no reason for the kernels to stand still.
TEST(DeviceOverlap, ACollectiveRunsBesideKernelsUntilItIsWaitedFor) {
  constexpr std::int64_t size = 64;
  constexpr int kernels_beside = 6;
  for (const double reduction : {2.0, 5.0, 9.0})
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {
      FakeDriver driver({.seed = seed, .seconds = [&](const std::string& name, std::size_t) {
                           return name == "reduce" ? reduction : name == "copy" ? 0 : 1;
                         }});
      {
        ThreadWorld world(2, patience);
        run_ranks(world, [&](int index) {
          Arena arena(&driver, 0);
          const auto kernels = make_kernels(arena, DType::f64, 1);
          const auto group = world.join(index, {0, 1}, "dp");
          const Tensor x(arena, MemoryCategory::other, DType::f64, {size}),
              y(arena, MemoryCategory::other, DType::f64, {size});
          kernels->fill(x, index + 1);
          kernels->fill(y, 7);
          Pending sum = group->all_reduce(x);
          for (int i = 0; i < kernels_beside; ++i) {
            kernels->scale(y, 1);
            sum.progress();
          }
          sum.wait();
          kernels->add(y, x);
          EXPECT_EQ(copy_to_host<double>(x), std::vector<double>(size, 1 + 2 + 7));
        });
      }
      EXPECT_EQ(driver.complaints(), std::vector<std::string>());
      EXPECT_EQ(driver.last_end(), 2 + std::max<double>(kernels_beside, reduction) + 1) << "seed " << seed;
    }
}

// Of two optimizer steps, where a kernel and a reduction take so long for each byte.
double seconds_of_steps(const Plan& plan, double kernel, double reduction) {
  FakeDriver driver({.seconds = [=](const std::string& name, std::size_t bytes) {
    return (name == "reduce" ? reduction : name == "copy" ? 0 : kernel) * static_cast<double>(bytes);
  }});
  {
    ThreadWorld world(plan.mesh.num_ranks(), patience);
    run_ranks(world, [&](int index) {
      Arena arena(&driver, 0);
      const auto kernels = make_kernels(arena, plan.precision, 1, plan.numerics);
      const Rank rank(world, plan.mesh, index, plan.precision, arena, *kernels);
      Trainer trainer(rank, plan, {}, 1);
      for (std::int64_t step = 0; step < 2; ++step) {
        trainer.compute_gradients(step, random_samples(plan));
        trainer.apply_gradients(step);
      }
      arena.synchronize();
    });
  }
  EXPECT_EQ(driver.complaints(), std::vector<std::string>());
  return driver.last_end();
}

TEST(DeviceOverlap, GradientsAreSummedBehindTheBackwardPass) {
  Plan plan = odd_plan(odd_llama(false, 2, 6), 2, 1, false);
  plan.bucket_bytes = 1;  // one for each layer
  plan.global_batch = 8;
  plan.seq_len = 32;
  for (const int zero : {0, 2}) {
    plan.zero = zero;
    const double kernels = seconds_of_steps(plan, 1, 0), reductions = seconds_of_steps(plan, 0, 1);
    // A fifth of the kernels' time; one after another the steps would take all of it longer.
    const double scale = 0.2 * kernels / reductions, seen = seconds_of_steps(plan, 1, scale) - kernels;
    EXPECT_GT(reductions, 0);
    EXPECT_GE(seen, 0);
    EXPECT_LT(seen, 0.5 * 0.2 * kernels) << "zero " << zero;
  }
}

}  // namespace
}  // namespace echelon::device_overlap_test

// What the parameters of a rank are at first.
#include "model/parameters.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "base/philox.h"
#include "checkpoint/logical_tensors.h"
#include "comm/threads.h"
#include "patience.h"
#include "schedule/pipeline_layout.h"
#include "tensor/host.h"

namespace echelon::parameters_test {
namespace {

// Tables of several pieces, of which each thread draws some.
Plan plan_of(const PrecisionRecipe& precision) {
  Plan plan;
  plan.model = load_model("gpt2-tiny");
  plan.model.vocab = 2500;
  plan.precision = precision;
  return plan;
}

using Drawn = std::map<std::string, std::vector<double>>;  // the whole model

Drawn drawn(Plan plan, int tp, int threads, int zero = 0, int dp = 1) {
  plan.mesh.set(Axis::tp, tp);
  plan.mesh.set(Axis::dp, dp);
  plan.zero = zero;
  Drawn all;
  ThreadWorld world(tp * dp, checks::patience);
  run_ranks(world, [&](int index) {
    Arena arena;
    const auto kernels = make_kernels(arena, plan.precision, threads);
    const Rank rank(world, plan.mesh, index, plan.precision, arena, *kernels);
    const ParameterStore parameters(rank, plan, PipelineLayout(plan), 5);
    for (const Parameter& p : parameters.all()) {
      const auto numbers = copy_numbers_to_host(gather_logical(rank, p, ParameterTensor::value));
      if (index == 0) all[p.spec.name] = numbers;
    }
  });
  return all;
}

TEST(Parameters, WhatIsDrawnDependsOnNeitherThreadsNorMesh) {
  for (const char* name : {"f64", "f32", "bf16", "bf16-lean"}) {
    const Plan plan = plan_of(recipe(name));
    const Drawn one = drawn(plan, 1, 1);
    const std::string table = embedding_parameters(plan.model).front().name;
    const Philox random(5, Stream::initial_value, name_hash(table.c_str()));
    const double deviation = embedding_parameters(plan.model).front().init_std;
    const auto& numbers = one.at(table);
    ASSERT_GT(numbers.size(), std::size_t{2} << 16) << "of one piece";
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const double exact = deviation * random.normal(i);
      double want = exact;
      if (std::string(name) != "f64") want = static_cast<double>(static_cast<float>(exact));
      if (std::string(name) == "bf16-lean")
        want = static_cast<double>(float{bf16(static_cast<float>(exact))});
      ASSERT_EQ(numbers[i], want) << name << " " << i;
    }
    if (!has_fast_kernels(plan.precision) && std::string(name) != "f64") continue;
    EXPECT_EQ(drawn(plan, 1, 3), one) << name;
    EXPECT_EQ(drawn(plan, 2, 2), one) << name;
    EXPECT_EQ(drawn(plan, 1, 2, 3, 2), one) << name;
  }
}

// A layer's gradients are memory from its backward pass until the next update begins; what no pass has needed
// is zeros when all are summed.
TEST(Parameters, GradientsComeWhenTheyAreNeeded) {
  for (const int zero : {0, 1}) {
    Plan plan = plan_of(recipe("f32"));
    plan.mesh.set(Axis::dp, 2);
    plan.zero = zero;
    plan.bucket_bytes = 1;
    ThreadWorld world(2, checks::patience);
    run_ranks(world, [&](int index) {
      Arena arena;
      const auto kernels = make_kernels(arena, plan.precision, 1);
      const Rank rank(world, plan.mesh, index, plan.precision, arena, *kernels);
      const ParameterStore parameters(rank, plan, PipelineLayout(plan), 5);
      const auto live = [&] { return arena.live()[MemoryCategory::gradients]; };
      const auto bytes_of = [&](auto belongs) {
        std::int64_t bytes = 0;
        for (const Parameter& p : parameters.all())
          if (belongs(p)) bytes += p.gradient.bytes();
        return bytes;
      };
      const std::int64_t whole = bytes_of([](const Parameter&p) { return p.spec.shard_dim < 0; }),
                         all = bytes_of([](const Parameter&) { return true; });
      EXPECT_EQ(live(), 0);
      for (int update = 0; update < 3; ++update) {
        parameters.begin_gradients();
        EXPECT_EQ(live(), whole);
        std::int64_t needed = whole;
        for (const int group : {2, 1, 2}) {
          parameters.need_gradients(group);
          needed = std::max(needed, whole + bytes_of([&](const Parameter& p) {
                                      return p.spec.shard_dim >= 0 && p.group >= group && p.group <= 2;
                                    }));
          EXPECT_EQ(live(), needed);
        }
        for (const Parameter& p : parameters.all())
          if (p.group == 1) kernels->fill(p.gradient, 1);
        parameters.end_gradients(1);
        parameters.need_all_gradients();
        EXPECT_EQ(live(), all);
        for (const Parameter& p : parameters.all())
          for (const double x : copy_numbers_to_host(p.gradient))
            ASSERT_EQ(x, p.group == 1 ? 1 : 0) << p.spec.name;
      }
    });
  }
}

}  // namespace
}  // namespace echelon::parameters_test

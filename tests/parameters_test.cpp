// What the parameters of a rank are at first.
#include "model/parameters.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace echelon::parameters_test

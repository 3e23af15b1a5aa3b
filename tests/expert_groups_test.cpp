// Experts over expert groups, with everything that they meet: on every mesh what they are on one rank.
#include <gtest/gtest.h>

#include "case_choice.h"
#include "checkpoint/checkpoint.h"
#include "expert_runs.h"
#include "schedule/pipeline_layout.h"
#include "verify/verify.h"

namespace echelon::expert_groups_test {
namespace {

using namespace checks;

void expect_verified(const Plan& plan) {
  SCOPED_TRACE(describe_experts(plan));
  VerifyRequest request;
  request.plan = plan;
  request.steps = request.optimizer.total_steps = 2;
  const VerifyReport report = verify(request);
  EXPECT_TRUE(report.pass) << to_json(report, plan);
  EXPECT_GT(report.reference_losses.front(), 0);
}

// The meshes on which experts meet the other axes: dp is ep, or twice that.
std::vector<Plan> meshes(const ModelSpec& model, int ep) {
  Plan plan = odd_plan(model, ep, 1, false);
  plan.mesh.ep = ep;
  plan.seq_len = 12;
  plan.global_batch = 3 * ep + 1;
  plan.micro_batch = 1;
  std::vector<Plan> list{plan};
  const auto add = [&](const auto& change) {
    list.push_back(plan);
    change(list.back());
  };
  add([](Plan& p) { p.mesh.set(Axis::tp, 2), p.sequence_parallel = false; });
  add([](Plan& p) { p.mesh.set(Axis::tp, 2), p.sequence_parallel = true; });
  add([](Plan& p) { p.mesh.set(Axis::dp, p.mesh.ep / 2), p.mesh.set(Axis::cp, 2); });
  for (const char* schedule : {"1f1b", "zb-v", "dualpipe"})
    add([&](Plan& p) {
      p.mesh.set(Axis::pp, 2);
      p.schedule = schedule;
      p.model.num_layers = 5;
      p.global_batch = 4 * p.mesh.ep;
    });
  for (int zero : {1, 2, 3})
    add([&](Plan& p) {
      p.mesh.set(Axis::dp, 4);
      p.zero = zero;
    });
  return list;
}

std::vector<Balancing> balancings_of(const ModelSpec& model) {
  std::vector<Balancing> list(3, all_losses(model.router.groups > 1));
  list[1].capacity = list[2].capacity = 0.9;
  list[2].drop = DropPolicy::position;
  return list;
}

class ExpertGroups : public testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(ExpertGroups, EqualOneRank) {
  const auto [ep, k] = GetParam();
  for (const ModelSpec& model : {even_mixtral(k), even_deepseek(k)})
    for (Plan& plan : meshes(model, ep))
      for (const Balancing& balancing : balancings_of(model)) {
        if (!is_taken()) continue;
        plan.balancing = balancing;
        expect_verified(plan);
      }
}

INSTANTIATE_TEST_SUITE_P(Sizes, ExpertGroups,
                         testing::Combine(testing::Values(2, 4), testing::Values(1, 2, 4)),
                         [](const auto& of) {
                           return fmt::format("ep{}_k{}", std::get<0>(of.param), std::get<1>(of.param));
                         });

// Everything at once, on 16 ranks; f32 on the fast kernels too.
TEST(ExpertGroupsTogether, EqualOneRank) {
  for (DType dtype : {DType::f64, DType::f32}) {
    if (dtype == DType::f32 && !has_cpu_kernels()) continue;
    Plan plan = odd_plan(even_deepseek(2, 5), 2, 2, true, dtype);
    plan.mesh.set(Axis::cp, 2), plan.mesh.set(Axis::pp, 2);
    plan.mesh.ep = 4;
    plan.seq_len = 12;
    plan.global_batch = 8;
    plan.micro_batch = 1;
    plan.schedule = "zb-h1";
    plan.zero = 3;
    plan.recompute = Recompute::full;
    plan.balancing = all_losses();
    plan.balancing.capacity = 1.1;
    expect_verified(plan);
    plan.zero = 2;
    plan.hsdp = 1;
    plan.recompute = Recompute::selective;
    plan.schedule = "1f1b";
    expect_verified(plan);
  }
}

// Blocks of ZeRO with whole expert groups in each.
TEST(ExpertGroupsTogether, EqualOneRankUnderHybridSharding) {
  for (int zero : {1, 2, 3}) {
    Plan plan = odd_plan(even_mixtral(2), 8, 1, false);
    plan.global_batch = 8;
    plan.micro_batch = 1;
    plan.mesh.ep = 2;
    plan.zero = zero;
    plan.hsdp = 2;
    expect_verified(plan);
  }
}

// A rank of the pipeline that owns no layer with experts.
TEST(ExpertGroupsTogether, EqualOneRankWhereAStageHasNoExperts) {
  ModelSpec model = even_deepseek(2, 4);
  model.num_dense_layers = 2;
  Plan plan = odd_plan(model, 2, 1, false);
  plan.mesh.set(Axis::pp, 2);
  plan.mesh.ep = 2;
  plan.balancing = all_losses();
  expect_verified(plan);
}

// What was saved by one expert group is loaded by any other, and goes on to the same losses.
TEST(ExpertGroupsTogether, CheckpointsGoToAnyMesh) {
  Plan plan = odd_plan(even_deepseek(2), 4, 1, false);
  plan.mesh.ep = 4;
  plan.zero = 1;
  const TemporaryDirectory directory;
  CheckpointInfo info;
  info.step = 2;
  info.seed = 1;
  info.dtype = plan.precision.master;
  info.model = plan.model;
  double undisturbed = 0;
  std::string path;
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, {}, 1);
    for (std::int64_t step : {0, 1}) trainer.step(step, random_samples(plan), 2 - step);
    const std::string where = save_checkpoint(rank, trainer.parameters(), directory.path(), info);
    const double loss = trainer.step(2, random_samples(plan), 1).front().loss;
    if (rank.index() == 0) path = where, undisturbed = loss;
  });
  info = read_checkpoint_info(path);
  for (auto [dp, tp, pp, ep, zero] :
       {std::tuple{1, 1, 1, 1, 0}, {2, 2, 1, 2, 3}, {4, 1, 1, 2, 2}, {2, 1, 2, 1, 0}, {4, 1, 2, 4, 3}}) {
    Plan other = plan;
    other.mesh.set(Axis::dp, dp), other.mesh.set(Axis::tp, tp), other.mesh.set(Axis::pp, pp);
    other.mesh.ep = ep;
    other.zero = zero;
    on_mesh(other, [&](const Rank& rank) {
      Trainer trainer(rank, other, {}, 99);
      load_checkpoint(rank, trainer.parameters(), info, false);
      EXPECT_NEAR(trainer.step(2, random_samples(plan), 1).front().loss, undisturbed, 1e-13 * undisturbed)
          << describe_experts(other);
    });
  }
}

}  // namespace
}  // namespace echelon::expert_groups_test

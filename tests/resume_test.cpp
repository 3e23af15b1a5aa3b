// Training goes on from a checkpoint of one mesh on others: the state is the same to the last bit, and the
// losses of the next steps are those of the run that was never interrupted.
#include <gtest/gtest.h>

#include <mutex>

#include "checkpoint/checkpoint.h"
#include "mesh_runs.h"
#include "verify/verify.h"

namespace echelon::resume_test {
namespace {

using namespace checks;

constexpr std::int64_t saved_after = 2, steps = 5;

Plan plan_on(const ModelSpec& model, int dp, int tp, int pp, int zero) {
  Plan plan = odd_plan(model, dp, tp, tp > 1);
  plan.mesh.set(Axis::pp, pp);
  plan.zero = zero;
  plan.micro_batch = 1;
  return plan;
}

OptimizerOptions options() {
  OptimizerOptions o;
  o.warmup_steps = 0;
  o.lr = 1e-2;
  o.total_steps = steps;
  return o;
}

struct Trained {
  std::vector<double> losses;  // of the steps that were run
  LogicalTensors state;        // before the first of them: values and moments, of all ranks
};

// Steps [first, steps), with a checkpoint in `directory` behind the first ones.
Trained train(const Plan& plan, std::int64_t first, const std::function<void(const Rank&, Trainer&)>& load,
              const std::string& directory) {
  Trained trained;
  std::mutex mutex;
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, options(), first == 0 ? 1 : 99);  // another seed: nothing is right by chance
    if (load) load(rank, trainer);
    for (ParameterTensor which :
         {ParameterTensor::value, ParameterTensor::exp_avg, ParameterTensor::exp_avg_sq})
      for (auto& [name, values] : gather(rank, trainer, which)) {
        const std::lock_guard lock(mutex);
        const auto held =
            trained.state.try_emplace(fmt::format("{} {}", name, static_cast<int>(which)), values).first;
        EXPECT_EQ(held->second, values) << name << " of rank " << rank.index();
      }
    for (std::int64_t step = first; step < steps; ++step) {
      if (step == saved_after && !directory.empty()) {
        CheckpointInfo info;
        info.step = info.updates = saved_after;
        info.seed = 1;
        info.dtype = plan.precision.master;
        info.model = plan.model;
        save_checkpoint(rank, trainer.parameters(), directory, info);
      }
      const double loss = trainer.step(step, random_samples(plan), 1).front().loss;
      if (rank.index() == 0) trained.losses.push_back(loss);
    }
  });
  return trained;
}

Trained resumed(const Plan& plan, const CheckpointInfo& info, bool values_only = false) {
  return train(
      plan, saved_after,
      [&](const Rank& rank, const Trainer& trainer) {
        load_checkpoint(rank, trainer.parameters(), info, values_only);
      },
      "");
}

class Resume : public testing::TestWithParam<const char*> {
 protected:
  static ModelSpec model() {
    const std::string name = GetParam();
    if (name == "llama") return odd_llama(false, 2, 4);  // tp 4 has two ranks for each key/value head
    if (name == "tied_llama") return odd_llama(true, 2, 4);
    return odd_gpt2(true, 4);  // tied
  }
};

TEST_P(Resume, OnAnotherMeshTheLossesAreThoseOfTheRunThatWentOn) {  // long
  const TemporaryDirectory directory;
  const Plan from = plan_on(model(), 2, 2, 2, 1);
  const Trained whole = train(from, 0, {}, directory.path());
  const CheckpointInfo info = read_checkpoint_info(directory.path());
  ASSERT_EQ(info.step, saved_after);
  const std::vector<double> expected(whole.losses.begin() + saved_after, whole.losses.end());

  const Trained same = resumed(from, info);
  EXPECT_EQ(same.losses, expected);                                                   // to the last bit
  for (const Plan& to : {plan_on(model(), 1, 4, 1, 0), plan_on(model(), 1, 1, 3, 0),  // 4 layers on 3 stages
                         plan_on(model(), 4, 1, 1, 3), plan_on(model(), 1, 1, 1, 0)}) {
    SCOPED_TRACE(fmt::format("{}, zero {}", to.mesh.describe(), to.zero));
    const Trained other = resumed(to, info);
    EXPECT_EQ(other.state, same.state);
    ASSERT_EQ(other.losses.size(), expected.size());
    // The first comes of the same parameters; each update may add what regrouped sums in its gradient do.
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_LE(std::abs(other.losses[i] - expected[i]),
                static_cast<double>(i + 1) * verify_bound(to) * expected[i]);
  }

  // What this would show: moments that are lost change the loss of the step after next.
  const Trained without = resumed(plan_on(model(), 1, 1, 1, 0), info, true);
  EXPECT_GT(std::abs(without.losses[1] - expected[1]), 1e-4);
}

INSTANTIATE_TEST_SUITE_P(Models, Resume, testing::Values("llama", "tied_llama", "gpt2"),
                         [](const auto& instance) { return std::string(instance.param); });

}  // namespace
}  // namespace echelon::resume_test

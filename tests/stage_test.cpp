// What a pipeline stage holds while it runs: of a rank alone, on no device, which is what the rank of a real
// mesh holds (dry_run_test).
#include "model/stage.h"

#include <gtest/gtest.h>

#include <utility>

#include "comm/imagined.h"
#include "mesh_runs.h"
#include "model/held_stages.h"
#include "parallel/vocabulary_logits.h"
#include "pipeline_runs.h"

namespace echelon::stage_test {
namespace {

using namespace checks;

// One stage of a pipeline, on the first of the ranks that hold it.
struct DryStage {
  DryStage(const Plan& of, int id)
      : plan(of),
        world(plan.mesh.num_ranks(), plan.mesh.rank_at({.pp = id})),
        rank(world, plan.mesh, plan.mesh.rank_at({.pp = id}), plan.precision, arena, *kernels),
        held(rank, plan, pipeline, parameters, faults),
        stage(held.stage(id)),
        microbatch(load_microbatch(rank, plan, 0, {0, plan.micro_batch}, random_samples(plan))) {}

  Tensor forward() {
    return stage.forward(microbatch, held.make_boundary(microbatch.rows()), saved).finish();
  }
  Tensor backward(
      Tensor dy, Weights when, const Loss& loss = {}, Stage::GroupDone done = [](int) {}) {
    return stage.backward(microbatch, std::move(dy), loss, saved, when, std::move(done)).finish();
  }

  Plan plan;
  PipelineLayout pipeline{plan};
  ImaginedWorld world;
  Arena arena{Device::none};
  std::unique_ptr<Kernels> kernels = make_kernels(arena, plan.precision, 1);
  Rank rank;
  Faults faults;
  ParameterStore parameters{rank, plan, pipeline, 1};
  HeldStages held;
  const Stage& stage;
  Microbatch microbatch;
  Stage::Saved saved;
};

Plan three_stages(int tp, bool sequence_parallel) {
  Plan plan = pipeline_plan(odd_llama(false, 2, 3), "zb-h1", 3, 1, tp, 3);
  plan.sequence_parallel = sequence_parallel;
  plan.layers_per_stage = {1, 2, 0};
  return plan;
}

// Where weights get their gradients later, they read the gradient of the residual stream itself, but under
// sequence parallelism what was gathered of it.
TEST(Stage, CopiesADeferredGradientOnlyWhereItIsReadAgain) {
  for (const bool sequence_parallel : {false, true})
    for (const Weights when : {Weights::now, Weights::deferred}) {
      DryStage middle(three_stages(2, sequence_parallel), 1);
      middle.forward();
      const Tensor dy = middle.held.make_boundary(middle.microbatch.rows());
      const Tensor dx = middle.backward(dy, when);
      EXPECT_EQ(dx.begins_with(dy), when == Weights::now || sequence_parallel)
          << "sequence parallelism " << sequence_parallel;
    }
}

// The output layer alone, N rows of C, one chunk with room for V logits in each row. Behind its products the input's gradient
// takes the logits' place: at the peak there are the norm's output and the gradient of it, statistics,
// logits, and three numbers of each row.
TEST(Stage, TheOutputLayerHoldsItsLogitsAndTwoMatrices) {
  DryStage last(three_stages(1, false), 2);
  ASSERT_FALSE(last.forward().defined());
  const auto live = [&](MemoryCategory c) { return last.arena.live()[c]; };
  const Loss loss{1, Tensor(last.rank.arena(), MemoryCategory::other, DType::f64, {1})};
  const auto before = live(MemoryCategory::activations), other = live(MemoryCategory::other);
  last.arena.reset_peak();
  std::uint64_t other_behind = 0;
  const Tensor dx =
      last.backward({}, Weights::deferred, loss, [&](int) { other_behind = live(MemoryCategory::other); });
  const auto N = static_cast<std::uint64_t>(last.microbatch.rows()),
             C = static_cast<std::uint64_t>(last.plan.model.hidden),
             V = static_cast<std::uint64_t>(logits_row_stride(last.plan.model.vocab));
  EXPECT_EQ(last.arena.peak()[MemoryCategory::activations] - before, 8 * (2 * N * C + N + N * V + 3 * N));
  EXPECT_EQ(other_behind, other);  // a microbatch's own sum has gone when the layers begin
  EXPECT_EQ(dx.numel(), last.microbatch.rows() * last.plan.model.hidden);
}

}  // namespace
}  // namespace echelon::stage_test

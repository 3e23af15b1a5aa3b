// Whole steps of training on the kernels of a device, which the host runs with several lanes to a block
// (emulated_launch.h), give what the reference kernels give, in f64 and so to 1e-10: the kernels meet the
// shapes, strides and empty parts that a trainer has.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "case_choice.h"
#include "context_runs.h"
#include "devices_under_test.h"
#include "emulated_launch.h"
#include "expert_runs.h"
#include "tensor/device_kernels.h"

namespace echelon::device_kernels_training_test {
namespace {

using namespace checks;

using MakeKernels = std::function<std::unique_ptr<Kernels>()>;

std::vector<Outcome> steps_on(const MakeKernels& make, const Plan& plan) {
  constexpr std::int64_t steps = 2;
  std::vector<Outcome> outcomes(static_cast<std::size_t>(plan.mesh.num_ranks()));
  const SampleSource samples = random_samples(plan);
  ThreadWorld world(plan.mesh.num_ranks(), patience);
  run_ranks(world, [&](int index) {
    Arena arena;
    const std::unique_ptr<Kernels> kernels = make();
    const Rank rank(world, plan.mesh, index, plan.precision, arena, *kernels);
    Outcome& o = outcomes[static_cast<std::size_t>(index)];
    Trainer trainer(rank, plan, {}, 1);
    for (std::int64_t step = 0; step < steps; ++step) {
      o.losses.push_back(trainer.compute_gradients(step, samples));
      if (step + 1 == steps)
        for (const Parameter& p : trainer.parameters().all())
          if (p.spec.parts == 1)
            o.gradients[p.spec.name] = as_doubles(gather_logical(rank, p, ParameterTensor::gradient));
      o.norms.push_back(trainer.apply_gradients(step).gradient_norm);
    }
    o.losses.push_back(trainer.evaluate(2, samples));
  });
  return outcomes;
}

void expect_the_references(const Plan& plan) {
  SCOPED_TRACE(describe_context(plan));
  const std::vector<Outcome> expected = steps_on(make_reference_kernels, plan);
  std::vector<DeviceUnderTest> devices = devices_under_test();
  if (!takes_wide_cases()) devices.erase(devices.begin(), devices.end() - 1);  // that with most lanes
  for (const DeviceUnderTest& device : devices) {
    SCOPED_TRACE(device.name);
    const std::vector<Outcome> found = steps_on([&] { return device.use().kernels; }, plan);
    for (std::size_t r = 0; r < expected.size(); ++r) {
      EXPECT_LE(relative_difference(found[r].losses, expected[r].losses), 1e-10);
      EXPECT_LE(relative_difference(found[r].norms, expected[r].norms), 1e-10);
      ASSERT_EQ(found[r].gradients.size(), expected[r].gradients.size());
      for (const auto& [name, gradient] : expected[r].gradients)
        EXPECT_LE(relative_difference(found[r].gradients.at(name), gradient), 1e-10) << name;
    }
  }
}

TEST(DeviceKernelsTraining, Dense) {
  expect_the_references(odd_plan(odd_gpt2(), 1, 1, false));
  expect_the_references(odd_plan(odd_llama(), 1, 2, true));
}

TEST(DeviceKernelsTraining, KeysInBlocks) {  // long
  Plan plan = context_plan(Family::llama, {ContextKind::ring, ContextBalance::zigzag, 2, 1});
  plan.mask = AttentionMask::document;
  expect_the_references(plan);
}

TEST(DeviceKernelsTraining, Experts) {
  Plan plan = odd_plan(even_deepseek(3), 2, 1, false);
  plan.mesh.ep = 2;
  plan.balancing = all_losses();
  expect_the_references(plan);
  plan = odd_plan(even_mixtral(2), 2, 1, false);
  plan.mesh.ep = 2;
  plan.balancing.capacity = 0.8;
  expect_the_references(plan);
}

TEST(DeviceKernelsTraining, TensorParallelWithPackedGradients) {
  Plan plan = odd_plan(odd_llama(), 2, 2, false);
  plan.compression = parse_compression("int8", "--compress");
  expect_the_references(plan);
}

// What the trainer lets follow its products, in one pass.
struct Followed {
  int biases = 0, added = 0, activated = 0, hidden = 0, column_sums = 0;
};
class FollowedKernels final : public DeviceKernels<EmulatedLaunch> {
 public:
  explicit FollowedKernels(Followed& seen)
      : DeviceKernels<EmulatedLaunch>(EmulatedLaunch(2, false, 16, 4, 6000)), seen_(seen) {}
  bool fused_matmul(const MatrixProduct& p, const Epilogue& e) override {
    seen_.biases += e.bias.defined();
    seen_.added += e.added.defined();
    seen_.activated += e.activated.defined();
    seen_.hidden += e.hidden.defined();
    seen_.column_sums += e.column_sums.defined();
    return DeviceKernels<EmulatedLaunch>::fused_matmul(p, e);
  }

 private:
  Followed& seen_;
};

// Of a layer's forward passes, which are those of its MLP, and backward passes: with one rank all biases,
// both residual sums, the activation and its gradient, and the gradients of the biases of products by
// columns; with tp 2 the sums of products by rows travel first. A gate's activation is no part of the
// product.
TEST(DeviceKernelsTraining, WhatFollowsAProductIsOfItsPass) {
  const auto seen_in = [](const Plan& plan) {
    std::vector<Followed> seen(static_cast<std::size_t>(plan.mesh.num_ranks()));
    std::atomic<std::size_t> next = 0;
    steps_on([&] { return std::make_unique<Kernels>(std::make_shared<FollowedKernels>(seen[next++])); },
             plan);
    return seen.front();
  };
  const auto plan = [](const ModelSpec& model, int tp) {
    Plan p = odd_plan(model, 1, tp, false);
    p.seq_len = 3;
    return p;
  };
  const Followed alone = seen_in(plan(odd_gpt2(), 1));
  EXPECT_GT(alone.activated, alone.hidden);  // an evaluation has no backward pass
  EXPECT_GT(alone.hidden, 0);
  EXPECT_EQ(alone.added, 2 * alone.activated);
  EXPECT_EQ(alone.biases, 4 * alone.activated);
  EXPECT_EQ(alone.column_sums, 2 * alone.hidden);
  const Followed cut = seen_in(plan(odd_gpt2(), 2));
  EXPECT_EQ(cut.activated, alone.activated);
  EXPECT_EQ(cut.hidden, alone.hidden);
  EXPECT_EQ(cut.added, 0);
  EXPECT_EQ(cut.biases, 2 * cut.activated);
  const Followed gated = seen_in(plan(odd_llama(), 1));
  EXPECT_EQ(gated.added, alone.added);
  EXPECT_EQ(gated.biases + gated.activated + gated.hidden + gated.column_sums, 0);
  // What is made again has the same passes: of an MLP's input alone no activation.
  Plan again = plan(odd_gpt2(), 1);
  again.recompute = Recompute({"mlp_in"});
  const Followed made_again = seen_in(again);
  EXPECT_EQ(made_again.activated, alone.activated);
  EXPECT_EQ(made_again.hidden, alone.hidden);
  EXPECT_EQ(made_again.biases, alone.biases + alone.hidden);
}

// In bf16 attention is multiplied on tensor cores, its weights rounded once more: what comes out is no
// further from f64 than with the reference kernels, twice over. Keys come in blocks, of documents.
TEST(DeviceKernelsTraining, AttentionOnTensorCores) {
  ModelSpec model = odd_llama(false, 1, 1);
  model.hidden = 32;
  model.num_heads = 2;
  model.head_dim = 16;
  Plan plan = odd_plan(model, 1, 1, false);
  plan.mesh.set(Axis::cp, 2);
  plan.context_kind = ContextKind::ring;
  plan.seq_len = 32;
  plan.model.max_seq = 32;
  plan.global_batch = plan.micro_batch = 1;
  plan.mask = AttentionMask::document;
  plan.document_end = 5;
  const std::vector<Outcome> exact = steps_on(make_reference_kernels, plan);
  plan.precision = recipe("bf16");
  const TensorCoresUnderTest device = devices_with_tensor_cores().front();
  const auto on = [&](Numerics numerics) {
    return steps_on([&] { return device.use(numerics).kernels; }, plan);
  };
  const std::vector<Outcome> reference = steps_on(make_reference_kernels, plan),
                             found = on(Numerics::ordinary), in_tiles = on(Numerics::invariant);
  EXPECT_NE(found.front().losses, in_tiles.front().losses);  // they were used
  for (std::size_t r = 0; r < exact.size(); ++r) {
    EXPECT_LE(relative_difference(found[r].losses, exact[r].losses), 0x1p-8);  // one rounding of all numbers
    double off = 0, off_by_reference = 0;
    for (const auto& [name, gradient] : exact[r].gradients) {
      off = std::max(off, relative_difference(found[r].gradients.at(name), gradient));
      off_by_reference =
          std::max(off_by_reference, relative_difference(reference[r].gradients.at(name), gradient));
    }
    EXPECT_LE(off, 2 * off_by_reference);
  }
}

}  // namespace
}  // namespace echelon::device_kernels_training_test

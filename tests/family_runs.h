// What the tests of families share: a small model's gradients, the meshes it is to be the same on, and what
// is predicted of it there.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <tuple>
#include <vector>

#include "base/philox.h"
#include "case_choice.h"
#include "expert_runs.h"
#include "predicted_runs.h"
#include "verify/verify.h"

namespace echelon::checks {

// Multi-head latent attention, of values narrower than keys.
inline void latent(ModelSpec& m) {
  m.num_kv_heads = m.num_heads;
  m.kv_rank = 5;
  m.rotary_dim = 4;
  m.value_head_dim = m.head_dim - 1;
}

// As the same test of Training, which says why these bounds.
inline void expect_derivatives(ModelSpec model) {
  const double step = std::cbrt(0x1p-52);
  model.init_std = 0.2;
  const Plan plan = odd_plan(model, 1, 1, false);
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, {}, 1);
    const SampleSource samples = random_samples(plan);
    // Away from the ones and zeros that norms and biases begin with.
    for (const Parameter& p : trainer.parameters().all()) {
      std::vector<double> noise(static_cast<std::size_t>(p.value.numel()));
      Philox(23, Stream::test, name_hash(p.spec.name.c_str())).fill_normal(0, noise.size(), noise.data());
      for (std::size_t k = 0; k < noise.size(); ++k) p.value.host<double>()[k] += 0.1 * noise[k];
    }
    const double loss = trainer.compute_gradients(0, samples), tolerance = 20 * step * step * (1 + loss);
    each_derivative(trainer, samples, step, [&](const Parameter& p, double measured, double expected) {
      EXPECT_NEAR(measured, expected, tolerance) << p.spec.name;
    });
  });
}

// tp (4: neighbouring ranks hold the same key/value head), sp, cp, pp, ZeRO, what is made again.
inline std::vector<Plan> plans_of(const ModelSpec& model) {
  std::vector<Plan> plans;
  for (int tp : {2, 4})
    for (bool sp : {false, true}) plans.push_back(odd_plan(model, 1, tp, sp));
  for (int zero : {1, 2, 3}) {
    plans.push_back(odd_plan(model, 2, 2, zero == 2));
    plans.back().zero = zero;
  }
  for (ContextKind kind : {ContextKind::ring, ContextKind::allgather}) {
    plans.push_back(odd_plan(model, 1, 2, kind == ContextKind::ring));
    plans.back().mesh.set(Axis::cp, 2);
    plans.back().context_kind = kind;
    plans.back().seq_len = 12;
  }
  for (const char* schedule : {"1f1b", "zb-h1"}) {
    plans.push_back(odd_plan(model, 1, 2, false));
    plans.back().mesh.set(Axis::pp, 2);
    plans.back().schedule = schedule;
  }
  for (const Recompute& recompute : {Recompute::selective, Recompute::full}) {
    plans.push_back(odd_plan(model, 1, 2, true));
    plans.back().recompute = recompute;
  }
  // Whose gathered parameters are read once more.
  plans.push_back(odd_plan(model, 2, 1, false));
  plans.back().zero = 3;
  plans.back().recompute = Recompute::full;
  return plans;
}

// By `verify`, for two steps.
inline void expect_verified(const Plan& plan) {
  VerifyRequest request;
  request.plan = plan;
  request.optimizer.warmup_steps = 0;
  request.optimizer.total_steps = 10;
  request.run.timeout = patience;
  request.steps = 2;
  const VerifyReport report = verify(request);
  EXPECT_TRUE(report.pass) << to_json(report, plan);
  // Where nothing turns keys, the sum over tokens that is the gradient of their bias cancels to 0.
  if (!(plan.model.learned_positions || plan.model.alibi) || !plan.model.qkv_bias) {
    EXPECT_LE(report.grad_max_rel_diff, 1e-10);
  }
}

inline void expect_verified_and_predicted(const Plan& plan) {
  SCOPED_TRACE(to_toml(plan));
  expect_verified(plan);
  expect_as_measured(plan);
}

// Context parallel ranks that have tokens of a sequence of 24 in every way, documents among them; of the
// layouts one in `some` where not all cases are asked for.
inline void expect_every_layout_of_tokens(const ModelSpec& model, int some) {
  for (const auto& [kind, balance, cp] : {std::tuple{ContextKind::ring, ContextBalance::zigzag, 2},
                                          {ContextKind::ring, ContextBalance::stripe, 4},
                                          {ContextKind::allgather, ContextBalance::none, 2},
                                          {ContextKind::ulysses, ContextBalance::zigzag, 2},
                                          {ContextKind::hybrid, ContextBalance::zigzag, 4}}) {
    if (some > 1 && !is_taken(some)) continue;
    for (const AttentionMask mask : {AttentionMask::causal, AttentionMask::document}) {
      Plan plan = odd_plan(model, 1, 1, false);
      plan.mesh.set(Axis::cp, cp);
      plan.context_kind = kind;
      plan.context_balance = balance;
      plan.ulysses = kind == ContextKind::hybrid ? 2 : 1;
      plan.seq_len = 24;
      plan.mask = mask;
      plan.document_end = 3;
      expect_verified_and_predicted(plan);
    }
  }
}

// The gradients of all parameters of one step, one behind the other.
inline std::vector<double> gradients_of(const Plan& plan) {
  std::vector<double> all;
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, {}, 1);
    trainer.compute_gradients(0, random_samples(plan));
    for (const Parameter& p : trainer.parameters().all()) {
      const auto gradient = as_doubles(gather_logical(rank, p, ParameterTensor::gradient));
      if (rank.index() == 0) all.insert(all.end(), gradient.begin(), gradient.end());
    }
  });
  return all;
}

inline std::vector<double> invariant_gradients(const ModelSpec& model, int dp, int tp, int batch) {
  Plan plan = odd_plan(model, dp, tp, tp > 1);
  plan.numerics = Numerics::invariant;
  plan.global_batch = 4;
  plan.micro_batch = batch;
  return gradients_of(plan);
}

inline void expect_toml_says(const ModelSpec& model) {
  EXPECT_EQ(to_toml(model_from_toml(to_toml(model), "x")), to_toml(model));
}

}  // namespace echelon::checks

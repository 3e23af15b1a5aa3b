// Training in bf16: proved, predicted, saved and gone on with as in any precision.
#include <gtest/gtest.h>

#include <cmath>

#include "base/split_weight.h"
#include "case_choice.h"
#include "checkpoint/checkpoint.h"
#include "expert_runs.h"
#include "mesh_runs.h"
#include "parallel/logits_room.h"
#include "plan/memory.h"
#include "schedule/schedules.h"
#include "spec/fp8.h"
#include "temporary_directory.h"
#include "train/dry_run.h"
#include "verify/verify.h"

namespace echelon::precision_training_test {
namespace {

using namespace checks;

Plan plan_in(const char* precision, ModelSpec model, int dp = 1, int tp = 1) {
  Plan plan = odd_plan(std::move(model), dp, tp, tp > 1);
  plan.precision = recipe(precision);
  plan.global_batch = 8;
  plan.seq_len = 16;
  return plan;
}

// Norms over heads.
ModelSpec with_head_norms() {
  ModelSpec m = odd_llama();
  m.qk_norm = true;
  return m;
}

ModelSpec mixture() {
  ModelSpec m = load_model("mixtral-tiny");
  m.num_layers = 2;
  return m;
}

// The axes of parallelism, one or two at a time.
std::vector<Plan> plans_in(const char* precision) {
  std::vector<Plan> plans;
  const auto add = [&](ModelSpec model, int dp, int tp, const std::function<void(Plan&)>& change) {
    plans.push_back(plan_in(precision, std::move(model), dp, tp));
    change(plans.back());
  };
  const auto as_is = [](Plan&) {};
  for (const ModelSpec& model : {odd_gpt2(true), odd_llama(), with_head_norms()}) {
    add(model, 2, 1, as_is);
    add(model, 1, 2, as_is);
    add(model, 2, 2, [](Plan& p) { p.recompute = Recompute::full; });
    add(model, 1, 1, [](Plan& p) { p.recompute = Recompute({"attention_in", "mlp_in"}); });
    for (int zero : {1, 2, 3}) add(model, 2, 1, [&](Plan& p) { p.zero = zero; });
  }
  for (const char* schedule : {"gpipe", "1f1b", "zb-h1", "zb-v", "dualpipe"})
    add(odd_llama(false, 2, 4), 1, 1, [&](Plan& p) {
      p.mesh.set(Axis::pp, 2);
      p.schedule = schedule;
    });
  for (ContextKind kind : {ContextKind::ring, ContextKind::ulysses, ContextKind::allgather})
    add(odd_llama(), 1, 1, [&](Plan& p) {
      p.mesh.set(Axis::cp, 2);
      p.context_kind = kind;
    });
  for (int tp : {1, 2}) add(mixture(), 2, tp, [](Plan& p) { p.mesh.ep = 2; });
  return plans;
}

VerifyReport verify_with(const Plan& plan, const Faults& faults = {}) {
  VerifyRequest request;
  request.plan = plan;
  request.steps = 2;
  request.optimizer.warmup_steps = 0;
  request.optimizer.eps = 1e-5;
  if (!flushes(plan) || !plan.optimizer_barrier) request.optimizer.clip = 0;
  request.run.timeout = patience;
  request.faults = faults;
  return verify(request);
}

TEST(PrecisionTraining, IsProvedOnEveryAxis) {
  for (const char* precision : {"bf16", "bf16-lean", "fp8"})
    for (const Plan& plan : plans_in(precision)) {
      if (!is_taken(6)) continue;
      SCOPED_TRACE(describe(plan) + " " + plan.mesh.describe() + " " + plan.schedule);
      const VerifyReport report = verify_with(plan);
      EXPECT_TRUE(report.pass) << (report.first_difference ? report.first_difference->tensor : "");
      ASSERT_TRUE(report.wide);
      // Rounding to 8 bits shows, and is far from a half; to fp8 by no more than products at random make of
      // it.
      const double products = 4.0 * static_cast<double>(plan.model.num_layers + 1);
      EXPECT_GT(report.wide->grad_rel_diff, 0x1p-10);
      EXPECT_LT(report.wide->grad_rel_diff,
                multiplies_in_fp8(plan.precision)
                    ? std::sqrt(products) * std::hypot(fp8_epsilon(Fp8::e4m3), fp8_epsilon(Fp8::e5m2))
                    : 0.5);
      // Where nothing regroups activations they have the same bits, and weights' gradients are sums in f32.
      // In fp8 an expert's rows from several ranks have one scale.
      if (!regroups_activations(plan) && !(multiplies_in_fp8(plan.precision) && plan.mesh.ep > 1)) {
        EXPECT_LT(report.grad_max_rel_diff, 1e-4);
      }
    }
}

TEST(PrecisionTraining, AGradientKeptInFewerBitsIsNamed) {
  Faults faults;
  faults.narrow_gradients = true;
  for (auto [dp, tp] : {std::pair{2, 1}, {1, 2}}) {
    const Plan plan = plan_in("bf16", odd_llama(), dp, tp);
    const VerifyReport report = verify_with(plan, faults);
    EXPECT_FALSE(report.pass);
    ASSERT_TRUE(report.first_difference);
    EXPECT_EQ(report.first_difference->kind, tp == 1 ? "grad" : "width");
    EXPECT_TRUE(report.first_difference->tensor.ends_with(".weight"));
  }
}

// Of two tokens the first attends to itself alone, so that its query has a gradient of rounding, or none:
// what remains of the sum in fp8 is one product, which fits into bf16 on one run and not on the other.
TEST(PrecisionTraining, WhatOneTokenGivesInFp8IsNotTooNarrow) {  // long
  Plan plan = plan_in("fp8", load_model("llama-tiny"), 1, 2);
  plan.global_batch = 1;
  plan.seq_len = 2;
  VerifyRequest request;
  request.plan = plan;
  request.steps = 1;
  request.optimizer.warmup_steps = 0;
  request.optimizer.eps = 1e-5;
  request.run.timeout = patience;
  for (request.seed = 2; request.seed < 6; ++request.seed) {
    const VerifyReport right = verify(request);
    EXPECT_FALSE(right.first_difference) << request.seed << " " << to_json(right, plan);
  }
  request.faults.narrow_gradients = true;
  const VerifyReport wrong = verify(request);
  ASSERT_TRUE(wrong.first_difference);
  EXPECT_EQ(wrong.first_difference->kind, "width");
}

// Where rounding of many layers and updates adds up: a wrong sign, scale, reduction and shard show all the
// same.
std::vector<Plan> long_ways(const char* precision) {
  std::vector<Plan> plans;
  for (const std::int64_t layers : {8, 24})
    plans.push_back(plan_in(precision, odd_llama(false, 2, layers), 1, 2));
  Plan late = plan_in(precision, odd_llama(false, 2, 4), 1, 2);
  late.mesh.set(Axis::pp, 2);
  late.schedule = "pipedream";
  late.micro_batch = 1;
  plans.push_back(late);
  late.schedule = "2bw";
  plans.push_back(late);
  Plan open = plan_in(precision, odd_llama(false, 2, 4), 1, 2);
  open.mesh.set(Axis::pp, 2);
  open.optimizer_barrier = false;
  plans.push_back(open);
  return plans;
}

TEST(PrecisionTraining, FaultsAreCaughtThroughManyLayersAndUpdates) {  // long
  Faults negated, halved, words, norms;
  negated.loss_scale = -1;
  halved.loss_scale = 0.5;
  words.vocabulary_shift = 1;
  norms.forget_norm_reduction = true;
  for (const char* precision : {"bf16", "fp8"})
    for (const Plan& plan : long_ways(precision)) {
      if (!is_taken(2)) continue;
      SCOPED_TRACE(std::string(precision) + " " + describe(plan) + " " + plan.schedule);
      const VerifyReport right = verify_with(plan);
      EXPECT_TRUE(right.pass) << to_json(right, plan);
      EXPECT_LE(right.bound, most_unmeasured);
      for (const Faults& faults : {negated, halved, words, norms}) {
        const VerifyReport report = verify_with(plan, faults);
        EXPECT_FALSE(report.pass) << to_json(report, plan);
        EXPECT_TRUE(report.first_difference);
      }
    }
}

// After sixteen updates in fp8 there is nothing but rounding: no verdict is better than a wrong one.
TEST(PrecisionTraining, WhatRoundingHidesIsNotProved) {  // long
  Plan plan = plan_in("fp8", load_model("llama-tiny"), 1, 2);
  plan.mesh.set(Axis::pp, 2);
  plan.schedule = "pipedream";
  plan.micro_batch = 1;
  plan.global_batch = 16;
  Faults negated;
  negated.loss_scale = -1;
  EXPECT_FALSE(verify_with(plan, negated).pass);
  const VerifyReport report = verify_with(plan);
  EXPECT_FALSE(report.pass);
  EXPECT_FALSE(report.first_difference) << to_json(report, plan);
  EXPECT_GT(2 * report.hidden.size(), all_parameters(plan.model).size());
  expect_contains(report.incomparable, {"could be rounding in fp8", "legal: a wider --precision"});
}

TEST(PrecisionTraining, ASkippedReductionIsNamed) {
  Faults faults;
  faults.forget_norm_reduction = true;
  for (const char* precision : {"bf16", "fp8"}) {
    const VerifyReport report = verify_with(plan_in(precision, odd_llama(), 1, 2), faults);
    EXPECT_FALSE(report.pass);
    ASSERT_TRUE(report.first_difference);
    EXPECT_EQ(report.first_difference->kind, "grad");
    EXPECT_EQ(report.first_difference->tensor, "model.layers.0.input_layernorm.weight");
  }
}

// Rounded operands show in every gradient, the same ones in every run.
TEST(PrecisionTraining, Fp8MultipliesTheLayers) {
  const auto gradients = [](const char* precision, ModelSpec model) {
    LogicalTensors all;
    const Plan plan = plan_in(precision, std::move(model));
    on_mesh(plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, {}, 1);
      trainer.compute_gradients(0, random_samples(plan));
      all = gather(rank, trainer, ParameterTensor::gradient);
    });
    return all;
  };
  for (const ModelSpec& model : {odd_gpt2(true), odd_llama(), mixture(), even_deepseek(2)}) {
    const LogicalTensors in_fp8 = gradients("fp8", model), in_bf16 = gradients("bf16", model);
    for (const auto& [name, gradient] : in_fp8) EXPECT_NE(gradient, in_bf16.at(name)) << name;
  }
  EXPECT_EQ(gradients("fp8", odd_llama()), gradients("fp8", odd_llama())) << "the same bits again";
}

void expect_predicted_to_the_byte(const Plan& plan) {
  const PipelineLayout pipeline(plan);
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, {}, 1);
    rank.arena().reset_peak();
    const Traffic before = rank.traffic();
    (void)trainer.step(0, random_samples(plan), 1);
    DryRun dry = dry_run(plan, pipeline, rank.coordinates());
    dry.peak[MemoryCategory::other] += kernel_scratch_bytes(plan.precision, 1);
    EXPECT_EQ(dry.peak, rank.arena().peak()) << describe(plan) << " " << plan.mesh.describe();
    EXPECT_EQ(dry.traffic, rank.traffic() - before) << describe(plan) << " " << plan.mesh.describe();
  });
}

TEST(PrecisionTraining, IsPredictedToTheByte) {
  for (const char* precision : {"bf16", "bf16-lean", "fp8"})
    for (const Plan& plan : plans_in(precision))
      if (plan.mesh.ep == 1) expect_predicted_to_the_byte(plan);  // else data decide what travels
}

TEST(PrecisionTraining, SeveralChunksOfLogitsArePredictedToTheByte) {
  for (const char* precision : {"bf16", "bf16-lean", "fp8"})
    for (const int tp : {1, 2}) {
      Plan plan = plan_in(precision, odd_llama(false, 2, 1), 1, tp);
      plan.model.max_seq = plan.seq_len = 551;
      ASSERT_GT(plan.micro_batch * plan.seq_len,
                logits_chunk_rows(Device::cpu, element_bytes(plan.precision.activations)));
      expect_predicted_to_the_byte(plan);
    }
}

TEST(LogitsRoom, HoldsTheGradientsOfAllRowsAndTheLogitsOfAPiece) {
  const Plan plan = plan_in("bf16", odd_gpt2(), 1, 1);
  on_mesh(plan, [](const Rank& rank) {
    for (const std::int64_t rows : {1, 2, 7, 62, 80, 200, 512, 1024})
      for (const bool in_one_piece : {false, true}) {
        constexpr std::int64_t width = 53;
        const LogitsRoom room(rank, rows, width, in_one_piece);
        const std::int64_t wide = in_one_piece ? rows : wide_logits_rows(rows);
        EXPECT_EQ(rank.arena().live()[MemoryCategory::activations],
                  (std::min<std::int64_t>(rows, 16) + 2 * wide) * logits_row_stride(width) * 2);
        for (const std::int64_t here : {rows, (rows + 1) / 2}) {
          std::int64_t next = 0;
          int pieces = 0;
          std::vector<double> expected;  // each row's number
          room.each_piece(here, [&](const LogitsRoom::Piece& piece) {
            ++pieces;
            EXPECT_EQ(piece.rows.begin, next);
            EXPECT_EQ(piece.logits.rows(), piece.rows.size());
            rank.kernels().fill(piece.logits, 7.0);
            std::int64_t next_of_piece = 0;
            room.each_group(piece, [&](Range group) {
              EXPECT_EQ(group.begin, next_of_piece);
              EXPECT_GT(group.size(), 0);
              const Tensor gradients = room.gradients(here).row_range(next + group.begin, next + group.end);
              // Neither do a group's gradients overwrite its own logits, nor those of later groups.
              const double number = static_cast<double>(expected.size() / width);
              rank.kernels().fill(gradients, number);
              for (const double x : as_doubles(piece.logits.row_range(group.begin, piece.rows.size())))
                ASSERT_EQ(x, 7);
              expected.insert(expected.end(), static_cast<std::size_t>(group.size() * width), number);
              next_of_piece = group.end;
            });
            EXPECT_EQ(next_of_piece, piece.rows.size());
            next = piece.rows.end;
          });
          EXPECT_EQ(next, here);
          EXPECT_EQ(as_doubles(room.gradients(here)), expected) << rows << " rows, " << here << " here";
          EXPECT_LE(pieces, in_one_piece ? 1 : 2);
        }
      }
  });
}

// A parameter's weights are kept in two bytes where layers compute with it, and in two more beside it, or
// not.
TEST(PrecisionTraining, HoldsWhatTheRecipeSays) {
  const auto held = [](const char* precision) {
    const Plan plan = plan_in(precision, odd_llama());
    return dry_run(plan, PipelineLayout(plan), {}).peak;
  };
  const auto parameters = [](const Memory& m) { return m[MemoryCategory::parameters]; };
  const auto optimizer = [](const Memory& m) { return m[MemoryCategory::optimizer]; };
  const Memory f32 = held("f32"), bf16 = held("bf16"), lean = held("bf16-lean");
  EXPECT_EQ(2 * parameters(bf16), parameters(f32));
  EXPECT_EQ(2 * parameters(lean), parameters(f32));
  EXPECT_EQ(4 * optimizer(bf16), 5 * optimizer(f32));
  EXPECT_EQ(2 * optimizer(lean), optimizer(f32));
  EXPECT_LT(bf16[MemoryCategory::activations], f32[MemoryCategory::activations]);
}

// Saved on one mesh and gone on with on another: the same masters, and values that are these rounded.
TEST(PrecisionTraining, GoesOnFromItsMasterWeights) {
  TemporaryDirectory directory;
  for (const char* precision : {"bf16", "bf16-lean", "fp8"}) {
    const Plan saved = plan_in(precision, odd_llama(), 2, 1);
    std::string path;
    LogicalTensors weights;
    on_mesh(saved, [&](const Rank& rank) {
      Trainer trainer(rank, saved, {}, 1);
      (void)trainer.step(0, random_samples(saved), 1);
      CheckpointInfo info;
      info.step = info.updates = 1;
      info.seed = 1;
      info.model = saved.model;
      info.dtype = saved.precision.master;
      const auto here = gather(rank, trainer, ParameterTensor::value);
      const std::string at = save_checkpoint(rank, trainer.parameters(), directory / precision, info, {});
      if (rank.index() == 0) path = at, weights = here;
    });
    Plan other = plan_in(precision, odd_llama(), 2, 2);
    other.zero = 3;
    on_mesh(other, [&](const Rank& rank) {
      Trainer trainer(rank, other, {}, 2);
      load_checkpoint(rank, trainer.parameters(), read_checkpoint_info(path), false, {});
      EXPECT_EQ(gather(rank, trainer, ParameterTensor::value), weights);
      for (const Parameter& p : trainer.parameters().all()) {
        const std::vector<double> master = copy_numbers_to_host(own_weights(rank, p)),
                                  value = copy_numbers_to_host(p.own_value);
        for (std::size_t i = 0; i < master.size(); ++i)
          ASSERT_EQ(static_cast<double>(SplitWeight(static_cast<float>(master[i])).value), value[i]);
      }
    });
  }
}

// docs/precision.md has these.
TEST(PrecisionTraining, BytesAParameterAreThoseOfTheTable) {
  for (const auto& [precision, bytes] :
       {std::pair{"f32", 16}, {"bf16", 16}, {"bf16-lean", 10}, {"f64", 32}}) {
    const Plan plan = plan_in(precision, odd_llama());
    on_mesh(plan, [&, bytes = bytes](const Rank& rank) {
      const std::int64_t before = rank.arena().live().total();
      const ParameterStore parameters(rank, plan, PipelineLayout(plan), 1);
      parameters.begin_gradients();
      parameters.need_all_gradients();
      const StateBytes each = state_bytes(plan);
      EXPECT_EQ(rank.arena().live().total() - before, bytes * parameters.layout().size()) << precision;
      EXPECT_EQ(each.value + each.gradient + each.optimizer, bytes) << precision;
    });
  }
}

// Whatever the ranks hold of the weights: values whole, and what completes them cut or not.
TEST(PrecisionTraining, ResumesToTheLastBit) {
  TemporaryDirectory directory;
  for (const int zero : {0, 1, 3}) {
    Plan plan = plan_in("bf16", odd_llama(), 2, 2);
    plan.zero = zero;
    const auto weights_after = [&](std::uint64_t seed, const std::string& from, const std::string& to) {
      LogicalTensors weights;
      on_mesh(plan, [&](const Rank& rank) {
        Trainer trainer(rank, plan, {}, seed);
        if (!from.empty()) load_checkpoint(rank, trainer.parameters(), read_checkpoint_info(from), false, {});
        for (std::int64_t step = from.empty() ? 0 : 2; step < 4; ++step) {
          if (step == 2 && !to.empty()) {
            CheckpointInfo info;
            info.step = info.updates = 2;
            info.seed = 1;
            info.model = plan.model;
            info.dtype = plan.precision.master;
            save_checkpoint(rank, trainer.parameters(), to, info, {});
          }
          (void)trainer.step(step, random_samples(plan), 1);
        }
        const auto here = gather(rank, trainer, ParameterTensor::value);
        if (rank.index() == 0) weights = here;
      });
      return weights;
    };
    const std::string saved = directory / std::to_string(zero);
    const LogicalTensors whole = weights_after(1, "", saved);
    EXPECT_EQ(weights_after(99, saved, ""), whole) << "zero " << zero;
  }
}

}  // namespace
}  // namespace echelon::precision_training_test

// Training as a person would check it: it learns, and its loss, gradients, clipping and learning rate are
// what they are said to be.
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "expert_runs.h"
#include "verify/verify.h"

namespace echelon::training_test {
namespace {

using namespace checks;
using checks::Outcome;  // not a search's

// A text that repeats eight letters, all equally often: without context log 8 is the best loss there is.
SampleSource repeating_text(const Plan& plan) {
  return [seq_len = plan.seq_len](std::int64_t step, std::int64_t sample, std::int32_t* tokens,
                                  std::int32_t* targets) {
    constexpr std::array<std::int32_t, 8> text{7, 1, 40, 13, 52, 0, 22, 9};
    const Philox random(3, Stream::test, static_cast<std::uint64_t>(step));
    const std::uint64_t start = random.below(static_cast<std::uint64_t>(sample), text.size());
    for (std::int64_t t = 0; t < seq_len; ++t) {
      const std::uint64_t at = start + static_cast<std::uint64_t>(t);
      tokens[t] = text[at % text.size()];
      targets[t] = text[(at + 1) % text.size()];
    }
  };
}

OptimizerOptions fast_options() {
  OptimizerOptions options;
  options.lr = 1e-2;
  options.min_lr = 1e-3;
  options.warmup_steps = 5;
  options.total_steps = 60;
  return options;
}

TEST(Training, LearnsWhatFollowsWhat) {  // long
  std::vector<Plan> plans;
  for (const ModelSpec& model : {odd_gpt2(), odd_llama()}) {
    plans.push_back(odd_plan(model, 1, 1, false));
    plans.push_back(odd_plan(model, 2, 2, true));
    if (has_cpu_kernels()) plans.push_back(odd_plan(model, 1, 2, true, DType::f32));
  }
  for (const Plan& plan : plans) {
    const std::vector<double> losses = run_steps(plan, fast_options(), 60, repeating_text(plan))[0].losses;
    EXPECT_NEAR(losses.front(), std::log(53), 0.2) << describe(plan);  // uniform at the start
    EXPECT_LT(losses.back(), 0.1 * std::log(8)) << describe(plan);
  }
}

// Weights so small that all logits are the same to the last digits.
TEST(Training, TheLossOfAUniformModelIsTheLogOfTheVocabulary) {
  for (ModelSpec model : {odd_gpt2(), odd_llama()}) {
    model.init_std = 1e-20;
    for (auto [dp, tp] : {std::pair{1, 1}, {3, 2}, {2, 4}}) {
      const Plan plan = odd_plan(model, dp, tp, tp > 1);
      const Outcome outcome = run_steps(plan, {}, 1, random_samples(plan))[0];
      EXPECT_NEAR(outcome.losses[0], std::log(53), verify_bound(plan) * std::log(53)) << describe(plan);
    }
  }
}

// One rank against the mesh cannot see what both do wrong. The derivative of the loss along a random
// direction of each parameter, by central differences: truncation (step^2) and rounding (eps loss / step) are
// both of the order eps^(2/3), with third derivatives of order ten.
TEST(Training, GradientsAreTheDerivativesOfTheLoss) {
  const double step = std::cbrt(0x1p-52);
  for (ModelSpec model : {odd_gpt2(), odd_gpt2(false), odd_llama(), odd_llama(true, 4)}) {
    model.init_std = 0.2;  // so that no part of the model is next to nothing
    const Plan plan = odd_plan(model, 1, 1, false);
    on_mesh(plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, {}, 1);
      const SampleSource samples = random_samples(plan);
      const double loss = trainer.compute_gradients(0, samples);
      const double tolerance = 10 * step * step * (1 + loss);
      each_derivative(trainer, samples, step, [&](const Parameter& p, double measured, double expected) {
        EXPECT_NEAR(measured, expected, tolerance) << p.spec.name;
        EXPECT_GT(std::abs(expected), 10 * tolerance) << p.spec.name << ": too flat to tell";
      });
    });
  }
}

void expect_close(const Outcome& a, const Outcome& b, double bound) {
  EXPECT_NEAR(a.losses[0], b.losses[0], bound * a.losses[0]);
  EXPECT_NEAR(a.norms[0], b.norms[0], bound * a.norms[0]);
  for (const auto& [name, gradient] : a.gradients)
    EXPECT_LE(relative_difference(gradient, b.gradients.at(name)), bound) << name;
}

TEST(Training, MicrobatchesOfAnySizeGiveTheSameGradients) {
  for (const ModelSpec& model : {odd_gpt2(), odd_llama()})
    for (auto [dp, tp] : {std::pair{1, 1}, {2, 2}}) {
      Plan plan = odd_plan(model, dp, tp, tp > 1);
      plan.micro_batch = 7;
      const Outcome whole = run_steps(plan, {}, 1, random_samples(plan))[0];
      for (std::int64_t micro_batch : {1, 2, 3, 4}) {
        plan.micro_batch = micro_batch;
        SCOPED_TRACE(fmt::format("{}, micro-batch {}", describe(plan), micro_batch));
        expect_close(whole, run_steps(plan, {}, 1, random_samples(plan))[0], verify_bound(plan));
      }
    }
}

// Seven samples over dp 3 are 3 + 2 + 2: the mean over all of them, by running each alone, is not the mean of
// the ranks' means. The same holds of the gradients.
TEST(Training, LossAndGradientsAreTheMeanOverAllTokens) {
  for (const ModelSpec& model : {odd_gpt2(), odd_llama()}) {
    const Plan plan = odd_plan(model, 3, 1, false);
    const SampleSource samples = random_samples(plan);
    Plan alone = odd_plan(model, 1, 1, false);
    alone.global_batch = alone.micro_batch = 1;
    std::vector<Outcome> single;
    for (std::int64_t index = 0; index < 7; ++index)
      single.push_back(run_steps(
          alone, {}, 1, [&](std::int64_t step, std::int64_t, std::int32_t* tokens, std::int32_t* targets) {
            samples(step, index, tokens, targets);
          })[0]);
    Outcome mean = single[0];
    const auto mean_loss = [&](std::size_t begin, std::size_t end) {
      double sum = 0;
      for (std::size_t i = begin; i < end; ++i) sum += single[i].losses[0];
      return sum / static_cast<double>(end - begin);
    };
    mean.losses[0] = mean_loss(0, 7);
    double squares = 0;
    for (auto& [name, gradient] : mean.gradients)
      for (std::size_t k = 0; k < gradient.size(); ++k) {
        for (std::size_t i = 1; i < 7; ++i) gradient[k] += single[i].gradients.at(name)[k];
        gradient[k] /= 7;
        squares += gradient[k] * gradient[k];
      }
    mean.norms[0] = std::sqrt(squares);
    for (const Outcome& rank : run_steps(plan, {}, 1, samples)) expect_close(mean, rank, verify_bound(plan));
    const double mean_of_means = (mean_loss(0, 3) + mean_loss(3, 5) + mean_loss(5, 7)) / 3;
    EXPECT_GT(std::abs(mean_of_means - mean.losses[0]), 1e-6);  // so this test can tell them apart
  }
}

TEST(Training, EvaluateIsTheSameMeanAndChangesNothing) {
  double first_two = 0;
  for (auto [dp, tp] : {std::pair{1, 1}, {3, 2}}) {
    const Plan plan = odd_plan(odd_llama(), dp, tp, tp > 1);
    on_mesh(plan, [&, dp = dp](const Rank& rank) {
      Trainer trainer(rank, plan, {}, 1);
      const SampleSource samples = random_samples(plan);
      const double loss = trainer.compute_gradients(0, samples);
      const LogicalTensors gradients = gather(rank, trainer, ParameterTensor::gradient);
      EXPECT_NEAR(trainer.evaluate(7, samples), loss, verify_bound(plan) * loss);
      EXPECT_EQ(gather(rank, trainer, ParameterTensor::gradient), gradients);
      // Fewer samples than ranks: some have none.
      const double two = trainer.evaluate(2, samples);
      if (dp == 1)
        first_two = two;
      else
        EXPECT_NEAR(two, first_two, verify_bound(plan) * first_two);
      EXPECT_NE(two, loss);
    });
  }
}

// However the gradients are cut for their way, the sums are the same.
TEST(Training, BucketsOfEverySizeGiveTheSameBits) {
  for (auto [dp, tp] : {std::pair{3, 1}, {2, 2}}) {
    Plan plan = odd_plan(odd_llama(true, 2, 4), dp, tp, tp > 1);
    const std::vector<Outcome> one = run_steps(plan, {}, 3, random_samples(plan));
    for (std::int64_t bytes : {std::int64_t{1}, std::int64_t{50'000}}) {
      plan.bucket_bytes = bytes;
      EXPECT_EQ(plan_from_toml(to_toml(plan), "plan.toml").bucket_bytes, bytes);
      EXPECT_EQ(run_steps(plan, {}, 3, random_samples(plan)), one) << describe(plan) << ", " << bytes;
    }
  }
  Plan plan = odd_plan(odd_llama(), 2, 1, false);
  plan.bucket_bytes = 0;
  expect_contains(message_of<RequestError>([&] { validate(plan); }), {"--bucket 0", "at least 1"});
  plan.bucket_bytes = 50'000;
  plan.zero = 1;
  expect_contains(message_of<RequestError>([&] { validate(plan); }),
                  {"--bucket 50000", "--zero 1", "--zero 0"});
}

// The norm is that of all logical elements, each once, on any mesh: shared key/value heads and norms too.
TEST(Clipping, TheNormCountsEachElementOnce) {
  for (const ModelSpec& model : {odd_gpt2(), odd_llama(), odd_llama(true, 1)})
    for (auto [dp, tp, sp] : {std::tuple{1, 1, false}, {1, 4, false}, {2, 4, true}, {3, 2, true}}) {
      const Plan plan = odd_plan(model, dp, tp, sp);
      for (const Outcome& rank : run_steps(plan, {}, 1, random_samples(plan))) {
        double squares = 0;
        for (const auto& [name, gradient] : rank.gradients)
          for (double g : gradient) squares += g * g;
        EXPECT_NEAR(rank.norms[0], std::sqrt(squares), verify_bound(plan) * rank.norms[0]) << describe(plan);
      }
    }
}

// Clipping is scaling the gradients by clip / norm, to the bit; and nothing where the norm is below.
TEST(Clipping, IsScalingTheGradients) {
  for (auto [dp, tp] : {std::pair{1, 1}, {2, 2}}) {
    const Plan plan = odd_plan(odd_llama(), dp, tp, tp > 1);
    const SampleSource samples = random_samples(plan);
    on_mesh(plan, [&](const Rank& rank) {
      OptimizerOptions clipped, unclipped, loose;
      clipped.clip = 0.05;
      unclipped.clip = 0;
      loose.clip = 100;
      Trainer a(rank, plan, clipped, 1), b(rank, plan, unclipped, 1), c(rank, plan, unclipped, 1),
          d(rank, plan, loose, 1);
      for (Trainer* trainer : {&a, &b, &c, &d}) trainer->compute_gradients(0, samples);
      const double norm = a.apply_gradients(0).gradient_norm;
      EXPECT_GT(norm, clipped.clip);
      EXPECT_LT(norm, loose.clip);
      for (const Parameter& p : b.parameters().all()) rank.kernels().scale(p.gradient, clipped.clip / norm);
      EXPECT_NEAR(b.apply_gradients(0).gradient_norm, clipped.clip, verify_bound(plan) * clipped.clip);
      c.apply_gradients(0);
      d.apply_gradients(0);
      for (ParameterTensor which :
           {ParameterTensor::value, ParameterTensor::exp_avg, ParameterTensor::exp_avg_sq}) {
        EXPECT_EQ(gather(rank, a, which), gather(rank, b, which));
        EXPECT_NE(gather(rank, a, which), gather(rank, c, which));
        EXPECT_EQ(gather(rank, c, which), gather(rank, d, which));
      }
    });
  }
}

TEST(Clipping, FactorIsOneBelowTheLimit) {
  EXPECT_EQ(clip_factor(2.0, 0.5), 0.25);
  EXPECT_EQ(clip_factor(0.5, 0.5), 1);
  EXPECT_EQ(clip_factor(0.1, 0.5), 1);
  EXPECT_EQ(clip_factor(1e9, 0), 1);  // 0: none
}

// AdamW by hand, one element at a time, for two steps (Loshchilov & Hutter 2019, algorithm 2).
TEST(Optimizer, IsAdamWWithDecayOnMatricesOnly) {
  Plan plan = odd_plan(odd_gpt2(), 1, 1, false);
  OptimizerOptions o;
  o.lr = 3e-3;
  o.warmup_steps = 0;
  o.clip = 0;
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, o, 1);
    LogicalTensors x = gather(rank, trainer, ParameterTensor::value), m = x, v = x;
    for (auto* moment : {&m, &v})
      for (auto& [name, values] : *moment) std::fill(values.begin(), values.end(), 0.0);
    for (std::int64_t step : {0, 1}) {
      trainer.compute_gradients(step, random_samples(plan));
      const double lr = learning_rate(o, step);
      for (const Parameter& p : trainer.parameters().all()) {
        const bool matrix = p.spec.shape.size() == 2;
        EXPECT_EQ(p.spec.decay, matrix) << p.spec.name;
        const std::vector<double> g = as_doubles(p.gradient);
        for (std::size_t k = 0; k < g.size(); ++k) {
          double &xk = x[p.spec.name][k], &mk = m[p.spec.name][k], &vk = v[p.spec.name][k];
          mk = o.beta1 * mk + (1 - o.beta1) * g[k];
          vk = o.beta2 * vk + (1 - o.beta2) * g[k] * g[k];
          const double t = static_cast<double>(step + 1);
          const double m_hat = mk / (1 - std::pow(o.beta1, t)), v_hat = vk / (1 - std::pow(o.beta2, t));
          xk -= lr * (m_hat / (std::sqrt(v_hat) + o.eps) + (matrix ? o.weight_decay * xk : 0));
        }
      }
      trainer.apply_gradients(step);
      const LogicalTensors values = gather(rank, trainer, ParameterTensor::value);
      // Some ten roundings of numbers up to 1 + lr.
      for (const auto& [name, expected] : x)
        for (std::size_t k = 0; k < expected.size(); ++k)
          ASSERT_NEAR(values.at(name)[k], expected[k], 16 * 0x1p-53 * (std::abs(expected[k]) + o.lr)) << name;
      x = values;  // so that differences do not add up
    }
  });
}

// Also where those of later parameters are finite.
TEST(Optimizer, AGradientThatIsNotFiniteIsNamedAndNothingIsUpdated) {
  for (const Numerics numerics : {Numerics::ordinary, Numerics::invariant})
    for (const double value :
         {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
      Plan plan = odd_plan(odd_llama(), 1, 1, false);
      plan.numerics = numerics;
      on_mesh(plan, [&](const Rank& rank) {
        Trainer trainer(rank, plan, {}, 1);
        trainer.compute_gradients(0, random_samples(plan));
        const LogicalTensors before = gather(rank, trainer, ParameterTensor::value);
        const std::string name = "model.layers.1.mlp.up_proj.weight";
        trainer.parameters().find(name).gradient.host<double>()[5] = value;
        expect_contains(message_of<RunError>([&] { trainer.apply_gradients(0); }),
                        {"step 1", name, "not finite"});
        EXPECT_EQ(gather(rank, trainer, ParameterTensor::value), before) << name_of(numerics) << " " << value;
      });
    }
}

TEST(LearningRate, WarmsUpThenFollowsACosine) {
  OptimizerOptions o;
  o.lr = 1.0;
  o.min_lr = 0.2;
  o.warmup_steps = 4;
  o.total_steps = 12;
  EXPECT_DOUBLE_EQ(learning_rate(o, 0), 0.25);
  EXPECT_DOUBLE_EQ(learning_rate(o, 2), 0.75);
  EXPECT_DOUBLE_EQ(learning_rate(o, 3), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(o, 4), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(o, 6), 0.6 + 0.4 * std::numbers::sqrt2 / 2);  // a quarter of the way
  EXPECT_DOUBLE_EQ(learning_rate(o, 8), 0.6);                                  // half
  EXPECT_DOUBLE_EQ(learning_rate(o, 12), 0.2);
  EXPECT_DOUBLE_EQ(learning_rate(o, 1000), 0.2);
  o.warmup_steps = 0;
  EXPECT_DOUBLE_EQ(learning_rate(o, 0), 1.0);
}

TEST(LearningRate, BadOptionsAreRefused) {
  const auto refusal = [](void (*change)(OptimizerOptions&)) {
    OptimizerOptions o;
    change(o);
    return message_of<RequestError>([&] { validate(o); });
  };
  expect_contains(refusal([](auto& o) { o.lr = 0; }), {"--lr 0", "above 0"});
  expect_contains(refusal([](auto& o) { o.lr = NAN; }), {"--lr nan"});
  expect_contains(refusal([](auto& o) { o.min_lr = -1; }), {"--min-lr -1"});
  expect_contains(refusal([](auto& o) { o.min_lr = 1; }), {"--min-lr 1", "--lr 0.001"});
  expect_contains(refusal([](auto& o) { o.warmup_steps = -3; }), {"--warmup -3"});
  expect_contains(refusal([](auto& o) { o.weight_decay = -0.1; }), {"--weight-decay -0.1"});
  expect_contains(refusal([](auto& o) { o.clip = INFINITY; }), {"--clip inf"});
}

// Every refusal names the flag, the value and what would be legal.
TEST(PlanRefusals, NameFlagValueAndLegalValues) {
  const auto refusal = [](const std::function<void(Plan&)>& change) {
    Plan plan = odd_plan(odd_llama(), 1, 1, false);
    change(plan);
    return message_of<RequestError>([&] { validate(plan); });
  };
  const auto sizes = [](int dp, int tp) {
    return [=](Plan& p) {
      p.mesh.set(Axis::dp, dp);
      p.mesh.set(Axis::tp, tp);
    };
  };
  expect_contains(refusal([](Plan& p) {
                    p.model.num_heads = p.model.num_kv_heads = 6;
                    p.model.head_dim = 4;
                    p.mesh.set(Axis::tp, 4);
                  }),
                  {"--tp 4", "6 heads", "legal: 1, 2, 3, 6"});
  expect_contains(refusal([](Plan& p) {
                    p.model.num_heads = 12;
                    p.model.num_kv_heads = 4;
                    p.mesh.set(Axis::tp, 6);
                  }),
                  {"--tp 6", "4 key/value heads", "legal: 1, 2, 4, 12"});
  expect_contains(refusal(sizes(1, 3)), {"--tp 3", "4 heads", "legal: 1, 2, 4"});
  expect_contains(refusal(sizes(8, 1)), {"--dp 8", "7 sequences", "up to 7", "at least 8"});
  expect_contains(refusal(sizes(0, 1)), {"dp", "0", "1"});
  expect_contains(refusal([](Plan& p) { p.mesh.set(Axis::cp, 3); }),
                  {"--seq-len 11", "--cp 3", "legal: 6, 12"});
  expect_contains(refusal([](Plan& p) { p.mesh.ep = 2; }), {"--ep 2", "no experts", "legal: 1"});
  expect_contains(refusal([](Plan& p) { p.micro_batch = 0; }), {"--micro-batch 0", "1 to"});
  expect_contains(refusal([](Plan& p) { p.global_batch = -7; }), {"--global-batch -7", "1 to"});
  expect_contains(refusal([](Plan& p) { p.seq_len = 0; }), {"--seq-len 0", "odd-llama", "1 to 16"});
  expect_contains(refusal([](Plan& p) { p.seq_len = 17; }), {"--seq-len 17", "odd-llama", "1 to 16"});
  expect_contains(refusal([](Plan& p) {
                    p.mesh.set(Axis::tp, 4);
                    p.model.vocab = 3;
                  }),
                  {"--tp 4", "vocabulary", "3"});
  expect_contains(refusal([](Plan& p) {
                    p.mesh.set(Axis::tp, 4);
                    p.model.mlp_hidden = 3;
                  }),
                  {"--tp 4", "MLP", "3"});
  expect_contains(refusal([](Plan& p) {
                    p.model = odd_deepseek();
                    p.model.shared_hidden = 2;
                    p.mesh.set(Axis::tp, 4);
                  }),
                  {"--tp 4", "shared expert of only 2", "legal: 1, 2"});
  // And what is legal is let through, sequence parallelism without tp included.
  Plan plan = odd_plan(odd_llama(), 7, 4, true);
  EXPECT_NO_THROW(validate(plan));
  plan = odd_plan(odd_llama(), 1, 1, true);
  plan.seq_len = 1;
  EXPECT_NO_THROW(validate(plan));
}

// Models with a part of each kind that tp cuts, or holds whole, which is narrower than 8 ranks.
std::vector<ModelSpec> narrow_models() {
  const auto wide = [](ModelSpec m) {
    m.num_heads = 8, m.head_dim = 4;
    m.num_kv_heads = m.num_kv_heads == 4 ? 8 : 2;
    m.init_std = 0.3;
    return m;
  };
  const ModelSpec llama = wide(odd_llama()), mixture = wide(odd_deepseek());
  std::vector<ModelSpec> models;
  const auto add = [&](const char* name, ModelSpec m, const std::function<void(ModelSpec&)>& narrow) {
    m.name = name;
    narrow(m);
    models.push_back(m);
  };
  const auto latent = [](ModelSpec& m) {
    m.num_kv_heads = m.num_heads, m.kv_rank = 2, m.q_rank = 3, m.rotary_dim = 2, m.value_head_dim = 1;
  };
  add("vocabulary", llama, [](ModelSpec& m) { m.vocab = 3; });
  add("mlp", llama, [](ModelSpec& m) { m.mlp_hidden = 3; });
  add("mlp-bias", llama, [](ModelSpec& m) { m.mlp_hidden = 3, m.mlp_bias = true; });
  add("hidden", llama, [](ModelSpec& m) { m.hidden = 3; });
  add("one-key", llama, [](ModelSpec& m) { m.num_kv_heads = 1, m.qkv_bias = m.qk_norm = true; });
  add("whole-norms", llama, [](ModelSpec& m) { m.qk_norm = m.qk_norm_whole = true; });
  add("gate", llama, [](ModelSpec& m) { m.attention_gate = m.attention_sinks = true; });
  add("latent", llama, latent);
  add("lora", llama, [](ModelSpec& m) { m.tuning.lora.rank = 1; });
  add("experts", mixture, [](ModelSpec& m) { m.expert_hidden = 3, m.shared_hidden = 16; });
  add("shared", mixture, [](ModelSpec& m) { m.expert_hidden = 16, m.shared_hidden = 3; });
  add("two-shared", mixture, [](ModelSpec& m) {
    m.expert_hidden = 16, m.shared_hidden = 2, m.num_shared_experts = 2, m.shared_gate = true;
  });
  add("predicts", mixture, [&](ModelSpec& m) { latent(m), m.num_mtp_layers = 1, m.expert_hidden = 3; });
  add("short-conv", llama, [](ModelSpec& m) { m.hidden = 4, m.short_conv = {3, {1}}; });
  add("groups", llama, [](ModelSpec& m) { m.state_space = {8, 2, 2, 3, 3, true, 4, {1}}; });
  add("few-heads", llama, [](ModelSpec& m) { m.state_space = {4, 2, 2, 3, 3, true, 4, {1}}; });
  add("delta", llama,
      [](ModelSpec& m) { m.state_space = {8, 2, 2, 3, 3, false, 4, {1}, StateRule::gated_delta}; });
  return models;
}

// Where a part is narrower than tp, ranks would have none of it, or each the same: that is refused, and what
// is called legal instead has a part for each, as has what is not refused. The gradients are those of one
// rank.
TEST(PlanRefusals, NoRankIsWithoutItsPart) {  // long
  int refused = 0, run = 0;
  for (const ModelSpec& model : narrow_models())
    for (int tp : {2, 4, 8}) {
      Plan plan = odd_plan(model, 1, tp, false);
      SCOPED_TRACE(describe(plan));
      try {
        validate(plan);
      } catch (const RequestError& error) {
        expect_contains(error.what(), {fmt::format("--tp {}", tp), "legal: 1"});
        ++refused;
        continue;
      }
      for (const ParamSpec& spec : all_parameters(model))
        for (int index = 0; index < tp; ++index)
          for (std::int64_t extent : local_shape(spec, tp, index)) EXPECT_GT(extent, 0) << spec.name;
      EXPECT_TRUE(verify({plan, {}, {1, patience}, 1, 1, {}, {}}).pass);
      ++run;
    }
  EXPECT_GE(refused, 12);
  EXPECT_GE(run, 20);
}

// The smallest plans that are let through do run: one sequence each, one token each.
TEST(PlanRefusals, TheEdgesOfWhatIsLegalRun) {
  for (const ModelSpec& model : {odd_gpt2(), odd_llama()}) {
    Plan plan = odd_plan(model, 2, 4, true);
    plan.global_batch = 2;
    plan.micro_batch = 100;
    plan.seq_len = 4;  // one row for each rank
    EXPECT_TRUE(verify({plan, {}, {1, patience}, 2, 1, {}, {}}).pass) << describe(plan);
    plan.sequence_parallel = false;
    plan.seq_len = 1;
    EXPECT_TRUE(verify({plan, {}, {1, patience}, 2, 1, {}, {}}).pass) << describe(plan);
    plan.model.vocab = plan.model.mlp_hidden = 4;
    EXPECT_TRUE(verify({plan, {}, {1, patience}, 2, 1, {}, {}}).pass) << describe(plan);
  }
}

}  // namespace
}  // namespace echelon::training_test

// What the tests of training share: small odd-sized models, and bodies run on every rank of a mesh.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/philox.h"
#include "checkpoint/logical_tensors.h"
#include "comm/rank.h"
#include "spec/plan.h"
#include "temporary_directory.h"
#include "tensor/host.h"
#include "train/trainer.h"
#include "turned_clock.h"

namespace echelon::checks {

// Sizes that tp does not divide wherever they need not: the vocabulary and the MLP.
inline ModelSpec odd_gpt2(bool tied = true, std::int64_t layers = 2) {
  ModelSpec m;
  m.name = "odd-gpt2";
  m.family = Family::gpt2;
  m.activation = usual_activation(m.family);
  m.num_layers = layers;
  m.hidden = 24;
  m.num_heads = m.num_kv_heads = 4;
  m.head_dim = 6;
  m.mlp_hidden = 41;
  m.vocab = 53;
  m.max_seq = 16;
  m.tied_embedding = tied;
  return m;
}

inline ModelSpec odd_llama(bool tied = false, std::int64_t kv_heads = 2, std::int64_t layers = 2) {
  ModelSpec m = odd_gpt2(tied, layers);
  m.name = "odd-llama";
  m.family = Family::llama;
  m.activation = usual_activation(m.family);
  m.num_kv_heads = kv_heads;
  m.mlp_hidden = 37;
  return m;
}

// Steps that clip.
inline OptimizerOptions clipping() {
  OptimizerOptions options;
  options.warmup_steps = 0;
  options.lr = 1e-2;
  options.clip = 0.1;  // below the norms of these models
  return options;
}

// A global batch of 7 in microbatches of 2: a smaller last microbatch, and uneven parts over dp 2, 3 and 4.
inline Plan odd_plan(ModelSpec model, int dp, int tp, bool sp, DType dtype = DType::f64) {
  Plan plan;
  plan.model = std::move(model);
  plan.mesh.set(Axis::dp, dp);
  plan.mesh.set(Axis::tp, tp);
  plan.sequence_parallel = sp;
  plan.global_batch = 7;
  plan.micro_batch = 2;
  plan.seq_len = 11;
  plan.precision = dtype;
  return plan;
}

inline std::string describe(const Plan& p) {
  return fmt::format("{} {} tied {} kv heads {}: dp {} tp {} sp {}", p.model.name, p.precision.name,
                     p.model.tied_embedding, p.model.num_kv_heads, p.mesh.size(Axis::dp),
                     p.mesh.size(Axis::tp), p.sequence_parallel);
}

// Calls visit(dp, tp, sp) for dp 1, 2, 3, 4 x tp 1, 2, 4 x sp off and on (on where tp > 1).
template <class Visit>
void for_each_mesh(const Visit& visit) {
  for (int dp : {1, 2, 3, 4})
    for (int tp : {1, 2, 4})
      for (bool sp : {false, true})
        if (tp > 1 || !sp) visit(dp, tp, sp);
}

inline void on_mesh(const Plan& plan, const std::function<void(const Rank&)>& body, int threads = 1,
                    Collectives collectives = Collectives::direct) {
  ThreadWorld world(plan.mesh.num_ranks(), patience);
  run_ranks(world, [&](int index) {
    Arena arena;
    const auto kernels = make_kernels(arena, plan.precision, threads, plan.numerics);
    body(Rank(world, plan.mesh, index, plan.precision, arena, *kernels, collectives));
  });
}

inline SampleSource random_samples(const Plan& plan) {
  return [vocab = static_cast<std::uint64_t>(plan.model.vocab), seq_len = plan.seq_len](
             std::int64_t step, std::int64_t sample, std::int32_t* tokens, std::int32_t* targets) {
    const Philox random(11, Stream::test, static_cast<std::uint64_t>(step * 1000 + sample));
    const auto token = [&](std::int64_t t) {
      return static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(t), vocab));
    };
    for (std::int64_t t = 0; t < seq_len; ++t) {
      tokens[t] = token(t);
      targets[t] = token(t + 1);
    }
  };
}

inline std::vector<double> as_doubles(const Tensor& t) { return copy_numbers_to_host(t); }

// The derivative of the loss along a random direction of each parameter of a rank alone, in f64:
// visit(parameter, by central differences over +-step, by its gradient).
template <class Visit>
void each_derivative(Trainer& trainer, const SampleSource& samples, double step, const Visit& visit) {
  // Of both losses where one more token is predicted: an evaluation has one.
  const ModelSpec& model = trainer.plan().model;
  const auto loss = [&] {
    if (model.num_mtp_layers == 0) return trainer.evaluate(trainer.plan().global_batch, samples);
    const double of_next = trainer.compute_gradients(0, samples);
    return of_next + model.mtp_weight * trainer.mtp_loss();
  };
  for (const Parameter& p : trainer.parameters().all()) {
    const std::vector<double> middle = as_doubles(p.value), gradient = as_doubles(p.gradient);
    std::vector<double> direction(middle.size());
    Philox(17, Stream::test, name_hash(p.spec.name.c_str()))
        .fill_normal(0, direction.size(), direction.data());
    double length = 0, expected = 0;
    for (double d : direction) length += d * d;
    length = std::sqrt(length);
    for (std::size_t k = 0; k < direction.size(); ++k) expected += gradient[k] * direction[k] / length;
    const auto loss_at = [&](double distance) {
      for (std::size_t k = 0; k < middle.size(); ++k)
        p.value.host<double>()[k] = middle[k] + distance * direction[k] / length;
      return loss();
    };
    visit(p, (loss_at(step) - loss_at(-step)) / (2 * step), expected);
    loss_at(0);
  }
}

using LogicalTensors = std::map<std::string, std::vector<double>>;  // by name

inline LogicalTensors gather(const Rank& rank, const Trainer& trainer, ParameterTensor which) {
  LogicalTensors tensors;
  for (const Parameter& p : trainer.parameters().all())
    tensors[p.spec.name] = as_doubles(gather_logical(rank, p, which));
  return tensors;
}

// Of the parameters that have one: what Muon updates has not.
inline LogicalTensors gather_second_moments(const Rank& rank, const Trainer& trainer) {
  LogicalTensors tensors;
  for (const Parameter& p : trainer.parameters().all())
    if (!p.is_updated_whole)
      tensors[p.spec.name] = as_doubles(gather_logical(rank, p, ParameterTensor::exp_avg_sq));
  return tensors;
}

// What a rank has after some steps. Gathered over its tp group, but for what each rank holds whole.
struct Outcome {
  std::vector<double> losses, norms;
  LogicalTensors gradients;  // of the last step
  LogicalTensors values, exp_avg, exp_avg_sq;
  bool operator==(const Outcome&) const = default;
};

// By rank.
inline std::vector<Outcome> run_steps(const Plan& plan, const OptimizerOptions& options, std::int64_t steps,
                                      const SampleSource& samples, const Faults& faults = {}, int threads = 1,
                                      Collectives collectives = Collectives::direct) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(plan.mesh.num_ranks()));
  on_mesh(
      plan,
      [&](const Rank& rank) {
        Outcome& o = outcomes[static_cast<std::size_t>(rank.index())];
        Trainer trainer(rank, plan, options, 1, {faults});
        for (std::int64_t step = 0; step < steps; ++step) {
          o.losses.push_back(trainer.compute_gradients(step, samples));
          if (step + 1 == steps) o.gradients = gather(rank, trainer, ParameterTensor::gradient);
          o.norms.push_back(trainer.apply_gradients(step).gradient_norm);
        }
        o.values = gather(rank, trainer, ParameterTensor::value);
        o.exp_avg = gather(rank, trainer, ParameterTensor::exp_avg);
        o.exp_avg_sq = gather_second_moments(rank, trainer);
      },
      threads, collectives);
  return outcomes;
}

// max |a - b| / max |a|
inline double relative_difference(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double difference = 0, magnitude = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference = std::max(difference, std::abs(a[i] - b[i]));
    magnitude = std::max(magnitude, std::abs(a[i]));
  }
  return difference == 0 ? 0 : difference / magnitude;
}

// The message of the E that body throws; "" and a failure when it throws none.
template <class E, class Body>
std::string message_of(const Body& body) {
  try {
    body();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another kind of error: " << error.what();
    return "";
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

inline void expect_contains(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << "\"" << part << "\" is not in: " << text;
}

}  // namespace echelon::checks

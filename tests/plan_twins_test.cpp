// What the planner's search says that a configuration holds is what training it holds: 42 configurations over
// all axes, schedules, kinds of sharding and of recomputation, in f32 and bf16, 9 more of a mixture of
// experts, and 6 with the output layer cut over the pipeline. And what it says that a rank sends along each
// axis is what training sends, of models of full size, in dry runs.
#include <gtest/gtest.h>

#include <mutex>

#include "case_choice.h"
#include "pipeline_runs.h"
#include "plan/explain.h"
#include "plan/step_model.h"
#include "schedule/schedules.h"
#include "train/dry_run.h"
#include "train/trainer.h"
#include "workloads.h"

namespace echelon::plan_twins_test {
namespace {

using namespace checks;

Workload workload(Family family, Precision precision = Precision::f32) {
  Workload w;
  ModelSpec& m = w.plan.model;
  m.family = family;
  m.activation = usual_activation(family);
  m.num_layers = 8;
  m.hidden = 32;
  m.num_heads = 8;
  m.num_kv_heads = family == Family::llama ? 4 : 8;
  m.head_dim = 4;
  m.mlp_hidden = 64;
  m.vocab = 64;
  m.max_seq = 32;
  m.tied_embedding = family == Family::gpt2;
  w.plan.seq_len = 32;
  w.plan.global_batch = 16;
  w.precision = precision;
  w.machine = load_machine("a100-80");
  w.software = load_software("echelon");
  w.exact_memory = exact_memory();
  return w;
}

// Experts that all get every token, so that their loads are even.
Workload mixture_workload() {
  Workload w = workload(Family::llama);
  w.plan.model.experts = Experts::mixtral;
  w.plan.model.num_experts = w.plan.model.experts_per_token = 4;
  w.plan.model.expert_hidden = 16;
  return w;
}

Plan on(int dp, int tp, int pp, int cp = 1) {
  Plan c = checks::searched_plan();
  c.mesh.set(Axis::dp, dp);
  c.mesh.set(Axis::tp, tp);
  c.mesh.set(Axis::pp, pp);
  c.mesh.set(Axis::cp, cp);
  c.balance_layers = false;
  return c;
}

std::vector<Plan> configurations() {
  std::vector<Plan> all;
  const auto add = [&](Plan c, const auto& change) {
    change(c);
    all.push_back(c);
  };
  const auto as_it_is = [](Plan&) {};
  // Meshes, with and without sequence parallelism, and micro-batches.
  add(on(1, 1, 1), as_it_is);
  add(on(2, 1, 1), [](Plan& c) { c.micro_batch = 4; });
  add(on(1, 2, 1), as_it_is);
  add(on(1, 4, 1), [](Plan& c) { c.micro_batch = 2; });
  add(on(1, 4, 1), [](Plan& c) { c.sequence_parallel = false; });
  add(on(2, 2, 2), [](Plan& c) { c.sequence_parallel = false, c.micro_batch = 2; });
  add(on(2, 2, 2), as_it_is);
  // Every schedule.
  for (const char* schedule : {"naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min",
                               "dualpipe", "dualpipev", "zb-auto"})
    add(on(1, 1, 4), [&](Plan& c) { c.schedule = schedule; });
  for (int chunks : {2, 4}) add(on(2, 1, 2), [&](Plan& c) { c.schedule = "interleaved", c.chunks = chunks; });
  // Context parallelism.
  for (ContextKind kind : {ContextKind::ring, ContextKind::allgather, ContextKind::ulysses}) {
    add(on(1, 1, 1, 2), [&](Plan& c) { c.context_kind = kind; });
    add(on(1, 2, 2, 2), [&](Plan& c) { c.context_kind = kind, c.micro_batch = 2; });
  }
  // ZeRO, with and without replicas, and recomputation.
  for (int zero : {1, 2, 3}) {
    add(on(4, 1, 1), [&](Plan& c) { c.zero = zero; });
    add(on(4, 2, 1), [&](Plan& c) { c.zero = zero, c.hsdp = 2, c.recompute = Recompute::selective; });
    add(on(2, 1, 2), [&](Plan& c) { c.zero = zero, c.schedule = "zb-h1", c.recompute = Recompute::full; });
  }
  add(on(1, 2, 2), [](Plan& c) { c.recompute = Recompute::selective, c.micro_batch = 4; });
  add(on(2, 1, 1, 2), [](Plan& c) { c.zero = 3, c.recompute = Recompute::full; });
  // With the moments in a file.
  for (int zero : {0, 1, 3})
    add(on(2, 1, 2), [&](Plan& c) { c.zero = zero, c.offload = Offload::optimizer; });
  // With activations in one.
  add(on(1, 2, 1), [](Plan& c) { c.offload = Offload::activations; });
  for (const char* schedule : {"1f1b", "gpipe", "zb-h1", "dualpipe"})
    add(on(1, 1, 4), [&](Plan& c) { c.schedule = schedule, c.offload = Offload::activations; });
  add(on(2, 1, 2), [](Plan& c) { c.zero = 1, c.recompute = Recompute::full, c.offload = Offload::both; });
  return all;
}

// With the output layer cut over the pipeline, of a family whose output layer is its own.
std::vector<Plan> cut_configurations() {
  std::vector<Plan> all;
  for (const char* schedule : {"1f1b", "zb-h1", "zb-v"})
    for (const auto& [dp, tp] : {std::pair{1, 1}, {2, 2}}) {
      Plan c = on(dp, tp, tp == 1 ? 4 : 2);
      c.schedule = schedule;
      c.vocabulary_parallel = true;
      c.zero = dp > 1 ? 1 : 0;
      all.push_back(c);
    }
  return all;
}

std::vector<Plan> mixture_configurations() {
  std::vector<Plan> all;
  const auto add = [&](Plan c, int ep, const auto& change) {
    c.mesh.ep = ep;
    c.mesh.etp = c.mesh.tp();
    change(c);
    all.push_back(c);
  };
  const auto as_it_is = [](Plan&) {};
  add(on(2, 1, 1), 1, as_it_is);
  add(on(2, 1, 1), 2, as_it_is);
  add(on(2, 2, 1), 2, [](Plan& c) { c.recompute = Recompute::full; });
  add(on(2, 1, 1, 2), 4, as_it_is);
  for (int zero : {1, 2, 3}) add(on(4, 1, 1), 2, [&](Plan& c) { c.zero = zero; });
  add(on(4, 1, 2), 4, [](Plan& c) { c.schedule = "1f1b"; });
  add(on(2, 1, 2), 2, [](Plan& c) { c.schedule = "dualpipe"; });
  return all;
}

// In the second step, on that rank of each pipeline rank which holds most of the parameters' state: shards of
// ZeRO are seldom equal, and whoever plans for one device must know of the fullest.
// `more`: the fraction that another rank may hold beyond it.
std::vector<StepMemory> measure(const Plan& plan, double more) {
  std::vector<StepMemory> peaks(static_cast<std::size_t>(plan.mesh.size(Axis::pp)));
  std::vector<std::int64_t> most(peaks.size());
  const PipelineLayout pipeline(plan);
  std::mutex mutex;
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, {}, 1);
    for (std::int64_t step : {0, 1}) {
      rank.arena().reset_peak();
      (void)trainer.take_offloaded();
      trainer.compute_gradients(step, random_samples(plan));
      trainer.apply_gradients(step);
    }
    const std::scoped_lock lock(mutex);
    const auto pp = static_cast<std::size_t>(rank.coordinates().pp);
    const Memory peak = rank.arena().peak();
    most[pp] = std::max(most[pp], peak.total());
    if (rank.index() == plan.mesh.rank_at(with_largest_shard(plan, pipeline, {.pp = rank.coordinates().pp})))
      peaks[pp] = {peak, trainer.take_offloaded()};
  });
  for (std::size_t pp = 0; pp < peaks.size(); ++pp)
    EXPECT_LE(static_cast<double>(most[pp]), (1 + more) * static_cast<double>(peaks[pp].total()));
  return peaks;
}

void expect_held(const Workload& work, const std::vector<Plan>& all, double more = 0) {
  StepModel model(work);
  for (Plan c : all) {
    c.model = work.plan.model;
    c.seq_len = work.plan.seq_len;
    c.global_batch = work.plan.global_batch;
    c.optimizer = work.plan.optimizer;
    SCOPED_TRACE(fmt::format("{} {}", work.plan.model.family == Family::gpt2 ? "gpt2" : "llama", summary(c)));
    ASSERT_EQ(shape_problem(work, c), "");
    ASSERT_EQ(model.schedule_problem(c), "");
    const Estimate estimate = model.estimate(c);
    const std::vector<StepMemory> measured = measure(trained_plan(estimate, work), more);
    ASSERT_EQ(estimate.rank_memory.size(), measured.size());
    ASSERT_GT(measured.back()[MemoryCategory::activations], 0);
    for (std::size_t r = 0; r < measured.size(); ++r)
      for (MemoryCategory category : {MemoryCategory::parameters, MemoryCategory::gradients,
                                      MemoryCategory::optimizer, MemoryCategory::activations})
        EXPECT_EQ(estimate.rank_memory[r][category], measured[r][category])
            << memory_category_name(category) << " of pipeline rank " << r;
    if (c.offload != Offload::activations) continue;
    double most = 0, moved = 0;
    for (const StepMemory& rank : measured) {
      most = std::max(most, static_cast<double>(rank.host.most));
      moved = std::max(moved, static_cast<double>(rank.host.out + rank.host.back));
    }
    EXPECT_EQ(estimate.host_bytes, most);
    EXPECT_EQ(estimate.host_traffic, moved);
  }
}

TEST(PlanTwins, MemoryIsWhatTrainingHolds) {
  const std::vector<Plan> all = configurations();
  ASSERT_GE(all.size(), 30u);
  for (Family family : {Family::gpt2, Family::llama}) expect_held(workload(family), all);
  for (Family family : {Family::gpt2, Family::llama}) expect_held(workload(family, Precision::bf16), all);
  expect_held(mixture_workload(), mixture_configurations());
  expect_held(workload(Family::llama), cut_configurations());
}

// Muon keeps one moment of matrices; what it makes of them is there when activations are gone.
TEST(PlanTwins, MemoryUnderMuonIsWhatTrainingHolds) {
  std::vector<Plan> all;
  for (const auto& [dp, tp, pp] : {std::tuple{1, 1, 1}, {2, 2, 2}, {1, 4, 1}, {4, 1, 1}})
    for (int zero : {0, 1, 2, 3}) {
      if (zero > 0 && dp == 1) continue;
      all.push_back(on(dp, tp, pp));
      all.back().zero = zero;
    }
  for (const char* schedule : {"zb-v", "dualpipe"}) {
    all.push_back(on(1, 1, 4));
    all.back().schedule = schedule;
  }
  // Of shards of nearly one size another one may have more with two moments.
  constexpr double of_other_shards = 0.005;
  for (Workload work : {workload(Family::gpt2), workload(Family::llama, Precision::bf16)}) {
    work.plan.optimizer = OptimizerKind::muon;
    expect_held(work, all, of_other_shards);
  }
  Workload work = mixture_workload();
  work.plan.optimizer = OptimizerKind::muon;
  expect_held(work, mixture_configurations(), of_other_shards);
}

// Of models of full size, whose few bytes of losses and norms do not count.
std::vector<Plan> sending_configurations(const ModelSpec& m) {
  std::vector<Plan> all;
  const bool has_experts = m.experts != Experts::none, has_attention = m.num_heads > 0;
  const auto add = [&](Plan c, int ep, const auto& change) {
    c.model = m;
    c.mesh.ep = has_experts ? ep : 1;
    c.seq_len = 1024;
    c.micro_batch = 1;
    c.global_batch = std::int64_t{8} * c.mesh.dp();
    c.balance_layers = false;
    change(c);
    all.push_back(c);
  };
  for (bool sp : {true, false})
    for (const Recompute& kind : {Recompute::none, Recompute::full})
      add(on(2, 4, 1), 2, [&](Plan& c) { c.sequence_parallel = sp, c.recompute = kind; });
  add(on(1, 2, 1), 1, [](Plan& c) { c.micro_batch = 2; });
  for (int zero : {1, 2, 3}) {
    add(on(4, 1, 1), 1, [&](Plan& c) { c.zero = zero; });
    add(on(4, 2, 1), 4, [&](Plan& c) { c.zero = zero, c.recompute = Recompute::full; });
  }
  for (ContextKind kind : {ContextKind::ring, ContextKind::allgather, ContextKind::ulysses})
    for (const Recompute& again : {Recompute::none, Recompute::selective, Recompute::full})
      if (has_attention || again != Recompute::selective)
        add(on(1, 1, 1, 2), 2, [&](Plan& c) { c.context_kind = kind, c.recompute = again; });
  for (const char* schedule : {"1f1b", "zb-h1", "zb-v", "dualpipe", "dualpipev"})
    add(on(2, 1, 4), 1, [&](Plan& c) { c.schedule = schedule, c.zero = 1; });
  add(on(2, 2, 2, 2), 4, [](Plan& c) { c.schedule = "interleaved", c.chunks = 2, c.zero = 1; });
  return all;
}

AxisBytes sent(const Plan& plan) {
  const PipelineLayout pipeline(plan);
  AxisBytes most;
  for (int pp = 0; pp < plan.mesh.pp(); ++pp) {
    const Traffic traffic = predict_traffic(plan, pipeline, {.pp = pp});
    for (const auto& [bytes, axis] : {std::pair{&AxisBytes::dp, Axis::dp},
                                      {&AxisBytes::tp, Axis::tp},
                                      {&AxisBytes::pp, Axis::pp},
                                      {&AxisBytes::cp, Axis::cp},
                                      {&AxisBytes::ep, Axis::ep}})
      most.*bytes = std::max(most.*bytes, static_cast<double>(traffic.bytes(axis)));
  }
  return most;
}

// Muon's exchanges are counted as if no part of a matrix lay where it is made already. `fewer`: what may.
void expect_traffic(const Workload& work, const Plan& c, double fewer = 0) {
  SCOPED_TRACE(fmt::format("{} {}", c.model.name, summary(c)));
  StepModel model(work);
  ASSERT_EQ(model.schedule_problem(c), "");
  const Estimate estimate = model.estimate_seconds(c);
  const AxisBytes measured = sent(trained_plan(estimate, work));
  const auto expect_sent = [&](const char* axis, double predicted, double bytes) {
    // What is sent once a step of few bytes: counts of routed tokens, losses, clipped norms. And where a
    // pass begins with the layer that the one before ended with, ZeRO 3 may still have it.
    constexpr double few = 1 << 20;
    const double off = (c.zero == 3 ? 0.06 : 0.025) * bytes + few;
    EXPECT_GE(predicted, bytes - off) << axis;
    EXPECT_LE(predicted, bytes + off + fewer * bytes) << axis;
  };
  expect_sent("dp", estimate.traffic.dp, measured.dp);
  expect_sent("tp", estimate.traffic.tp, measured.tp);
  expect_sent("pp", estimate.traffic.pp, measured.pp);
  expect_sent("cp", estimate.traffic.cp, measured.cp);
  expect_sent("ep", estimate.traffic.ep, measured.ep);
}

TEST(PlanTwins, TrafficUnderMuonIsWhatTrainingSends) {
  for (const char* name : {"llama-3.2-1b", "gpt2-350m", "qwen3-30b-a3b", "deepseek-v2-lite"}) {
    Workload work = workload(Family::llama, Precision::bf16);
    work.plan.model = load_model(name);
    work.plan.optimizer = OptimizerKind::muon;
    int priced = 0;
    for (Plan c : sending_configurations(work.plan.model)) {
      if (!is_taken(3)) continue;
      ++priced;
      c.optimizer = OptimizerKind::muon;
      work.plan.seq_len = c.seq_len;
      work.plan.global_batch = c.global_batch;
      if (shape_problem(work, c).empty()) expect_traffic(work, c, 0.06);
    }
    EXPECT_GT(priced, 0);
  }
}

TEST(PlanTwins, TrafficIsWhatTrainingSends) {
  // Tied tables, mixtures with a shared expert and without, latent attention, state spaces and convolutions.
  for (const char* name : {"llama-3.2-1b", "gpt2-350m", "qwen3-30b-a3b", "qwen1.5-moe-a2.7b",
                           "deepseek-v2-lite", "nemotron-h-8b", "qwen3-next-80b-a3b", "lfm2-8b-a1b"}) {
    Workload work = workload(Family::llama, Precision::bf16);
    work.plan.model = load_model(name);
    const std::vector<Plan> all = sending_configurations(work.plan.model);
    int priced = 0;
    for (const Plan& c : all) {
      if (!is_taken(3)) continue;
      ++priced;
      work.plan.seq_len = c.seq_len;
      work.plan.global_batch = c.global_batch;
      if (shape_problem(work, c).empty()) expect_traffic(work, c);
    }
    EXPECT_GT(priced, 0);
  }
}

}  // namespace
}  // namespace echelon::plan_twins_test

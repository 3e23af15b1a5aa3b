// A rank alone, on no device, among imagined others: what it holds and sends is what the rank of a real mesh
// does, since it is the same program.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "comm/imagined.h"
#include "context_runs.h"
#include "expert_runs.h"
#include "mesh_runs.h"
#include "pipeline_runs.h"

namespace echelon::dry_run_test {
namespace {

using namespace checks;

struct Account {
  Memory peak;
  Traffic traffic;
  bool operator==(const Account&) const = default;
};

constexpr std::int64_t steps = 2;

Account account(const Rank& rank, const Plan& plan, const OptimizerOptions& options) {
  Trainer trainer(rank, plan, options, 1);
  const SampleSource samples = random_samples(plan);
  for (std::int64_t step = 0; step < steps; ++step) trainer.step(step, samples, steps - step);
  return {rank.arena().peak(), rank.traffic()};
}

void expect_dry_run_counts(const Plan& plan, const std::string& what, bool data_decides = false) {
  OptimizerOptions options;
  options.total_steps = steps;
  options.clip = 0;
  std::vector<Account> real(static_cast<std::size_t>(plan.mesh.num_ranks()));
  on_mesh(plan, [&](const Rank& rank) {
    real[static_cast<std::size_t>(rank.index())] = account(rank, plan, options);
  });
  for (int index = 0; index < plan.mesh.num_ranks(); ++index) {
    ImaginedWorld world(plan.mesh.num_ranks(), index);
    Arena arena(Device::none);
    const auto kernels = make_kernels(arena, plan.precision, 1);
    Account dry;
    {
      const Rank rank(world, plan.mesh, index, plan.precision, arena, *kernels);
      dry = account(rank, plan, options);
    }
    Account& among = real[static_cast<std::size_t>(index)];
    // Where copies go is what the data decide.
    if (data_decides)
      dry.traffic.at(Axis::ep, Verb::all_to_all) = among.traffic.at(Axis::ep, Verb::all_to_all);
    EXPECT_EQ(dry.traffic, among.traffic) << what << " rank " << index;
    for (MemoryCategory category : all_memory_categories)
      EXPECT_EQ(dry.peak[category], among.peak[category])
          << what << " rank " << index << " " << memory_category_name(category);
    EXPECT_EQ(arena.held_bytes(), 0u);
  }
}

TEST(DryRun, DenseModelsOnEveryAxis) {
  for (const ModelSpec& model : {odd_llama(), odd_gpt2()})
    for (const DType dtype : {DType::f64, DType::f32}) {
      if (dtype == DType::f32 && !has_cpu_kernels()) continue;
      for (const bool sp : {false, true})
        expect_dry_run_counts(odd_plan(model, 2, 2, sp, dtype), "dp 2 tp 2");
      for (const int zero : {1, 2, 3}) {
        Plan plan = odd_plan(model, 3, 1, false, dtype);
        plan.zero = zero;
        expect_dry_run_counts(plan, "zero");
      }
    }
  Plan recompute = odd_plan(odd_llama(), 1, 2, true);
  recompute.recompute = Recompute::full;
  expect_dry_run_counts(recompute, "recompute");
  Plan by_rank = pipeline_plan(odd_llama(false, 2, 4), "interleaved", 2, 1, 1, 4);
  by_rank.recompute = parse_pipeline_recompute("full/none", "");
  expect_dry_run_counts(by_rank, "recompute by rank");
  for (const ContextKind kind : {ContextKind::ring, ContextKind::ulysses, ContextKind::allgather})
    expect_dry_run_counts(context_plan(Family::llama, {kind, ContextBalance::zigzag, 2, 1}), "context");
}

TEST(DryRun, Pipelines) {
  for (const char* schedule : {"1f1b", "gpipe", "zb-h1", "pipedream", "dualpipe"})
    expect_dry_run_counts(pipeline_plan(odd_llama(false, 2, 4), schedule, 2, 1, 1, 4), schedule);
}

TEST(DryRun, CompressedGradients) {
  for (const char* compression : {"bf16", "int8", "topk:0.25", "powersgd:2"}) {
    Plan plan = odd_plan(odd_llama(), 2, 1, false);
    plan.compression = parse_compression(compression, "compress");
    expect_dry_run_counts(plan, compression);
  }
}

TEST(DryRun, MixturesTakeTheEvenLoad) {
  for (const std::int64_t k : {8, 2}) {  // k 8: every expert has every token, and the load is even
    Plan plan = odd_plan(even_mixtral(k), 4, 1, false);
    plan.mesh.ep = 2;
    plan.global_batch = 8;
    for (const Balancing& balancing : balancings(plan.model)) {
      plan.balancing = balancing;
      if (k == 2 && balancing.capacity == 0) continue;  // the rows that come are what the data decide
      expect_dry_run_counts(plan, describe_experts(plan), k == 2 || balancing.capacity > 0);
    }
  }
}

}  // namespace
}  // namespace echelon::dry_run_test

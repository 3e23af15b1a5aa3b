// A whole job run dry: one rank of each class stands for all of them, is what a real rank is, and what a plan
// says.
#include <gtest/gtest.h>

#include <filesystem>
#include <vector>

#include "context_runs.h"
#include "expert_runs.h"
#include "mesh_runs.h"
#include "pipeline_runs.h"
#include "plan/explain.h"
#include "plan/search.h"
#include "train/dry_job.h"
#include "train/dry_report.h"
#include "workloads.h"

namespace echelon::dry_job_test {
namespace {

using namespace checks;

DryJob job_of(const Plan& plan, Device device = Device::cpu) {
  check_whole(plan);
  return dry_job(plan, PipelineLayout(plan), {}, {.device = device});
}

void expect_same(const DryRun& run, const Memory& peak, const Traffic& traffic, const std::string& what) {
  EXPECT_EQ(run.peak, peak) << what;
  EXPECT_EQ(run.traffic, traffic) << what;
}

// Runs all of them; returns the number of classes.
std::size_t expect_classes(const Plan& plan, const std::string& what) {
  check_whole(plan);
  const PipelineLayout pipeline(plan);
  const DryJob job = dry_job(plan, pipeline);
  std::vector<std::int64_t> counted(job.classes.size());
  for (int rank = 0; rank < plan.mesh.num_ranks(); ++rank) {
    const DryRun own = dry_run(plan, pipeline, plan.mesh.coordinates(rank));
    expect_same(job.of(rank), own.peak, own.traffic, fmt::format("{}, rank {}", what, rank));
    ++counted[static_cast<std::size_t>(job.class_of[static_cast<std::size_t>(rank)])];
  }
  for (std::size_t i = 0; i < counted.size(); ++i) EXPECT_EQ(counted[i], job.classes[i].ranks) << what;
  return job.classes.size();
}

Plan on(Plan plan, int pp, int dp, int cp, int tp) {
  plan.mesh.set(Axis::pp, pp);
  plan.mesh.set(Axis::dp, dp);
  plan.mesh.set(Axis::cp, cp);
  plan.mesh.set(Axis::tp, tp);
  return plan;
}

TEST(DryJob, EveryRankOfUnevenMeshesIsAsItsClass) {  // long
  for (const ModelSpec& model : {odd_llama(false, 1), odd_gpt2(true)})
    for (const bool sp : {false, true})
      for (const int zero : {0, 1, 2, 3}) {
        Plan plan = odd_plan(model, 6, 4, sp);
        plan.global_batch = 15;
        plan.zero = zero;
        expect_classes(plan, fmt::format("{} sp {} zero {}", model.name, sp, zero));
        if (zero == 0) continue;
        plan.hsdp = 2;
        expect_classes(plan, fmt::format("{} sp {} zero {} in 2 replicas", model.name, sp, zero));
      }
}

TEST(DryJob, EveryRankOfEveryContextIsAsItsClass) {
  for (const ContextCase& c : context_cases(4))
    for (const AttentionMask mask : {AttentionMask::causal, AttentionMask::document}) {
      Plan plan = context_plan(Family::llama, c);
      plan.mask = mask;
      plan.mesh.set(Axis::dp, 2);
      for (const int zero : {0, 3}) {
        plan.zero = zero;
        expect_classes(plan, describe_context(plan));
      }
    }
}

TEST(DryJob, EveryRankOfEveryScheduleIsAsItsClass) {
  for (const char* schedule :
       {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe", "pipedream", "2bw"})
    for (const bool tied : {false, true}) {
      Plan plan = pipeline_plan(odd_llama(tied, 2, 4), schedule, 2, 3, 2, 4);
      if (tied && !flushes(plan)) continue;
      expect_classes(plan, fmt::format("{} tied {}", schedule, tied));
    }
  Plan plan = pipeline_plan(odd_llama(false, 2, 4), "1f1b", 2, 3, 2, 4);
  plan.optimizer_barrier = false;
  expect_classes(plan, "without a barrier");
}

TEST(DryJob, EveryRankOfCompressedGradientsIsAsItsClass) {
  for (const char* compression : {"bf16", "fp16", "int8", "topk:0.25", "powersgd:2"})
    for (const int zero : {0, 2}) {
      Plan plan = odd_plan(odd_llama(), 5, 2, true);
      plan.zero = zero;
      plan.compression = parse_compression(compression, "compress");
      expect_classes(plan, fmt::format("{} zero {}", compression, zero));
    }
}

TEST(DryJob, EveryRankOfExpertGroupsIsAsItsClass) {  // long
  for (const int ep : {1, 2, 4})
    for (const int zero : {0, 1, 3})
      for (const bool capacity : {false, true}) {
        Plan plan = on(odd_plan(even_deepseek(2), 4, 2, true), 1, 4, 2, 2);
        plan.mesh.ep = ep;
        plan.seq_len = 12;
        plan.global_batch = 6;
        plan.zero = zero;
        plan.balancing = all_losses();
        if (capacity) plan.balancing.capacity = 1;
        expect_classes(plan, fmt::format("ep {} zero {} capacity {}", ep, zero, capacity));
      }
}

// What a run on threads measures, on every rank.
void expect_real(const Plan& plan, const std::string& what) {
  const DryJob job = job_of(plan);
  on_mesh(plan, [&](const Rank& rank) {
    const std::int64_t scratch = rank.arena().live()[MemoryCategory::other];
    Trainer trainer(rank, plan, {}, 1);
    Traffic before;
    for (const std::int64_t step : {0, 1}) {
      before = rank.traffic();
      rank.arena().reset_peak();
      trainer.step(step, random_samples(plan), 2 - step);
    }
    Memory peak = rank.arena().peak();
    peak[MemoryCategory::other] -= scratch;
    expect_same(job.of(rank.index()), peak, rank.traffic() - before,
                fmt::format("{}, rank {}", what, rank.index()));
  });
}

TEST(DryJob, EveryRankHoldsAndSendsWhatARealOneDoes) {
  for (const DType dtype : {DType::f64, DType::f32}) {
    if (dtype == DType::f32 && !has_cpu_kernels()) continue;
    for (const int zero : {0, 1, 2, 3}) {
      Plan plan = odd_plan(odd_llama(false, 1), 3, 2, true, dtype);
      plan.zero = zero;
      expect_real(plan, fmt::format("zero {}", zero));
    }
    expect_real(on(odd_plan(odd_gpt2(true), 2, 2, false, dtype), 2, 2, 1, 2), "dp 2 pp 2 tp 2");
    expect_real(on(context_plan(Family::llama, {.cp = 2}, dtype), 1, 2, 2, 2), "dp 2 cp 2 tp 2");
    Plan full = pipeline_plan(odd_llama(false, 2, 4), "zb-v", 2, 2, 1, 4);
    full.recompute = Recompute::full;
    expect_real(full, "zb-v");
  }
}

// Of a large mesh whose parts are even few ranks are run.
TEST(DryJob, RunsFewRanksOfALargeMesh) {
  Plan plan;
  plan.model = load_model("llama-tiny");
  plan = on(plan, 4, 64, 2, 2);
  plan.sequence_parallel = true;
  plan.global_batch = 64;
  plan.seq_len = 64;
  plan.zero = 0;
  const std::size_t classes = expect_classes(plan, "1024 ranks");
  // Of each pipeline rank those that have the larger part of an uneven sum, and the others.
  EXPECT_LT(classes, 100u);
  EXPECT_EQ(job_of(plan).class_of.size(), 1024u);
}

// The plan that the planner writes, read again, holds what the planner said, by pipeline rank, on what the
// machine computes with.
TEST(DryJob, HoldsWhatThePlanSays) {
  for (const char* model : {"gpt2-124m", "llama-tiny", "mixtral-tiny"}) {
    SearchRequest request;
    request.work = checks::workload_of(load_model(model), 256, 64, Precision::f32, load_machine("a100-80"),
                                       load_software("echelon"), exact_memory());
    request.gpus = 16;
    request.top = 3;
    const SearchResult result = search(request);
    ASSERT_FALSE(result.plans.empty()) << model;
    for (const Estimate& e : result.plans) {
      const Plan plan = plan_from_toml(to_toml(trained_plan(e, request.work)), "plan");
      const DryJob job = job_of(plan, request.work.machine.device());
      Memory largest;
      for (const RankClass& of : job.classes)
        if (of.run.peak.total() > largest.total()) largest = of.run.peak;
      EXPECT_EQ(largest.total(), e.memory.total()) << summary(e.plan);
      std::vector<std::int64_t> of_pipeline(e.rank_memory.size());
      for (int rank = 0; rank < plan.mesh.num_ranks(); ++rank) {
        std::int64_t& most = of_pipeline[static_cast<std::size_t>(plan.mesh.coordinate(rank, Axis::pp))];
        most = std::max(most, job.of(rank).peak.total());
      }
      for (std::size_t pp = 0; pp < of_pipeline.size(); ++pp)
        EXPECT_EQ(of_pipeline[pp], e.rank_memory[pp].total()) << summary(e.plan);
    }
  }
}

// Moments in a file are in no dry run's.
TEST(DryJob, MakesNoFileForOffloadedMoments) {
  const TemporaryDirectory directory;
  Plan plan = odd_plan(odd_llama(), 2, 1, false);
  const DryRun with = job_of(plan).of(0);
  plan.offload = Offload::optimizer;
  plan.offload_directory = (std::filesystem::path(directory.path()) / "absent").string();
  const DryRun without = job_of(plan).of(0);
  EXPECT_GT(with.peak[MemoryCategory::optimizer], 0);
  Memory expected = with.peak;
  expected[MemoryCategory::optimizer] = 0;
  EXPECT_EQ(without.peak, expected);
  EXPECT_FALSE(std::filesystem::exists(plan.offload_directory));
}

}  // namespace
}  // namespace echelon::dry_job_test

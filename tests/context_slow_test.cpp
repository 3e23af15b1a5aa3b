// Context parallelism in the whole product of its kinds, balances and sizes with the other axes, and on long
// rings.
#include "context_runs.h"

namespace echelon::context_slow_test {
namespace {

using namespace checks;

TEST(ContextSlow, EveryKindWithEveryOtherAxis) {
  for (int cp : {2, 3, 4})
    for (const ContextCase& c : context_cases(cp))
      for (Family family : {Family::gpt2, Family::llama})
        for (AttentionMask mask : {AttentionMask::causal, AttentionMask::document})
          for (Plan plan : combined_with_the_other_axes(context_plan(family, c))) {
            plan.mask = mask;
            expect_context_pass(plan);
          }
}

TEST(ContextSlow, EveryKindOnFourRanks) { expect_every_kind(4); }

TEST(ContextSlow, EveryPipelineAndRecompute) {
  for (ContextKind kind : {ContextKind::ring, ContextKind::ulysses})
    for (const char* schedule : {"gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe"})
      for (const Recompute& recompute : {Recompute::none, Recompute::selective, Recompute::full})
        expect_context_pass(under_a_pipeline(kind, schedule, recompute));
}

// Merging more blocks regroups longer sums, but no sum becomes longer: the bound is that of one rank.
TEST(ContextSlow, DifferencesDoNotGrowWithTheRing) {
  if (!has_cpu_kernels()) GTEST_SKIP() << "this build has no CPU kernels";
  for (int cp : {2, 4, 8, 16}) {
    Plan plan = context_plan(Family::llama, {ContextKind::ring, ContextBalance::zigzag, cp, 1}, DType::f32);
    plan.model.max_seq = plan.seq_len = 4096;
    plan.global_batch = plan.micro_batch = 1;
    const VerifyReport report = verified(plan);
    EXPECT_TRUE(report.pass) << cp << to_json(report, plan);
    fmt::print("ring of {}: gradients {:.2e}, bound {:.2e}\n", cp, report.grad_max_rel_diff, report.bound);
  }
}

}  // namespace
}  // namespace echelon::context_slow_test

// The presets that people run, over the whole grid: dp 1, 2, 3, 4 x tp 1, 2, 4 x sp off and on, in f64 on the
// reference kernels and in f32 on the CPU kernels. Their vocabulary of 257 is uneven over tp.
#include <gtest/gtest.h>

#include "case_choice.h"
#include "random_models.h"
#include "verify/verify.h"

namespace echelon::verify_slow_test {
namespace {

using namespace checks;

void expect_pass_on_every_mesh(const char* preset, DType dtype) {
  for_each_mesh([&](int dp, int tp, bool sp) {
    if (!is_taken()) return;
    VerifyRequest request;
    request.plan = odd_plan(load_model(preset), dp, tp, sp, dtype);
    request.plan.seq_len = 29;
    request.optimizer.clip = 0.1;
    request.run.timeout = patience;
    const VerifyReport report = verify(request);
    EXPECT_TRUE(report.pass) << describe(request.plan) << "\n" << to_json(report, request.plan);
    EXPECT_LE(report.grad_max_rel_diff, dtype == DType::f64 ? 1e-10 : verify_bound(request.plan));
    EXPECT_LE(report.param_worst, 1);
  });
}

TEST(VerifySlow, Gpt2TinyInF64) { expect_pass_on_every_mesh("gpt2-tiny", DType::f64); }
TEST(VerifySlow, LlamaTinyInF64) { expect_pass_on_every_mesh("llama-tiny", DType::f64); }

TEST(VerifySlow, Gpt2TinyInF32) {
  if (!has_cpu_kernels()) GTEST_SKIP() << "this build has no CPU kernels";
  expect_pass_on_every_mesh("gpt2-tiny", DType::f32);
}
TEST(VerifySlow, LlamaTinyInF32) {
  if (!has_cpu_kernels()) GTEST_SKIP() << "this build has no CPU kernels";
  expect_pass_on_every_mesh("llama-tiny", DType::f32);
}

TEST(VerifySlow, RandomModels) {
  const int wanted = so_many(100, 1000);
  const int visited = for_each_random_request(5000, wanted, [&](const VerifyRequest& request) {
    const VerifyReport report = verify(request);
    EXPECT_TRUE(report.pass) << to_json(report, request.plan);
  });
  EXPECT_GT(visited, wanted * 4 / 5);
}

// More threads a rank, and longer sequences.
TEST(VerifySlow, TwoThreadsARankAndLongSequences) {
  if (!has_cpu_kernels()) GTEST_SKIP() << "this build has no CPU kernels";
  for (const char* preset : {"gpt2-tiny", "llama-tiny"}) {
    VerifyRequest request;
    request.plan = odd_plan(load_model(preset), 2, 2, true, DType::f32);
    request.plan.seq_len = 300;  // a microbatch is more than one chunk of logits
    request.run.threads_per_rank = 2;
    request.run.timeout = patience;
    request.optimizer.clip = 0.1;
    const VerifyReport report = verify(request);
    EXPECT_TRUE(report.pass) << describe(request.plan) << "\n" << to_json(report, request.plan);
  }
}

}  // namespace
}  // namespace echelon::verify_slow_test

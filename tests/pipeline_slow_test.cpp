// pipeline_test.cpp over all combinations: every schedule, stages, microbatches, both families.
#include <gtest/gtest.h>

#include "pipeline_runs.h"

namespace echelon::pipeline_slow_test {
namespace {

using namespace checks;

TEST(PipelineSlow, EveryScheduleGivesTheBitsOfOneRank) {
  for (const std::string& schedule : flushing_schedules())
    for (int pp : {2, 3, 4})
      for (const ModelSpec& model : {odd_gpt2(true, 8), odd_llama(pp == 3, 2, 8 + pp % 3)})
        if (schedule != "dualpipe" || pp != 3)  // an even number of ranks
          expect_bits_of_one_rank(pipeline_plan(model, schedule, pp, 1, 1, 8));
}

TEST(PipelineSlow, ComposesWithDataTensorAndSequenceParallel) {
  for (const std::string& schedule : flushing_schedules())
    for (auto [dp, tp] : {std::pair{2, 1}, {1, 2}, {2, 2}})
      for (const ModelSpec& model : {odd_gpt2(true, 4), odd_llama(false, 2, 4)})
        expect_passes(pipeline_plan(model, schedule, 2, dp, tp, 4));
}

TEST(PipelineSlow, AnyNumberOfMicrobatches) {
  for (const std::string& schedule : flushing_schedules())
    for (int microbatches = 1; microbatches <= 9; ++microbatches)
      if (has_microbatches(schedule, microbatches))
        expect_bits_of_one_rank(pipeline_plan(odd_gpt2(true, 6), schedule,
                                              schedule.starts_with("dualpipe") ? 2 : 3, 1, 1, microbatches));
}

TEST(PipelineSlow, StreamsEqualTheEmulationOfTheirDelay) {
  for (int pp : {2, 3, 4})
    for (auto [schedule, microbatches] :
         {std::pair{"pipedream", 1}, {"pipedream", 2}, {"pipedream", 6}, {"2bw", pp}, {"2bw", 7}})
      for (auto [dp, tp] : {std::pair{1, 1}, {2, 1}, {1, 2}, {2, 2}})
        for (const ModelSpec& model : {odd_gpt2(false, 5), odd_llama(false, 2, 4)})
          expect_emulation(pipeline_plan(model, schedule, pp, dp, tp, microbatches), 4);
}

TEST(PipelineSlow, OptimizerWithoutABarrierGivesTheSameBits) {
  Guesses guesses;
  for (const char* schedule : {"zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "1f1b", "interleaved"})
    for (auto [pp, dp, tp, microbatches] :
         {std::tuple{2, 1, 1, 4}, {4, 1, 1, 8}, {4, 1, 1, 2}, {3, 1, 1, 1}, {2, 2, 2, 3}})
      for (const ModelSpec& model : {odd_gpt2(true, 8), odd_llama(false, 2, 8)})
        for (DType dtype : {DType::f64, DType::f32}) {
          if (dtype == DType::f32 && !has_cpu_kernels()) continue;
          if (schedule == std::string("interleaved") && microbatches % pp != 0) continue;
          Plan plan = pipeline_plan(model, schedule, pp, dp, tp, microbatches);
          plan.precision = dtype;
          expect_bits_without_barrier(plan, guesses);
        }
  EXPECT_GT(guesses.right, so_many(10, 100));
  EXPECT_GT(guesses.wrong, so_many(10, 100));
}

}  // namespace
}  // namespace echelon::pipeline_slow_test

// What DualPipe's pairs hide: passes sleep as long as they would compute, and halfway something travels for
// as long. Where the two of a pair change places, it travels while the other computes; the result does not
// depend on what else the machine does.
#include <gtest/gtest.h>

#include <thread>

#include "base/median.h"
#include "comm/threads.h"
#include "parallel/pipeline_parallel.h"
#include "schedule/schedules.h"
#include "schedule/step_programs.h"

namespace echelon::pair_overlap_test {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds half{10}, travel{10};

class SleepingStages final : public PipelineStages {
 public:
  SleepingStages(Arena& arena, bool pauses) : arena_(arena), pauses_(pauses) {}
  Work<Tensor> forward(Instruction, Tensor) override { return pass(); }
  Work<Tensor> backward(Instruction, Tensor) override { return pass(); }
  Work<Tensor> backward_input(Instruction, Tensor) override { return pass(); }
  bool pauses() const override { return pauses_; }
  void backward_weight(const Instruction&) override { std::this_thread::sleep_for(half); }
  void step(const Instruction&) override {}
  bool validate() override { return true; }
  Tensor make_boundary(int) override { return {arena_, MemoryCategory::activations, DType::f32, {1}}; }

 private:
  Work<Tensor> pass() {
    std::this_thread::sleep_for(half);
    const auto there = Clock::now() + travel;
    co_await Pause{};
    std::this_thread::sleep_until(there);
    std::this_thread::sleep_for(half);
    co_return make_boundary(0);
  }

  Arena& arena_;
  bool pauses_;
};

struct Measured {
  double seconds = 0, busy = 0;  // of the slower rank, and of rank 0 in passes
};

Measured run(const StepPrograms& programs, int ranks, bool pauses) {
  std::vector<double> seconds;
  Measured measured;
  for (int repeat = 0; repeat < 3; ++repeat) {
    ThreadWorld world(ranks, std::chrono::minutes(1));
    std::vector<double> of_rank(static_cast<std::size_t>(ranks));
    run_ranks(world, [&](int rank) {
      std::vector<int> all;
      for (int r = 0; r < ranks; ++r) all.push_back(r);
      const auto group = world.join(rank, all, "pp");
      Arena arena;
      SleepingStages stages(arena, pauses);
      PipelineExecutor executor(*group);
      group->barrier().wait();
      const auto begin = Clock::now();
      const PipelineRun of = executor.run(programs.program(0, 1), stages);
      of_rank[static_cast<std::size_t>(rank)] = seconds_since(begin);
      if (rank == 0) measured.busy = Timeline{{of.spans}}.busy(0);
    });
    seconds.push_back(*std::max_element(of_rank.begin(), of_rank.end()));
  }
  measured.seconds = median(seconds);
  return measured;
}

TEST(PairOverlap, OnePassComputesWhileTheOtherTravels) {
  constexpr int ranks = 2, microbatches = 12;
  const StepPrograms programs(make_schedule("dualpipe", ranks, microbatches, 0));
  int pairs = 0;
  for (const Instruction& i : programs.schedule().ranks[0]) pairs += i.overlaps_next;
  ASSERT_GT(pairs, microbatches / 2);
  const Measured apart = run(programs, ranks, false), together = run(programs, ranks, true);
  const double travels = 2 * pairs * std::chrono::duration<double>(travel).count();
  const double hidden = (apart.seconds - together.seconds) / travels;
  fmt::print(
      "{} pairs: {:.0f} ms one after the other, {:.0f} ms together: {:.0f}% of what travels in pairs is "
      "hidden\n",
      pairs, 1e3 * apart.seconds, 1e3 * together.seconds, 100 * hidden);
  EXPECT_GE(hidden, 0.6);
  EXPECT_LT(together.busy, apart.busy);  // a pair counts once
}

}  // namespace
}  // namespace echelon::pair_overlap_test

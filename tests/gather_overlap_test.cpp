// What gathering parameters ahead of their use hides: with a delay planted on every gather, the time of a
// step beside that of its computation alone and of its gathers alone.
#include <gtest/gtest.h>

#include <cstdio>

#include "base/median.h"
#include "delayed_gathers.h"
#include "mesh_runs.h"
#include "parallel/zero.h"
#include "schedule/group_uses.h"

namespace echelon::gather_overlap_test {
namespace {

using namespace checks;
using std::chrono::milliseconds;

// Medians over rounds; each round measures all three, so that what else the machine does meets them alike.
struct Times {
  double compute = 0, communication = 0, together = 0;  // seconds

  // The part of the shorter of the two that ran beside the longer one.
  double hidden() const { return (compute + communication - together) / std::min(compute, communication); }
  void print(const char* what, int ahead) const {
    std::printf("%s, %d ahead: computation %.1f ms, gathers %.1f ms, together %.1f ms: %.0f%% hidden\n", what,
                ahead, 1e3 * compute, 1e3 * communication, 1e3 * together, 100 * hidden());
  }
};

struct Rounds {
  std::vector<double> compute, communication, together;
  Times medians() const { return {median(compute), median(communication), median(together)}; }
};

template <class Run>
double seconds_of(const Run& run) {
  const auto begin = Clock::now();
  run();
  return seconds_since(begin);
}

// ---- the gathers of a step, around layers that sleep as long as they would compute

struct SleepingStep {
  int layers = 8;
  milliseconds forward{3};  // of a layer; twice as long backward
  milliseconds delay{4};    // of a gather
};

// Embedding, layers, output layer, layers again: the last unit is there throughout.
std::vector<int> uses_of(const SleepingStep& step) {
  std::vector<int> uses;
  for (int unit = 0; unit < step.layers + 2; ++unit) uses.push_back(unit);
  for (int unit = step.layers; unit > 0; --unit) uses.push_back(unit);
  return uses;
}

Times measure(const SleepingStep& step, int ahead) {
  const std::vector<int> uses = uses_of(step);
  Times times;
  DelayedWorld world(2, patience);
  run_ranks(world, [&](int rank) {
    const auto group = world.join(rank, {0, 1}, "dp");
    Arena arena;
    std::vector<std::vector<ShardedUnit>> units;
    for (int unit = 0; unit < step.layers + 3; ++unit) {
      units.push_back({{group.get(),
                        Tensor(arena, MemoryCategory::parameters, DType::f32, {64}),
                        Tensor(arena, MemoryCategory::parameters, DType::f32, {32}),
                        {32, 32}}});
      units.back().front().whole.release_memory();
    }
    const ShardedUnit always = units.back().front();
    units.pop_back();
    ParameterGather gather(std::move(units), always, ahead);
    const auto seconds = [&](milliseconds delay, milliseconds forward) {
      return seconds_of([&] {
        world.link(rank).delay = delay;
        gather.begin(uses);
        for (std::size_t i = 0; i < uses.size(); ++i) {
          gather.use(uses[i]);
          const bool backward = i > static_cast<std::size_t>(step.layers) + 1;
          if (uses[i] > 0) std::this_thread::sleep_for(backward ? 2 * forward : forward);
          gather.done();
        }
        gather.end();
      });
    };
    constexpr milliseconds none{0};
    Rounds rounds;
    for (int round = 0; round < 3; ++round) {
      rounds.compute.push_back(seconds(none, step.forward));
      rounds.communication.push_back(seconds(step.delay, none));
      rounds.together.push_back(seconds(step.delay, step.forward));
    }
    if (rank == 0) times = rounds.medians();
  });
  times.print("sleeping layers", ahead);
  return times;
}

constexpr double bar = 0.6;

// Gathers that take about as long as the layers, twice as long and half as long; and more of them ahead.
TEST(GatherOverlap, OfSleepingLayers) {
  for (auto [delay, ahead] : {std::pair{4, 1}, {8, 1}, {2, 1}, {4, 3}}) {
    SleepingStep step;
    step.delay = milliseconds(delay);
    EXPECT_GE(measure(step, ahead).hidden(), bar) << delay << " ms, " << ahead << " ahead";
  }
}

TEST(GatherOverlap, NoneWithoutGatheringAhead) { EXPECT_LT(measure({}, 0).hidden(), 0.2); }

// ---- a training step

Plan training_plan(int ahead) {
  ModelSpec model = odd_gpt2(false, 10);
  model.hidden = 64;
  model.head_dim = 16;
  model.mlp_hidden = 256;
  model.max_seq = 64;
  Plan plan = odd_plan(model, 2, 1, false);
  plan.global_batch = 8;
  plan.micro_batch = 4;  // one microbatch on each rank
  plan.seq_len = 64;
  plan.dtype = have_cpu_kernels() ? DType::f32 : DType::f64;
  plan.zero = 3;
  plan.zero_prefetch = ahead;
  return plan;
}

// The seconds of each kind, and those that uses of parameters waited for their gathers in a step, at least.
struct TrainingTimes {
  Times times;
  double waited = 0, planted = 0;
};

// Gathers take four times as long as the computation, and sleep: however loaded the machine is, what a layer
// computes fits into the gather of the next one.
TrainingTimes measure_training(int ahead) {
  const Plan plan = training_plan(ahead);
  const SampleSource samples = random_samples(plan);
  TrainingTimes result;
  DelayedWorld world(2, patience);
  run_ranks(world, [&](int index) {
    Arena arena;
    const auto kernels = make_kernels(arena, plan.dtype, 1);
    const Rank rank(world, plan.mesh, index, plan.dtype, arena, *kernels);
    Communicator& group = rank.along(Axis::dp);
    Trainer trainer(rank, plan, {}, 1);
    const ParameterStore& parameters = trainer.parameters();
    const auto uses = group_uses(trainer.pipeline(), trainer.pipeline().programs(0).program(0, 1), 0);
    std::int64_t step = 0;
    const auto train = [&] {
      trainer.step(step++, samples, 1);
      group.barrier().wait();
    };
    const auto gather = [&] {
      parameters.begin_uses(uses);
      for (int used : uses) const auto use = parameters.use(used);
      parameters.end_uses();
      group.barrier().wait();
    };

    std::vector<double> undelayed;
    for (int i = 0; i < 5; ++i) undelayed.push_back(seconds_of(train));
    const Tensor compute(arena, MemoryCategory::other, DType::f64, {1});
    *compute.data<double>() = median(undelayed);
    group.all_reduce(compute, ReduceOp::max).wait();
    const int gathers = parameters.gather()->measures().gathers;
    const auto delay = std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(4 * *compute.data<double>() / gathers));

    std::vector<double> waited;
    Rounds rounds;
    for (int round = 0; round < 5; ++round) {
      world.link(index).delay = {};
      rounds.compute.push_back(seconds_of(train));
      world.link(index).delay = delay;
      rounds.communication.push_back(seconds_of(gather));
      rounds.together.push_back(seconds_of(train));
      waited.push_back(parameters.gather()->measures().wait_seconds);
    }
    if (index != 0) return;
    result.times = rounds.medians();
    result.waited = *std::min_element(waited.begin(), waited.end());
    result.planted = gathers * std::chrono::duration<double>(delay).count();
  });
  result.times.print("training step", ahead);
  return result;
}

TEST(GatherOverlap, OfATrainingStep) { EXPECT_GE(measure_training(1).times.hidden(), bar); }

// Not by the time of a step: ranks that sleep in between compute faster on a loaded machine.
TEST(GatherOverlap, WithoutGatheringAheadATrainingStepWaitsForAllOfThem) {
  const TrainingTimes none = measure_training(0);
  EXPECT_GE(none.waited, 0.95 * none.planted);  // all, but for what passes between asking and waiting
}

}  // namespace
}  // namespace echelon::gather_overlap_test

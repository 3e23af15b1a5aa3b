// What is hidden behind what: the same runs on a clock that only sleep turns, where tests know the result,
// and on the machine's, where bench/overlap_bench.cpp measures it.
#pragma once

#include <algorithm>
#include <vector>

#include "base/median.h"
#include "context_runs.h"
#include "mesh_runs.h"
#include "parallel/pipeline_parallel.h"
#include "parallel/zero.h"
#include "schedule/group_uses.h"
#include "schedule/schedules.h"
#include "schedule/step_programs.h"
#include "sleeping_kernels.h"
#include "slow_links.h"
#include "timed_kernels.h"

namespace echelon::checks {

using std::chrono::milliseconds;

inline double seconds_of(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

// Of one rank: medians over rounds, each of which measures all three.
struct OverlapTimes {
  double compute = 0, communication = 0, together = 0;  // seconds
  double waited = 0;   // by uses of parameters for their gathers, in a step of both
  double planted = 0;  // delays of those gathers

  // The part of the shorter of the two that ran beside the longer one.
  double hidden() const { return (compute + communication - together) / std::min(compute, communication); }
};

class OverlapRounds {
 public:
  explicit OverlapRounds(const Time& time) : time_(time) {}
  template <class Run>
  double seconds(const Run& run) const {
    const auto begin = time_.now();
    run();
    return seconds_between(begin, time_.now());
  }
  void add(double compute, double communication, double together, double waited) {
    compute_.push_back(compute);
    communication_.push_back(communication);
    together_.push_back(together);
    waited_.push_back(waited);
  }
  OverlapTimes times(double planted) const {
    return {median(compute_), median(communication_), median(together_), median(waited_), planted};
  }

 private:
  const Time& time_;
  std::vector<double> compute_, communication_, together_, waited_;
};

// ---- ZeRO 3: the gathers of a step, around layers that sleep as long as they would compute

struct SleepingStep {
  int layers = 8;
  milliseconds forward{3};  // of a layer; twice as long backward
  milliseconds delay{4};    // of a gather
};

// Embedding, layers, output layer, layers again: the last unit is there throughout.
inline std::vector<int> uses_of(const SleepingStep& step) {
  std::vector<int> uses;
  for (int unit = 0; unit < step.layers + 2; ++unit) uses.push_back(unit);
  for (int unit = step.layers; unit > 0; --unit) uses.push_back(unit);
  return uses;
}

inline OverlapTimes sleeping_gathers(const SleepingStep& step, int ahead, const Time& time, int rounds) {
  const std::vector<int> uses = uses_of(step);
  OverlapTimes times;
  DelayedWorld world(2, time);
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
    ParameterGather gather(std::move(units), {always}, ahead, time);
    OverlapRounds measured(time);
    const auto seconds = [&](milliseconds delay, milliseconds forward) {
      return measured.seconds([&] {
        world.link(rank).delay = delay;
        gather.begin(uses);
        for (std::size_t i = 0; i < uses.size(); ++i) {
          gather.use(uses[i]);
          const bool backward = i > static_cast<std::size_t>(step.layers) + 1;
          if (uses[i] > 0) time.sleep(backward ? 2 * forward : forward);
          gather.done();
        }
        gather.end();
      });
    };
    constexpr milliseconds none{0};
    for (int round = 0; round < rounds; ++round) {
      const double compute = seconds(none, step.forward), communication = seconds(step.delay, none),
                   together = seconds(step.delay, step.forward);
      measured.add(compute, communication, together, gather.measures().wait_seconds);
    }
    if (rank == 0) times = measured.times(gather.measures().gathers * seconds_of(step.delay));
  });
  return times;
}

// ---- ZeRO 3: a training step, whose gathers take four times as long as its computation

inline Plan gathering_plan(int ahead) {
  ModelSpec model = odd_gpt2(false, 10);
  model.hidden = 64;
  model.head_dim = 16;
  model.mlp_hidden = 256;
  model.max_seq = 64;
  Plan plan = odd_plan(model, 2, 1, false);
  plan.global_batch = 8;
  plan.micro_batch = 4;  // one microbatch on each rank
  plan.seq_len = 64;
  plan.precision = has_cpu_kernels() ? DType::f32 : DType::f64;
  plan.zero = 3;
  plan.zero_prefetch = ahead;
  return plan;
}

// `product`: what a matrix product takes beside what it takes; of 0 kernels are as they are.
inline OverlapTimes training_gathers(int ahead, Clock::duration product, const Time& time, int rounds) {
  const Plan plan = gathering_plan(ahead);
  const SampleSource samples = random_samples(plan);
  OverlapTimes times;
  DelayedWorld world(2, time);
  run_ranks(world, [&](int index) {
    Arena arena;
    auto kernels = make_kernels(arena, plan.precision, 1);
    if (product.count() > 0)
      kernels = std::make_unique<Kernels>(std::make_shared<TimedKernels>(std::move(kernels), product, time));
    const Rank rank(world, plan.mesh, index, plan.precision, arena, *kernels);
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

    OverlapRounds measured(time);
    std::vector<double> undelayed;
    for (int i = 0; i < rounds; ++i) undelayed.push_back(measured.seconds(train));
    const Tensor compute(arena, MemoryCategory::other, DType::f64, {1});
    *compute.host<double>() = median(undelayed);
    group.all_reduce(compute, ReduceOp::max).wait();
    const int gathers = parameters.gather()->measures().gathers;
    const auto delay = std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(4 * *compute.host<double>() / gathers));

    for (int round = 0; round < rounds; ++round) {
      world.link(index).delay = {};
      const double computing = measured.seconds(train);
      world.link(index).delay = delay;
      const double gathering = measured.seconds(gather), together = measured.seconds(train);
      measured.add(computing, gathering, together, parameters.gather()->measures().wait_seconds);
    }
    if (index == 0) times = measured.times(gathers * seconds_of(delay));
  });
  return times;
}

// ---- ring attention: hops behind blocks

// Seconds of attention forward and backward on rank 0, with `delay` on every hop and `block` for a block.
inline double ring_seconds(int cp, milliseconds block, milliseconds delay, const Time& time, int rounds) {
  Plan plan = context_plan(Family::llama, {ContextKind::ring, ContextBalance::zigzag, cp, 1});
  plan.seq_len = plan.model.max_seq = 256;
  const ContextLayout layout(plan);
  std::vector<double> seconds;
  SlowWorld world(cp, "cp", delay, time);
  run_ranks(world, [&](int index) {
    Arena arena;
    Kernels kernels(std::make_shared<SleepingKernels>(layout.causal_pairs(0) / cp, block, time));
    const Rank rank(world, plan.mesh, index, DType::f32, arena, kernels);
    const Heads heads(24, 4, 2);
    const ContextParallel context(rank, plan, heads);
    const Sequences sequences{1, {}};
    const std::int64_t rows = plan.tokens_here();
    const Tensor qkv = rank.activation({rows, heads.qkv_width()}),
                 out = rank.activation({rows, heads.width()}), lse = rank.activation({rows * 24}),
                 dqkv = rank.activation({rows, heads.qkv_width()});
    for (int round = 0; round < rounds; ++round) {
      rank.along(Axis::cp).barrier().wait();
      const auto begin = time.now();
      const Tensor core = context.enter(sequences, qkv);
      context.forward(sequences, core, {}, out, lse);
      context.backward(sequences, core, {}, SequenceSums(nullptr, kernels, 0, 1, rows), out, lse,
                       context.delta(sequences, out, out), dqkv);
      if (index == 0) seconds.push_back(seconds_between(begin, time.now()));
    }
  });
  return median(seconds);
}

// ---- a pipeline whose passes sleep

// Passes take as long as these say, and halfway something travels for `travel`.
class SleepingStages final : public PipelineStages {
 public:
  SleepingStages(Arena& arena, const SimulationCosts& costs, Clock::duration travel, bool pauses,
                 const Time& time)
      : arena_(arena), costs_(costs), travel_(travel), pauses_(pauses), time_(time) {}
  Work<Tensor> pass(Instruction i, Tensor) override {
    const auto& of = costs_.of(i.stage);
    const double seconds = i.op == Op::F   ? of.forward
                           : i.op == Op::B ? of.backward_input
                                           : of.backward_input + of.backward_weight;
    time_.sleep(duration(seconds) / 2);
    const auto there = time_.now() + travel_;
    co_await Pause{};
    sleep_until(time_, there);
    time_.sleep(duration(seconds) - duration(seconds) / 2);
    co_return make_room(ValueKind::activation, 0);
  }
  bool pauses() const override { return pauses_; }
  void backward_weight(const Instruction& i) override {
    time_.sleep(duration(costs_.of(i.stage).backward_weight));
  }
  void step(const Instruction&) override {}
  bool validate() override { return true; }
  Tensor make_room(ValueKind, int) override { return {arena_, MemoryCategory::activations, DType::f32, {1}}; }
  VocabularyParallel::Part head_part(const Instruction&, Tensor) override {
    throw InvariantError("no parts");
  }
  void head_part_weight(const Instruction&, Tensor) override { throw InvariantError("no parts"); }
  VocabularyParallel::Whole merge_head(int, const std::vector<VocabularyParallel::Part>&) override {
    throw InvariantError("no parts");
  }

  static Clock::duration duration(double seconds) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }

 private:
  Arena& arena_;
  const SimulationCosts costs_;
  const Clock::duration travel_;
  const bool pauses_;
  const Time time_;
};

// What each rank ran, in seconds since all began, and until the last was done.
struct SleepingRun {
  Timeline timeline;
  double seconds = 0;
};

inline SleepingRun run_asleep(const StepPrograms& programs, int ranks, const SimulationCosts& costs,
                              Clock::duration travel, bool pauses, const Time& time) {
  SleepingRun run;
  run.timeline.ranks.resize(static_cast<std::size_t>(ranks));
  std::vector<double> ends(static_cast<std::size_t>(ranks));
  SlowWorld world(ranks, "pp", SleepingStages::duration(costs.message), time);
  run_ranks(world, [&](int rank) {
    std::vector<int> all;
    for (int r = 0; r < ranks; ++r) all.push_back(r);
    const auto group = world.join(rank, all, "pp");
    Arena arena;
    SleepingStages stages(arena, costs, travel, pauses, time);
    PipelineExecutor executor(*group, time);
    group->barrier().wait();
    const auto begin = time.now();
    const PipelineRun of = executor.run(programs.program(0, 1), stages);
    const auto r = static_cast<std::size_t>(rank);
    ends[r] = seconds_between(begin, time.now());
    run.timeline.ranks[r] = of.spans_since(begin);
  });
  run.seconds = *std::max_element(ends.begin(), ends.end());
  return run;
}

}  // namespace echelon::checks

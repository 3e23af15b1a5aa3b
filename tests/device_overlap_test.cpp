// What crosses between ranks runs beside a device's kernels, and waits for what it must: on the clock of a
// fake device, which is decided by the order of its streams alone (fake_driver.h).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "fake_driver.h"
#include "pipeline_runs.h"
#include "tensor/device_stream.h"
#include "tensor/host.h"
#include "train/calibrate.h"
#include "turned_clock.h"

namespace echelon::device_overlap_test {
namespace {

using namespace checks;

constexpr std::int64_t size = 64;
constexpr int num_orders = 5;

// Of kernels, of collectives and messages.
FakeDriver::Options timed(std::uint64_t seed, double kernel, double transfer) {
  return {.seed = seed, .seconds = [=](const std::string& name, std::size_t) {
            return name == "reduce" || name == "transfer" ? transfer : kernel;
          }};
}

struct OverlapRank {
  ThreadWorld& world;
  int index;
  Arena& arena;
  Kernels& kernels;
  Tensor make() const { return {arena, MemoryCategory::other, DType::f64, {size}}; }
  Tensor filled(double value) const {
    const Tensor x = make();
    kernels.fill(x, value);
    return x;
  }
};

void on_two_ranks(FakeDriver& driver, const std::function<void(const OverlapRank&)>& body) {
  {
    ThreadWorld world(2, patience);
    run_ranks(world, [&](int index) {
      Arena arena(&driver, 0);
      const auto kernels = make_kernels(arena, DType::f64, 1);
      body({world, index, arena, *kernels});
      arena.synchronize();
    });
  }
  EXPECT_EQ(driver.complaints(), std::vector<std::string>());
}

void in_orders(double kernel, double transfer, const std::function<void(FakeDriver&)>& body) {
  for (std::uint64_t seed = 1; seed <= num_orders; ++seed) {
    SCOPED_TRACE(seed);
    FakeDriver driver(timed(seed, kernel, transfer));
    body(driver);
  }
}

TEST(DeviceOverlap, ACollectiveRunsBesideKernelsUntilItIsWaitedFor) {
  for (const double transfer : {2.0, 5.0, 9.0})
    in_orders(1, transfer, [&](FakeDriver& driver) {
      on_two_ranks(driver, [&](const OverlapRank& rank) {
        const auto group = rank.world.join(rank.index, {0, 1}, "dp");
        const Tensor x = rank.filled(rank.index + 1), y = rank.filled(7);  // 2 s
        Pending sum = group->all_reduce(x);
        for (int i = 0; i < 6; ++i) {
          rank.kernels.scale(y, 1);
          sum.progress();  // which is no reason for the kernels to wait
        }
        sum.wait();
        rank.kernels.add(y, x);  // 1 s
        EXPECT_EQ(copy_to_host<double>(x), std::vector<double>(size, 10));
      });
      // And the copy to the host.
      EXPECT_EQ(driver.last_end(), 2 + std::max(6.0, transfer) + 1 + transfer);
    });
}

TEST(DeviceOverlap, TheGroupsOfTwoAxesDoNotStandBehindEachOther) {
  in_orders(1, 10, [&](FakeDriver& driver) {
    on_two_ranks(driver, [&](const OverlapRank& rank) {
      const auto dp = rank.world.join(rank.index, {0, 1}, "dp"),
                 tp = rank.world.join(rank.index, {0, 1}, "tp");
      const Tensor x = rank.filled(1), y = rank.filled(2);
      Pending of_dp = dp->all_reduce(x), of_tp = tp->all_reduce(y);
      of_tp.wait();
      of_dp.wait();
    });
    EXPECT_EQ(driver.last_end(), 12);
  });
}

// What a message carries may go at once, and be changed once it was waited for.
TEST(DeviceOverlap, MessagesRunBesideKernels) {
  for (const bool dropped : {true, false})
    in_orders(1, 4, [&](FakeDriver& driver) {
      on_two_ranks(driver, [&](const OverlapRank& rank) {
        const auto group = rank.world.join(rank.index, {0, 1}, "pp");
        const Tensor y = rank.filled(0);
        if (rank.index == 0) {
          for (int i = 0; i < 8; ++i) {
            Tensor x = rank.filled(i);
            Pending sent = group->send(x, 1);
            if (!dropped) {
              sent.wait();
              rank.kernels.fill(x, -1);
            }
            x = {};
          }
          return;
        }
        const Tensor x = rank.make();
        for (int i = 0; i < 8; ++i) {
          group->recv(x, 0).wait();
          rank.kernels.add(x, y);
        }
        EXPECT_EQ(copy_to_host<double>(y), std::vector<double>(size, 28));
      });
    });
}

// However far the host runs ahead, messages under way hold two blocks more than the program.
TEST(DeviceOverlap, MessagesUnderWayHoldLittleMemory) {
  in_orders(1, 4, [&](FakeDriver& driver) {
    on_two_ranks(driver, [&](const OverlapRank& rank) {
      const auto group = rank.world.join(rank.index, {0, 1}, "pp");
      std::vector<Pending> sends;
      for (int i = 0; i < 20; ++i) {
        if (rank.index == 0) {
          sends.push_back(group->send(rank.filled(i), 1));
        } else {
          const Tensor x = rank.make();
          group->recv(x, 0).wait();
          EXPECT_EQ(copy_to_host<double>(x), std::vector<double>(size, i));
        }
      }
      EXPECT_LE(rank.arena.system_allocations(), 3);
    });
  });
}

// Gradients are summed while the rest of the backward pass runs, ZeRO 3's values gathered ahead of their
// uses: a step takes less than its kernels and its transfers one after another, by what is said.
double step_seconds(const Plan& plan, double kernel, double transfer) {
  // Values cross when a step begins, too; gathers of ZeRO 3 are copies.
  const auto crosses = [&](const std::string& name) {
    return name == "reduce" || (plan.zero == 3 && name == "transfer");
  };
  FakeDriver driver({.seconds = [=](const std::string& name, std::size_t bytes) {
    return (crosses(name) ? transfer : name == "transfer" ? 0 : kernel) * static_cast<double>(bytes);
  }});
  ThreadWorld world(plan.mesh.num_ranks(), patience);
  run_ranks(world, [&](int index) {
    Arena arena(&driver, 0);
    const auto kernels = make_kernels(arena, plan.precision, 1, plan.numerics);
    const Rank rank(world, plan.mesh, index, plan.precision, arena, *kernels);
    Trainer trainer(rank, plan, {}, 1);
    trainer.compute_gradients(0, random_samples(plan));
    trainer.apply_gradients(0);
    arena.synchronize();
  });
  EXPECT_EQ(driver.complaints(), std::vector<std::string>());
  return driver.last_end();
}

TEST(DeviceOverlap, ReductionsAndGathersAreHiddenBehindPasses) {
  Plan plan = odd_plan(odd_llama(false, 2, 6), 2, 1, false);
  plan.bucket_bytes = 1;  // of one layer each
  plan.global_batch = 8;
  plan.seq_len = 32;
  for (const int zero : {0, 2, 3}) {
    plan.zero = zero;
    const double kernels = step_seconds(plan, 1, 0), transfers = step_seconds(plan, 0, 1);
    // A fifth of the kernels' time; one after another they would take all of it longer.
    const double scale = 0.2 * kernels / transfers, seen = step_seconds(plan, 1, scale) - kernels;
    EXPECT_GT(transfers, 0);
    EXPECT_GE(seen, 0);
    EXPECT_LT(seen, 0.5 * 0.2 * kernels) << "zero " << zero;
  }
}

// ---- when it ran

constexpr TraceTime second = 1'000'000'000;

struct Times {
  TraceTime begin, posted, waited, end;
  bool operator==(const Times&) const = default;
  friend void PrintTo(const Times& t, std::ostream* out) {
    *out << t.begin << " " << t.posted << " " << t.waited << " " << t.end;
  }
};

// Calls of two ranks, of which one comes 3 s later to the first.
std::vector<std::vector<Times>> traced_calls(double transfer) {
  std::vector<std::vector<Times>> times(2);
  FakeDriver driver(timed(1, 1, transfer));
  TurnedClock clock;  // stands still: what is told is the device's
  Plan plan = odd_plan(odd_llama(), 2, 1, false);
  ThreadWorld world(2, patience, {}, clock.time());
  run_ranks(world, [&](int index) {
    Arena arena(&driver, 0);
    const auto kernels = make_kernels(arena, plan.precision, 1);
    TraceRecorder recorder(clock.time(), clock.time().now(), 1);
    const Rank rank(world, plan.mesh, index, plan.precision, arena, *kernels, Collectives::direct, 0,
                    &recorder);
    const OverlapRank own{world, index, arena, *kernels};
    recorder.begin_step(1);
    const Tensor x = own.filled(1);  // 1 s
    for (int i = 0; i < 3 * index; ++i) kernels->scale(x, 2);
    {
      const Doing doing = rank.doing(Activity::optimizer);
      rank.dp_cp().all_reduce(x).wait();
      const Tensor y = own.filled(1);
      Pending sum = rank.dp_cp().all_reduce(x);
      for (int i = 0; i < 6; ++i) kernels->scale(y, 2);
      sum.wait();
    }
    const Trace trace = recorder.trace();
    EXPECT_EQ(trace.calls.size(), 2u);
    for (const CallSpan& call : trace.calls)
      times[static_cast<std::size_t>(index)].push_back({call.begin, call.posted, call.waited, call.end});
    EXPECT_EQ(trace.work.size(), 1u);
    EXPECT_EQ(trace.work[0].begin, (1 + 3 * index) * second);
    EXPECT_EQ(trace.work[0].end, trace.calls[1].end > trace.calls[1].waited
                                     ? trace.calls[1].end
                                     : static_cast<TraceTime>(4 + transfer + 7) * second);
  });
  EXPECT_EQ(driver.complaints(), std::vector<std::string>());
  return times;
}

TEST(DeviceTrace, TellsWhenACollectiveRanAndWhatItHeldUp) {
  // The first runs from 4 s on, when both have come; rank 0's kernels stand from 1 s on. The second is hidden
  // behind seven kernels, the first of which comes before it.
  for (const TraceTime transfer : {3, 9}) {
    const TraceTime second_call = 4 + transfer + 1, end = second_call + transfer,
                    reached = std::min(second_call + 6, end);
    const auto scaled = [&](Times t) {
      return Times{t.begin * second, t.posted * second, t.waited * second, t.end * second};
    };
    const Times hidden = scaled({second_call, second_call, reached, end});
    const auto times = traced_calls(static_cast<double>(transfer));
    EXPECT_EQ(times[0], (std::vector{scaled({1, 1, 1, 4 + transfer}), hidden}));
    EXPECT_EQ(times[1], (std::vector{scaled({4, 4, 4, 4 + transfer}), hidden}));
  }
}

// Clocks of two devices are not compared: what another one does is told by when the own one waited for it.
TEST(DeviceTrace, OfTwoDevicesIsToldByTheOwnOne) {
  constexpr TraceTime transfer = 3;
  FakeDriver::Options options = timed(1, 1, transfer);
  options.devices = 2;
  FakeDriver driver(options);
  TurnedClock clock;
  const Plan plan = pipeline_plan(odd_llama(false, 2, 4), "1f1b", 2, 1, 1, 4);
  auto world = std::make_unique<ThreadWorld>(2, patience, FailureHooks(), clock.time());
  run_ranks(*world, [&](int index) {
    Arena arena(&driver, index);
    const auto kernels = make_kernels(arena, plan.precision, 1);
    TraceRecorder recorder(clock.time(), clock.time().now(), 1);
    const Rank rank(*world, plan.mesh, index, plan.precision, arena, *kernels, Collectives::direct, 0,
                    &recorder);
    recorder.begin_step(1);
    const Tensor x = OverlapRank{*world, index, arena, *kernels}.filled(1);  // 1 s
    Communicator& group = rank.along(Axis::pp);
    group.all_reduce(x).wait();  // half of it on each device, at once
    (index == 0 ? group.send(x, 1) : group.recv(x, 0)).wait();
    const Trace trace = recorder.trace();
    ASSERT_EQ(trace.calls.size(), 2u);
    const CallSpan &sum = trace.calls[0], &message = trace.calls[1];
    EXPECT_EQ(sum.begin, 1 * second);
    EXPECT_EQ(sum.end, (1 + transfer) * second);
    EXPECT_EQ(message.begin, sum.end);
    // By way of the channel where the receive was not known when it was sent.
    const TraceTime seconds = (message.end - message.begin) / second;
    EXPECT_TRUE(seconds == transfer || (index == 1 && seconds == 2 * transfer)) << seconds;
  });
  world.reset();
  EXPECT_EQ(driver.complaints(), std::vector<std::string>());
}

// Seconds on the device's clock that a step of one microbatch takes, and what copies to the host and back do.
struct OffloadedStep {
  double seconds = 0, forward = 0, backward = 0, copies = 0;
};
OffloadedStep offloaded_step(Offload what, std::int64_t layers, double copy) {
  OffloadedStep step;
  int copies = 0;
  FakeDriver driver({.seconds = [&](const std::string& name, std::size_t) {
    copies += name == "transfer";
    return name == "transfer" ? copy : 1.0;
  }});
  {
    Plan plan = odd_plan(odd_llama(false, 2, layers), 1, 1, false);
    plan.micro_batch = plan.global_batch = 2;
    plan.offload = what;
    ThreadWorld world(1, patience);
    run_ranks(world, [&](int index) {
      Arena arena(&driver, 0);
      const auto kernels = make_kernels(arena, plan.precision, 1);
      const Rank rank(world, plan.mesh, index, plan.precision, arena, *kernels);
      Trainer trainer(rank, plan, {}, 1);
      trainer.compute_gradients(0, random_samples(plan));
      arena.synchronize();
      copies = 0;
      trainer.compute_gradients(1, random_samples(plan));
      arena.synchronize();
      for (const Span& span : trainer.last_run().spans) {
        (span.instruction.op == Op::F ? step.forward : step.backward) += span.end - span.begin;
        step.seconds += span.end - span.begin;
      }
    });
  }
  step.copies = copies;
  EXPECT_EQ(driver.complaints(), std::vector<std::string>());
  return step;
}

// What the planner adds for a layer (StateSeconds::activations) is what the passes take longer: nothing while
// its copies take less than the pass beside them, else the difference, to a few of a layer's kernels.
TEST(DeviceOverlap, OffloadedActivationsMoveBesideTheLayers) {
  constexpr std::int64_t few = 4, layers = 24;
  constexpr double quick = 1e-3, kernels = 4;  // seconds: one takes one
  const OffloadedStep none = offloaded_step(Offload::none, layers, quick),
                      less = offloaded_step(Offload::none, few, quick),
                      moved = offloaded_step(Offload::activations, layers, quick);
  const double forward = (none.forward - less.forward) / (layers - few),
               backward = (none.backward - less.backward) / (layers - few);
  // Of a layer, each way; two blocks turn: the output layer's, and the last layer's.
  const double copies = (moved.copies - none.copies) / 2 / (layers - 1);
  ASSERT_GT(copies, 1);
  EXPECT_NEAR(moved.seconds, none.seconds, 1);  // hidden
  for (const double link : {0.5 * forward, 2 * forward, 2 * backward}) {
    const OffloadedStep slow = offloaded_step(Offload::activations, layers, link / copies);
    const double predicted = (layers - 1) * (std::max(0.0, link - forward) + std::max(0.0, link - backward));
    EXPECT_NEAR(slow.seconds - none.seconds, predicted, kernels) << "a layer's copies take " << link;
    EXPECT_EQ(predicted > 0, link > forward);
  }
}

// A pipeline's passes lie where the device ran them: what a rank receives begins when it has been computed.
TEST(DeviceTrace, TellsWhenThePassesOfAPipelineRan) {
  const Plan plan = pipeline_plan(odd_llama(false, 2, 4), "1f1b", 2, 1, 1, 4);
  FakeDriver driver(timed(1, 1, 2));
  std::vector<std::vector<Span>> spans(2);
  TurnedClock clock;
  auto world = std::make_unique<ThreadWorld>(2, patience, FailureHooks(), clock.time());
  run_ranks(*world, [&](int index) {
    Arena arena(&driver, 0);
    const auto kernels = make_kernels(arena, plan.precision, 1);
    const Rank rank(*world, plan.mesh, index, plan.precision, arena, *kernels);
    Trainer trainer(rank, plan, {}, 1);
    trainer.compute_gradients(0, random_samples(plan));
    spans[static_cast<std::size_t>(index)] = trainer.last_run().spans_since(clock.time().now());
  });
  world.reset();
  EXPECT_EQ(driver.complaints(), std::vector<std::string>());
  const auto end_of = [&](std::size_t rank, Op op, int stage, int microbatch) {
    for (const Span& span : spans[rank])
      if (span.instruction.op == op && span.instruction.stage == stage &&
          span.instruction.microbatch == microbatch)
        return span;
    ADD_FAILURE() << "no such pass";
    return Span{};
  };
  for (std::size_t rank : {0u, 1u}) {
    double at = 0;
    for (const Span& span : spans[rank]) {
      EXPECT_GE(span.begin, at);
      EXPECT_GE(span.end, span.begin);
      EXPECT_EQ(span.end, std::round(span.end));  // kernels take whole seconds
      if (is_compute(span.instruction.op)) {
        EXPECT_GT(span.end, span.begin + 5);
      }
      at = span.end;
    }
    EXPECT_LE(at, driver.last_end());
  }
  for (int m = 0; m < 4; ++m) {
    // A message takes 2 s, and twice that where the receive was not known when it was sent.
    EXPECT_GE(end_of(1, Op::F, 1, m).begin, end_of(0, Op::F, 0, m).end + 2);
    EXPECT_GE(end_of(0, Op::BW, 0, m).begin, end_of(1, Op::BW, 1, m).end + 2);
  }
}

// A machine file says what the device's clock said, whatever the host did meanwhile.
TEST(DeviceTrace, CalibratesByTheDevicesClock) {  // long
  const auto seconds = [](const std::string& name, std::size_t bytes) {
    return (name == "matmul" ? 3e-6 : 1e-6) + static_cast<double>(bytes) * 1e-12;
  };
  FakeDriver driver({.memory_bytes = std::size_t{80} << 30, .computes = false, .seconds = seconds});
  const Calibration c = calibrate(1, {}, &driver);
  EXPECT_EQ(driver.complaints(), std::vector<std::string>());
  const auto measured = [&](const std::string& what) {
    for (const CalibrationSample& s : c.samples)
      if (s.what == what) return s.measured_seconds;
    ADD_FAILURE() << what << " is not measured";
    return 0.0;
  };
  constexpr double rounding = 1e-9;  // of sums of times below a second
  const auto product = [&](double width, double m, double k, double n) {
    return 3e-6 + width * (m * k + k * n + m * n) * 1e-12;
  };
  EXPECT_NEAR(measured("f32 product 8192 x 768 x 3072"), product(4, 8192, 768, 3072), rounding);
  EXPECT_NEAR(measured("bf16 product 4096 x 4096 x 4096"), product(2, 4096, 4096, 4096), rounding);
  EXPECT_NEAR(measured("all_reduce of 4 KiB, 2 ranks"), 1e-6 + 4 * 4096e-12, rounding);
  const double copied = 8.0 * (64 << 20);
  EXPECT_NEAR(c.machine.memory_bandwidth, copied / (1e-6 + copied * 1e-12), 1e-6 * copied / 1e-3);
  EXPECT_EQ(c.machine.name, "a fake device");
  EXPECT_EQ(to_toml(machine_from_toml(to_toml(c.machine), "calibrated")), to_toml(c.machine));
}

}  // namespace
}  // namespace echelon::device_overlap_test

// Passes that a device replays as graphs (train/pass_graphs.h): the order, the lifetime and the failures of
// what is asked of a driver, on one that keeps what is captured and runs it again (fake_driver.h), with the
// reference kernels.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "device_runs.h"
#include "expert_runs.h"
#include "model/offloaded_moments.h"
#include "tensor/device_stream.h"
#include "tensor/host.h"
#include "tensor/uploads.h"
#include "train/dry_run.h"

namespace echelon::device_graphs_test {
namespace {

using namespace checks;

constexpr std::uint64_t num_orders = 10;  // seeds

Tensor of(Arena& arena, std::vector<std::int64_t> shape) {
  return {arena, MemoryCategory::other, DType::f64, std::move(shape)};
}

// ---- the seam

TEST(DeviceGraphs, RunWhatWasQueuedOnWhatIsThereThen) {
  for (std::uint64_t seed = 1; seed <= num_orders; ++seed) {
    SCOPED_TRACE(seed);
    FakeDriver driver({.seed = seed});
    {
      Arena arena(&driver, 0);
      const auto kernels = make_kernels(arena, DType::f64, 1);
      const Tensor x = of(arena, {3}), y = of(arena, {3}), sum = of(arena, {3});
      kernels->fill(sum, 0);
      copy_from_host<double>({1, 2, 3}, x);
      DeviceGraph graph(arena.stream(), [&] {
        copy_on_device(x, y);
        kernels->scale(y, 2);
        kernels->add(y, sum);
      });
      EXPECT_EQ(copy_to_host<double>(sum), std::vector<double>(3));
      for (const double number : {10.0, 20.0}) {
        graph.launch();
        kernels->fill(x, number);
      }
      graph.launch();
      EXPECT_EQ(copy_to_host<double>(sum), (std::vector<double>{2 + 20 + 40, 4 + 20 + 40, 6 + 20 + 40}));
    }
    EXPECT_EQ(driver.complaints(), std::vector<std::string>());
  }
}

TEST(DeviceGraphs, MayGoWhileTheyAreQueued) {
  FakeDriver driver;
  {
    Arena arena(&driver, 0);
    const auto kernels = make_kernels(arena, DType::f64, 1);
    const Tensor x = of(arena, {3});
    kernels->fill(x, 1);
    {
      const DeviceGraph graph(arena.stream(), [&] { kernels->scale(x, 3); });
      graph.launch();
      graph.launch();
    }
    EXPECT_EQ(copy_to_host<double>(x), std::vector<double>(3, 9));
  }
  EXPECT_EQ(driver.complaints(), std::vector<std::string>());
}

// Said before the driver is asked, which has other words for each; and the stream is as it was.
TEST(DeviceGraphs, WhatAGraphCannotHoldIsSaid) {
  FakeDriver driver;
  {
    Arena arena(&driver, 0);
    const auto kernels = make_kernels(arena, DType::f64, 1);
    const Tensor x = of(arena, {3});
    kernels->fill(x, 1);
    const auto event = arena.transfers("other").record();
    const auto why = [&](const std::function<void()>& what) {
      return message_of<RunError>([&] {
        const DeviceGraph graph(arena.stream(), [&] {
          kernels->scale(x, 2);
          what();
        });
      });
    };
    const std::string could_not = "a CUDA graph could not be captured on device 0: ";
    EXPECT_EQ(why([&] { copy_to_host<double>(x); }), could_not + "the host reads what it computes");
    EXPECT_EQ(why([&] { copy_from_host<double>({1, 2, 3}, x); }), could_not + "it copies what the host has");
    EXPECT_EQ(why([&] { (void)arena.stream().record(); }), could_not + "an event is recorded in it");
    EXPECT_EQ(why([&] { arena.stream().wait_for(*event); }), could_not + "it waits for another stream");
    EXPECT_EQ(why([&] { arena.synchronize(); }), could_not + "the host waits for what it computes");
    EXPECT_EQ(copy_to_host<double>(x), std::vector<double>(3, 1));
  }
  EXPECT_EQ(driver.complaints(), std::vector<std::string>());
}

// What the host gives a kernel once is where it was, however much else is uploaded since; it is not in the
// memory of passes, and what is new in a capture goes there beside it.
TEST(DeviceGraphs, UploadsOfAPassStay) {
  FakeDriver driver;
  {
    Arena arena(&driver, 0);
    Uploads uploads;
    const auto uploaded = [&](double number) {
      return uploads.get(arena, std::as_bytes(std::span<const double>(&number, 1)));
    };
    Tensor before, in_pass, in_capture;
    before = uploaded(-1);
    {
      const Arena::PoolUse pool(arena, MemoryPool::passes);
      EXPECT_EQ(uploaded(-1).address(), before.address());
      in_pass = uploaded(-2);
      const DeviceGraph graph(arena.stream(), [&] {
        EXPECT_EQ(uploaded(-2).address(), in_pass.address());
        in_capture = uploaded(-3);
      });
    }
    const std::array<std::byte*, 3> places{before.address(), in_pass.address(), in_capture.address()};
    before = in_pass = in_capture = Tensor();
    arena.end_passes();
    const std::int64_t copies = driver.calls(FakeCall::create_event);
    for (int i = 0; i < 100; ++i) uploaded(i);
    EXPECT_EQ(driver.calls(FakeCall::create_event), copies + 100);
    EXPECT_EQ(uploaded(-1).address(), places[0]);
    EXPECT_EQ(uploaded(-2).address(), places[1]);
    EXPECT_EQ(uploaded(-3).address(), places[2]);
    EXPECT_EQ(driver.calls(FakeCall::create_event), copies + 100);
    std::vector<std::byte> bytes(sizeof(double));
    for (int i = 0; i < 3; ++i) {
      copy_bytes_to_host(uploaded(-1 - i), bytes);
      double number = 0;
      std::memcpy(&number, bytes.data(), sizeof number);
      EXPECT_EQ(number, -1 - i);
    }
    // Of others the last ones are kept.
    (void)uploaded(99);
    EXPECT_EQ(driver.calls(FakeCall::create_event), copies + 100);
    (void)uploaded(0);
    EXPECT_EQ(driver.calls(FakeCall::create_event), copies + 101);
  }
  EXPECT_EQ(driver.complaints(), std::vector<std::string>());
}

// ---- training

struct Replayed {
  Outcome outcome;
  GraphCounts counts;
  Memory peak;
};

// Steps of one rank on the reference kernels, of the host where there is no driver, with graphs where there
// is one, or where they are asked for.
Replayed steps_on(FakeDriver* driver, const Plan& plan, std::int64_t steps, const SampleSource& samples) {
  Replayed run;
  ThreadWorld world(1, patience);
  run_ranks(world, [&](int index) {
    Arena arena(driver, 0);
    const auto kernels =
        driver == nullptr ? make_reference_kernels() : make_kernels(arena, plan.precision, 1, plan.numerics);
    const Rank rank(world, plan.mesh, index, plan.precision, arena, *kernels);
    Trainer trainer(rank, plan, {}, 1);
    if (driver != nullptr) trainer.replay_passes();
    arena.reset_peak();
    Outcome& o = run.outcome;
    for (std::int64_t step = 0; step < steps; ++step) {
      o.losses.push_back(trainer.compute_gradients(step, samples));
      if (trainer.plan().model.num_mtp_layers > 0) o.losses.push_back(trainer.mtp_loss());
      o.norms.push_back(trainer.apply_gradients(step).gradient_norm);
      if (step == 1) o.losses.push_back(trainer.evaluate(3, samples));
    }
    run.peak = arena.peak();
    run.counts = trainer.graph_counts().value_or(GraphCounts{});
    for (const Parameter& p : trainer.parameters().all()) {
      if (p.spec.parts != 1) continue;
      o.values[p.spec.name] = as_doubles(gather_logical(rank, p, ParameterTensor::value));
      if (!p.spec.frozen)
        o.exp_avg_sq[p.spec.name] = as_doubles(gather_logical(rank, p, ParameterTensor::exp_avg_sq));
    }
  });
  return run;
}

// With the bits of the host, which has none, and with the memory that was predicted. Returns how often.
GraphCounts expect_bits_of_the_host(const Plan& plan, const SampleSource& samples, std::int64_t steps = 5,
                                    std::uint64_t seeds = 1) {
  SCOPED_TRACE(describe(plan));
  const Outcome host = steps_on(nullptr, plan, steps, samples).outcome;
  Memory predicted = predict_memory(plan, PipelineLayout(plan), {}, {.graphs = true});
  if (plan.offload == Offload::optimizer)
    predicted[MemoryCategory::other] += OffloadedMoments::window_bytes(plan.precision.moments);
  Replayed replayed;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    FakeDriver driver({.seed = seed});
    replayed = steps_on(&driver, plan, steps, samples);
    EXPECT_TRUE(replayed.outcome == host) << "seed " << seed;
    for (const MemoryCategory category : all_memory_categories)
      EXPECT_EQ(replayed.peak[category], predicted[category]) << memory_category_name(category);
    EXPECT_EQ(driver.calls(FakeCall::capture), 2 * replayed.counts.captured);
    EXPECT_EQ(driver.calls(FakeCall::launch_graph), replayed.counts.captured + replayed.counts.replayed);
    EXPECT_EQ(driver.complaints(), std::vector<std::string>());
    EXPECT_EQ(driver.operations_queued(), 0u);
  }
  return replayed.counts;
}
GraphCounts expect_bits_of_the_host(const Plan& plan, std::int64_t steps = 5, std::uint64_t seeds = 1) {
  return expect_bits_of_the_host(plan, random_samples(plan), steps, seeds);
}

Plan one_rank(ModelSpec model, const char* precision = "f64") {
  Plan plan = odd_plan(std::move(model), 1, 1, false);
  plan.precision = recipe(precision);
  return plan;
}

// Of three microbatches of two sequences and one of one: the first of a kind runs as it does without, the
// second is captured, the rest is replayed.
TEST(DeviceGraphs, TrainingHasTheBitsOfTrainingWithout) {
  const GraphCounts counts = expect_bits_of_the_host(one_rank(odd_gpt2()), 5, 3);
  EXPECT_EQ(counts.captured, 2 * 2);  // forward and backward
  EXPECT_EQ(counts.replayed, 2 * (5 * 4 - 2 - 2));
  Plan plan = one_rank(odd_llama());
  plan.global_batch = 2;  // one microbatch a step
  EXPECT_EQ(expect_bits_of_the_host(plan).replayed, 2 * 3);
  expect_bits_of_the_host(one_rank(odd_llama(), "bf16"));
  expect_bits_of_the_host(one_rank(odd_llama(true), "bf16-lean"));
  expect_bits_of_the_host(one_rank(odd_llama(), "fp8"));
}

TEST(DeviceGraphs, TrainingHasTheBitsOfTrainingWithoutWhateverThePassesAre) {
  Plan plan = one_rank(odd_llama());
  for (const char* recompute : {"full", "mlp"}) {
    plan.recompute = parse_recompute(recompute, "--recompute");
    expect_bits_of_the_host(plan, 3);
  }
  plan = one_rank(odd_llama());
  plan.model.window = {.size = 4, .full_every = 2};  // a layer with, one without
  plan.mask = AttentionMask::document;
  plan.document_end = 5;
  expect_bits_of_the_host(plan, 4);
  plan = one_rank(odd_gpt2());
  plan.model.tuning.lora = parse_lora("rank=2", "--lora");
  expect_bits_of_the_host(plan, 3);
  plan = one_rank(odd_llama());  // with DeepSeek-V3's attention and its further prediction
  plan.model.num_kv_heads = plan.model.num_heads;
  plan.model.q_rank = 6;
  plan.model.kv_rank = 5;
  plan.model.rotary_dim = 4;
  plan.model.value_head_dim = plan.model.head_dim - 1;
  plan.model.num_mtp_layers = 1;
  plan.model.mtp_weight = 0.7;
  expect_bits_of_the_host(plan, 3);
  plan = one_rank(odd_llama());
  plan.offload = Offload::optimizer;
  expect_bits_of_the_host(plan, 3);
}

// The factor of the gradients is an argument of a launch.
TEST(DeviceGraphs, AnotherNumberOfTargetsIsCapturedAnew) {
  const Plan plan = one_rank(odd_llama());
  const auto ignoring = [&](const std::vector<int>& ignored_in_step) -> SampleSource {
    return [=, all = random_samples(plan), seq_len = plan.seq_len](
               std::int64_t step, std::int64_t sample, std::int32_t* tokens, std::int32_t* targets) {
      all(step, sample, tokens, targets);
      const int ignored = ignored_in_step[static_cast<std::size_t>(step)];
      for (std::int64_t t = 0; t < std::min<std::int64_t>(ignored, seq_len - 1); ++t) targets[t] = -1;
    };
  };
  // Of a step with a number that was not the last one's, one microbatch of two sequences runs as it does
  // without, one is captured, and one is replayed; that of one sequence runs as it does without.
  const GraphCounts changing = expect_bits_of_the_host(plan, ignoring({0, 3, 3, 0, 7}));
  EXPECT_EQ(changing.captured, 2 * (4 + 1));
  EXPECT_EQ(changing.replayed, 2 * (4 + 3));
  // They may lie elsewhere in each, as long as there are as many.
  const GraphCounts steady = expect_bits_of_the_host(plan, ignoring({2, 2, 2, 2, 2}));
  EXPECT_EQ(steady.captured, 2 * 2);
}

// Passes hold what they need from the first of them on, and another's memory is not theirs.
TEST(DeviceGraphs, HoldTheirMemoryAndGiveItBack) {
  const Plan plan = one_rank(odd_llama());
  FakeDriver driver;
  ThreadWorld world(1, patience);
  run_ranks(world, [&](int index) {
    Arena arena(&driver, 0);
    const auto kernels = make_kernels(arena, plan.precision, 1, plan.numerics);
    const Rank rank(world, plan.mesh, index, plan.precision, arena, *kernels);
    std::optional<Trainer> trainer(std::in_place, rank, plan, OptimizerOptions{}, 1);
    trainer->replay_passes();
    const Memory without = arena.live();
    const auto step = [&](std::int64_t k) {
      trainer->compute_gradients(k, random_samples(plan));
      trainer->apply_gradients(k);
    };
    step(0);
    const Memory held = arena.live();
    EXPECT_GT(held[MemoryCategory::activations], without[MemoryCategory::activations]);
    step(1);
    const std::int64_t allocations = arena.system_allocations();
    const std::size_t bytes = arena.held_bytes();
    for (std::int64_t k = 2; k < 5; ++k) {
      step(k);
      arena.drop_kept();  // which leaves what graphs have
      EXPECT_EQ(arena.live(), held);
    }
    EXPECT_LE(arena.held_bytes(), bytes);
    EXPECT_GE(arena.held_bytes(), static_cast<std::size_t>(held.total()));
    EXPECT_GE(arena.system_allocations(), allocations);
    trainer.reset();
    EXPECT_EQ(arena.live().total(), 0);
    arena.drop_kept();
    EXPECT_EQ(arena.held_bytes(), 0u);
  });
  EXPECT_EQ(driver.complaints(), std::vector<std::string>());
}

// In the timeline each pass has its place, whether it is replayed or not.
TEST(DeviceGraphs, EveryPassIsInTheTimeline) {
  const Plan plan = one_rank(odd_llama());
  FakeDriver driver(
      {.seconds = [](const std::string& name, std::size_t) { return name == "transfer" ? 0 : 1.0; }});
  ThreadWorld world(1, patience);
  run_ranks(world, [&](int index) {
    Arena arena(&driver, 0);
    const auto kernels = make_kernels(arena, plan.precision, 1, plan.numerics);
    const Rank rank(world, plan.mesh, index, plan.precision, arena, *kernels);
    Trainer trainer(rank, plan, {}, 1);
    trainer.replay_passes();
    std::vector<double> first;
    for (std::int64_t step = 0; step < 3; ++step) {
      trainer.compute_gradients(step, random_samples(plan));
      std::vector<double> seconds;
      for (const Span& span : trainer.last_run().spans) seconds.push_back(span.end - span.begin);
      ASSERT_EQ(seconds.size(), 8u);
      EXPECT_GT(*std::min_element(seconds.begin(), seconds.end()), 10);
      if (step == 0) first = seconds;
      EXPECT_EQ(seconds, first);  // as many kernels
    }
  });
  EXPECT_EQ(driver.complaints(), std::vector<std::string>());
}

// ---- failures

TEST(DeviceGraphs, StopWholeWhereverTheDeviceFails) {
  Plan plan = one_rank(odd_gpt2(true, 1));
  plan.global_batch = 2;
  struct Case {
    FakeCall call;
    const char* says;
  };
  for (const Case& c :
       {Case{FakeCall::allocate, "out of memory on device 0"},
        Case{FakeCall::create_event, "no event could be made on device 0"},
        Case{FakeCall::launch, "could not be launched on device 0: planted"},
        Case{FakeCall::capture, "a CUDA graph could not be captured on device 0: planted"},
        Case{FakeCall::launch_graph, "a CUDA graph could not be launched on device 0: planted"},
        Case{FakeCall::run, "device 0 was lost: it fell off the bus"}}) {
    int calls = 0;
    {
      FakeDriver driver;
      steps_on(&driver, plan, 4, random_samples(plan));
      calls = driver.calls(c.call);
    }
    EXPECT_GT(calls, 3);
    const int places = std::min(calls, 16);
    for (int i = 0; i < places; ++i) {
      SCOPED_TRACE(fmt::format("{} at {}", c.says, i));
      FakeDriver driver({.seed = static_cast<std::uint64_t>(i + 1)});
      driver.fail_after(c.call, calls <= places ? i : i * (calls - 4) / places);
      const std::string failure =
          message_of<RunError>([&] { steps_on(&driver, plan, 4, random_samples(plan)); });
      EXPECT_NE(failure.find(c.says), std::string::npos) << failure;
      EXPECT_EQ(failure.find('\n'), std::string::npos) << failure;
      EXPECT_EQ(driver.complaints(), std::vector<std::string>());
    }
  }
}

// ---- whole runs

class GraphRuns : public RunsOnADevice {
 protected:
  TrainRequest request(const char* name, std::shared_ptr<FakeDriver> driver, bool graphs) const {
    TrainRequest r = RunsOnADevice::request(name, std::move(driver), 1);
    r.run.cuda_graphs = graphs;
    r.eval_samples = 3;
    r.eval_every = 2;
    r.trace = true;
    return r;
  }
};

TEST_F(GraphRuns, EndWithTheHostsWeightsAndHoldWhatWasPredicted) {
  const TrainSummary host = run(request("host", nullptr, false));
  EXPECT_FALSE(host.graphs.has_value());
  const auto driver = std::make_shared<FakeDriver>(FakeDriver::Options{.workspace_bytes = 4096});
  TrainRequest asked = request("device", driver, true);
  const TrainSummary device = run(asked);
  expect_end_of(host, device);
  ASSERT_TRUE(device.graphs.has_value());
  EXPECT_EQ(device.graphs->captured, 2);
  EXPECT_EQ(device.graphs->replayed, 2 * (4 * 2 - 2));
  expect_contains(to_json(device), {R"("cuda_graphs":{"captured":2,"replayed":12})"});
  EXPECT_EQ(device.measured_timeline.ranks.front().size(), host.measured_timeline.ranks.front().size());
  EXPECT_EQ(driver->complaints(), std::vector<std::string>());
  EXPECT_EQ(driver->operations_queued(), 0u);
  // A run goes on from what either has saved.
  asked.resume = true;
  asked.optimizer.total_steps = 6;
  TrainRequest again = request("host", nullptr, false);
  again.resume = true;
  again.optimizer.total_steps = 6;
  EXPECT_EQ(run(asked).fingerprint, run(again).fingerprint);
  EXPECT_EQ(driver->complaints(), std::vector<std::string>());
}

// What is made of weights to be saved, and text, come beside what is held for passes.
TEST_F(GraphRuns, KeepWithinAMemoryLimitThatCountsThem) {
  const auto driver = std::make_shared<FakeDriver>();
  TrainRequest asked = request("limited", driver, true);
  asked.plan.precision = recipe("bf16");
  const TrainSummary first = run(asked);
  EXPECT_EQ(first.measured_memory, first.predicted_memory);
  asked.run.memory_limit = first.predicted_memory.total();
  asked.checkpoint_directory = directory_ / "just";
  EXPECT_EQ(run(asked).fingerprint, first.fingerprint);
  --asked.run.memory_limit;
  expect_contains(message_of<RequestError>([&] { run(asked); }), {"--memory-limit "});
}

TEST_F(GraphRuns, WhatCannotBeReplayedIsRefused) {
  const auto driver = std::make_shared<FakeDriver>();
  const auto refused = [&](const std::function<void(TrainRequest&)>& ask, const std::string& words) {
    TrainRequest r = request("refused", driver, true);
    ask(r);
    EXPECT_EQ(message_of<RequestError>([&] { run(r); }), "--cuda-graphs on: " + words);
  };
  refused([](TrainRequest& r) { r.run.driver = nullptr; },
          "a graph is launched on a device, and --device cpu has none; legal: --device cuda, or "
          "--cuda-graphs off");
  refused(
      [](TrainRequest& r) { r.plan.mesh.set(Axis::dp, 2); },
      "the passes of 2 ranks hold messages and sums of each other; legal: one rank, or --cuda-graphs off");
  refused(
      [](TrainRequest& r) {
        r.plan.model = even_mixtral(2);
        r.plan.model.vocab = bytes_vocab;
      },
      "the host reads how many tokens each expert of even-mixtral got; legal: a dense model, or "
      "--cuda-graphs "
      "off");
  refused([](TrainRequest& r) { r.plan.numerics = Numerics::invariant; },
          "under --numerics invariant each microbatch's sums have a place of their own; legal: --numerics "
          "ordinary, or --cuda-graphs off");
  refused([](TrainRequest& r) { r.plan.offload = Offload::activations; },
          "with --offload activations the passes wait for copies on other streams; legal: "
          "--offload none or optimizer, or --cuda-graphs off");
  EXPECT_EQ(driver->calls(FakeCall::allocate), 0);
}

}  // namespace
}  // namespace echelon::device_graphs_test

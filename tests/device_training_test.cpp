// Training on an accelerator gives what the host gives, bit for bit, whatever the device does when: nothing
// touches its memory from the host, and nothing is read before it is there (fake_driver.h).
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_writer.h"
#include "context_runs.h"
#include "device_runs.h"
#include "expert_runs.h"
#include "patience.h"
#include "tensor/device_stream.h"
#include "train/generate.h"
#include "train/refuse_request.h"
#include "train/state_copy.h"

namespace echelon::device_training_test {
namespace {

using namespace checks;

using Tokens = std::vector<std::int32_t>;

// On the reference kernels, of the host where there is no driver.
void on_mesh_of(FakeDriver* driver, const Plan& plan, const std::function<void(const Rank&)>& body,
                Collectives collectives = Collectives::direct) {
  ThreadWorld world(plan.mesh.num_ranks(), patience);
  run_ranks(world, [&](int index) {
    Arena arena(driver, driver == nullptr ? 0 : index % driver->num_devices());
    const auto kernels =
        driver == nullptr ? make_reference_kernels() : make_kernels(arena, plan.precision, 1, plan.numerics);
    body(Rank(world, plan.mesh, index, plan.precision, arena, *kernels, collectives));
  });
}

void expect_clean(const FakeDriver& driver) {
  EXPECT_EQ(driver.complaints(), std::vector<std::string>());
  EXPECT_EQ(driver.operations_queued(), 0u);
}

std::vector<Outcome> steps_on(FakeDriver* driver, const Plan& plan, std::int64_t steps = 2,
                              Collectives collectives = Collectives::direct) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(plan.mesh.num_ranks()));
  const SampleSource samples = random_samples(plan);
  const auto run = [&](const Rank& rank) {
    Outcome& o = outcomes[static_cast<std::size_t>(rank.index())];
    Trainer trainer(rank, plan, {}, 1);
    for (std::int64_t step = 0; step < steps; ++step) {
      o.losses.push_back(trainer.compute_gradients(step, samples));
      o.norms.push_back(trainer.apply_gradients(step).gradient_norm);
    }
    o.losses.push_back(trainer.evaluate(2, samples));
    const auto gathered = [&](ParameterTensor which) {
      LogicalTensors tensors;
      for (const Parameter& p : trainer.parameters().all())
        if (p.spec.parts == 1) tensors[p.spec.name] = as_doubles(gather_logical(rank, p, which));
      return tensors;
    };
    o.values = gathered(ParameterTensor::value);
    o.exp_avg = gathered(ParameterTensor::exp_avg);
    o.exp_avg_sq = gathered(ParameterTensor::exp_avg_sq);
  };
  on_mesh_of(driver, plan, run, collectives);
  return outcomes;
}

// Rank r on device r mod `devices`.
void expect_bits_of_the_host(const Plan& plan, std::uint64_t seeds = 1, int devices = 1,
                             Collectives collectives = Collectives::direct) {
  SCOPED_TRACE(describe_context(plan));
  const std::vector<Outcome> host = steps_on(nullptr, plan, 2, collectives);
  for (double loss : host[0].losses) EXPECT_TRUE(std::isfinite(loss));
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    FakeDriver driver({.seed = seed, .devices = devices});
    EXPECT_TRUE(steps_on(&driver, plan, 2, collectives) == host) << "seed " << seed;
    EXPECT_GT(driver.operations_run(), 100u);
    expect_clean(driver);
  }
}

Plan in(const char* precision, Plan plan) {
  plan.precision = recipe(precision);
  return plan;
}

TEST(DeviceTraining, OneRank) {
  expect_bits_of_the_host(odd_plan(odd_gpt2(), 1, 1, false), 3);
  expect_bits_of_the_host(in("bf16", odd_plan(odd_llama(), 1, 1, false)));
  expect_bits_of_the_host(in("bf16-lean", odd_plan(odd_llama(), 1, 1, false)));
  expect_bits_of_the_host(in("fp8", odd_plan(odd_llama(), 1, 1, false)));
}

TEST(DeviceTraining, DataAndTensorParallel) {
  expect_bits_of_the_host(odd_plan(odd_llama(), 2, 2, true), 3);
  expect_bits_of_the_host(odd_plan(odd_gpt2(false), 3, 1, false));
  expect_bits_of_the_host(odd_plan(odd_gpt2(), 1, 4, false));
  expect_bits_of_the_host(in("bf16", odd_plan(odd_gpt2(), 2, 2, true)));
}

TEST(DeviceTraining, IsThatOfTheHostWithStateSpaces) {
  ModelSpec hybrid = odd_llama();
  hybrid.state_space = {4, 3, 1, 5, 3, true, 4, {1}};
  expect_bits_of_the_host(odd_plan(hybrid, 2, 2, true), 3);
  Plan plan = in("bf16", odd_plan(hybrid, 1, 1, false));
  plan.mask = AttentionMask::document;
  plan.document_end = 3;
  expect_bits_of_the_host(plan);
  plan.model.state_space.groups = 2;
  plan.mesh.set(Axis::cp, 2);
  plan.seq_len = 12;
  expect_bits_of_the_host(plan);
}

TEST(DeviceTraining, IsThatOfTheHostWithTheDeltaRule) {
  ModelSpec model = odd_llama();
  model.state_space = {4, 3, 2, 5, 3, false, 4, {1}, StateRule::gated_delta};
  model.attention_gate = true;
  expect_bits_of_the_host(odd_plan(model, 2, 2, true), 3);
  Plan plan = in("bf16", odd_plan(model, 1, 1, false));
  plan.mask = AttentionMask::document;
  plan.document_end = 3;
  plan.mesh.set(Axis::cp, 2);
  plan.seq_len = 12;
  expect_bits_of_the_host(plan);
}

TEST(DeviceTraining, IsThatOfTheHostWithBothSideBySide) {  // long
  ModelSpec model = odd_llama();
  model.state_space = {4, 3, 1, 5, 3, true, 4, {}};
  model.state_space.norm = false;
  model.state_space.beside_attention = true;
  model.scales.state_space = {0.5, 0.75, 1.25, 0.875, 1.125};
  model.scales.mlp_gate = 0.75;
  expect_bits_of_the_host(odd_plan(model, 1, 2, true), 3);
  expect_bits_of_the_host(in("bf16", odd_plan(model, 1, 1, false)));
}

TEST(DeviceTraining, IsThatOfTheHostWithShortConvolutions) {
  ModelSpec model = odd_llama();
  model.short_conv = {3, {1}};
  expect_bits_of_the_host(odd_plan(model, 2, 2, true), 3);
  Plan plan = in("bf16", odd_plan(model, 1, 1, false));
  plan.mask = AttentionMask::document;
  plan.document_end = 3;
  plan.mesh.set(Axis::cp, 2);
  plan.seq_len = 12;
  expect_bits_of_the_host(plan);
}

TEST(DeviceTraining, ADeviceForEachRank) {  // long
  expect_bits_of_the_host(odd_plan(odd_llama(), 2, 2, true), 3, 4);
  expect_bits_of_the_host(odd_plan(odd_gpt2(false), 3, 1, false), 1, 2);  // one alone, two on the other
  Plan plan = odd_plan(odd_llama(), 3, 1, false);
  plan.zero = 3;
  expect_bits_of_the_host(in("bf16", plan), 1, 3);
  plan = odd_plan(even_deepseek(3), 2, 1, false);
  plan.mesh.ep = 2;
  plan.balancing = all_losses();
  expect_bits_of_the_host(plan, 1, 2);
  expect_bits_of_the_host(pipeline_plan(odd_gpt2(true, 4), "interleaved", 2, 2, 1, 4), 1, 4);
  expect_bits_of_the_host(pipeline_plan(odd_llama(false, 2, 4), "dualpipe", 2, 1, 1, 4), 1, 2);
  for (const ContextCase& c : context_cases(2)) expect_bits_of_the_host(context_plan(Family::llama, c), 1, 2);
}

TEST(DeviceTraining, DevicesThatCannotReachEachOtherHaveNoSums) {
  FakeDriver driver({.devices = 2, .peers = false});
  expect_contains(message_of<RunError>([&] { steps_on(&driver, odd_plan(odd_llama(), 2, 1, false), 1); }),
                  {" cannot reach the memory of device ", ", which a sum over their ranks needs"});
}

TEST(DeviceTraining, ShardedData) {
  for (const int zero : {1, 2, 3}) {
    Plan plan = odd_plan(odd_llama(), 2, zero == 3 ? 2 : 1, zero == 3);
    plan.zero = zero;
    expect_bits_of_the_host(plan, 2);
  }
  Plan plan = odd_plan(odd_gpt2(), 4, 1, false);
  plan.zero = 3;
  plan.hsdp = 2;
  expect_bits_of_the_host(in("bf16", plan));
}

TEST(DeviceTraining, OffloadedOptimizerState) {  // long
  for (const int zero : {0, 2}) {
    Plan plan = odd_plan(odd_llama(), 2, 1, false);
    plan.zero = zero;
    plan.offload = Offload::optimizer;
    expect_bits_of_the_host(plan, 2);
  }
  // A guessed step reads them too.
  Plan plan = pipeline_plan(odd_llama(false, 2, 4), "1f1b", 2, 1, 1, 4);
  plan.offload = Offload::optimizer;
  plan.optimizer_barrier = false;
  const auto losses_on = [&](FakeDriver* driver) {
    std::vector<double> losses;
    on_mesh_of(driver, plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, {}, 1);
      for (std::int64_t step = 0; step < 3; ++step)
        for (const StepResult& result : trainer.step(step, random_samples(plan), 3 - step))
          if (rank.index() == 0) losses.push_back(result.loss);
    });
    return losses;
  };
  FakeDriver driver;
  EXPECT_EQ(losses_on(&driver), losses_on(nullptr));
  expect_clean(driver);
}

// Copies to the host and back are queued as late, and in any order, as their events let them: the fake driver
// complains of memory that is used before it is there, or handed out before its copy is done.
TEST(DeviceTraining, OffloadedActivations) {  // long
  const auto offloaded = [](Plan plan, Offload what = Offload::activations) {
    plan.offload = what;
    return plan;
  };
  expect_bits_of_the_host(offloaded(odd_plan(odd_gpt2(), 1, 1, false)), 5);
  expect_bits_of_the_host(offloaded(in("bf16", odd_plan(odd_llama(), 2, 2, true))), 2);
  for (const char* schedule : {"1f1b", "gpipe", "zb-v", "dualpipe"})
    expect_bits_of_the_host(offloaded(pipeline_plan(odd_llama(false, 2, 4), schedule, 2, 1, 1, 4)), 2);
  Plan plan = odd_plan(odd_llama(), 2, 1, false);
  plan.zero = 3;
  plan.recompute = parse_recompute("full", "--recompute");
  expect_bits_of_the_host(offloaded(plan, Offload::both), 2);
  plan = odd_plan(even_mixtral(2), 2, 1, false);
  plan.mesh.ep = 2;
  expect_bits_of_the_host(offloaded(plan), 2);
}

TEST(DeviceTraining, Pipelines) {
  for (const char* schedule : {"1f1b", "zb-v", "dualpipe"})
    expect_bits_of_the_host(pipeline_plan(odd_llama(false, 2, 4), schedule, 2, 1, 1, 4), 2);
  Plan plan = pipeline_plan(odd_gpt2(true, 4), "interleaved", 2, 2, 1, 4);
  plan.recompute = parse_recompute("full", "--recompute");
  expect_bits_of_the_host(plan);
  plan = pipeline_plan(odd_llama(false, 2, 4), "1f1b", 2, 1, 1, 4);
  plan.vocabulary_parallel = true;
  expect_bits_of_the_host(plan);
  plan.model.output_bias = true;
  expect_bits_of_the_host(plan);
  plan = odd_plan(plan.model, 1, 2, true);
  expect_bits_of_the_host(in("bf16", plan));
}

TEST(DeviceTraining, ContextParallel) {  // long
  for (const ContextCase& c : context_cases(2)) expect_bits_of_the_host(context_plan(Family::llama, c));
  Plan plan = context_plan(Family::llama, {ContextKind::hybrid, ContextBalance::zigzag, 4, 2});
  plan.mask = AttentionMask::document;
  expect_bits_of_the_host(plan);
}

TEST(DeviceTraining, Experts) {
  Plan plan = odd_plan(even_deepseek(3), 2, 1, false);
  plan.mesh.ep = 2;
  plan.balancing = all_losses();
  expect_bits_of_the_host(plan, 3);
  plan = odd_plan(even_mixtral(2), 2, 2, true);
  plan.mesh.ep = 2;
  plan.balancing.capacity = 0.8;
  plan.zero = 1;
  expect_bits_of_the_host(plan);
}

TEST(DeviceTraining, CompressedGradients) {
  for (const char* compression : {"bf16", "int8", "topk:0.2", "powersgd:2"}) {
    Plan plan = odd_plan(odd_llama(), 2, 1, false);
    plan.compression = parse_compression(compression, "--compress");
    expect_bits_of_the_host(plan);
  }
}

// Their parts travel as messages between devices, and are added where they come to.
TEST(DeviceTraining, CollectivesByMessages) {  // long
  for (const Collectives collectives :
       {Collectives::ring, Collectives::halving_doubling, Collectives::automatic}) {
    SCOPED_TRACE(collectives_name(collectives));
    Plan plan = odd_plan(odd_llama(), 3, 1, false);
    plan.zero = 2;
    expect_bits_of_the_host(plan, 2, 2, collectives);
    expect_bits_of_the_host(in("bf16", odd_plan(odd_gpt2(), 2, 2, true)), 1, 1, collectives);
  }
  Plan plan = odd_plan(even_mixtral(2), 2, 2, true);
  plan.mesh.ep = 2;
  expect_bits_of_the_host(plan, 1, 4, Collectives::ring);
  // Devices that cannot reach each other's memory can copy.
  FakeDriver apart({.devices = 2, .peers = false});
  plan = odd_plan(odd_llama(), 2, 1, false);
  EXPECT_TRUE(steps_on(&apart, plan, 1, Collectives::ring) == steps_on(nullptr, plan, 1, Collectives::ring));
  expect_clean(apart);
}

TEST(DeviceTraining, CheckpointsMoveBetweenHostAndDevice) {
  Plan sharded = odd_plan(odd_llama(), 2, 2, true);
  sharded.zero = 2;
  const Plan other = odd_plan(odd_llama(), 1, 1, false);
  CheckpointInfo info;
  info.step = 1;
  info.seed = 1;
  info.dtype = DType::f64;
  info.model = other.model;
  const auto saved = [&](FakeDriver* driver, const std::string& directory) {
    std::string path;
    on_mesh_of(driver, sharded, [&](const Rank& rank) {
      Trainer trainer(rank, sharded, {}, 1);
      trainer.compute_gradients(0, random_samples(sharded));
      trainer.apply_gradients(0);
      const std::string where = save_checkpoint(rank, trainer.parameters(), directory, info);
      if (rank.index() == 0) path = where;
    });
    return path;
  };
  const auto loaded = [&](FakeDriver* driver, const std::string& path) {
    LogicalTensors values, moments;
    on_mesh_of(driver, other, [&](const Rank& rank) {
      Trainer trainer(rank, other, {}, 99);
      load_checkpoint(rank, trainer.parameters(), read_checkpoint_info(path), false);
      values = gather(rank, trainer, ParameterTensor::value);
      moments = gather(rank, trainer, ParameterTensor::exp_avg_sq);
    });
    return std::pair(values, moments);
  };
  FakeDriver driver;
  const TemporaryDirectory from_host, from_device;
  const std::string host = saved(nullptr, from_host.path()), device = saved(&driver, from_device.path());
  EXPECT_EQ(loaded(nullptr, host), loaded(&driver, device));
  EXPECT_EQ(loaded(&driver, host), loaded(nullptr, device));
  expect_clean(driver);
}

// It is copied while the next step runs, and is of the step before.
TEST(DeviceTraining, ACheckpointIsCopiedBesideTheNextStep) {
  const Plan plan = odd_plan(odd_llama(), 2, 1, false);
  CheckpointInfo info;
  info.step = 1;
  info.seed = 1;
  info.dtype = DType::f64;
  info.model = plan.model;
  const TemporaryDirectory directory;
  const auto seconds = [&](bool saves, double copy) {
    FakeDriver driver({.seconds = [=](const std::string& name, std::size_t bytes) {
      return name == "transfer" ? copy * static_cast<double>(bytes) : name == "reduce" ? 0 : 1.0;
    }});
    on_mesh_of(&driver, plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, {}, 1);
      CheckpointWriter writer(rank, directory / fmt::format("{}-{}", saves, copy));
      for (std::int64_t step = 0; step < 2; ++step) {
        trainer.compute_gradients(step, random_samples(plan));
        trainer.apply_gradients(step);
        if (saves && step == 0) writer.start(trainer.parameters(), info, {}, {});
      }
      if (saves) {
        writer.wait();
        rank.dp_cp().barrier().wait();
        writer.commit(0);
      }
      rank.arena().synchronize();
    });
    expect_clean(driver);
    return driver.last_end();
  };
  const double step = seconds(false, 0), bytes = seconds(true, 1) - seconds(false, 1);
  // As long as half of a step's kernels: the update of the second step would wait for more.
  EXPECT_EQ(seconds(true, step / 4 / bytes), seconds(false, step / 4 / bytes));
  EXPECT_GT(bytes, 0);
  const auto find = [&](bool load) {
    LogicalTensors values;
    on_mesh_of(nullptr, plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, {}, 1);
      if (load) {
        const auto all = list_checkpoints(directory / "true-1");
        load_checkpoint(rank, trainer.parameters(), read_checkpoint_info(all.back()), false);
      } else {
        trainer.compute_gradients(0, random_samples(plan));
        trainer.apply_gradients(0);
      }
      for (const ParameterTensor which : {ParameterTensor::value, ParameterTensor::exp_avg_sq})
        for (const auto& [name, tensor] : gather(rank, trainer, which))
          if (rank.index() == 0) values[fmt::format("{} {}", name, static_cast<int>(which))] = tensor;
    });
    return values;
  };
  EXPECT_EQ(find(true), find(false));
}

// As a checkpoint of it does, beside the rank's stream.
TEST(DeviceTraining, AStateIsPutBackBehindWhatStillReadsIt) {
  FakeDriver driver(
      {.seconds = [](const std::string& name, std::size_t) { return name == "read" ? 1000.0 : 1e-3; }});
  on_mesh_of(&driver, odd_plan(odd_llama(), 1, 1, false), [&](const Rank& rank) {
    Trainer trainer(rank, odd_plan(odd_llama(), 1, 1, false), {}, 1);
    StateCopy copy(rank, trainer);
    copy.keep(0, copy.fingerprints());
    const DeviceStream& reader = rank.arena().transfers("reader");
    driver.enqueue("read", reader.handle(), {}, [] {});
    const auto read = reader.record();
    trainer.parameters().read_until(read);
    copy.restore();
    const auto restored = rank.arena().stream().record();
    restored->synchronize();
    EXPECT_GT(restored->seconds_since(*read), 0);
  });
  expect_clean(driver);
}

TEST(DeviceTraining, GeneratesTheHostsText) {
  Plan plan = odd_plan(odd_llama(), 1, 2, true);
  plan.model.init_std = 0.5;
  plan.model.max_seq = 40;
  GenerateOptions options;
  options.max_tokens = 12;
  options.temperature = 2;
  const auto text_on = [&](FakeDriver* driver) {
    std::vector<Tokens> texts(2);
    on_mesh_of(driver, plan, [&](const Rank& rank) {
      const Trainer trainer(rank, plan, {}, 1);
      texts[static_cast<std::size_t>(rank.index())] =
          generate(rank, plan, trainer.parameters(), {}, {3, 52, 0, 17}, options);
    });
    return texts;
  };
  FakeDriver driver;
  EXPECT_EQ(text_on(&driver), text_on(nullptr));
  expect_clean(driver);
}

TEST(DeviceTraining, VerifiesAMeshAgainstOneRank) {
  for (const bool experts : {false, true}) {
    Plan plan = experts ? odd_plan(even_mixtral(2), 2, 2, true)
                        : pipeline_plan(odd_gpt2(false, 4), "2bw", 2, 1, 2, 4);
    if (experts) plan.mesh.ep = 2;
    VerifyRequest request = verify_request(plan, 2, experts ? 0.1 : 0);
    const auto driver = std::make_shared<FakeDriver>();
    request.run.driver = driver;
    const VerifyReport report = verify(request);
    EXPECT_TRUE(report.pass) << to_json(report, plan);
    EXPECT_GT(driver->operations_run(), 100u);
    expect_clean(*driver);
  }
}

// The device's kernels are not one rank's, whatever the mesh cuts: sums of another order are rounded to other
// numbers of bf16, beyond the bound of a mesh whose kernels are the same. A gradient that is half as large
// again is still found.
TEST(DeviceTraining, NarrowNumbersAreHeldToOtherKernels) {  // long
  if (!has_cpu_kernels()) GTEST_SKIP() << "this build has no CPU kernels";
  Plan experts = odd_plan(even_mixtral(2), 2, 1, false);
  experts.mesh.ep = 2;
  Plan sharded = odd_plan(odd_llama(), 2, 1, false);
  sharded.zero = 3;
  const Plan pipeline = pipeline_plan(odd_gpt2(false, 4), "1f1b", 2, 1, 1, 4);
  for (const char* precision : {"bf16", "bf16-lean", "fp8"})
    for (const Plan& of : {experts, sharded, pipeline}) {
      const Plan plan = in(precision, of);
      SCOPED_TRACE(precision + (" " + describe(plan)));
      for (const double loss_scale : {1.0, 1.5}) {
        VerifyRequest request = verify_request(plan);
        const auto driver = std::make_shared<FakeDriver>();
        request.run.driver = driver;
        request.faults.loss_scale = loss_scale;
        const VerifyReport report = verify(request);
        EXPECT_EQ(report.pass, loss_scale == 1) << to_json(report, plan);
        EXPECT_EQ(report.bound, verify_bound(plan, true));
        // In fp8 the bound has what scales do to it, with the same kernels too.
        if (!multiplies_in_fp8(plan.precision)) {
          EXPECT_GT(report.grad_max_rel_diff, verify_bound(plan));
        }
        expect_clean(*driver);
      }
    }
}

// To the last bit of one rank on the device, whose kernels the host's need not be.
TEST(DeviceTraining, VerifiesEveryBitAgainstOneRankOnTheDevice) {
  Plan plan = odd_plan(odd_llama(), 2, 2, false);
  plan.global_batch = 4;
  plan.numerics = Numerics::invariant;
  VerifyRequest request = verify_request(plan, 2, 0);
  const auto operations = [&](bool invariant) {
    const auto driver = std::make_shared<FakeDriver>();
    request.run.driver = driver;
    request.plan.numerics = invariant ? Numerics::invariant : Numerics::ordinary;
    const VerifyReport report = verify(request);
    EXPECT_TRUE(report.pass) << to_json(report, plan);
    EXPECT_EQ(report.bound == 0, invariant);
    expect_clean(*driver);
    return driver->operations_run();
  };
  EXPECT_GT(operations(true), operations(false));
}

// Operands lose 13 of 23 bits: beyond f32's bound, which finds it where nobody asked for it, and within
// TF32's, which still finds a gradient that is a tenth too large.
TEST(DeviceTraining, Tf32IsHeldToItsOwnBound) {  // long
  const auto verified = [](const char* precision, const Plan& plan, bool unasked = false,
                           double loss_scale = 1) {
    VerifyRequest request = verify_request(in(precision, plan));
    const auto driver = std::make_shared<FakeDriver>(FakeDriver::Options{.tf32_unasked = unasked});
    request.run.driver = driver;
    request.faults.loss_scale = loss_scale;
    const VerifyReport report = verify(request);
    expect_clean(*driver);
    return report;
  };
  Plan mixture = odd_plan(even_mixtral(2), 2, 2, true);
  mixture.mesh.ep = 2;
  const Plan dense = odd_plan(odd_gpt2(), 2, 2, true);
  for (const Plan& plan : {dense, mixture}) {
    const VerifyReport asked = verified("tf32", plan);
    EXPECT_TRUE(asked.pass) << to_json(asked, plan);
    EXPECT_GT(asked.grad_max_rel_diff, verify_bound(in("f32", plan)));
  }
  EXPECT_FALSE(verified("f32", dense, true).pass);
  EXPECT_FALSE(verified("tf32", dense, false, 1.1).pass);
}

class DeviceRuns : public RunsOnADevice {
 protected:
  TrainRequest request(const char* name, std::shared_ptr<FakeDriver> driver) const {
    TrainRequest r = RunsOnADevice::request(name, std::move(driver), 2);
    r.plan.zero = 3;
    r.eval_samples = 2;
    return r;
  }
};

TEST_F(DeviceRuns, EndWithTheHostsWeightsAndHoldAndSendWhatWasPredicted) {
  const TrainSummary host = run(request("host", nullptr));
  const auto driver = std::make_shared<FakeDriver>(FakeDriver::Options{.workspace_bytes = 4096});
  TrainRequest timed = request("device", driver);
  timed.priced_step.reset(), timed.peak_flops.reset();
  const TrainSummary device = run(timed);
  expect_end_of(host, device);
  EXPECT_EQ(device.measured_traffic, host.measured_traffic);
  EXPECT_GT(device.predicted_step_seconds, 0);
  EXPECT_GT(device.peak_flops, 0);
  expect_clean(*driver);
}

// A device's chunks of logits have more rows than the host's.
TEST_F(DeviceRuns, HoldALargeChunkOfLogitsAsPredicted) {  // long
  TrainRequest request = RunsOnADevice::request("large", std::make_shared<FakeDriver>(), 1);
  request.plan.model.max_seq = request.plan.seq_len = 301;
  request.plan.micro_batch = request.plan.global_batch = 2;
  request.optimizer.total_steps = 1;
  request.sample_tokens = request.eval_samples = 0;
  ASSERT_GT(request.plan.micro_batch * request.plan.seq_len,
            logits_chunk_rows(Device::cpu, element_bytes(request.plan.precision.activations)));
  expect_predicted_memory(run(request));
}

TEST_F(DeviceRuns, OffloadWhatWasPredicted) {  // long
  const TrainSummary host = run(request("kept", nullptr));
  const auto driver = std::make_shared<FakeDriver>();
  TrainRequest offloading = request("offloaded", driver);
  offloading.plan.offload = Offload::optimizer;
  const TrainSummary device = run(offloading);
  EXPECT_EQ(device.fingerprint, host.fingerprint);
  EXPECT_EQ(device.measured_memory[MemoryCategory::optimizer], 0);
  expect_predicted_memory(device);
  expect_clean(*driver);
  offloading.resume = true;  // with the moments that were saved
  offloading.optimizer.total_steps = 6;
  TrainRequest again = request("kept", nullptr);
  again.resume = true;
  again.optimizer.total_steps = 6;
  EXPECT_EQ(run(offloading).fingerprint, run(again).fingerprint);
}

TEST_F(DeviceRuns, OffloadActivationsAsPredicted) {  // long
  const TrainSummary host = run(request("kept", nullptr));
  const auto driver = std::make_shared<FakeDriver>();
  TrainRequest offloading = request("offloaded", driver);
  offloading.plan.offload = Offload::activations;
  const TrainSummary device = run(offloading);
  EXPECT_EQ(device.fingerprint, host.fingerprint);
  expect_predicted_memory(device);
  EXPECT_GT(device.measured_host.out, 0);
  EXPECT_EQ(device.measured_host, device.predicted_host);
  expect_clean(*driver);
}

TEST_F(DeviceRuns, ALostDeviceLeavesTheLastCheckpointToGoOnFrom) {  // long
  const auto asked = [&](const std::string& name, std::shared_ptr<FakeDriver> driver) {
    TrainRequest r = request(name.c_str(), std::move(driver));
    r.save_beside = false;
    return r;
  };
  const auto clean = std::make_shared<FakeDriver>();
  const std::string whole = run(asked("whole", clean)).fingerprint;
  int stopped_between = 0;
  for (const int tenths : {3, 5, 6, 7}) {
    SCOPED_TRACE(tenths);
    const std::string name = fmt::format("lost{}", tenths);
    const auto driver = std::make_shared<FakeDriver>();
    driver->fail_after(FakeCall::run, clean->calls(FakeCall::run) * tenths / 10);
    const TrainRequest r = asked(name, driver);
    const std::string failure = message_of<RunError>([&] { run(r); });
    EXPECT_EQ(failure, "device 0 was lost: it fell off the bus; ranks 0, 1 were on it");
    EXPECT_EQ(driver->complaints(), std::vector<std::string>());
    const auto left = list_checkpoints(r.checkpoint_directory);
    if (left.size() == 1) ++stopped_between;
    for (const std::string& path : left) EXPECT_NO_THROW(read_checkpoint_info(path));
    TrainRequest again = asked(name, nullptr);
    again.resume = !left.empty();
    EXPECT_EQ(run(again).fingerprint, whole);
  }
  EXPECT_GT(stopped_between, 0);
}

TEST_F(DeviceRuns, ALostDeviceIsNamedWithItsRanks) {  // long
  std::set<std::string> seen;
  for (const int others : {300, 301, 302, 303, 304, 305}) {
    const auto driver = std::make_shared<FakeDriver>(FakeDriver::Options{.devices = 2});
    driver->fail_after(FakeCall::run, others);
    TrainRequest r = request("lost", driver);
    r.plan.mesh.set(Axis::dp, 3);
    r.plan.global_batch = 6;
    seen.insert(message_of<RunError>([&] { run(r); }));
    EXPECT_EQ(driver->complaints(), std::vector<std::string>());
  }
  for (const std::string& failure : seen)
    EXPECT_TRUE(failure == "device 0 was lost: it fell off the bus; ranks 0, 2 were on it" ||
                failure == "device 1 was lost: it fell off the bus; rank 1 was on it")
        << failure;
}

TEST_F(DeviceRuns, WhatADeviceCannotDoIsRefused) {
  const auto driver = std::make_shared<FakeDriver>(FakeDriver::Options{.memory_bytes = 100 << 10});
  const auto refused = [&](const std::function<void(TrainRequest&)>& ask, const std::string& words) {
    TrainRequest r = request("refused", driver);
    ask(r);
    expect_contains(message_of<RequestError>([&] { run(r); }), {words});
  };
  refused(
      [](TrainRequest& r) {
        r.plan.offload = Offload::optimizer;
        r.plan.offload_directory = ".";
      },
      "--offload-dir .: what a device offloads is in the host's memory");
  refused(
      [](TrainRequest& r) {
        r.plan.zero = 0;
        r.save_every = 0;
        r.asynchronous = AsynchronousOptions{};
      },
      "--device cuda: parameter servers");
  refused(
      [](TrainRequest& r) {
        r.run.driver = nullptr;
        r.plan.precision = recipe("tf32");
      },
      "--precision tf32: is what a device multiplies in; legal with --device cpu: f32");
  refused(
      [](TrainRequest& r) {
        r.plan.precision = recipe("tf32");
        r.plan.numerics = Numerics::invariant;
      },
      "--precision tf32: with --numerics invariant products are not left to a library, which TF32 is; legal: "
      "f32");
  refused(
      [](TrainRequest& r) {
        r.run.driver = std::make_shared<FakeDriver>(FakeDriver::Options{.capability = {8, 0}});
        r.plan.precision = recipe("fp8");
      },
      "--precision fp8: device 0 (a fake device) has compute capability 8.0, and products of fp8 come with "
      "8.9; legal: bf16");
  refused(
      [](TrainRequest& r) {
        r.run.driver = std::make_shared<FakeDriver>(FakeDriver::Options{
            .devices = 2, .last_capability = std::pair{7, 5}, .least_capability = {8, 0}});
      },
      "--device cuda: device 1 (a fake device) has compute capability 7.5, and this build has kernels for "
      "8.0 on; legal: cpu, or devices that it has, named by CUDA_VISIBLE_DEVICES");
  // What no rank uses may be what it is.
  TrainRequest fp8 = request("fp8", nullptr);
  fp8.plan.precision = recipe("fp8");
  for (const int devices : {3, 2}) {
    SCOPED_TRACE(devices);
    fp8.run.driver = std::make_shared<FakeDriver>(
        FakeDriver::Options{.devices = devices, .last_capability = std::pair{8, 0}});
    const auto ask = [&] { refuse_on_device(fp8.plan, fp8.run); };
    if (devices == 3)
      EXPECT_NO_THROW(ask());
    else
      expect_contains(message_of<RequestError>(ask), {"--precision fp8: device 1 (a fake device)"});
  }
  refused(
      [](TrainRequest& r) {
        r.plan.mesh.set(Axis::dp, 13);
        r.plan.mesh.set(Axis::cp, 5);
        r.plan.global_batch = 13;
        r.plan.seq_len = 10;
      },
      "--dp 13 x --cp 5: with --device cuda and --collectives direct a sum is over at most 64 ranks, and "
      "here over 65; legal: up to 64, --collectives ring, or a process for each rank");
  refused([](TrainRequest&) {}, "on 2 ranks of device 0, which has 100.00 KiB");
  EXPECT_EQ(driver->calls(FakeCall::allocate), 0);
  const auto apart = std::make_shared<FakeDriver>(FakeDriver::Options{.devices = 2, .peers = false});
  TrainRequest r = request("apart", apart);
  expect_contains(message_of<RequestError>([&] { run(r); }),
                  {"device 0 cannot reach the memory of device 1", "legal: devices that reach each other"});
}

// Memory by category is that of the host: the same program asks for it.
TEST(DeviceTraining, HoldsWhatTheHostHolds) {
  const Plan plan = odd_plan(odd_llama(), 2, 2, true);
  const auto peak_on = [&](FakeDriver* driver, Collectives collectives) {
    std::vector<Memory> peaks(4);
    const auto step = [&](const Rank& rank) {
      Trainer trainer(rank, plan, {}, 1);
      trainer.compute_gradients(0, random_samples(plan));
      trainer.apply_gradients(0);
      peaks[static_cast<std::size_t>(rank.index())] = rank.arena().peak();
    };
    on_mesh_of(driver, plan, step, collectives);
    return peaks;
  };
  for (const Collectives collectives : {Collectives::direct, Collectives::ring}) {
    FakeDriver driver;
    const std::vector<Memory> host = peak_on(nullptr, collectives), device = peak_on(&driver, collectives);
    for (std::size_t r = 0; r < host.size(); ++r)
      for (const MemoryCategory category : all_memory_categories)
        EXPECT_EQ(device[r][category], host[r][category]) << memory_category_name(category);
  }
}

// Wherever a call to the device fails, every rank stops with one cause, and nothing is left behind.
TEST(DeviceTraining, StopsWholeWhereverTheDeviceFails) {
  Plan plan = odd_plan(odd_gpt2(true, 1), 2, 1, false);
  plan.global_batch = 2;
  struct Case {
    FakeCall call;
    const char* says;
  };
  for (const Case& c : {Case{FakeCall::allocate, "out of memory on device 0"},
                        Case{FakeCall::create_event, "no event could be made on device 0"},
                        Case{FakeCall::launch, "could not be launched on device 0: planted"},
                        Case{FakeCall::run, "device 0 was lost: it fell off the bus"}}) {
    int calls = 0;
    {
      FakeDriver driver;
      steps_on(&driver, plan, 1);
      calls = driver.calls(c.call);
    }
    EXPECT_GT(calls, 10);
    for (int i = 0; i < 12; ++i) {
      FakeDriver driver;
      driver.fail_after(c.call, i * (calls - 4) / 12);
      const Collectives collectives = i % 2 == 0 ? Collectives::direct : Collectives::ring;
      const std::string failure = message_of<RunError>([&] { steps_on(&driver, plan, 1, collectives); });
      EXPECT_NE(failure.find(c.says), std::string::npos) << failure;
      EXPECT_EQ(failure.find('\n'), std::string::npos) << failure;
      EXPECT_EQ(driver.complaints(), std::vector<std::string>()) << c.says << " at " << i;
    }
  }
}

// At every call of them: what is received lies in memory that goes with the communicator, before the rank's.
TEST(DeviceTraining, CollectivesByMessagesStopWholeToo) {  // long
  const Plan plan = odd_plan(odd_llama(), 3, 1, false);
  for (const Collectives collectives : {Collectives::ring, Collectives::halving_doubling}) {
    const auto sum_twice = [&](FakeDriver& driver) {
      on_mesh_of(
          &driver, plan,
          [](const Rank& rank) {
            const Tensor x(rank.arena(), MemoryCategory::other, DType::f64, {8});
            rank.kernels().fill(x, 1);
            for (int i = 0; i < 2; ++i) rank.along(Axis::dp).all_reduce(x).wait();
            EXPECT_EQ(copy_to_host<double>(x), std::vector<double>(8, 9));
          },
          collectives);
    };
    for (const FakeCall call : {FakeCall::allocate, FakeCall::create_stream, FakeCall::create_event,
                                FakeCall::launch, FakeCall::run}) {
      int failures = 0;
      for (int others = 0;; ++others) {
        FakeDriver driver({.seed = static_cast<std::uint64_t>(others + 1)});
        driver.fail_after(call, others);
        std::string failure;
        try {
          sum_twice(driver);
        } catch (const RunError& error) {
          failure = error.what();
        }
        EXPECT_EQ(driver.complaints(), std::vector<std::string>()) << failure << " at " << others;
        if (driver.calls(call) <= others) break;  // it does not come so often
        failures += failure.empty() ? 0 : 1;      // none: all there was to do is done by then
      }
      EXPECT_GT(failures, 2);
    }
  }
}

// A receive that nobody waits for is finished by its communicator's destructor, which cannot throw.
TEST(DeviceTraining, ADroppedReceiveOnALostDeviceFailsTheJob) {
  FakeDriver driver({.devices = 2});
  ThreadWorld world(2, patience);
  const std::string failure = message_of<RunError>([&] {
    run_ranks(world, [&](int rank) {
      Arena arena(&driver, rank);
      const Tensor x(arena, MemoryCategory::other, DType::f64, {8});
      const auto group = world.join(rank, {0, 1}, "dp");
      if (rank == 0) {
        while (world.states()[1].waits_in.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        group->send(x, 1).wait();
        return;
      }
      (void)group->recv(x, 0);
      driver.fail_after(FakeCall::run, 0);
      EXPECT_THROW(arena.synchronize(), DeviceLost);
    });
  });
  EXPECT_NE(failure.find("device 1 was lost: it fell off the bus"), std::string::npos) << failure;
  EXPECT_EQ(driver.complaints(), std::vector<std::string>());
}

thread_local bool is_late = false;

// Its tensors and streams are gone when a rank that has not heard of the failure yet comes to it.
TEST(DeviceTraining, ADroppedCollectiveIsNotQueuedByALateRank) {
  std::atomic<bool> has_called{false}, is_held_up{false}, is_gone{false};
  FakeDriver driver({.before_event = [&] {
    if (!is_late) return;
    is_held_up = true;
    wait_until([&] { return is_gone.load(); });
  }});
  {
    ThreadWorld world(2, patience);
    const auto body = [&](int rank) {
      Arena arena(&driver, 0);
      const Tensor x(arena, MemoryCategory::other, DType::f64, {8});
      const auto group = world.join(rank, {0, 1}, "dp");
      if (rank == 1) {
        wait_until([&] { return has_called.load(); });
        is_late = true;
      }
      const Pending sum = group->all_reduce(x);
      has_called = true;
      wait_until([&] { return is_held_up.load(); });
      fail("rank 0 has had enough");
    };
    const std::string failure = message_of<RunError>([&] {
      run_ranks(world, [&](int rank) {
        try {
          body(rank);
        } catch (const std::exception&) {
          if (rank == 0) is_gone = true;
          throw;
        }
      });
    });
    EXPECT_EQ(failure, "rank 0 has had enough");
  }
  EXPECT_EQ(driver.complaints(), std::vector<std::string>());
}

}  // namespace
}  // namespace echelon::device_training_test

// Training whose gradients travel compressed: what stays equal to the last bit, and what a checkpoint keeps.
#include <gtest/gtest.h>

#include <fstream>
#include <mutex>

#include "case_choice.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_compare.h"
#include "checkpoint/checkpoint_reader.h"
#include "mesh_runs.h"
#include "train/session.h"
#include "untimed.h"
#include "verify/verify.h"

namespace echelon::compressed_training_test {
namespace {

using namespace checks;

const std::vector<std::string> lossy{"bf16", "fp16", "int8", "topk:0.1", "powersgd:2", "powersgd:2:2"};

struct Shape {
  int dp = 1, tp = 1, pp = 1, zero = 0;
  std::string schedule = "1f1b";
};

Plan plan_of(const ModelSpec& model, const Shape& shape, const std::string& compress) {
  Plan plan = odd_plan(model, shape.dp, shape.tp, shape.tp > 1);
  plan.mesh.set(Axis::pp, shape.pp);
  plan.schedule = shape.schedule;
  if (shape.schedule == "dualpipe") plan.global_batch = 8 * shape.dp;
  plan.zero = shape.zero;
  plan.compression = parse_compression(compress, "--compress");
  validate(plan);
  return plan;
}

using Parts =
    std::map<std::pair<std::string, int>, std::vector<double>>;  // by name and tensor-parallel slice

// The values after some steps; every rank that holds a part must have the same bits.
Parts train_on_mesh(const Plan& plan, std::int64_t steps = 3) {
  Parts parts;
  std::mutex mutex;
  on_mesh(plan, [&](const Rank& rank) {
    OptimizerOptions options;
    options.warmup_steps = 0;
    options.total_steps = 100;
    options.clip = flushes(plan) && plan.optimizer_barrier ? 1 : 0;
    Trainer trainer(rank, plan, options, 1);
    for (std::int64_t step = 0; step < steps; ++step) trainer.step(step, random_samples(plan), steps - step);
    const std::lock_guard lock(mutex);
    for (const Parameter& p : trainer.parameters().all()) {
      const int slice = rank.coordinate(Axis::tp) / tp_replicas(p.spec, rank.size(Axis::tp));
      const auto [there, fresh] = parts.emplace(std::pair(p.spec.name, slice), as_doubles(p.value));
      if (!fresh) {
        EXPECT_EQ(there->second, as_doubles(p.value)) << p.spec.name << " rank " << rank.index();
      }
    }
  });
  return parts;
}

// Data-parallel ranks, both ends of a tied embedding, key/value heads that tp ranks share, DualPipe's copies.
TEST(CompressedTraining, CopiesStayEqual) {
  for (const std::string& compress : lossy)
    for (const Shape& shape : {Shape{3, 1, 1}, Shape{2, 4, 1}, Shape{2, 2, 2}, Shape{3, 1, 1, 2},
                               Shape{2, 1, 2, 1}, Shape{2, 1, 2, 0, "dualpipe"}})
      for (const ModelSpec& model : {odd_gpt2(true, 4), odd_llama(false, 2, 4)}) {
        if (!is_taken()) continue;
        const Plan plan = plan_of(model, shape, compress);
        SCOPED_TRACE(compress + " " + describe(plan));
        EXPECT_EQ(train_on_mesh(plan).empty(), false);
      }
}

// The first part that differs; "" where all are the same.
std::string difference(const Parts& a, const Parts& b) {
  if (a.size() != b.size()) return "other parts";
  for (const auto& [part, values] : a)
    if (!b.contains(part) || b.at(part) != values) return part.first;
  return "";
}

// What is in a bucket, on which pipeline rank and in which shard changes nothing, but that packed sums are
// rounded once less where ZeRO cuts them.
TEST(CompressedTraining, BitsDependOnTheParametersOwnGradients) {  // long
  const ModelSpec model = odd_llama(false, 2, 4);
  const Parts plain = train_on_mesh(plan_of(model, {3}, "none"));
  ASSERT_EQ(difference(train_on_mesh(plan_of(model, {3, 1, 2}, "none")), plain), "");
  for (const std::string& compress : lossy) {
    SCOPED_TRACE(compress);
    const auto difference_from = [&](const Parts& expected, const Shape& shape) {
      return difference(train_on_mesh(plan_of(model, shape, compress)), expected);
    };
    const Parts whole = train_on_mesh(plan_of(model, {3}, compress));
    EXPECT_NE(difference(whole, plain), "");
    EXPECT_EQ(difference_from(whole, {3}), "");
    EXPECT_EQ(difference_from(whole, {3, 1, 2}), "");
    EXPECT_EQ(difference_from(whole, {3, 1, 2, 0, "zb-h1"}), "");
    const Parts cut = train_on_mesh(plan_of(model, {3, 1, 1, 1}, compress));
    EXPECT_EQ(difference_from(cut, {3, 1, 1, 2}), "");
    EXPECT_EQ(difference_from(cut, {3, 1, 2, 2}), "");
    const CompressionKind kind = parse_compression(compress, "--compress").kind;
    EXPECT_EQ(difference(cut, whole).empty(), has_residuals(kind));
  }
}

TEST(CompressedTraining, NeedsNoOptimizerBarrier) {
  for (const char* compress : {"int8", "topk:0.1", "powersgd:2"}) {
    Plan plan = plan_of(odd_llama(false, 2, 4), {2, 1, 2, 0, "zb-h1"}, compress);
    plan.optimizer_barrier = false;
    Plan waiting = plan;
    waiting.optimizer_barrier = true;
    OptimizerOptions options;
    options.warmup_steps = 0;
    options.total_steps = 100;
    options.clip = 0.05;  // bites: guesses are taken back
    const auto values = [&](const Plan& p) {
      std::vector<LogicalTensors> all(static_cast<std::size_t>(p.mesh.num_ranks()));
      on_mesh(p, [&](const Rank& rank) {
        Trainer trainer(rank, p, options, 1);
        for (std::int64_t step = 0; step < 4; ++step) trainer.step(step, random_samples(p), 4 - step);
        all[static_cast<std::size_t>(rank.index())] = gather(rank, trainer, ParameterTensor::value);
      });
      return all;
    };
    EXPECT_TRUE(values(plan) == values(waiting)) << compress;
  }
}

// PipeDream steps once a microbatch: random numbers and factors differ from one to the next.
TEST(CompressedTraining, RunsWithoutFlushes) {  // long
  for (const char* schedule : {"pipedream", "2bw"})
    for (const std::string& compress : lossy) {
      Plan plan = plan_of(odd_llama(false, 2, 4), {2, 1, 2, 0, schedule}, "none");
      plan.global_batch = 8;
      const Parts plain = train_on_mesh(plan);
      plan.compression = parse_compression(compress, "--compress");
      const Parts first = train_on_mesh(plan);
      EXPECT_NE(difference(first, plain), "") << schedule << " " << compress;
      EXPECT_EQ(difference(train_on_mesh(plan), first), "") << schedule << " " << compress;
    }
}

// With all of a matrix's rank nothing is left to compress, and with all elements nothing is left out.
TEST(CompressedTraining, IsExactWhereNothingIsLeftOut) {  // long
  for (const Shape& shape : {Shape{3, 1, 1}, Shape{2, 2, 2}, Shape{2, 1, 1, 2}}) {
    const ModelSpec model = odd_gpt2(true, 4);
    EXPECT_EQ(difference(train_on_mesh(plan_of(model, shape, "powersgd:24")),
                         train_on_mesh(plan_of(model, shape, "none"))),
              "");
    for (const char* compress : {"topk:1", "powersgd:24", "powersgd:24:1"}) {
      VerifyRequest request;
      request.plan = plan_of(model, shape, compress);
      request.run.timeout = patience;
      const VerifyReport report = verify(request);
      EXPECT_TRUE(report.pass) << to_json(report, request.plan);
    }
  }
}

// PowerSGD's uncompressed first steps too: where the run ends in them, just after them, or goes on from a
// checkpoint among them.
TEST(CompressedTraining, TrafficIsPredictedForTheStepThatIsMeasured) {  // long
  const TemporaryDirectory directory;
  std::ofstream(directory / "text") << std::string(3000, 'a');
  const TokenData data({directory / "text"}, bytes_vocab);
  ModelSpec model = odd_llama(false, 2, 4);
  model.vocab = bytes_vocab;
  std::int64_t most = 0, least = std::numeric_limits<std::int64_t>::max();
  for (const char* schedule : {"1f1b", "2bw", "pipedream"})
    for (std::int64_t steps : {2, 3}) {
      Plan plan = plan_of(model, {2, 1, 2, 0, schedule}, "powersgd:2:3");
      plan.micro_batch = 1;
      plan.global_batch = 8;
      TrainRequest request = untimed();
      request.plan = plan;
      request.optimizer.warmup_steps = 0;
      request.optimizer.total_steps = steps;
      request.optimizer.clip = 0;
      request.run.timeout = patience;
      request.checkpoint_directory = directory / fmt::format("{} {}", schedule, steps);
      SCOPED_TRACE(fmt::format("{}, {} steps", schedule, steps));
      const TrainSummary first = train(request, data, {});
      EXPECT_EQ(first.predicted_traffic, first.measured_traffic);
      request.optimizer.total_steps = steps + 1;
      request.resume = true;
      const TrainSummary second = train(request, data, {});
      EXPECT_EQ(second.predicted_traffic, second.measured_traffic);
      most = std::max(most, first.measured_traffic.bytes(Axis::dp));
      least = std::min(least, second.measured_traffic.bytes(Axis::dp));
    }
  EXPECT_LT(2 * least, most);
}

TEST(CompressedTraining, VerifyRefusesWhatIsLossy) {
  for (const std::string& compress : lossy) {
    VerifyRequest request;
    request.plan = plan_of(odd_gpt2(), {2}, compress);
    // Queries, keys and values of 24 hidden have the matrix that needs most: 72 x 24 / (72 + 24).
    expect_contains(message_of<RequestError>([&] { verify(request); }),
                    {"--compress " + compress, "none", "topk:1", "at least 18"});
    request.plan.mesh.set(Axis::dp, 1);
    EXPECT_TRUE(verify(request).pass);  // nothing travels
  }
  VerifyRequest request;
  request.plan = plan_of(odd_gpt2(), {2}, "powersgd:17");
  EXPECT_THROW(verify(request), RequestError);
  request.plan = plan_of(odd_gpt2(), {2}, "powersgd:18");
  EXPECT_TRUE(verify(request).pass);
}

TEST(CompressedTraining, RefusesWhatItCannotDo) {
  Plan plan = plan_of(odd_llama(), {4}, "int8");
  plan.zero = 3;
  expect_contains(message_of<RequestError>([&] { validate(plan); }),
                  {"--compress int8", "--zero 3", "legal: none, or --zero 0, 1, 2"});
  plan.zero = 2;
  plan.hsdp = 2;
  expect_contains(message_of<RequestError>([&] { validate(plan); }),
                  {"--compress int8", "2 replicas", "--hsdp 1"});
  plan.hsdp = 1;
  EXPECT_NO_THROW(validate(plan));
  plan = plan_from_toml(to_toml(plan), "plan");
  EXPECT_EQ(plan.compression, parse_compression("int8", ""));
  expect_contains(
      message_of<RequestError>([] { plan_from_toml("model = \"gpt2-tiny\"\ncompress = \"zip\"", "plan"); }),
      {"plan: compress zip", "powersgd"});
}

// ---- checkpoints

OptimizerOptions long_run() {
  OptimizerOptions options;
  options.warmup_steps = 0;
  options.total_steps = 100;
  return options;
}

void run_steps_of(Trainer& trainer, const Plan& plan, std::int64_t from, std::int64_t to) {
  for (std::int64_t step = from; step < to; ++step) trainer.step(step, random_samples(plan), to - step);
}

std::string save(const Rank& rank, const Trainer& trainer, const Plan& plan, const std::string& directory,
                 std::int64_t step) {
  CheckpointInfo info;
  info.step = info.updates = step;
  info.seed = 1;
  info.dtype = plan.precision.master;
  info.model = plan.model;
  info.compression = plan.compression;
  return save_checkpoint(rank, trainer.parameters(), directory, info, trainer.carried());
}

// Trains and saves; the path.
std::string trained(const Plan& plan, const std::string& directory, std::int64_t steps) {
  std::string path;
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, long_run(), 1);
    run_steps_of(trainer, plan, 0, steps);
    const std::string where = save(rank, trainer, plan, directory, steps);
    if (rank.index() == 0) path = where;
  });
  return path;
}

TEST(CompressedCheckpoint, GoesOnWithTheSameBits) {
  const std::vector<Shape> shapes{{2, 4, 1}, {2, 2, 2}, {3, 1, 1, 2}};
  std::size_t turn = 0;  // two of the three for each
  for (const std::string& compress : lossy)
    for (const Shape& shape : {shapes[turn++ % 3], shapes[turn++ % 3]}) {
      if (!is_taken()) continue;
      const Plan plan = plan_of(odd_gpt2(true, 4), shape, compress);
      SCOPED_TRACE(compress + " " + describe(plan));
      const TemporaryDirectory directory;
      const std::string path = trained(plan, directory.path(), 3);
      const CheckpointInfo info = read_checkpoint_info(path);
      const auto outcome = [&](const std::function<void(const Rank&, Trainer&)>& begin) {
        std::vector<LogicalTensors> all(static_cast<std::size_t>(plan.mesh.num_ranks()));
        on_mesh(plan, [&](const Rank& rank) {
          Trainer trainer(rank, plan, long_run(), 1);
          begin(rank, trainer);
          run_steps_of(trainer, plan, 3, 5);
          all[static_cast<std::size_t>(rank.index())] = gather(rank, trainer, ParameterTensor::value);
        });
        return all;
      };
      const auto uninterrupted =
          outcome([&](const Rank&, Trainer& trainer) { run_steps_of(trainer, plan, 0, 3); });
      EXPECT_TRUE(uninterrupted == outcome([&](const Rank& rank, Trainer& trainer) {
                    load_checkpoint(rank, trainer.parameters(), info, false, trainer.carried());
                    trainer.resume(3, 3);
                  }));
      EXPECT_EQ(info.residual_ranks, has_residuals(plan.compression.kind) ? shape.dp : 0);
      // And it is what is carried over that does it.
      EXPECT_EQ(uninterrupted == outcome([&](const Rank& rank, Trainer& trainer) {
                  CheckpointInfo without = info;
                  without.residual_ranks = 0;
                  load_checkpoint(rank, trainer.parameters(), without, false);
                  trainer.resume(3, 3);
                }),
                info.residual_ranks == 0);
    }
}

// What is carried is wider than bf16's weights.
TEST(CompressedCheckpoint, IsWholeInBf16) {
  if (!has_cpu_kernels()) GTEST_SKIP() << "on the reference kernels alone";
  for (const char* compress : {"topk:0.1", "powersgd:2"}) {
    Plan plan = plan_of(odd_gpt2(true, 4), {2, 1, 1}, compress);
    plan.precision = recipe("bf16-lean");
    const TemporaryDirectory directory;
    const std::string path = trained(plan, directory.path(), 2);
    EXPECT_NO_THROW(check_checkpoint(path, {})) << compress;
    EXPECT_TRUE(diff_checkpoints(path, path, {}).empty());
  }
}

// What is not trained sends nothing, and carries nothing.
TEST(CompressedCheckpoint, HasNothingOfFrozenParameters) {
  for (const char* compress : {"topk:0.1", "powersgd:1"}) {
    Plan plan = plan_of(odd_gpt2(true, 4), {2, 1, 1}, compress);
    plan.model.tuning.freeze = {"*mlp*"};
    const TemporaryDirectory directory;
    const std::string path = trained(plan, directory.path(), 2);
    EXPECT_NO_THROW(check_checkpoint(path, {})) << compress;
    int carried = 0;
    for (const std::string& name : CheckpointReader(path).names()) {
      const bool is_carried = name.find(".residual.") != name.npos || name.find(".factor.") != name.npos;
      EXPECT_FALSE(is_carried && name.find("mlp") != name.npos) << compress << ": " << name;
      carried += is_carried;
    }
    EXPECT_GT(carried, 0) << compress;
  }
}

// Residuals of all dp ranks together, logical.
LogicalTensors total_residuals(const Plan& plan, const std::function<void(const Rank&, Trainer&)>& begin) {
  LogicalTensors total;
  std::mutex mutex;
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, long_run(), 1);
    begin(rank, trainer);
    for (const CarriedTensor& c : trainer.carried()) {
      if (c.what != "residual") continue;
      const Parameter& p = trainer.parameters().find(c.parameter);
      const std::vector<double> mine = as_doubles(gather_logical(rank, p.spec, c.tensor));
      if (rank.coordinate(Axis::tp) > 0 || p.holders.front() != rank.coordinate(Axis::pp)) continue;
      const std::lock_guard lock(mutex);
      std::vector<double>& sum = total[c.parameter];
      sum.resize(mine.size());
      for (std::size_t i = 0; i < mine.size(); ++i) sum[i] += mine[i];
    }
  });
  return total;
}

TEST(CompressedCheckpoint, AnotherMeshKeepsTheSumOfTheResiduals) {  // long
  const ModelSpec model = odd_gpt2(true, 4);
  for (const char* compress : {"topk:0.1", "powersgd:1"}) {
    const Plan from = plan_of(model, {4, 2, 1}, compress);
    const TemporaryDirectory directory;
    const std::string path = trained(from, directory.path(), 2);
    const CheckpointInfo info = read_checkpoint_info(path);
    const LogicalTensors expected =
        total_residuals(from, [&](const Rank&, Trainer& trainer) { run_steps_of(trainer, from, 0, 2); });
    ASSERT_FALSE(expected.empty());
    for (const Shape& shape : {Shape{2, 1, 1}, Shape{3, 2, 2}, Shape{5, 1, 1}, Shape{2, 1, 2, 1}}) {
      const Plan to = plan_of(model, shape, compress);
      const LogicalTensors loaded = total_residuals(to, [&](const Rank& rank, Trainer& trainer) {
        load_checkpoint(rank, trainer.parameters(), info, false, trainer.carried());
      });
      ASSERT_EQ(loaded.size(), expected.size());
      for (const auto& [name, sum] : expected) {
        double largest = 0;
        for (double x : sum) largest = std::max(largest, std::abs(x));
        EXPECT_GT(largest, 0) << name;
        // Sums of four ranks' numbers, grouped in another way; those may be larger than what they add up to.
        for (std::size_t i = 0; i < sum.size(); ++i)
          ASSERT_NEAR(loaded.at(name)[i], sum[i], 64 * 0x1p-52 * largest) << name;
      }
    }
  }
}

TEST(CompressedCheckpoint, LosesNoResidualSilently) {
  const ModelSpec model = odd_gpt2(true, 4);
  const TemporaryDirectory directory;
  const std::string path = trained(plan_of(model, {2}, "powersgd:2"), directory.path(), 2);
  const CheckpointInfo info = read_checkpoint_info(path);
  for (const Plan& plan :
       {plan_of(model, {1}, "powersgd:2"), plan_of(model, {2}, "none"), plan_of(model, {2}, "powersgd:24")})
    expect_contains(message_of<RequestError>([&] {
                      on_mesh(plan, [&](const Rank& rank) {
                        Trainer trainer(rank, plan, long_run(), 1);
                        load_checkpoint(rank, trainer.parameters(), info, false, trainer.carried());
                      });
                    }),
                    {"--resume", path, "not sent yet", "legal: --compress powersgd:2"});
  // Top-k has a place for all of them, and starts without where there are none.
  const Plan topk = plan_of(model, {3}, "topk:0.1");
  EXPECT_NO_THROW(on_mesh(topk, [&](const Rank& rank) {
    Trainer trainer(rank, topk, long_run(), 1);
    load_checkpoint(rank, trainer.parameters(), info, false, trainer.carried());
  }));
}

}  // namespace
}  // namespace echelon::compressed_training_test

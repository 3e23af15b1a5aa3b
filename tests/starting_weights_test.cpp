// Training that starts from weights, rather than from new ones.
#include "checkpoint/starting_weights.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "checkpoint/hugging_face.h"
#include "mesh_runs.h"
#include "patience.h"
#include "refusals.h"
#include "temporary_directory.h"
#include "train/session.h"
#include "untimed.h"

namespace echelon::starting_weights_test {
namespace {

using namespace checks;
namespace fs = std::filesystem;

const fs::path fixtures = fs::path(ECHELON_SOURCE_DIR) / "tests/fixtures/hugging_face";

class FromWeights : public testing::Test {
 protected:
  TrainRequest request(const std::string& model, const PrecisionRecipe& precision, const Mesh& mesh,
                       int zero) const {
    TrainRequest r = untimed();
    r.plan.model = load_model((fixtures / model).string());
    r.plan.precision = precision;
    r.plan.mesh = mesh;
    r.plan.zero = zero;
    r.plan.global_batch = 4;
    r.plan.micro_batch = 1;
    r.plan.seq_len = 8;
    r.optimizer.total_steps = 3;
    r.optimizer.warmup_steps = 0;
    r.optimizer.lr = 0.01;
    r.run.timeout = patience;
    r.validation_fraction = 0;
    return r;
  }
  std::vector<double> losses(const TrainRequest& request) const {
    std::vector<std::int32_t> ids;
    for (std::int64_t i = 0; i < 500; ++i)
      ids.push_back(static_cast<std::int32_t>(i * i % 91 % request.plan.model.vocab));
    const std::string path = directory_ / "tokens.bin";
    if (!fs::exists(path)) write_token_file(path, ids, 2);
    const TokenData data({path}, request.plan.model.vocab);
    std::vector<double> all;
    TrainObserver observer;
    observer.on_step = [&](const StepRecord& record) { all.push_back(record.loss); };
    train(request, data, observer);
    return all;
  }
  std::shared_ptr<const StartingWeights> weights(const std::string& path) const {
    return std::make_shared<const StartingWeights>(path);
  }

  const TemporaryDirectory directory_;
};

Mesh mesh_of(Axis axis, int size) {
  Mesh mesh;
  mesh.set(axis, size);
  return mesh;
}

// The way over `checkpoint import` and --resume, which the fixtures of transformers hold to its numbers.
TEST_F(FromWeights, AreThoseThatAnImportContinuesFrom) {  // long
  int runs = 0;
  for (const char* model : {"gpt2", "llama", "mixtral"})
    for (const auto& [mesh, zero] : {std::pair{Mesh{}, 0},
                                     {mesh_of(Axis::tp, 2), 0},
                                     {mesh_of(Axis::pp, 2), 0},
                                     {mesh_of(Axis::dp, 2), 3}}) {
      TrainRequest imported = request(model, DType::f64, mesh, zero), direct = imported;
      imported.checkpoint_directory = directory_ / fmt::format("imported-{}", runs++);
      import_hugging_face((fixtures / model).string(), imported.checkpoint_directory, DType::f64,
                          imported.seed);
      imported.resume = true;
      direct.from = weights((fixtures / model).string());
      const std::vector<double> expected = losses(imported), found = losses(direct);
      ASSERT_EQ(expected.size(), 3u);
      EXPECT_EQ(found, expected) << model << " on " << mesh.describe();
      direct.from = nullptr;
      EXPECT_NE(losses(direct).front(), expected.front());
    }
}

TEST_F(FromWeights, OfACheckpointBeginAnewInAnyDtype) {
  TrainRequest first = request("llama", DType::f64, Mesh{}, 0);
  first.from = weights((fixtures / "llama").string());
  first.checkpoint_directory = directory_ / "first";
  first.optimizer.total_steps = 2;
  losses(first);
  TrainRequest whole = request("llama", DType::f64, Mesh{}, 0), next = whole;
  whole.from = first.from;
  const std::vector<double> uncut = losses(whole);
  next.from = weights(directory_ / "first");
  EXPECT_EQ(next.from->checkpoint()->step, 2);
  next.optimizer.total_steps = 1;
  const double begin = losses(next).front();  // step 0: other samples than the third step of the whole run
  next.plan.precision = DType::f32;
  next.plan.mesh.set(Axis::tp, 2);
  EXPECT_NEAR(losses(next).front(), begin, 1e-5);
  EXPECT_NE(begin, uncut.front());
}

TEST_F(FromWeights, AreRefusedWhereTheyDoNotFit) {
  const std::string gpt2 = (fixtures / "gpt2").string();
  ModelSpec other = load_model(gpt2);
  other.name = "another name";
  weights(gpt2)->refuse_other_model(other);
  other.num_layers += 1;
  expect_refusal(
      [&] { weights(gpt2)->refuse_other_model(other); },
      {"--model another name", fmt::format("layers = {}", other.num_layers), "--from", "leave out --model"});
  fs::create_directory(directory_ / "bare");
  expect_refusal([&] { weights(directory_ / "bare"); }, {"--from", "config.json", "checkpoint"});
  fs::copy_file(fixtures / "gpt2/config.json", directory_ / "bare/config.json");
  expect_refusal([&] { weights(directory_ / "bare"); }, {"--from", "no weights"});
  expect_refusal([&] { weights(directory_ / "none"); }, {"--from", "no such directory"});
  TrainRequest both = request("gpt2", DType::f64, Mesh{}, 0);
  both.from = weights(gpt2);
  both.checkpoint_directory = directory_ / "both";
  fs::create_directory(both.checkpoint_directory);
  both.resume = true;
  expect_refusal([&] { losses(both); }, {"--from", "--resume"});
}

// The one window of the records is a sequence and its next token (fixtures/fine_tune/make_fixture.py).
TEST_F(FromWeights, AreTunedOnRecordsWithTheLossOfTransformers) {  // long
  const fs::path fixture = fs::path(ECHELON_SOURCE_DIR) / "tests/fixtures/fine_tune";
  const auto expected = nlohmann::json::parse(read_text((fixture / "expected.json").string()));
  DataReading reading;
  reading.text = text_tokens(fixture.string());
  reading.cache_directory = directory_ / "cache";
  const auto from = weights(fixture.string());
  const TokenData data({(fixture / "records.jsonl").string()}, from->model().vocab, reading);
  const std::vector<std::int32_t> ids = expected["ids"], labels = expected["labels"];
  ASSERT_EQ(data.size(), std::ssize(ids));
  std::vector<std::int32_t> marked(ids.size());
  data.copy_marked(0, data.size(), marked.data());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(marked[i] & 0x7fffffff, ids[i]) << i;
    EXPECT_EQ(marked[i] < 0, labels[i] < 0) << i;
  }
  Mesh both = mesh_of(Axis::tp, 2);
  both.set(Axis::pp, 2);
  for (const Mesh& mesh : {Mesh{}, mesh_of(Axis::tp, 2), mesh_of(Axis::pp, 2), both})
    for (const DType dtype : {DType::f64, DType::f32}) {
      if (dtype == DType::f32 && !has_cpu_kernels()) continue;
      TrainRequest r = untimed();
      r.plan.model = from->model();
      r.plan.precision = dtype;
      r.plan.mesh = mesh;
      r.plan.global_batch = r.plan.micro_batch = 1;
      r.plan.seq_len = data.size() - 1;
      r.optimizer.total_steps = 1;
      r.optimizer.warmup_steps = 0;
      r.run.timeout = patience;
      r.validation_fraction = 0;
      r.from = from;
      const TrainSummary summary = train(r, data, {});
      EXPECT_NEAR(summary.final_loss, expected["loss"].get<double>(), dtype == DType::f64 ? 1e-12 : 1e-5)
          << mesh.describe();
    }
}

}  // namespace
}  // namespace echelon::starting_weights_test

// Biases of loss-free balancing as state: saved by any mesh, loaded by any other, and used by all that
// routes.
#include "checkpoint/router_biases.h"

#include <gtest/gtest.h>

#include "checkpoint/hugging_face.h"
#include "expert_runs.h"
#include "train/generate.h"
#include "train/session.h"
#include "untimed.h"

namespace echelon::router_biases_test {
namespace {

using namespace checks;

constexpr double rate = 0.05;

Plan balanced_plan(const ModelSpec& model, int dp = 1, int tp = 1, int pp = 1) {
  Plan plan = odd_plan(model, dp, tp, tp > 1);
  plan.mesh.set(Axis::pp, pp);
  plan.global_batch = 12;
  plan.balancing.bias_rate = rate;
  return plan;
}

// Saves what three steps make, and returns the biases of all layers.
RouterBiases train_and_save(const Plan& plan, const std::string& directory) {
  std::vector<RouterBiases> of_rank(static_cast<std::size_t>(plan.mesh.num_ranks()));
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, {}, 1);
    for (std::int64_t step = 0; step < 3; ++step) trainer.step(step, random_samples(plan), 3 - step);
    CheckpointInfo info;
    info.step = 3;
    info.model = plan.model;
    of_rank[static_cast<std::size_t>(rank.index())] = trainer.stages().router_biases();
    save_checkpoint(rank, trainer.parameters(), directory, info, {}, trainer.stages().router_biases());
  });
  RouterBiases all;
  for (const RouterBiases& biases : of_rank)
    for (const auto& [layer, bias] : biases) {
      const auto [found, fresh] = all.try_emplace(layer, bias);
      EXPECT_EQ(found->second, bias) << "ranks that hold layer " << layer << " differ";
    }
  return all;
}

RouterBiases read(const std::string& directory) {
  CheckpointReader reader(read_checkpoint_info(directory).path);
  return read_router_biases(reader);
}

TEST(RouterBiases, AreSavedOnceByEveryMesh) {
  const TemporaryDirectory alone;
  const RouterBiases expected = train_and_save(balanced_plan(odd_deepseek(4)), alone / "one");
  ASSERT_EQ(expected.size(), 3u);
  for (const auto& [layer, bias] : expected) {
    const auto [least, most] = std::minmax_element(bias.begin(), bias.end());
    EXPECT_LT(*least, *most) << layer;
    EXPECT_LE(*most - *least, 6 * rate * (1 + 1e-15));
  }
  EXPECT_EQ(read(alone / "one"), expected);
  for (auto [dp, tp, pp, schedule] :
       {std::tuple{2, 2, 1, "1f1b"}, {1, 2, 2, "zb-v"}, {2, 1, 2, "dualpipe"}}) {
    const TemporaryDirectory directory;
    Plan plan = balanced_plan(odd_deepseek(4), dp, tp, pp);
    plan.schedule = schedule;
    if (dp > 1) plan.micro_batch = 1;
    EXPECT_EQ(train_and_save(plan, directory / "mesh"), expected) << schedule;
    EXPECT_EQ(read(directory / "mesh"), expected) << schedule;
  }
}

TEST(RouterBiases, SteerEvaluationAndGenerationAndStayWhereNothingMovesThem) {
  const TemporaryDirectory directory;
  ModelSpec model = odd_mixtral();
  model.init_std = 0.5;  // lively: another expert makes another text
  const Plan trained = balanced_plan(model);
  const RouterBiases expected = train_and_save(trained, directory.path());
  for (int tp : {1, 2}) {
    Plan plan = balanced_plan(model, 1, tp);
    plan.balancing = {};
    on_mesh(plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, {}, 7);
      const CheckpointInfo info = read_checkpoint_info(directory.path());
      const RouterBiases biases = load_checkpoint(rank, trainer.parameters(), info, true);
      EXPECT_EQ(biases, expected);
      RouterBiases strong = biases;
      for (auto& [layer, bias] : strong) bias.back() += 10;
      GenerateOptions likely;
      likely.max_tokens = 12;
      likely.temperature = 1;
      const auto text = [&](const RouterBiases& with) {
        return generate(rank, plan, trainer.parameters(), with, {3, 52, 0}, likely);
      };
      EXPECT_NE(text(strong), text({}));
      const double without = trainer.evaluate(4, random_samples(plan));
      trainer.stages().set_router_biases(strong);
      EXPECT_NE(trainer.evaluate(4, random_samples(plan)), without);
      trainer.step(0, random_samples(plan), 1);
      EXPECT_EQ(trainer.stages().router_biases(), strong);
    });
  }
}

TEST(RouterBiases, AreNotLostWhereTheyHaveNoPlace) {
  const TemporaryDirectory directory;
  Plan plan = balanced_plan(odd_mixtral());
  plan.model.vocab = bytes_vocab;
  train_and_save(plan, directory / "run");
  expect_contains(message_of<RequestError>(
                      [&] { export_hugging_face(directory / "run", directory / "exported", 1 << 20); }),
                  {"step-00000003", "biases", "--bias-rate"});
  TrainRequest request = untimed();
  request.plan = plan;
  request.plan.balancing = {};
  request.plan.mesh.set(Axis::dp, 2);
  request.optimizer.total_steps = 6;
  request.optimizer.warmup_steps = 0;
  request.asynchronous.emplace();
  request.checkpoint_directory = directory / "run";
  request.resume = true;
  request.seed = 0;  // as train_and_save() says
  request.plan.precision = DType::f64;
  write_text(directory / "text", std::string(2000, 'x'));
  const TokenData data({directory / "text"}, plan.model.vocab);
  expect_contains(message_of<RequestError>([&] { train(request, data, {}); }),
                  {"--resume", "biases", "--staleness"});
}

}  // namespace
}  // namespace echelon::router_biases_test

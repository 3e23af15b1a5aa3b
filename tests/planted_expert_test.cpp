#include "train/planted_expert.h"

#include <gtest/gtest.h>

#include "expert_runs.h"
#include "train/session.h"
#include "untimed.h"

namespace echelon::planted_expert_test {
namespace {

using namespace checks;

struct Planted {
  LogicalTensors values;
  std::vector<RoutingCounts> routing;
};

Planted planted_on(const Plan& plan, const std::optional<PlantedExpert>& planted) {
  Planted result;
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, {}, 1);
    if (planted) plant_expert(trainer.parameters(), plan.model, *planted);
    const LogicalTensors values = gather(rank, trainer, ParameterTensor::value);
    trainer.compute_gradients(0, random_samples(plan));
    if (rank.index() == 0) result = {values, trainer.routing()};
  });
  return result;
}

// A router's row and the embeddings move, nothing else, and by the same on every mesh and ZeRO stage.
TEST(PlantedExpert, IsTheSameOnEveryMesh) {
  for (const ModelSpec& model : {odd_mixtral(), odd_deepseek()}) {
    const Plan alone = odd_plan(model, 1, 1, false);
    const Planted before = planted_on(alone, {}), expected = planted_on(alone, PlantedExpert{2, 3});
    for (const auto& [name, values] : expected.values) {
      const bool table = name == "model.embed_tokens.weight", router = name.ends_with("gate.weight");
      for (std::size_t i = 0; i < values.size(); ++i) {
        const double moved = values[i] - before.values.at(name)[i];
        const bool row = router && i / static_cast<std::size_t>(model.hidden) == 2;
        if (table)
          EXPECT_NEAR(moved, model.init_std, 1e-15) << name;
        else
          EXPECT_EQ(moved > 0, row) << name << " " << i;
      }
    }
    for (auto [dp, tp, pp, zero] : {std::tuple{2, 2, 1, 0}, {3, 1, 1, 1}, {2, 1, 1, 3}, {2, 2, 2, 2}}) {
      Plan plan = odd_plan(model, dp, tp, tp > 1);
      plan.mesh.set(Axis::pp, pp);
      plan.zero = zero;
      const Planted found = planted_on(plan, PlantedExpert{2, 3});
      EXPECT_GE(found.values.size(), expected.values.size() / static_cast<std::size_t>(pp) - 1);
      for (const auto& [name, values] : found.values)  // those of the first stage
        EXPECT_TRUE(values == expected.values.at(name)) << name << ", " << describe_experts(plan);
      ASSERT_EQ(found.routing.size(), expected.routing.size());
      for (std::size_t i = 0; i < found.routing.size(); ++i)
        EXPECT_EQ(found.routing[i].routed, expected.routing[i].routed) << describe_experts(plan);
    }
  }
}

TEST(PlantedExpert, IsChosenByNearlyEveryToken) {
  const Plan plan = odd_plan(odd_mixtral(), 1, 1, false);
  const auto tokens = static_cast<double>(plan.global_batch * plan.seq_len);
  EXPECT_LT(planted_on(plan, {}).routing.front().routed[4], 0.7 * tokens);
  EXPECT_GT(planted_on(plan, PlantedExpert{4, 8}).routing.front().routed[4], 0.95 * tokens);
}

TEST(PlantedExpert, IsRefusedWhereThereIsNone) {
  const TemporaryDirectory directory;
  write_text(directory / "text", std::string(2000, 'x'));
  const TokenData data({directory / "text"}, bytes_vocab);
  const auto refusal = [&](const PlantedExpert& planted, const std::function<void(TrainRequest&)>& change) {
    TrainRequest request = untimed();
    request.plan = odd_plan(odd_mixtral(), 1, 1, false);
    request.plan.model.vocab = bytes_vocab;
    request.planted_expert = planted;
    request.optimizer.total_steps = 20;
    change(request);
    return message_of<RequestError>([&] { train(request, data, {}); });
  };
  const auto same = [](TrainRequest&) {};
  expect_contains(refusal({5, 1}, same), {"--plant-expert 5:1", "0 to 4"});
  expect_contains(refusal({-1, 1}, same), {"--plant-expert -1:1", "0 to 4"});
  expect_contains(refusal({0, 0}, same), {"--plant-expert 0:0", "above 0"});
  expect_contains(refusal({0, std::nan("")}, same), {"--plant-expert 0:nan", "above 0"});
  expect_contains(refusal({0, 1}, [](TrainRequest& r) { r.plan.model = odd_llama(); }), {"no experts"});
  expect_contains(refusal({0, 1},
                          [](TrainRequest& r) {
                            r.asynchronous.emplace();
                            r.optimizer.clip = 0;
                          }),
                  {"--plant-expert 0:1", "--staleness"});
}

}  // namespace
}  // namespace echelon::planted_expert_test

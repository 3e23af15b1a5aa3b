// What a run says of its experts: the same on every mesh, of every layer, in the log, the records and the
// summary.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "bottles.h"
#include "case_choice.h"
#include "expert_runs.h"
#include "train/session.h"
#include "untimed.h"

namespace echelon::expert_load_test {
namespace {

using namespace checks;
using nlohmann::json;

class ExpertLoads : public testing::Test {
 protected:
  ExpertLoads() {
    write_text(directory_ / "text", bottles(60));
    data_ = std::make_unique<TokenData>(std::vector{directory_ / "text"}, bytes_vocab);
  }

  static Plan plan_of() {
    Plan plan = odd_plan(odd_deepseek(4), 1, 1, false);  // the first layer has no experts
    plan.model.vocab = bytes_vocab;
    plan.global_batch = 8;
    plan.seq_len = 12;
    plan.balancing = all_losses();
    plan.balancing.capacity = 1;
    return plan;
  }

  struct Said {
    std::vector<StepRecord> records;
    TrainSummary summary;
    std::vector<json> log;
  };
  Said run(const Plan& plan) const {
    TrainRequest request = untimed();
    request.plan = plan;
    request.optimizer.total_steps = 2;
    request.optimizer.warmup_steps = 0;
    request.run.timeout = patience;
    request.log_paths = {directory_ / "log"};
    Said said;
    TrainObserver keep;
    keep.on_step = [&](const StepRecord& r) { said.records.push_back(r); };
    said.summary = train(request, *data_, keep);
    std::istringstream lines(read_bytes(directory_ / "log"));
    for (std::string line; std::getline(lines, line);) said.log.push_back(json::parse(line));
    std::filesystem::remove(directory_ / "log");
    return said;
  }

  const TemporaryDirectory directory_;
  std::unique_ptr<TokenData> data_;
};

TEST_F(ExpertLoads, AreTheSameOnEveryMesh) {
  const Said expected = run(plan_of());
  ASSERT_EQ(expected.records.size(), 2u);
  ASSERT_EQ(expected.records[0].experts.size(), 3u);
  for (const StepRecord& record : expected.records)
    for (std::size_t i = 0; i < record.experts.size(); ++i) {
      const ExpertLoad& load = record.experts[i];
      EXPECT_EQ(load.layer, static_cast<std::int64_t>(i) + 1);
      double tokens = 0, dropped = 0, most = 0;
      for (std::size_t e = 0; e < load.tokens.size(); ++e) {
        tokens += load.tokens[e];
        dropped += load.dropped[e];
        most = std::max(most, load.tokens[e]);
      }
      EXPECT_EQ(tokens, 8 * 12 * 4);
      EXPECT_DOUBLE_EQ(load.imbalance, most * 6 / tokens);
      EXPECT_DOUBLE_EQ(load.drop_rate, dropped / tokens);
      EXPECT_GT(load.drop_rate, 0);
      EXPECT_GT(load.balance_loss, 0);
    }
  struct On {
    int pp, dp, cp, tp, ep;
    const char* schedule;
  };
  // With pp 4 the first rank has no layer with experts, with ep 2 no rank has all experts of one.
  for (const On& on : {On{4, 1, 1, 1, 1, "1f1b"},
                       {1, 2, 1, 2, 1, "1f1b"},
                       {1, 1, 2, 1, 1, "1f1b"},
                       {2, 1, 1, 1, 1, "dualpipe"},
                       {2, 1, 1, 2, 1, "zb-v"},
                       {1, 2, 1, 1, 2, "1f1b"}}) {
    if (!is_taken(3)) continue;
    Plan plan = plan_of();
    plan.mesh.set(Axis::pp, on.pp), plan.mesh.set(Axis::dp, on.dp), plan.mesh.set(Axis::cp, on.cp);
    plan.mesh.set(Axis::tp, on.tp);
    plan.mesh.ep = on.ep;
    plan.sequence_parallel = on.tp > 1;
    plan.schedule = on.schedule;
    SCOPED_TRACE(describe_experts(plan));
    const Said said = run(plan);
    ASSERT_EQ(said.records.size(), 2u);
    for (std::size_t step = 0; step < 2; ++step) {
      ASSERT_EQ(said.records[step].experts.size(), 3u);
      for (std::size_t i = 0; i < 3; ++i) {
        const ExpertLoad &a = expected.records[step].experts[i], &b = said.records[step].experts[i];
        EXPECT_EQ(b.layer, a.layer);
        EXPECT_EQ(b.tokens, a.tokens);
        EXPECT_EQ(b.dropped, a.dropped);
        EXPECT_EQ(b.imbalance, a.imbalance);
        EXPECT_EQ(b.drop_rate, a.drop_rate);
        EXPECT_NEAR(b.balance_loss, a.balance_loss, 1e-12 * a.balance_loss);
      }
    }
  }
}

TEST_F(ExpertLoads, AreInTheLogAndTheSummary) {
  Plan plan = plan_of();
  plan.mesh.set(Axis::pp, 2);
  const Said said = run(plan);
  ASSERT_EQ(said.summary.experts.size(), 3u);
  std::vector<json> steps;
  for (const json& line : said.log)
    if (line.contains("loss")) steps.push_back(line);
  ASSERT_EQ(steps.size(), 2u);
  for (std::size_t step = 0; step < 2; ++step)
    for (std::size_t i = 0; i < 3; ++i) {
      const json& logged = steps[step]["experts"][i];
      const ExpertLoad& load = said.records[step].experts[i];
      EXPECT_EQ(logged["layer"], load.layer);
      EXPECT_EQ(logged["imbalance"], load.imbalance);
      EXPECT_EQ(logged["drop_rate"], load.drop_rate);
      EXPECT_EQ(logged["tokens"], load.tokens);
      EXPECT_EQ(logged["dropped"], load.dropped);
    }
  EXPECT_EQ(json::parse(to_json(said.summary))["experts"], steps[1]["experts"]);
  const std::string table = expert_table(said.summary.experts), note = expert_note(said.summary.experts);
  for (int layer : {1, 2, 3})
    EXPECT_NE(table.find(fmt::format("layer {}", layer)), std::string::npos) << table;
  EXPECT_NE(note.find("% dropped"), std::string::npos) << note;
  // A model without experts says nothing of them.
  Plan dense = odd_plan(odd_llama(), 1, 1, false);
  dense.model.vocab = bytes_vocab;
  const Said none = run(dense);
  EXPECT_FALSE(none.log.front().contains("experts"));
  EXPECT_FALSE(json::parse(to_json(none.summary)).contains("experts"));
  EXPECT_EQ(expert_note(none.summary.experts), "");
}

}  // namespace
}  // namespace echelon::expert_load_test

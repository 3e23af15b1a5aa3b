#include "train/metrics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace echelon::metrics_test {
namespace {

TrainSummary met() {
  TrainSummary s;
  s.predicted_memory[MemoryCategory::activations] = s.measured_memory[MemoryCategory::activations] = 1000;
  s.predicted_traffic.at(Axis::tp, Verb::all_reduce).bytes =
      s.measured_traffic.at(Axis::tp, Verb::all_reduce).bytes = 500;
  s.predicted_step_seconds = 1.05;
  s.step_seconds = 1;
  s.predicted_bubble = 0.15;
  s.measured_bubble = 0.2;
  return s;
}

using Lines = std::vector<std::string>;

TEST(Metrics, SaysWhichPredictionsWereMissed) {
  EXPECT_TRUE(missed_predictions(met()).empty());
  TrainSummary slow = met();
  slow.step_seconds = 2;
  EXPECT_EQ(missed_predictions(slow), Lines{"step time: the prediction is 48% below what was measured"});
  TrainSummary large = met();
  large.measured_memory[MemoryCategory::other] = 200;
  EXPECT_EQ(missed_predictions(large), Lines{"memory: the prediction is 17% below what was measured"});
  TrainSummary idle = met();
  idle.measured_bubble = 0.3;
  EXPECT_EQ(missed_predictions(idle), Lines{"bubble: 15.0% of the step predicted, 30.0% measured"});
  TrainSummary chatty = met();
  chatty.measured_traffic.at(Axis::dp, Verb::all_gather).bytes = 500;
  EXPECT_EQ(missed_predictions(chatty), Lines{"traffic: the prediction is 50% below what was measured"});
  // A sentence for each, without the line breaks of a page.
  EXPECT_NE(to_json(slow).find(
                R"("missed_predictions":["step time: the prediction is 48% below what was measured"])"),
            std::string::npos)
      << to_json(slow);
}

StepRecord step_400() {
  StepRecord r;
  r.step = 399;
  r.loss = 1.23456;
  r.grad_norm = 0.41;
  r.lr = 5e-3;
  r.tokens_per_second = 12345.6;
  r.mfu = 0.694;
  return r;
}

// Of two ranks, too: the slower one is no yardstick of itself.
TEST(Metrics, ASlowRankIsComparedWithTheOthers) {
  EXPECT_EQ((WorkSpread{1, 2, {0.5, 2}}.slowdown()), 4);
  EXPECT_EQ((WorkSpread{1, 2, {3, 0.5, 1, 1}}.slowdown()), 3);
  EXPECT_EQ((WorkSpread{1, 2, {1, 1, 1}}.slowdown()), 1);
  EXPECT_EQ((WorkSpread{1, 2, {0, 0.5}}.slowdown()), 1);
}

TEST(Metrics, AProgressLineFitsTheTerminal) {
  EXPECT_EQ(step_line(step_400(), 400, 99, 79),
            "step 399/400  loss 1.2346  grad 0.410  lr 5.00e-03   12346 tokens/s  ETA 1m39s");
  EXPECT_EQ(step_line(step_400(), 400, 99, 120),
            "step 399/400  loss 1.2346  grad 0.410  lr 5.00e-03   12346 tokens/s  MFU 69.4%  ETA 1m39s");
  EXPECT_EQ(step_line(step_400(), 400, 99, 50), "step 399/400  loss 1.2346   12346 tokens/s");
  StepRecord routed = step_400();
  routed.experts = {{0, 1.234, 0.01, 0, {}, {}}};
  for (int columns : {20, 40, 60, 79, 100, 200})
    for (const StepRecord& r : {step_400(), routed}) {
      const std::string line = step_line(r, 400, 1e7, columns);
      EXPECT_TRUE(line.starts_with("step 399/400  loss 1.2346")) << line;
      EXPECT_LE(line.size(), static_cast<std::size_t>(std::max(columns, 26))) << line;
    }
}

TEST(Metrics, TheTimeLeftIsNoNonsense) {
  StepRecord last = step_400();
  last.step = 400;
  EXPECT_EQ(step_line(last, 400, 0, 200).find("ETA"), std::string::npos);
  EXPECT_NE(step_line(step_400(), 400, 1e-4, 200).find("ETA 1s"), std::string::npos);
  last.grad_norm = std::nan("");
  EXPECT_EQ(step_line(last, 400, 0, 200).find("grad"), std::string::npos);
}

TEST(Metrics, NoNumberHasASign) {
  StepRecord lost = step_400();
  for (const double nan : {std::nan(""), -std::nan("")}) {
    lost.loss = nan;
    EXPECT_TRUE(step_line(lost, 400, 99, 200).starts_with("step 399/400  loss nan  "));
  }
}

}  // namespace
}  // namespace echelon::metrics_test

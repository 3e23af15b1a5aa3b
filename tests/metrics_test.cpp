#include "train/metrics.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace echelon::metrics_test

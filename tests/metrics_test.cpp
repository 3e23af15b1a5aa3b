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

TEST(Metrics, SaysWhichPredictionsWereMissed) {
  EXPECT_EQ(missed_predictions(met()), "");
  TrainSummary slow = met();
  slow.step_seconds = 2;
  EXPECT_NE(missed_predictions(slow).find("step time: the prediction is 48% below"), std::string::npos)
      << missed_predictions(slow);
  TrainSummary large = met();
  large.measured_memory[MemoryCategory::other] = 200;
  EXPECT_NE(missed_predictions(large).find("memory: the prediction is 17% below"), std::string::npos)
      << missed_predictions(large);
  TrainSummary idle = met();
  idle.measured_bubble = 0.3;
  EXPECT_NE(missed_predictions(idle).find("bubble: 15.0% of the step predicted, 30.0% measured"),
            std::string::npos);
  TrainSummary chatty = met();
  chatty.measured_traffic.at(Axis::dp, Verb::all_gather).bytes = 500;
  EXPECT_NE(missed_predictions(chatty).find("traffic: the prediction is 50% below"), std::string::npos);
  EXPECT_NE(to_json(slow).find("missed_predictions"), std::string::npos);
}

}  // namespace
}  // namespace echelon::metrics_test

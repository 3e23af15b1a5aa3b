// A request of which nothing is timed before the run: most tests of whole trainings look at no prediction of
// seconds, and what is timed for one computes for longer than their steps. `rehearsal` tests it, and what
// runs the program times as its users do.
#pragma once

#include "train/session.h"

namespace echelon::checks {

inline TrainRequest untimed() {
  TrainRequest request;
  request.priced_step = StepPrediction{};
  request.peak_flops = 1e12;
  return request;
}

}  // namespace echelon::checks

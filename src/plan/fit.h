// Fits a machine and a training program to measurements of a cluster.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "plan/measurements.h"

namespace echelon {

// A measurement beside its predictions: before the fit, after it, and, if there are enough measurements, from
// a fit without it (collectives: without all of its size).
struct FitRow {
  std::string what;
  double measured_seconds = 0, before_seconds = 0, fitted_seconds = 0;
  std::optional<double> left_out_seconds{};
};

// Mean of |predicted / measured - 1| over the rows that have a prediction; 0 if there are none.
double mean_error(const std::vector<FitRow>& rows, double FitRow::*predicted);
double mean_left_out_error(const std::vector<FitRow>& rows);

struct MachineFit {
  Machine machine;
  std::vector<FitRow> products, collectives;
};
// Fits the machine's numbers for products, if some were measured (efficiency, tiles, fixed depth), and of the
// links that collectives crossed, starting from those of `start`. RequestError for a collective over more
// ranks than the machine has, and for a product above its peak.
MachineFit fit_machine(const Machine& start, const std::vector<MeasuredProduct>& products,
                       const std::vector<MeasuredCollective>& collectives);

// A number of a program, and how far it may be from its starting value: the spread over the presets.
struct Knob {
  std::string name;
  double Software::*member = nullptr;
  double least = 0, most = 0;
  double middle = 0;  // geometric mean over the programs
  double spread = 0;  // standard deviation of the logarithm
};
// Over the fitted presets, without those named: what is usual before anything is measured.
std::vector<Knob> usual_numbers(const std::vector<std::string>& without = {});

// `start` with the middle of each number: for a program that was not measured.
Software with_usual_numbers(Software start, const std::vector<Knob>& knobs);

struct SoftwareFit {
  Software software;
  std::vector<FitRow> steps;
};
// The most likely numbers of the program given the steps: starting from `start`, with the deviations that
// `knobs` call usual, and an error of some percent in each predicted step. A number that no step depends on
// keeps its value. Intervals are widened so that they contain four fifths of the steps, each predicted by a
// fit without it.
SoftwareFit fit_software(const Software& start, const std::vector<Knob>& knobs, const Machine& machine,
                         const std::vector<MeasuredStep>& steps);

// Only the numbers, for steps with their own machines or facts: `errors` are log(predicted / measured).
using StepErrors = std::function<std::vector<double>(const Software&)>;
Software most_likely_numbers(const Software& start, const std::vector<Knob>& knobs, const StepErrors& errors);

// Which steps to measure: one after another, each the one that would tell most about the times of all steps.
struct StepChoice {
  // Relative uncertainty of times that the numbers leave: the root mean square over the steps.
  double uncertain = 0;
  struct Step {
    std::size_t step = 0;
    double uncertain = 0;  // once this step and those before it are measured
  };
  std::vector<Step> steps;
};
// `logs` are the logarithms of the steps' predicted times, and `measured` those whose times are known.
// Numbers are as uncertain as `knobs` say, and times depend on each as they do at `start`. Then the
// uncertainty after a measurement does not depend on its result (Chaloner & Verdinelli 1995,
// https://doi.org/10.1214/ss/1177009939).
StepChoice most_telling_steps(const Software& start, const std::vector<Knob>& knobs, const StepErrors& logs,
                              const std::vector<std::size_t>& measured, std::size_t count);

// A step that was measured, or will be, although its plan is predicted to need more memory than a device has.
struct TooLargeStep {
  bool is_left_out = false;  // far more: one of its fields is wrong or missing
  std::string text;          // one sentence
};
// Finds such steps, and erases those that are left out. Predictions for runs that did fit were up to a fifth
// too high (nanotron's, in docs/planning.md); above one and a half times the device's memory, no allocator
// could have made the run fit.
std::vector<TooLargeStep> leave_out_too_large(const Software& software, const Machine& machine,
                                              std::vector<MeasuredStep>& steps);

// The predicted seconds of a step.
double priced_seconds(const Software& software, const Machine& machine, const MeasuredStep& step);

}  // namespace echelon

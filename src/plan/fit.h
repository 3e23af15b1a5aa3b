// A machine and a training program from what was measured on a cluster.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "plan/measurements.h"

namespace echelon {

// A measurement beside what the files say of it: before the fit, after it, and, where there are enough, what
// a fit without this measurement (of a collective: without its size) says.
struct FitRow {
  std::string what;
  double measured_seconds = 0, before_seconds = 0, fitted_seconds = 0;
  std::optional<double> left_out_seconds{};
};

// Mean of |predicted / measured - 1| over the rows that have it; 0 of none.
double mean_error(const std::vector<FitRow>& rows, double FitRow::*predicted);
double mean_left_out_error(const std::vector<FitRow>& rows);

struct MachineFit {
  Machine machine;
  std::vector<FitRow> products, collectives;
};
// The machine's numbers of products, where some were measured (efficiency, tiles, fixed depth), and of the
// links that collectives crossed, beginning with those of `start`. RequestError for a collective over more
// ranks than it has, and for a product above its peak.
MachineFit fit_machine(const Machine& start, const std::vector<MeasuredProduct>& products,
                       const std::vector<MeasuredCollective>& collectives);

// How far a program's number may be from that of the one it begins with: the spread over the programs that
// ship.
struct Knob {
  std::string name;
  double Software::*member = nullptr;
  double least = 0, most = 0;
  double middle = 0;  // over the programs
  double spread = 0;  // standard deviation of the logarithm
};
// Of the presets that were fitted, without those named: what is usual before anything is measured.
std::vector<Knob> usual_numbers(const std::vector<std::string>& without = {});

// `start` with the middle of each number: a program of which nothing was measured.
Software with_usual_numbers(Software start, const std::vector<Knob>& knobs);

struct SoftwareFit {
  Software software;
  std::vector<FitRow> steps;
};
// The program's numbers that the steps say most likely: beginning with those of `start`, as far off as
// `knobs` say is usual, while a step's price is some percent off. What no step depends on stays. Its interval
// is widened so far that four fifths of the steps lie in it when each is left out.
SoftwareFit fit_software(const Software& start, const std::vector<Knob>& knobs, const Machine& machine,
                         const std::vector<MeasuredStep>& steps);

// The numbers alone, where the steps have machines or facts of their own: `errors` are log(predicted /
// measured).
using StepErrors = std::function<std::vector<double>(const Software&)>;
Software most_likely_numbers(const Software& start, const std::vector<Knob>& knobs, const StepErrors& errors);

// Which steps to measure: one after the other those that would tell most of the times of all.
struct StepChoice {
  // Of a time, as a part of it: what the numbers leave open, the root of its mean square over the steps.
  double uncertain = 0;
  struct Step {
    std::size_t step = 0;
    double uncertain = 0;  // once it is measured, and those before it
  };
  std::vector<Step> steps;
};
// `logs` are the logarithms of the steps' predicted times, and `measured` those whose times are known.
// Numbers are as uncertain as `knobs` say, and each makes a step longer as it does at `start`: then what a
// measurement leaves open does not depend on what it finds (Chaloner & Verdinelli 1995,
// https://doi.org/10.1214/ss/1177009939).
StepChoice most_telling_steps(const Software& start, const std::vector<Knob>& knobs, const StepErrors& logs,
                              const std::vector<std::size_t>& measured, std::size_t count);

// A step that was measured, or is to be, though its plan is counted to need more memory than a device has.
struct TooLargeStep {
  bool is_left_out = false;  // far more: some field of it is wrong or missing
  std::string text;          // one sentence
};
// Of the steps, without those that are left out from here on. What is counted of runs that did fit is up to a
// fifth too much (nanotron's, in docs/planning.md): above half as much again as there is, no allocator could
// have made room.
std::vector<TooLargeStep> leave_out_too_large(const Software& software, const Machine& machine,
                                              std::vector<MeasuredStep>& steps);

// Seconds that the planner says a step takes.
double priced_seconds(const Software& software, const Machine& machine, const MeasuredStep& step);

}  // namespace echelon

// Reads what a user measured on a cluster, from files that other programs write: matrix products,
// collectives, and training steps.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan/workload.h"
#include "spec/traffic.h"

namespace echelon {

// `count` products of (rows x depth) by (depth x cols).
struct MeasuredProduct {
  double rows = 0, depth = 0, cols = 0, count = 1;
  Precision precision = Precision::bf16;
  double seconds = 0;
  std::string where;  // "gemm.csv, line 3"
};

struct MeasuredCollective {
  Verb verb = Verb::all_reduce;
  double bytes = 0;  // of the whole buffer, as nccl-tests count it
  std::int64_t ranks = 0, hosts = 1;
  double seconds = 0;
  std::string where;
};

struct MeasuredStep {
  Plan plan;  // complete: with model, batch and lengths
  Precision precision = Precision::bf16;
  double seconds = 0;
  std::string where;
};

struct Measurements {
  std::vector<MeasuredProduct> products;
  std::vector<MeasuredCollective> collectives;
  std::vector<MeasuredStep> steps;
  std::vector<MeasuredStep> candidates;  // steps with empty seconds: not measured yet
};

// Adds the measurements in a file. Its content tells which kind it is:
//
//  * Output of nccl-tests for all_reduce, all_gather, reduce_scatter or alltoall; which one is taken from the
//    output or from the file's name. Out-of-place times are used.
//  * A CSV of products: columns m, n, k (m x k by k x n), one of seconds, ms, us, tflops, and optionally
//    batch and precision.
//  * A CSV of steps: the column seconds (empty: not measured yet), fields of a plan by the names of their
//    flags (dp, tp, micro-batch or micro_batch, ...), gpus (which gives dp), and precision.
//  * A log of Megatron, torchtitan or nanotron: one step, the median of those it prints without the first
//    ones, and the fields that the log states.
//
// A line "# echelon: KEY=VALUE ..." gives fields that the file lacks. `model` is used for steps that name
// none; empty: no model. RequestError names file, line and column of what cannot be read.
void read_measurements(const std::string& text, const std::string& file, const std::string& model,
                       Measurements& into);

}  // namespace echelon

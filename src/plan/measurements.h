// What a user measured on a cluster, read from the files that other programs write: products of matrices,
// collectives, steps of training.
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
  double bytes = 0;  // of the whole buffer, as nccl-tests count them
  std::int64_t ranks = 0, hosts = 1;
  double seconds = 0;
  std::string where;
};

struct MeasuredStep {
  Plan plan;  // whole: model, batch and lengths too
  Precision precision = Precision::bf16;
  double seconds = 0;
  std::string where;
};

struct Measurements {
  std::vector<MeasuredProduct> products;
  std::vector<MeasuredCollective> collectives;
  std::vector<MeasuredStep> steps;
  std::vector<MeasuredStep> candidates;  // steps whose seconds are left empty: nobody has measured them yet
};

// Adds what a file holds. Known by what stands in it:
//
//  * nccl-tests' output of all_reduce, all_gather, reduce_scatter or alltoall; which one it says itself, or
//  the file's
//    name does. Out of place times.
//  * A CSV of products: columns m, n, k (m x k by k x n), one of seconds, ms, us, tflops, and perhaps batch
//  and precision.
//  * A CSV of steps: the column seconds (empty: not measured yet), and fields of a plan by the names of their
//  flags (dp, tp, micro-batch or
//    micro_batch, ...), gpus (which gives dp), precision.
//  * A log of Megatron, torchtitan or nanotron: one step, the median of those it prints without the first
//  ones, and the
//    fields that the log says.
//
// A line "# echelon: KEY=VALUE ..." gives fields that the file does not. `model` is that of steps that name
// none; empty: none. RequestError names file, line and column of what cannot be read.
void read_measurements(const std::string& text, const std::string& file, const std::string& model,
                       Measurements& into);

}  // namespace echelon

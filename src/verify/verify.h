// The differential oracle: one rank and the mesh side by side for a few steps, each from the same weights,
// moments and tokens: after a step's comparison the mesh goes on from the reference's state. Every rank's
// copy of every gradient and parameter is compared with the part of the one-rank tensor that it should be.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/progress.h"
#include "parallel/faults.h"
#include "spec/plan.h"
#include "train/optimizer.h"
#include "train/session.h"
#include "train/trainer.h"
#include "verify/routing_decisions.h"

namespace echelon {

struct VerifyRequest {
  Plan plan;
  OptimizerOptions optimizer;
  RunOptions run;
  std::int64_t steps = 3;
  std::uint64_t seed = 1;
  SampleSource samples;  // empty: random tokens
  Faults faults;         // planted in the mesh, by tests
  bool trace = false;    // VerifyReport::rank_timelines, as TrainRequest's
  // Changes the initial weights of every rank and of the one-rank run in the same way, for tests; empty:
  // nothing.
  std::function<void(const ParameterStore&)> prepare = {};
  Progress progress{};  // told of each step, on rank 0's thread
};

struct Difference {
  std::int64_t step = 0;  // counts from 0
  std::string tensor;     // the parameter's name, or "loss"
  // "grad", "param", "loss", of a router "choice" or "drop", or "width": a gradient kept in fewer bits than
  // promised.
  std::string kind;
  double rel_diff = 0;
};

struct VerifyReport {
  bool pass = true;
  bool bitwise = true;
  std::int64_t steps = 0;
  double loss_max_rel_diff = 0, grad_max_rel_diff = 0, param_max_rel_diff = 0;
  double bound = 0;       // of gradients
  double loss_bound = 0;  // of losses
  double param_worst =
      0;  // largest difference of a parameter's element over what its gradient's bound allows; <= 1 passes
  std::optional<Difference> first_difference;
  // Comparisons beyond those bounds, which were held to rounding_multiple times what rounding does to these
  // very numbers; and the one that comes nearest to that, as a share of it.
  std::int64_t judged = 0;
  Difference worst_judged;
  // Where the mesh chose other experts than one rank, which then went on with the mesh's.
  std::vector<RoutingDifference> routing_differences;
  // Why it does not pass though nothing differs: what one rank computes is infinite or NaN, or rounding could
  // be all of most gradients; else empty.
  std::string incomparable;
  // Gradients of which all could be rounding, with the share of them that could: an error in one of these
  // alone does not show.
  std::vector<Difference> hidden;
  std::vector<double> reference_losses, mesh_losses;
  // Of a precision narrower than that: how far a run in it from the same weights is from both.
  struct Wide {
    std::string precision;
    double loss_rel_diff = 0, mesh_loss_rel_diff = 0, grad_rel_diff = 0;
  };
  std::optional<Wide> wide;
  // The mesh's last step, its first pipeline (dp 0, tp 0), as in TrainSummary.
  Timeline measured_timeline, simulated_timeline;
  std::vector<RankTimeline> rank_timelines;
};

// Largest relative difference (max |a-b| / max |a| of a tensor) that regrouping sums may cause:
//   4 (L + 1) eps sqrt(n),  n = the longest sum (hidden, MLP, vocabulary, or tokens of the global batch),
// eps = 2^-24 (f32) or 2^-53 (f64): each of about four products a layer, forward and backward, adds an error
// that grows like a random walk with its length.
// In bf16 that is so of weights' gradients, which are sums in f32. Where tp or cp cut the sums that
// activations are, their parts are rounded by themselves: each product moves its result by 2^-8 sqrt(tp cp)
// of its size. One rounding knows nothing of the next, so that those of 4 (L + 1) products come to
// sqrt(4 (L + 1)) 2^-8 sqrt(tp cp), which is added. So it is on any mesh whose kernels are not one rank's (tp
// cp is then 1 at least): a sum of another order may lie on the other side of the middle of two numbers of
// bf16, and be rounded to the other one.
// With TF32 each term of a product is off by what its two operands have lost, 2^-10 each, and the rank that
// the mesh is compared with multiplies in f32: eps sqrt(n) becomes that and 2^-9. Devices may cut operands
// off, all in one direction, so these add up.
// In fp8 operands that differ by d of their size, 2^-8 sqrt(tp cp) or what scales of other tensors than one
// rank's make of them (spec/fp8.h), are rounded to neighbours with a probability of d over what these are
// apart, 2 eps: d 2 eps in the mean square, eps = 2^-4 and 2^-3 for two operands. Either way at random, so
// that those of 4 (L + 1) products come to the root of 4 (L + 1) d 2 (2^-4 + 2^-3), which is added.
// A schedule that does not flush is compared with a one-rank emulation of its delay; the bound is then this
// times the `updates` that the two are apart before the mesh takes the reference's state.
// It is never above most_unmeasured. Invariant numerics promise every bit: 0.
double verify_bound(const Plan& plan, bool other_kernels = false, double updates = 1);
// Of a loss, the same, but that narrow roundings are those of each target: their mean over all has less of
// them by the root of their number.
double verify_loss_bound(const Plan& plan, bool other_kernels = false, double updates = 1);
// What rounding is believed to do without being measured. A wrong sign is twice the gradient, a forgotten sum
// over two ranks leaves one of them off by half of it or more, and what an eighth of the largest element
// hides of the others is small.
constexpr double most_unmeasured = 1.0 / 8;
// Whether the mesh computes by kernels that are not one rank's: on a device, where that is on the host.
bool takes_other_kernels(const Plan& plan, const RunOptions& run);
// Whether activations are rounded from other numbers than those of one rank.
bool rounds_otherwise(const Plan& plan, bool other_kernels);
// Whether they are other sums.
bool regroups_activations(const Plan& plan);

// Ill-conditioned results owe more to rounding than their size says: a sum that cancels keeps the rounding of
// its terms. What is beyond the bound is therefore computed again on one rank so many times with rounding
// noise (tensor/rounding_noise.h), and may differ by so much times the root mean square of what that changes.
constexpr int rounding_trials = 8;
constexpr double rounding_multiple = 8;
// Where that is much, as in fp8 through many layers, elements show little, but not the whole of a tensor:
// what noise adds to one has any direction, and a wrong sign or scale, or a part of a sum, has the
// gradient's. So the share of a gradient that a rank's part of it has too much or too little is held to as
// many times what noise makes of that very share. Where all of it could be noise, a gradient that is not
// there would pass: the report names it, as an error shows in the gradients around it alone. A report most of
// whose gradients are such in a step proves nothing, and does not pass.
constexpr double all_of_it = 1;

// Throws RequestError for what verify() refuses, which it does before any rank starts.
void validate(const VerifyRequest& request);

// Parameters are held to the bound of their gradients carried through AdamW: a gradient element that may be
// off by d moves its parameter by up to 4 lr d / (sqrt(v) + eps), and by no more than 4 lr.
// With processes, every one of them calls this; the report is rank 0's.
VerifyReport verify(const VerifyRequest& request);

std::string to_json(const VerifyReport& report, const Plan& plan);

}  // namespace echelon

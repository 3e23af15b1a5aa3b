// The differential oracle: runs one rank and the mesh side by side for a few steps, each step from the same
// weights, moments and tokens (after the comparison of a step the mesh takes over the reference's state).
// Every rank's copy of every gradient and parameter is compared with the part of the one-rank tensor that it
// should equal.
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
  Faults faults;         // planted in the mesh by tests
  bool trace = false;    // fills VerifyReport::rank_timelines, as in TrainRequest
  // For tests: changes the initial weights of every rank and of the one-rank run in the same way; empty: no
  // change.
  std::function<void(const ParameterStore&)> prepare = {};
  Progress progress{};  // notified of each step, on rank 0's thread
};

struct Difference {
  std::int64_t step = 0;  // counts from 0
  std::string tensor;     // the parameter's name, or "loss"
  // "grad", "param", "loss"; "choice" or "drop" of a router; "width": a gradient with fewer bits than
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
  // The largest difference of a parameter's element, as a multiple of what its gradient's bound allows; <= 1
  // passes.
  double param_worst = 0;
  std::optional<Difference> first_difference;
  // The number of comparisons beyond the bounds, which were held to rounding_multiple times the measured
  // effect of rounding on these very numbers; and the worst of them, as a fraction of what is allowed.
  std::int64_t judged = 0;
  Difference worst_judged;
  // Where the mesh chose other experts than the one rank, which then followed the mesh.
  std::vector<RoutingDifference> routing_differences;
  // Why it fails although nothing differs: a result of the one rank is infinite or NaN, or most gradients
  // could be nothing but rounding; otherwise empty.
  std::string incomparable;
  // Gradients that could be nothing but rounding, with the fraction that could: an error in one of these
  // alone does not show.
  std::vector<Difference> hidden;
  std::vector<double> reference_losses, mesh_losses;
  // For a precision narrower than `precision`: how far a run in that, from the same weights, is from both.
  struct Wide {
    std::string precision;
    double loss_rel_diff = 0, mesh_loss_rel_diff = 0, grad_rel_diff = 0;
  };
  std::optional<Wide> wide;
  // The last step of the mesh's first pipeline (dp 0, tp 0), as in TrainSummary.
  Timeline measured_timeline, simulated_timeline;
  std::vector<RankTimeline> rank_timelines;
};

// The largest relative difference (max |a-b| / max |a| of a tensor) that regrouping sums may cause:
//
//   4 (L + 1) eps sqrt(n),  n = the longest sum (hidden, MLP, vocabulary, or tokens of the global batch),
//
// eps = 2^-24 (f32) or 2^-53 (f64). There are about four products per layer, forward and backward; each adds
// an error that grows like a random walk with the length of its sum.
//
// bf16: the above holds for gradients of weights, which are summed in f32. If tp or cp cut the sums that
// yield activations, partial sums are rounded separately: each product changes its result by a fraction 2^-8
// sqrt(tp cp). These roundings are independent, so those of 4 (L + 1) products add up to sqrt(4 (L + 1)) 2^-8
// sqrt(tp cp), which is added to the bound. The same holds on any mesh with other kernels than the one rank's
// (with tp cp at least 1): a sum in another order may fall on the other side of the midpoint of two bf16
// numbers and be rounded to the other one.
//
// TF32: each term of a product is off by what its two operands have lost, 2^-10 each, while the reference
// rank multiplies in f32: eps sqrt(n) becomes that plus 2^-9. Devices may truncate operands, always in the
// same direction, so these errors add up.
//
// fp8: operands that differ by a fraction d, which is 2^-8 sqrt(tp cp), or what differing scales cause
// (spec/fp8.h), are rounded to different neighbours with a probability of d over their distance 2 eps. In the
// mean square that is d 2 eps, with eps = 2^-4 and 2^-3 for the two operands. The directions are random, so 4
// (L + 1) products add up to the root of 4 (L + 1) d 2 (2^-4 + 2^-3), which is added.
//
// A schedule without a flush is compared with a one-rank emulation of its delay; the bound is then multiplied
// by the number of `updates` after which the mesh takes over the reference's state. The bound never exceeds
// most_unmeasured. Invariant numerics promise every bit: 0.
double verify_bound(const Plan& plan, bool other_kernels = false, double updates = 1);
// The same for a loss. Here narrow roundings are those of each target, and the mean over all targets divides
// them by the root of their number.
double verify_loss_bound(const Plan& plan, bool other_kernels = false, double updates = 1);
// The largest effect of rounding that is accepted without a measurement. A wrong sign is twice the gradient;
// a forgotten sum over two ranks leaves one of them off by half of it or more; and errors that hide below an
// eighth of the largest element are small.
constexpr double most_unmeasured = 1.0 / 8;
// Whether the mesh uses other kernels than the one rank: on a device, while that runs on the host.
bool takes_other_kernels(const Plan& plan, const RunOptions& run);
// Whether activations are rounded from other numbers than on one rank.
bool rounds_otherwise(const Plan& plan, bool other_kernels);
// Whether activations are sums in another grouping.
bool regroups_activations(const Plan& plan);

// Rounding affects ill-conditioned results more than their size suggests: a sum that cancels keeps the
// rounding errors of its terms. What exceeds the bound is therefore recomputed on one rank, rounding_trials
// times with rounding noise (tensor/rounding_noise.h), and may differ by rounding_multiple times the root
// mean square of what the noise changes.
constexpr int rounding_trials = 8;
constexpr double rounding_multiple = 8;
// If the noise is large, as in fp8 through many layers, single elements show little, but a whole tensor does:
// noise has a random direction, while a wrong sign or scale, or a missing part of a sum, has the gradient's
// direction. So the component of a rank's error along the gradient, as a fraction of it, is held to the same
// multiple of what noise causes in that component. If all of a gradient could be noise, a missing gradient
// would pass: the report names it, since an error there shows only in the gradients around it. A report in
// which most gradients of a step are of this kind proves nothing and does not pass.
constexpr double all_of_it = 1;

// RequestError for what verify() refuses before any rank starts.
void validate(const VerifyRequest& request);

// Runs the comparison. Parameters are held to the bound of their gradients, carried through AdamW: a gradient
// element that may be off by d moves its parameter by up to 4 lr d / (sqrt(v) + eps), and by no more than 4
// lr. With processes, every one of them calls this; the report is rank 0's.
VerifyReport verify(const VerifyRequest& request);

std::string to_json(const VerifyReport& report, const Plan& plan);

}  // namespace echelon

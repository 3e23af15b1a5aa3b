#include "verify/verify.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json_text.h"
#include "comm/host_group.h"
#include "plan/cost.h"
#include "spec/fp8.h"
#include "spec/reduction_buckets.h"
#include "spec/tf32.h"
#include "tensor/prepare_kernels.h"
#include "train/random_tokens.h"
#include "train/rank_timeline.h"
#include "train/refuse_request.h"
#include "verify/comparison.h"

namespace echelon {
namespace {

// A sum from which something is left out is not what one rank has.
void refuse_lossy(const Plan& plan, const PipelineLayout& pipeline) {
  const Compression& c = plan.compression;
  const bool all_elements = c.kind == CompressionKind::topk && c.fraction == 1;
  if (plan.mesh.dp_cp_size() == 1 || c.kind == CompressionKind::none || all_elements) return;
  std::int64_t least = 1;
  for (int pp_rank = 0; pp_rank < plan.mesh.size(Axis::pp); ++pp_rank)
    for (int tp_rank = 0; tp_rank < plan.mesh.size(Axis::tp); ++tp_rank)
      for (const GradientBucket& bucket : reduction_buckets(plan, pipeline.groups_of(pp_rank, 0), tp_rank))
        for (const GradientSection& section : bucket.sections)
          least = std::max(least, uncompressed_rank(section));
  if (c.kind == CompressionKind::powersgd && c.rank >= least) return;
  refuse(
      "--compress {}: changes gradients by more than the rounding that a proof allows for; legal: none, "
      "topk:1, or powersgd:R with R of at least {}, which leave nothing out",
      compression_text(c), least);
}

// The mesh takes the reference's state after every whole step. Until then, and in the versions of weights
// that it keeps from before, it goes its own way: as many roundings of an update add up.
double updates_apart(const VerifyRequest& request, const StepPrograms& programs) {
  if (!request.plan.optimizer_barrier) return 2;
  if (programs.flushes()) return 1;
  const std::vector<int> late = staleness(programs.schedule());
  return programs.updates_per_step() + *std::max_element(late.begin(), late.end());
}

}  // namespace

bool takes_other_kernels(const Plan& plan, const RunOptions& run) {
  return run.driver != nullptr && plan.numerics == Numerics::ordinary;
}

namespace {

// How far they may move a gradient, of its size.
struct Roundings {
  double wide = 0;    // of sums in f32 or f64, and of TF32's operands
  double narrow = 0;  // of numbers that are kept in bf16, and of operands in fp8
};

Roundings roundings(const Plan& plan, bool other_kernels) {
  if (plan.numerics == Numerics::invariant) return {};
  const ModelSpec& m = plan.model;
  const std::int64_t longest =
      std::max({m.hidden, m.attention_width(), m.mlp_hidden, m.vocab, plan.global_batch * plan.seq_len});
  const PrecisionRecipe& precision = plan.precision;
  double error =
      (precision.gradients == DType::f64 ? 0x1p-53 : 0x1p-24) * std::sqrt(static_cast<double>(longest));
  // Two operands of each product, whose terms have any sign.
  if (multiplies_in_tf32(precision)) error += 2 * tf32_epsilon;
  // Sums are taken wide and rounded once, but those over ranks are of as many rounded parts. Kernels that are
  // not one rank's group sums too, of one part where no rank has another.
  double narrow = 0;
  if ((other_kernels || regroups_activations(plan)) && precision.activations == DType::bf16)
    narrow = 0x1p-8 * std::sqrt(static_cast<double>(plan.mesh.size(Axis::tp) * plan.mesh.size(Axis::cp) *
                                                    (plan.cuts_vocabulary() ? plan.mesh.pp() : 1)));
  const double products = 4.0 * static_cast<double>(m.num_layers + m.num_mtp_layers + 1);
  double walk = narrow;  // of a product
  if (multiplies_in_fp8(precision)) {
    narrow = std::max(narrow, fp8_scale_error);
    const double apart = 2 * (fp8_epsilon(Fp8::e4m3) + fp8_epsilon(Fp8::e5m2));
    walk = narrow + std::sqrt(narrow * apart);
  }
  return {products * error, std::sqrt(products) * walk};
}

}  // namespace

double verify_bound(const Plan& plan, bool other_kernels, double updates) {
  const Roundings r = roundings(plan, other_kernels);
  return std::min(most_unmeasured, updates * (r.wide + r.narrow));
}

double verify_loss_bound(const Plan& plan, bool other_kernels, double updates) {
  const Roundings r = roundings(plan, other_kernels);
  const double targets = static_cast<double>(plan.global_batch * plan.seq_len);
  return std::min(most_unmeasured, updates * (r.wide + r.narrow / std::sqrt(targets)));
}

bool rounds_otherwise(const Plan& plan, bool other_kernels) {
  return other_kernels || regroups_activations(plan) || multiplies_in_fp8(plan.precision);
}

bool regroups_activations(const Plan& plan) {
  return plan.mesh.size(Axis::tp) > 1 || plan.mesh.size(Axis::cp) > 1 || plan.cuts_vocabulary();
}

void validate(const VerifyRequest& request) {
  validate(request.plan);
  const PipelineLayout pipeline(request.plan);
  validate(request.optimizer);
  refuse_clipping(request.optimizer, pipeline);
  refuse_lossy(request.plan, pipeline);
  if (request.steps < 1) refuse("--steps {}: must be at least 1", request.steps);
  if (const ProcessWorld* const processes = request.run.processes;
      processes != nullptr && processes->num_ranks() != request.plan.mesh.num_ranks())
    refuse("--comm mpi: the mesh {} needs a process for each rank, and {} were started",
           request.plan.mesh.describe(), processes->num_ranks());
  refuse_on_device(request.plan, request.run);
  if (request.plan.offload != Offload::none && !request.run.driver)
    check_scratch_directory(request.plan.offload_directory);
}

VerifyReport verify(const VerifyRequest& given) {
  refuse_together(given.run.processes, [&] { validate(given); });
  VerifyRequest request = given;
  const PipelineLayout pipeline(request.plan);
  if (!request.samples) request.samples = random_tokens(request.plan, request.seed);
  VerifyReport report;
  report.steps = request.steps;
  const bool other_kernels = takes_other_kernels(request.plan, request.run);
  const double updates = updates_apart(request, pipeline.programs(0));
  report.bound = verify_bound(request.plan, other_kernels, updates);
  report.loss_bound = verify_loss_bound(request.plan, other_kernels, updates);
  const Comparison::Bounds bounds{report.bound, report.loss_bound};
  prepare_kernels(request.plan.precision);
  std::optional<ThreadWorld> threads;
  if (request.run.processes == nullptr)
    threads.emplace(request.plan.mesh.num_ranks(), request.run.timeout, request.run.failure_hooks,
                    request.run.time);
  World& world = threads ? static_cast<World&>(*threads) : *request.run.processes;
  const auto epoch = world.time().now();
  std::string unproved;  // why nothing is, said by rank 0
  const auto body = [&](int index) {
    std::optional<TraceRecorder> recorder;
    if (request.trace) recorder.emplace(world.time(), epoch, pipeline.programs(0).shown_steps());
    Arena arena(request.run.driver.get(), request.run.device_of(index));
    const auto kernels =
        make_kernels(arena, request.plan.precision, request.run.threads_per_rank, request.plan.numerics);
    const Rank rank(world, request.plan.mesh, index, request.plan.precision, arena, *kernels,
                    request.run.collectives, 0, recorder ? &*recorder : nullptr);
    VerifyReport unused;  // only rank 0 reports
    Comparison comparison(request, rank, bounds, index == 0 ? report : unused);
    StepTrace trace(rank);
    for (std::int64_t step = 0; step < request.steps; ++step) {
      if (index == 0)
        echelon::report(request.progress, static_cast<double>(step) / static_cast<double>(request.steps),
                        fmt::format("step {} of {}", step + 1, request.steps));
      trace.begin(step + 1);
      const bool goes_on = comparison.step(step);
      trace.end();
      if (!goes_on) break;
    }
    if (index == 0) unproved = comparison.unproved();
    const std::vector<Span> spans = comparison.last_run().spans_since(epoch);
    if (request.trace) {
      auto all = gather_timelines(rank, rank_timeline(rank, "rank", spans));
      if (index == 0) report.rank_timelines = std::move(all);
    }
    if (rank.dp_cp().rank() != 0 || rank.coordinate(Axis::tp) != 0) return;
    auto timelines = HostGroup(rank.along(Axis::pp)).gather_records(spans);
    if (index == 0) report.measured_timeline.ranks = std::move(timelines);
  };
  world.run(naming_lost_ranks(request.run, world.num_ranks(), body));
  if (!request.run.leads()) return report;
  if (report.pass && !unproved.empty()) {
    report.pass = false;
    report.incomparable = unproved;
  }
  report.simulated_timeline =
      simulated_twin(pipeline.programs(0), measured_costs(report.measured_timeline), request.steps, 1);
  return report;
}

std::string to_json(const VerifyReport& r, const Plan& plan) {
  using nlohmann::ordered_json;
  // JSON has no infinity: what cannot be compared at all is as different as can be.
  const auto number = [](double value) {
    return std::isfinite(value) ? value : std::numeric_limits<double>::max();
  };
  ordered_json first = nullptr;
  if (r.first_difference)
    first = {{"step", r.first_difference->step},
             {"tensor", r.first_difference->tensor},
             {"kind", r.first_difference->kind},
             {"rel_diff", number(r.first_difference->rel_diff)}};
  ordered_json judged = nullptr;
  if (r.judged > 0)
    judged = {{"comparisons", r.judged},
              {"worst_over_allowed", number(r.worst_judged.rel_diff)},
              {"step", r.worst_judged.step},
              {"tensor", r.worst_judged.tensor},
              {"kind", r.worst_judged.kind}};
  ordered_json hidden = ordered_json::array();
  for (const Difference& d : r.hidden)
    hidden.push_back({{"step", d.step}, {"tensor", d.tensor}, {"share", number(d.rel_diff)}});
  ordered_json wide = nullptr;
  if (r.wide)
    wide = {{"precision", r.wide->precision},
            {"loss_rel_diff", number(r.wide->loss_rel_diff)},
            {"mesh_loss_rel_diff", number(r.wide->mesh_loss_rel_diff)},
            {"grad_rel_diff", number(r.wide->grad_rel_diff)}};
  ordered_json routing = ordered_json::array();
  for (const RoutingDifference& d : r.routing_differences)
    routing.push_back({{"step", d.step},
                       {"layer", d.layer},
                       {"kind", d.kind},
                       {"tokens", d.tokens},
                       {"ties", d.ties()},
                       {"shift", number(d.shift)},
                       {"allowed", number(d.allowed)}});
  ordered_json incomparable = nullptr;
  if (!r.incomparable.empty()) incomparable = r.incomparable;
  ordered_json mesh = ordered_json::object();
  for (Axis axis : all_axes) mesh[axis_name(axis)] = plan.mesh.size(axis);
  mesh["ep"] = plan.mesh.ep;
  return json_text(ordered_json{{"pass", r.pass},
                                {"ranks", plan.mesh.num_ranks()},
                                {"steps", r.steps},
                                {"bitwise", r.bitwise},
                                {"loss_max_rel_diff", number(r.loss_max_rel_diff)},
                                {"grad_max_rel_diff", number(r.grad_max_rel_diff)},
                                {"param_max_rel_diff", number(r.param_max_rel_diff)},
                                {"bound", r.bound},
                                {"loss_bound", r.loss_bound},
                                {"param_worst_over_allowed", number(r.param_worst)},
                                {"judged_by_rounding", judged},
                                {"hidden_by_rounding", hidden},
                                {"routing_differences", routing},
                                {"wide", wide},
                                {"first_difference", first},
                                {"incomparable", incomparable},
                                {"mesh", mesh},
                                {"reference_losses", r.reference_losses},
                                {"mesh_losses", r.mesh_losses}});
}

}  // namespace echelon

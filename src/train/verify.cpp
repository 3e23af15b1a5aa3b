#include "train/verify.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/philox.h"
#include "plan/cost.h"
#include "spec/reduction_buckets.h"
#include "train/logical_tensors.h"
#include "train/reference_run.h"

namespace echelon {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

template <class T>
void to_doubles(const Tensor& t, double* out) {
  std::copy(t.data<T>(), t.data<T>() + t.numel(), out);
}
Tensor as_doubles(const Rank& rank, const Tensor& t) {
  Tensor out(rank.arena(), MemoryCategory::other, DType::f64, {t.numel()});
  if (t.dtype() == DType::f64)
    to_doubles<double>(t, out.data<double>());
  else
    to_doubles<float>(t, out.data<double>());
  return out;
}

double max_magnitude(const Tensor& t) {
  double largest = 0;
  for (std::int64_t i = 0; i < t.numel(); ++i) largest = std::max(largest, std::abs(t.data<double>()[i]));
  return largest;
}

double relative(double difference, double magnitude) {
  if (std::isnan(difference)) return infinity;
  return difference == 0 ? 0 : magnitude == 0 ? infinity : difference / magnitude;
}

// Zero biases would hide a bias that is added twice, and norms of one a weight that is left out.
void perturb_constants(const Rank& rank, const ParameterStore& parameters, std::uint64_t seed) {
  for (const Parameter& p : parameters.all()) {
    if (p.spec.init == Init::normal) continue;
    const Tensor values = local_tensor(rank, p, ParameterTensor::value);
    const Philox random(seed, Stream::test, name_hash(p.spec.name.c_str()));
    for_each_run(p.spec, rank.size(Axis::tp), rank.coordinate(Axis::tp),
                 [&](std::int64_t logical, std::int64_t local, std::int64_t count) {
                   for (std::int64_t i = 0; i < count; ++i) {
                     const double noise = 0.05 * random.normal(static_cast<std::uint64_t>(logical + i));
                     if (rank.dtype() == DType::f64)
                       values.data<double>()[local + i] += noise;
                     else
                       values.data<float>()[local + i] += static_cast<float>(noise);
                   }
                 });
    store_local(rank, values, p, ParameterTensor::value);
  }
}

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

class Comparison {
 public:
  // `report` is used on rank 0 only.
  Comparison(const VerifyRequest& request, const Rank& rank, double bound, VerifyReport& report)
      : request_(request),
        rank_(rank),
        bound_(bound),
        report_(report),
        trainer_(rank, request.plan, request.optimizer, request.seed, request.faults) {
    perturb_constants(rank, trainer_.parameters(), request.seed);
    if (leads()) {
      reference_ = std::make_unique<ReferenceRun>(request.plan, request.optimizer, request.run, request.seed);
      perturb_constants(reference_->rank(), reference_->parameters(), request.seed);
    }
  }

  // False when what was found cannot be stepped on: a gradient that is not a number.
  bool step(std::int64_t step) {
    if (leads()) expected_.push_back(reference_->compute_gradients(step, request_.samples));
    if (trainer_.flushes() && request_.plan.optimizer_barrier) {
      const double loss = trainer_.compute_gradients(step, request_.samples);
      const std::vector<double> gradient_sizes = compare_gradients(step);
      compare_loss(step, loss);
      if (!finite_) return false;
      const double clip = leads() ? reference_->apply_gradients(step) : 1;
      trainer_.apply_gradients(step);
      compare_parameters(step, gradient_sizes, clip);
    } else {
      return run_on(step);
    }
    take_reference_state();
    return true;
  }

  const PipelineRun& last_run() const { return trainer_.last_run(); }

 private:
  // A step that the mesh does not end before it begins the next one.
  bool run_on(std::int64_t step) {
    // Without the optimizer's barrier a step is unfinished until the next one validates it: two go together.
    const std::int64_t left = request_.steps - step;
    const std::int64_t together = trainer_.flushes() ? std::min<std::int64_t>(left, 2 - step % 2) : left;
    const bool is_whole = !trainer_.flushes() || together == 1;
    for (const StepResult& result : trainer_.step(step, request_.samples, together))
      compare_loss(result.step, result.loss);
    // The gradients of the last update stay until the next one begins.
    std::vector<double> gradient_sizes;
    if (is_whole) gradient_sizes = compare_gradients(step);
    if (!finite_) return false;
    const double clip = leads() ? reference_->apply_gradients(step) : 1;
    if (!is_whole) {
      if (trainer_.flushes()) keep_squares();
      return true;
    }
    compare_parameters(step, gradient_sizes, clip);
    take_reference_state();
    return true;
  }

  bool leads() const { return rank_.index() == 0; }
  std::size_t count() const { return trainer_.parameters().model().size(); }
  const ParamSpec& at(std::size_t i) const { return trainer_.parameters().model()[i]; }
  // nullptr on a pipeline rank that does not hold the parameter.
  const Parameter* here(std::size_t i) const { return trainer_.parameters().find_here(at(i).name); }

  // From rank 0 to everyone.
  void share(const Tensor& t) const {
    const bool first_stage = rank_.coordinate(Axis::pp) == 0;
    if (first_stage && rank_.dp_cp().rank() == 0) rank_.along(Axis::tp).broadcast(t, 0).wait();
    if (first_stage) rank_.dp_cp().broadcast(t, 0).wait();
    rank_.along(Axis::pp).broadcast(t, 0).wait();
  }
  // The reference's logical tensor, in double precision, on every rank.
  Tensor reference_tensor(std::size_t i, ParameterTensor which) const {
    Tensor t = leads() ? as_doubles(rank_, local_tensor(reference_->rank(),
                                                        reference_->parameters().find(at(i).name), which))
                       : Tensor(rank_.arena(), MemoryCategory::other, DType::f64, {at(i).numel()});
    share(t);
    return t;
  }

  struct Worst {
    double difference = 0;  // max |a - b|
    double share = 0;       // max |a - b| / tolerance, where a tolerance is given
  };
  // Over what every rank holds of the tensor, replicas included.
  Worst worst_difference(std::size_t i, ParameterTensor which, const Tensor& expected,
                         const double* tolerance) const {
    const Tensor worst(rank_.arena(), MemoryCategory::other, DType::f64, {2});
    double* w = worst.data<double>();
    w[0] = w[1] = 0;
    if (const Parameter* parameter = here(i)) {
      const Tensor local = as_doubles(rank_, local_tensor(rank_, *parameter, which));
      for_each_run(
          at(i), rank_.size(Axis::tp), rank_.coordinate(Axis::tp),
          [&](std::int64_t logical, std::int64_t begin, std::int64_t n) {
            for (std::int64_t k = 0; k < n; ++k) {
              double d = std::abs(expected.data<double>()[logical + k] - local.data<double>()[begin + k]);
              if (std::isnan(d)) d = infinity;
              w[0] = std::max(w[0], d);
              if (tolerance != nullptr && d > 0)
                w[1] = std::max(w[1], tolerance[logical + k] > 0 ? d / tolerance[logical + k] : infinity);
            }
          });
    }
    for (Axis axis : all_axes) rank_.along(axis).all_reduce(worst, ReduceOp::max).wait();
    return {w[0], w[1]};
  }

  void found(std::int64_t step, const std::string& tensor, const char* kind, double rel_diff) {
    report_.pass = false;
    if (!report_.first_difference) report_.first_difference = Difference{step, tensor, kind, rel_diff};
  }

  double updates_since_compared() const {
    return request_.plan.optimizer_barrier ? static_cast<double>(trainer_.updates(1)) : 2;
  }

  // Of the first of two updates that are compared together.
  void keep_squares() {
    has_earlier_squares_ = true;
    earlier_squares_.clear();
    if (!leads()) return;
    for (std::size_t i = 0; i < count(); ++i)
      earlier_squares_.push_back(
          as_doubles(rank_, local_tensor(reference_->rank(), reference_->parameters().find(at(i).name),
                                         ParameterTensor::exp_avg_sq)));
  }

  // What the first of two updates may have added to the tolerance of a parameter: its gradient was another
  // one, which left (1 - beta2) g^2 or more.
  void add_earlier_tolerance(std::size_t i, std::int64_t step, double* tolerance) const {
    if (!has_earlier_squares_) return;
    const OptimizerOptions& o = request_.optimizer;
    const Tensor squares = leads()
                               ? earlier_squares_[i]
                               : Tensor(rank_.arena(), MemoryCategory::other, DType::f64, {at(i).numel()});
    share(squares);
    const double correction = 1.0 - std::pow(o.beta2, static_cast<double>(trainer_.updates(step)));
    const double gradient_error = bound_ * std::sqrt(max_magnitude(squares) / (1 - o.beta2));
    for (std::int64_t k = 0; k < squares.numel(); ++k)
      tolerance[k] +=
          4 * learning_rate(o, step - 1) *
          std::min(1.0, gradient_error / (std::sqrt(squares.data<double>()[k] / correction) + o.eps));
  }

  std::vector<double> compare_gradients(std::int64_t step) {
    std::vector<double> sizes;
    for (std::size_t i = 0; i < count(); ++i) {
      const Tensor expected = reference_tensor(i, ParameterTensor::gradient);
      const Worst worst = worst_difference(i, ParameterTensor::gradient, expected, nullptr);
      sizes.push_back(max_magnitude(expected));
      finite_ &= std::isfinite(worst.difference);
      if (!leads()) continue;
      const double rel = relative(worst.difference, sizes.back());
      report_.bitwise &= worst.difference == 0;
      report_.grad_max_rel_diff = std::max(report_.grad_max_rel_diff, rel);
      if (!(rel <= bound_)) found(step, at(i).name, "grad", rel);
    }
    return sizes;
  }

  void compare_loss(std::int64_t step, double loss) {
    if (!leads()) return;
    const double expected = expected_.at(static_cast<std::size_t>(step));
    report_.reference_losses.push_back(expected);
    report_.mesh_losses.push_back(loss);
    const double rel = relative(std::abs(expected - loss), std::abs(expected));
    report_.bitwise &= expected == loss;
    report_.loss_max_rel_diff = std::max(report_.loss_max_rel_diff, rel);
    if (!(rel <= bound_)) found(step, "loss", "loss", rel);
  }

  void compare_parameters(std::int64_t step, const std::vector<double>& gradient_sizes, double clip) {
    const double lr = learning_rate(request_.optimizer, step);
    const double correction =
        1.0 - std::pow(request_.optimizer.beta2, static_cast<double>(trainer_.updates(step + 1)));
    const double epsilon = rank_.dtype() == DType::f64 ? 0x1p-52 : 0x1p-23;
    for (std::size_t i = 0; i < count(); ++i) {
      const Tensor expected = reference_tensor(i, ParameterTensor::value);
      const Tensor squares = reference_tensor(i, ParameterTensor::exp_avg_sq);
      const Tensor allowed(rank_.arena(), MemoryCategory::other, DType::f64, {expected.numel()});
      double* tolerance = allowed.data<double>();
      // Where a step has several updates the last one's gradient may be none at all, as that of an expert
      // without tokens: each g of the others left (1 - beta2) g^2 or more, but for beta2 to the number of
      // updates since.
      const double earlier =
          trainer_.flushes()
              ? 0
              : std::sqrt(max_magnitude(squares) / (1 - request_.optimizer.beta2) /
                          std::pow(request_.optimizer.beta2, static_cast<double>(trainer_.updates(1) - 1)));
      const double gradient_error = bound_ * std::max(gradient_sizes[i], earlier) * clip;
      for (std::int64_t k = 0; k < expected.numel(); ++k) {
        const double scale = std::sqrt(squares.data<double>()[k] / correction) + request_.optimizer.eps;
        tolerance[k] = updates_since_compared() * (4 * lr * std::min(1.0, gradient_error / scale) +
                                                   4 * epsilon * std::abs(expected.data<double>()[k]));
      }
      add_earlier_tolerance(i, step, tolerance);
      const Worst worst = worst_difference(i, ParameterTensor::value, expected, tolerance);
      if (!leads()) continue;
      const double rel = relative(worst.difference, max_magnitude(expected));
      report_.bitwise &= worst.difference == 0;
      report_.param_max_rel_diff = std::max(report_.param_max_rel_diff, rel);
      report_.param_worst = std::max(report_.param_worst, worst.share);
      if (!(worst.share <= 1)) found(step, at(i).name, "param", rel);
    }
    has_earlier_squares_ = false;
  }

  // AdamW turns the rounding of a small gradient into a step of any size up to lr, so parameters that each
  // lie within their tolerance make gradients of the next step that differ by more than rounding. The mesh
  // goes on from the reference's state: every step is compared from the same weights.
  void take_reference_state() {
    for (std::size_t i = 0; i < count(); ++i)
      for (ParameterTensor which :
           {ParameterTensor::value, ParameterTensor::exp_avg, ParameterTensor::exp_avg_sq}) {
        const Tensor reference = reference_tensor(i, which);
        if (here(i) == nullptr) continue;
        const Tensor local(rank_.arena(), MemoryCategory::other, rank_.dtype(), here(i)->value.shape());
        for_each_run(at(i), rank_.size(Axis::tp), rank_.coordinate(Axis::tp),
                     [&](std::int64_t logical, std::int64_t begin, std::int64_t n) {
                       const double* from = reference.data<double>() + logical;
                       if (rank_.dtype() == DType::f64)
                         std::copy_n(from, n, local.data<double>() + begin);
                       else
                         std::transform(from, from + n, local.data<float>() + begin,
                                        [](double x) { return static_cast<float>(x); });
                     });
        store_local(rank_, local, *here(i), which);
      }
  }

  const VerifyRequest& request_;
  const Rank& rank_;
  double bound_;
  VerifyReport& report_;
  Trainer trainer_;
  std::unique_ptr<ReferenceRun> reference_;  // on rank 0
  std::vector<double> expected_;             // losses, by step
  bool finite_ = true;                       // agreed by all ranks
  std::vector<Tensor> earlier_squares_;      // by parameter, on rank 0
  bool has_earlier_squares_ = false;
};

// Where documents are kept apart, they have 16 tokens on average.
SampleSource random_tokens(const Plan& plan, std::uint64_t seed) {
  const std::int32_t document_end = plan.mask == AttentionMask::document ? plan.end_of_document() : -1;
  return [seed, document_end, vocab = static_cast<std::uint64_t>(plan.model.vocab), seq_len = plan.seq_len](
             std::int64_t step, std::int64_t sample, std::int32_t* tokens, std::int32_t* targets) {
    const Philox random(seed, Stream::test, static_cast<std::uint64_t>(step));
    const auto token = [&](std::int64_t t) {
      const auto place = static_cast<std::uint64_t>(sample) << 32 | static_cast<std::uint64_t>(t);
      const auto id = static_cast<std::int32_t>(random.below(place, vocab));
      return document_end >= 0 && random.below(place ^ (std::uint64_t{1} << 62), 16) == 0 ? document_end : id;
    };
    for (std::int64_t t = 0; t < seq_len; ++t) {
      tokens[t] = token(t);
      targets[t] = token(t + 1);
    }
  };
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

double verify_bound(const Plan& plan) {
  const ModelSpec& m = plan.model;
  const std::int64_t longest =
      std::max({m.hidden, m.attention_width(), m.mlp_hidden, m.vocab, plan.global_batch * plan.seq_len});
  const double epsilon = plan.dtype == DType::f64 ? 0x1p-53 : 0x1p-24;
  return 4.0 * static_cast<double>(m.num_layers + 1) * epsilon * std::sqrt(static_cast<double>(longest));
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
  if (request.plan.offload != Offload::none) check_scratch_directory(request.plan.offload_directory);
}

VerifyReport verify(const VerifyRequest& given) {
  refuse_together(given.run.processes, [&] { validate(given); });
  VerifyRequest request = given;
  const PipelineLayout pipeline(request.plan);
  if (!request.samples) request.samples = random_tokens(request.plan, request.seed);
  VerifyReport report;
  report.steps = request.steps;
  const double bound = verify_bound(request.plan) * updates_apart(request, pipeline.programs(0));
  report.bound = bound;
  const auto epoch = std::chrono::steady_clock::now();
  std::optional<ThreadWorld> threads;
  if (request.run.processes == nullptr)
    threads.emplace(request.plan.mesh.num_ranks(), request.run.timeout, request.run.failure_hooks);
  World& world = threads ? static_cast<World&>(*threads) : *request.run.processes;
  world.run([&](int index) {
    Arena arena;
    const auto kernels = make_kernels(arena, request.plan.dtype, request.run.threads_per_rank);
    const Rank rank(world, request.plan.mesh, index, request.plan.dtype, arena, *kernels,
                    request.run.collectives);
    VerifyReport unused;  // only rank 0 reports
    Comparison comparison(request, rank, bound, index == 0 ? report : unused);
    for (std::int64_t step = 0; step < request.steps; ++step) {
      if (index == 0)
        echelon::report(request.progress, static_cast<double>(step) / static_cast<double>(request.steps),
                        fmt::format("step {} of {}", step + 1, request.steps));
      if (!comparison.step(step)) break;
    }
    if (rank.dp_cp().rank() != 0 || rank.coordinate(Axis::tp) != 0) return;
    auto timelines = gather_spans(rank.along(Axis::pp), comparison.last_run().spans_since(epoch));
    if (index == 0) report.measured_timeline.ranks = std::move(timelines);
  });
  if (!request.run.leads()) return report;
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
  ordered_json mesh = ordered_json::object();
  for (Axis axis : all_axes) mesh[axis_name(axis)] = plan.mesh.size(axis);
  mesh["ep"] = plan.mesh.ep;
  return ordered_json{{"pass", r.pass},
                      {"ranks", plan.mesh.num_ranks()},
                      {"steps", r.steps},
                      {"bitwise", r.bitwise},
                      {"loss_max_rel_diff", number(r.loss_max_rel_diff)},
                      {"grad_max_rel_diff", number(r.grad_max_rel_diff)},
                      {"param_max_rel_diff", number(r.param_max_rel_diff)},
                      {"bound", r.bound},
                      {"param_worst_over_allowed", number(r.param_worst)},
                      {"first_difference", first},
                      {"mesh", mesh},
                      {"reference_losses", r.reference_losses},
                      {"mesh_losses", r.mesh_losses}}
      .dump();
}

}  // namespace echelon

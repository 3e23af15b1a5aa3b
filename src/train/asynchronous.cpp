#include "train/asynchronous.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "plan/memory.h"

namespace echelon {
namespace {

ParameterServerRun served_run(const Plan& plan, const AsynchronousRun& run) {
  return {plan.mesh.size(Axis::dp), run.options.servers, run.options.staleness, run.first_step,
          run.last_step - run.first_step};
}

std::vector<ShardUnit> units_over_servers(const FlatLayout& layout, const AsynchronousOptions& options) {
  return shard_units(layout, {options.servers, options.servers});
}

std::string shown_bound(const AsynchronousOptions& options) {
  return options.staleness ? fmt::format("{}", *options.staleness) : "inf";
}

// The norm of the gradient that the store holds, all of it or cut over servers, which then agree on the name.
double finite_norm(const Rank& rank, const ParameterStore& parameters, std::int64_t step) {
  const std::vector<double> squares = GradientSquares(rank, parameters).get();
  const double norm = norm_of_squares(squares);
  if (std::isfinite(norm)) return norm;
  for (std::size_t i = 0; i < squares.size(); ++i)
    if (!std::isfinite(squares[i]))
      fail_for_good("step {}: the gradient of {} is not finite", step + 1, parameters.model()[i].name);
  fail_for_good("step {}: the gradient norm overflows", step + 1);
}

}  // namespace

void refuse_asynchronous(const Plan& plan, const AsynchronousOptions& options) {
  if (plan.precision.parameters != plan.precision.gradients)
    refuse(
        "--precision {}: parameter servers keep and send wide weights alone; legal with --staleness: f32, "
        "f64",
        plan.precision.name);
  const std::string flag = "--staleness " + shown_bound(options);
  if (plan.numerics == Numerics::invariant)
    refuse("{}: with --numerics invariant all ranks wait for the same sums; legal: --numerics ordinary",
           flag);
  if (!(plan.model.tuning == FineTuning{}))
    refuse(
        "{}: the servers hold and send every weight, and frozen ones neither change nor travel; legal: "
        "--freeze none and --lora none",
        flag);
  if (options.staleness && *options.staleness < 0) refuse("{}: must be a number of at least 0, or inf", flag);
  for (Axis axis : all_axes)
    if (axis != Axis::dp && plan.mesh.size(axis) > 1)
      refuse("{}: a parameter server serves data-parallel workers alone; legal: --{} 1, not {}", flag,
             axis_name(axis), plan.mesh.size(axis));
  if (plan.mesh.ep > 1)
    refuse(
        "{}: ranks that hold different experts exchange tokens in every layer, and workers of different "
        "clocks do not meet; legal: --ep 1, not {}",
        flag, plan.mesh.ep);
  if (plan.zero > 0)
    refuse("{}: the servers hold the optimizer's state already, cut over --servers; legal: --zero 0, not {}",
           flag, plan.zero);
  if (plan.balancing.has_losses() || plan.balancing.bias_rate > 0)
    refuse(
        "{}: the balance losses and biases of experts look at the tokens of all workers' batches, which do "
        "not meet; legal: --aux-loss, --device-loss, --communication-loss, --z-loss and --bias-rate 0",
        flag);
  if (!flushes(plan))
    refuse("{}: --schedule {} has stale gradients of its own; legal: a schedule that flushes, as 1f1b", flag,
           plan.schedule);
  if (!plan.optimizer_barrier)
    refuse("{}: the servers make the optimizer's steps; legal: --optimizer-barrier on", flag);
  if (plan.optimizer != OptimizerKind::adamw)
    refuse(
        "{}: the servers hold parts of matrices, and --optimizer {} needs whole ones; legal: --optimizer "
        "adamw",
        flag, name_of(plan.optimizer));
  if (plan.compression.kind != CompressionKind::none)
    refuse("{}: what workers push is not compressed; legal: --compress none", flag);
  constexpr int most_ranks = 1024;
  const int most = most_ranks - plan.mesh.num_ranks();
  if (options.servers < 1 || options.servers > most)
    refuse("--servers {}: must be from 1 to {}", options.servers, most);
}

int num_ranks(const Plan& plan, const std::optional<AsynchronousOptions>& options) {
  return plan.mesh.num_ranks() + (options ? options->servers : 0);
}

Plan server_plan(const Plan& plan, int servers) {
  Plan served = plan;
  served.mesh.set(Axis::dp, servers);
  served.zero = 3;
  served.global_batch = servers;  // of nothing: a server computes no batch
  served.micro_batch = 1;
  return served;
}

Memory predict_server_memory(const Plan& plan, const PipelineLayout& pipeline,
                             const AsynchronousOptions& options, int server) {
  const FlatLayout layout = flat_layout(pipeline.groups_of(0, 0), 1, 0);
  const std::int64_t own = shard_size(units_over_servers(layout, options), {server, server});
  Memory memory = kept_state(layout.size(), own, 3, state_bytes(plan));
  if (options.staleness == 0)  // the pushes of a clock but one wait beside
    memory[MemoryCategory::communication] =
        (plan.mesh.size(Axis::dp) - 1) * memory[MemoryCategory::gradients];
  return memory;
}

// In n steps the workers take n W batches. Of c batches of the slow worker, each f long, the others meanwhile
// do c f each, or c + s where the bound stops them: so c = n W / ((W-1) f + 1), or n - s (W-1)/W if that is
// more, and the run takes c f.
double straggler_slowdown(double factor, int workers, std::int64_t steps,
                          const AsynchronousOptions& options) {
  const double w = workers, n = static_cast<double>(steps);
  const double free = w / ((w - 1) * factor + 1);
  if (!options.staleness) return factor * free;
  const double bound = 1 - static_cast<double>(*options.staleness) / n * (w - 1) / w;
  return factor * std::max(free, bound);
}

Traffic predict_worker_traffic(const Plan& plan, const PipelineLayout& pipeline,
                               const AsynchronousOptions& options) {
  const std::vector<ShardUnit> units =
      units_over_servers(flat_layout(pipeline.groups_of(0, 0), 1, 0), options);
  const ParameterServerRun run = served_run(plan, {options});
  Traffic traffic;
  traffic.at(Axis::dp, Verb::send) = worker_sends(units, run, element_bytes(plan.precision.gradients));
  traffic.at(Axis::dp, Verb::recv) = worker_receives(units, run);
  if (run.synchronous() && run.workers > 1) {  // targets, and all losses together
    const std::int64_t losses = 1 + plan.model.num_mtp_layers;
    traffic.at(Axis::dp, Verb::all_reduce) = {
        2, all_reduce_bytes_sent(1, run.workers, 0, 8) + all_reduce_bytes_sent(losses, run.workers, 0, 8)};
  }
  return traffic;
}

std::unique_ptr<Communicator> join_all(const Rank& rank, int workers, int servers) {
  return rank.join(everyone(workers + servers), "parameter server", Axis::dp);
}

void run_worker(Communicator& all, Trainer& trainer, const AsynchronousRun& run, const SampleSource& samples,
                const std::function<void()>& after_batch) {
  const bool synchronous = run.options.staleness == 0;
  trainer.set_data_parallel_sums(synchronous ? DataParallelSums::counts : DataParallelSums::none);
  const ParameterStore& parameters = trainer.parameters();
  ParameterClient client(all, served_run(trainer.plan(), run),
                         units_over_servers(parameters.layout(), run.options), parameters.values(),
                         [&](Range range) { return parameters.gradient_range(range); });
  while (const std::optional<std::int64_t> clock = client.pull()) {
    Push push{.clock = *clock};
    push.loss = trainer.compute_gradients(*clock, samples);
    push.num_targets = trainer.num_targets();
    push.mtp_loss = trainer.mtp_loss();
    if (!synchronous) push.norm = finite_norm(trainer.rank(), parameters, *clock);
    client.push(push);
    if (after_batch) after_batch();
  }
  client.finish();
}

ParameterServerRank::ParameterServerRank(const Rank& rank, const Plan& plan,
                                         const OptimizerOptions& optimizer, std::uint64_t seed,
                                         const AsynchronousRun& run, FirstValues first_values)
    : rank_(rank),
      plan_(plan),
      optimizer_(optimizer),
      run_(run),
      server_plan_(server_plan(plan, run.options.servers)),
      pipeline_(server_plan_),
      parameters_(rank, server_plan_, pipeline_, seed, {}, Moments::here, first_values) {}

StalenessMeasures ParameterServerRank::serve(Communicator& all,
                                             const std::function<void(const ServedStep&)>& on_step) {
  on_step_ = on_step;
  step_begin_ = rank_.time().now();
  ParameterServer server(rank_, all, served_run(plan_, run_),
                         units_over_servers(parameters_.layout(), run_.options), parameters_.own_values(),
                         parameters_.keep_own_gradients(),
                         [this](const std::vector<Push>& pushes, int worker) { update(pushes, worker); });
  server.serve();
  return server.staleness();
}

void ParameterServerRank::update(const std::vector<Push>& pushes, int worker) {
  const int workers = plan_.mesh.size(Axis::dp);
  const bool synchronous = run_.options.staleness == 0;
  StepResult& result = step_.result;
  result.step = run_.first_step + pushes_ / workers;
  result.learning_rate = learning_rate(optimizer_, result.step);
  const double norm = synchronous ? finite_norm(rank_, parameters_, result.step) : pushes.front().norm;
  optimizer_step(rank_, parameters_, optimizer_, result.learning_rate, updates_,
                 clip_factor(norm, optimizer_.clip));
  ++updates_;
  pushes_ += static_cast<std::int64_t>(pushes.size());
  if (synchronous) {
    result.loss = pushes.front().loss;  // workers have summed it
    result.mtp_loss = pushes.front().mtp_loss;
    result.gradient_norm = norm;
    step_.sequences = plan_.global_batch;
  } else {
    const Push& push = pushes.front();
    num_targets_ += push.num_targets;
    const double part = push.num_targets / num_targets_;
    result.loss += (push.loss - result.loss) * part;
    result.mtp_loss += (push.mtp_loss - result.mtp_loss) * part;
    result.gradient_norm += norm / workers;
    step_.sequences += dp_samples(plan_, worker).size();
  }
  if (pushes_ % workers != 0) return;
  const auto now = rank_.time().now();
  step_.seconds = seconds_between(std::exchange(step_begin_, now), now);
  if (on_step_) on_step_(step_);
  step_ = {};
  num_targets_ = 0;
}

}  // namespace echelon

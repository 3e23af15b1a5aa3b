#include "schedule/pipeline_layout.h"

#include <algorithm>
#include <set>

#include "base/edits.h"
#include "base/error.h"
#include "base/units.h"
#include "schedule/balance.h"
#include "schedule/schedules.h"
#include "schedule/simulate.h"
#include "schedule/text.h"
#include "schedule/validate.h"
#include "schedule/vocabulary.h"
#include "schedule/zb_auto.h"
#include "spec/block.h"
#include "spec/plan_rules.h"

namespace echelon {

bool flushes(const Plan& plan) {
  return !is_stream(plan.schedule) || !plan.schedule_text.empty() || plan.mesh.size(Axis::pp) == 1;
}

namespace {

// A custom schedule, given as text.
Schedule own_schedule(const Plan& plan, int ranks, int microbatches) {
  Schedule schedule = from_text(plan.schedule_text, "--schedule " + plan.schedule);
  schedule.name = plan.schedule;
  validate(schedule);
  if (!is_synchronous(schedule))
    refuse("--schedule {}: has optimizer steps; of schedules that do not flush, train runs pipedream and 2bw",
           plan.schedule);
  if (schedule.vocabulary_parts > 0)
    refuse(
        "--schedule {}: has parts of the output layer (V, VW), which train puts in by itself; legal: the "
        "same without them, and --vocabulary-parallel",
        plan.schedule);
  if (schedule.num_ranks() != ranks)
    refuse_field(plan, "schedule", {remedy("pp", schedule.num_ranks())}, "it is for {}, and --pp is {}",
                 counted(schedule.num_ranks(), "rank"), ranks);
  if (const std::int64_t wanted = schedule.num_microbatches, dp = plan.mesh.size(Axis::dp);
      wanted != microbatches)
    refuse_field(plan, "schedule",
                 {remedy("global-batch", wanted * plan.micro_batch * dp),
                  remedy("micro-batch", (plan.global_batch + wanted * dp - 1) / (wanted * dp))},
                 "it is for {}, and --global-batch {} over --dp {} in --micro-batch {} makes {}",
                 counted(wanted, "microbatch"), plan.global_batch, dp, plan.micro_batch, microbatches);
  return schedule;
}

std::vector<std::int64_t> layers_of_stages(const Plan& plan, const Schedule& schedule) {
  const ModelSpec& model = plan.model;
  const int stages = schedule.num_stages;
  if (const auto refusal = stages_refusal(plan, stages)) throw PlanRefusal(plan, *refusal);
  if (!plan.layers_per_stage.empty()) return plan.layers_per_stage;
  if (plan.balance_layers) {
    const auto cost = [&](const StageSlice& slice) {
      const StageTimes flops = stage_flops(plan, slice);
      return flops.forward + flops.backward_input + flops.backward_weight;
    };
    // In hybrid models, and with frozen layers, layers may all differ in cost. Only a first stage has layers
    // without a backward pass: all others pass gradients on.
    const auto layers = [&](std::int64_t idle) {
      std::vector<double> costs;
      const std::vector<Recompute>& kinds = plan.recompute.kinds();
      for (std::int64_t k = 0; k < model.num_layers; ++k) {
        double mean = 0;  // over what ranks make again
        for (const Recompute& kind : kinds)
          mean += cost({{k, k + 1}, false, false, kind, false, k < idle ? 1 : 0});
        costs.push_back(mean / static_cast<double>(kinds.size()));
      }
      return costs;
    };
    const std::int64_t idle = idle_blocks(model) - 1;  // the embedding is one
    const double last = cost({{0, 0}, false, true, {}, plan.cuts_vocabulary()});
    return balance_layers(schedule, layers(0), cost({{0, 0}, true, false}), last,
                          idle > 0 ? layers(idle) : std::vector<double>())
        .layers;
  }
  std::vector<std::int64_t> even;
  for (int s = 0; s < stages; ++s) even.push_back(split_range(model.num_layers, stages, s).size());
  return even;
}

std::vector<StageSlice> cut_layers(const Plan& plan, const Schedule& schedule) {
  std::vector<StageSlice> slices;
  std::int64_t next = 0;
  for (std::int64_t count : layers_of_stages(plan, schedule)) {
    slices.push_back({{next, next + count}, slices.empty(), false, {}, plan.cuts_vocabulary()});
    next += count;
  }
  slices.back().head = true;
  StageSlice& first = slices.front();
  first.idle = std::min(idle_blocks(plan.model), 1 + first.layers.size());
  for (int r = 0; r < schedule.num_ranks(); ++r)
    for (const Instruction& i : schedule.ranks[static_cast<std::size_t>(r)])
      if (!is_of_head(i.op)) slices[static_cast<std::size_t>(i.stage)].recompute = plan.recompute.of(r);
  return slices;
}

// zb-auto for the actual stages: their FLOPs as times, their layers as memory, and on each rank no more
// activations than 1F1B has on its first.
Schedule searched_schedule(const Plan& plan, int ranks, int microbatches) {
  AutoCosts costs;
  costs.times.stages.clear();
  costs.memory.clear();
  costs.limit = {static_cast<double>(ranks)};
  double total = 0;
  // Stage r on rank r, as 1F1B has it.
  for (const StageSlice& slice : cut_layers(plan, one_f_one_b(ranks, microbatches))) {
    const StageTimes flops = stage_flops(plan, slice);
    total += flops.forward + flops.backward_input + flops.backward_weight;
    costs.times.stages.push_back(flops);
    // A stage without layers keeps its input: no pass keeps nothing.
    const double layers = static_cast<double>(std::max<std::int64_t>(1, slice.layers.size()) * ranks) /
                          static_cast<double>(plan.model.num_layers);
    costs.memory.push_back({layers, 0, -layers});
  }
  // In units of a mean pass, so that the result does not depend on the size of the model.
  for (StageTimes& times : costs.times.stages)
    for (double* t : {&times.forward, &times.backward_input, &times.backward_weight}) *t *= 3 * ranks / total;
  return zb_auto(ranks, microbatches, costs).schedule;
}

// Adds vocabulary parallelism if the plan has it.
Schedule with_output_layer(const Plan& plan, Schedule schedule) {
  if (!plan.cuts_vocabulary()) return schedule;
  if (const std::string problem = vocabulary_problem(schedule); !problem.empty())
    refuse_field(plan, "vocabulary-parallel", {{"vocabulary-parallel", "off"}, {"schedule", "1f1b"}},
                 "--schedule {}: {}", plan.schedule, problem);
  return with_vocabulary_parallelism(schedule, flops_of(plan, cut_layers(plan, schedule)));
}

// What a published schedule itself refuses: too few microbatches, or an odd number of them or of ranks.
[[noreturn]] void refuse_shape(const Plan& plan, int ranks, int microbatches, const std::string& problem) {
  const auto runs = [&](int count) {
    try {
      if (is_stream(plan.schedule))
        (void)StepPrograms(plan.schedule, ranks, count);
      else
        (void)make_schedule(plan.schedule, ranks, count, plan.chunks);
      return true;
    } catch (const RequestError&) {
      return false;
    }
  };
  const int dp = plan.mesh.size(Axis::dp), most = microbatches + 2 * ranks;  // DualPipe needs 2P
  int enough = microbatches + 1;
  while (enough <= most && !runs(enough)) ++enough;
  std::vector<Remedy> remedies{{"schedule", "1f1b"}};
  if (const std::int64_t all = std::int64_t{enough} * dp; enough <= most) {
    remedies.push_back(remedy("global-batch", all * plan.micro_batch));
    remedies.push_back(remedy("micro-batch", (plan.global_batch + all - 1) / all));
  } else {
    remedies.push_back(remedy("pp", ranks + 1));
  }
  refuse_field(plan, "schedule", std::move(remedies),
               "with --pp {}, --global-batch {} over --dp {} in --micro-batch {} makes {}: {}", ranks,
               plan.global_batch, dp, plan.micro_batch, counted(microbatches, "microbatch"), problem);
}

// One rank needs only "forward, backward": every schedule at P = 1, without a second chunk.
StepPrograms planned_programs(const Plan& plan, int microbatches) {
  const int ranks = plan.mesh.size(Axis::pp);
  if (const auto refusal = schedule_refusal(plan)) throw PlanRefusal(plan, *refusal);
  if (ranks == 1) return StepPrograms(one_f_one_b(1, microbatches));
  if (!plan.schedule_text.empty())
    return StepPrograms(with_output_layer(plan, own_schedule(plan, ranks, microbatches)),
                        plan.optimizer_barrier);
  try {
    if (!flushes(plan) && !plan.cuts_vocabulary()) return {plan.schedule, ranks, microbatches};
    return StepPrograms(
        with_output_layer(plan, plan.schedule == "zb-auto"
                                    ? searched_schedule(plan, ranks, microbatches)
                                    : make_schedule(plan.schedule, ranks, microbatches, plan.chunks)),
        plan.optimizer_barrier);
  } catch (const PlanRefusal&) {
    throw;
  } catch (const MicrobatchesError& error) {
    refuse_shape(plan, ranks, microbatches, error.problem);
  } catch (const RequestError& error) {
    refuse_shape(plan, ranks, microbatches, error.what());
  }
}

void refuse_stream(const Plan& plan) {
  const int dp = plan.mesh.size(Axis::dp);
  const Remedy flushing{"schedule", "1f1b"};
  if (plan.zero > 0)
    refuse_field(plan, "zero", {{"zero", "0"}, flushing},
                 "{} keeps several versions of whole weights, each stage at another step", plan.schedule);
  for (const auto& [field, number] : {std::pair{"aux-loss", &Balancing::expert_loss},
                                      {"device-loss", &Balancing::device_loss},
                                      {"communication-loss", &Balancing::communication_loss},
                                      {"z-loss", &Balancing::z_loss}})
    if (plan.balancing.*number > 0)
      refuse_field(plan, field, {{field, "0"}, flushing},
                   "is a mean over the tokens of a step, and {} updates stages inside of it", plan.schedule);
  if (plan.balancing.bias_rate > 0)
    refuse_field(plan, "bias-rate", {{"bias-rate", "0"}, flushing},
                 "the loads of a step's experts are counted at its end, and {} has none", plan.schedule);
  if (microbatches(plan, 0).size() != microbatches(plan, dp - 1).size())
    refuse_field(
        plan, "schedule", {flushing, remedy("global-batch", (plan.global_batch + dp - 1) / dp * dp)},
        "every data-parallel rank needs the same number of microbatches, and --global-batch {} over --dp {} "
        "in --micro-batch {} makes {} and {}",
        plan.global_batch, dp, plan.micro_batch, microbatches(plan, 0).size(),
        microbatches(plan, dp - 1).size());
  if (plan.model.tied_embedding)
    refuse_field(
        plan, "schedule", {flushing},
        "{} ties its output layer to its embedding, and the two ends of the pipeline step at different times",
        plan.model.name);
  if (plan.model.num_mtp_layers > 0)
    refuse_field(plan, "schedule", {flushing},
                 "{} predicts one more token (num_mtp_layers) with its embedding, and the two ends of the "
                 "pipeline step at different times",
                 plan.model.name);
}

// The counts of the global batch are complete only after its last forward pass; an earlier backward pass
// would use the loss of other tokens. Ranks sum the counts in the backward pass of their first microbatch,
// and between that and the last one no gradients may be summed.
void refuse_batch_scope(const Plan& plan, const Schedule& schedule, bool same_microbatches) {
  if (plan.balancing.scope != BalanceScope::batch || !plan.balancing.has_counts()) return;
  const auto problem = [&](const std::string& why) {
    const std::int64_t most = dp_samples(plan, 0).size();
    refuse_field(plan, "balance-scope",
                 {{"balance-scope", "sequence"},
                  {"balance-scope", "microbatch"},
                  remedy("micro-batch", most, Remedy::Kind::at_least),
                  {"schedule", "gpipe"}},
                 "{}", why);
  };
  if (!plan.optimizer_barrier) problem("with --optimizer-barrier off forward passes are taken back");
  if (!same_microbatches)
    problem(
        fmt::format("with --global-batch {} --dp {} --micro-batch {} some ranks have more "
                    "microbatches than others",
                    plan.global_batch, plan.mesh.size(Axis::dp), plan.micro_batch));
  if (parameter_copies(schedule) > 1)
    problem(fmt::format("{} runs each stage on two ranks, which would wait for each other's counts",
                        schedule.name));
  for (const auto& instructions : schedule.ranks) {
    std::set<int> backward;  // stages that have begun it
    for (const Instruction& i : instructions) {
      if (i.op == Op::B || i.op == Op::BW) backward.insert(i.stage);
      if (i.op == Op::F && backward.contains(i.stage))
        problem(
            fmt::format("{} with {} begins backward passes before the tokens of all "
                        "forward passes are counted",
                        plan.mesh.size(Axis::pp) == 1 ? "one pipeline rank" : schedule.name.c_str(),
                        counted(schedule.num_microbatches, "microbatch")));
    }
  }
}

void refuse_without_barrier(const Plan& plan, const Schedule& schedule) {
  const auto problem = [&](const std::string& why, std::vector<Remedy> others) {
    others.push_back({"optimizer-barrier", "on"});
    refuse_field(plan, "optimizer-barrier", std::move(others), "{}", why);
  };
  if (schedule.num_ranks() == 1) problem("needs a pipeline, and --pp is 1", {{"pp", "2"}});
  if (!flushes(plan)) problem(fmt::format("{} has no barrier between its steps", plan.schedule), {});
  if (plan.balancing.bias_rate > 0)
    problem("a step's biases of routers are known when all its tokens are counted, which is a barrier",
            {{"bias-rate", "0"}});
  if (parameter_copies(schedule) > 1)
    problem(fmt::format("{} adds up the gradients of its two copies of each stage, which is a barrier",
                        plan.schedule),
            {{"schedule", "1f1b"}});
}

// Summing over microbatches in a tree needs them in order; and if two ranks have copies of a stage, each must
// have one half of them, as in DualPipe.
void refuse_order_of_gradients(const Plan& plan, const Schedule& schedule) {
  if (plan.numerics == Numerics::ordinary) return;
  const auto problem = [&](const std::string& why) {
    refuse_field(plan, "schedule", {{"schedule", "1f1b"}, {"numerics", "ordinary"}}, "{}", why);
  };
  if (schedule.num_ranks() > 1 && !flushes(plan))
    problem("with --numerics invariant all microbatches of a step see the same weights");
  if (parameter_copies(schedule) > 1 && !plan.schedule_text.empty())
    problem("with --numerics invariant a stage is on one rank, and here two have copies of it");
  for (const auto& instructions : schedule.ranks) {
    std::map<int, int> last;  // microbatch whose gradients a stage has
    for (const Instruction& i : instructions) {
      // The output layer has them with those of the last stage's input.
      const bool is_output = i.op == Op::B && i.stage + 1 == schedule.num_stages;
      if (i.op != Op::W && i.op != Op::BW && !is_output) continue;
      const int stage = is_output ? schedule.num_stages : i.stage;
      const auto [at, is_first] = last.emplace(stage, i.microbatch);
      if (!is_first && at->second > i.microbatch)
        problem(
            fmt::format("with --numerics invariant gradients are added in the order of microbatches, and "
                        "stage {} has those "
                        "of microbatch {} behind those of {}",
                        i.stage, i.microbatch, at->second));
      at->second = i.microbatch;
    }
  }
}

}  // namespace

std::optional<Refusal> schedule_refusal(const Plan& plan) {
  const auto& names = schedule_names();
  if (!plan.schedule_text.empty() || std::find(names.begin(), names.end(), plan.schedule) != names.end())
    return {};
  Refusal refusal = refused("schedule", {}, "no such schedule or file{}", did_you_mean(plan.schedule, names));
  for (const std::string& name : names) refusal.remedies.push_back({"schedule", name});
  return refusal;
}

std::optional<Refusal> stages_refusal(const Plan& plan, int stages) {
  const ModelSpec& model = plan.model;
  const int ranks = plan.mesh.size(Axis::pp);
  const auto has = [&] {
    return fmt::format("{} over {} has {}", plan.schedule, counted(ranks, "rank"), counted(stages, "stage"));
  };
  const auto numbers = std::ssize(plan.layers_per_stage);
  if (numbers == stages || (numbers == 0 && model.num_layers >= stages)) return {};
  if (numbers > 0)
    return refused("layers-per-stage", {{"layers-per-stage", "auto"}}, "{}, and {}",
                   counted(numbers, "number"), has());
  Refusal refusal = refused("pp", {}, "{} of at least one layer, and {} has {}", has(), model.name,
                            counted(model.num_layers, "layer"));
  for (int pp = ranks - 1; pp >= 1 && std::ssize(refusal.remedies) < 4; --pp)
    if (stages / ranks * pp <= model.num_layers) refusal.remedies.push_back(remedy("pp", pp));
  return refusal;
}

std::optional<Refusal> copies_refusal(const Plan& plan, const std::vector<std::vector<int>>& stages_of) {
  std::map<int, int> first;  // rank that runs a stage
  for (int r = 0; r < static_cast<int>(stages_of.size()); ++r)
    for (int stage : stages_of[static_cast<std::size_t>(r)])
      if (const int other = first.emplace(stage, r).first->second;
          !(plan.recompute.of(other) == plan.recompute.of(r)))
        return refused("recompute",
                       {{"recompute", "none"}, {"recompute", "selective"}, {"recompute", "full"}},
                       "pipeline ranks {} and {} of {} both run stage {}, and must make the same again",
                       other, r, plan.schedule, stage);
  return {};
}

void check_whole(const Plan& plan) {
  judge(plan);
  const PipelineLayout checked(plan);
}

bool are_alike(const std::vector<Range>& microbatches) {
  return microbatches.back().size() == microbatches.front().size();
}

std::int64_t looked_up_rows(const Plan& plan, int dp_rank) {
  std::int64_t rows = 0;
  for (const Range& samples : microbatches(plan, dp_rank))
    rows += samples.size() * plan.seq_len / plan.mesh.size(Axis::cp);
  return rows;
}

bool may_keep_lookups(const Plan& plan, int dp_rank) {
  constexpr std::int64_t widest = 4;  // a gradient's elements, beside those of activations
  return plan.model.tied_embedding && looked_up_rows(plan, dp_rank) < widest * plan.model.vocab;
}

PipelineLayout::PipelineLayout(const Plan& plan, StepLength length)
    : shares_table_(plan.model.tied_embedding || plan.model.num_mtp_layers > 0),
      reads_embedding_again_(embedding_program(plan.model).reads_values_backward()),
      output_name_(output_matrix(plan.model).name) {
  for (int r = 0; r < plan.mesh.size(Axis::dp); ++r) {
    const std::vector<Range> batches = microbatches(plan, r);
    int count = static_cast<int>(batches.size());
    // With vocabulary parallelism, the order of a step depends on all its microbatches.
    if (length == StepLength::steady && plan.schedule_text.empty() && !plan.cuts_vocabulary() &&
        are_alike(batches) && !may_keep_lookups(plan, r))
      count = steady_microbatches(plan.schedule, plan.mesh.size(Axis::pp), count);
    microbatches_.push_back(count);
    if (!programs_.contains(count)) programs_.emplace(count, planned_programs(plan, count));
  }
  const Schedule& schedule = programs(0).schedule();
  if (!programs(0).flushes()) refuse_stream(plan);
  if (!plan.optimizer_barrier) refuse_without_barrier(plan, schedule);
  refuse_order_of_gradients(plan, schedule);
  refuse_batch_scope(plan, schedule, programs_.size() == 1);
  stage_copies_ = parameter_copies(schedule);
  slices_ = cut_layers(plan, schedule);
  hold(plan, schedule);
  if (const auto refusal = copies_refusal(plan, held_)) throw PlanRefusal(plan, *refusal);
  if (!shares_table_) return;
  const auto ends = model_->place_of(embedding_parameters(plan.model).front().name).holders.size();
  if (ends > 2)
    refuse_field(plan, "schedule", {{"schedule", "1f1b"}},
                 "the embedding and the output layer of {} share a table, which {} ranks would hold; two can",
                 plan.model.name, ends);
}

PipelineLayout PipelineLayout::of_rank(int pp_rank) const {
  PipelineLayout one = *this;
  one.programs_.clear();
  for (const auto& [count, programs] : programs_) one.programs_.emplace(count, programs.of_rank(pp_rank));
  return one;
}

void PipelineLayout::hold(const Plan& plan, const Schedule& schedule) {
  using Group = std::vector<ParamSpec>;
  const std::vector<Group> whole = parameter_groups(plan.model);
  const auto model = std::make_shared<HeldModel>();
  for (const Group& group : whole)
    model->parameters.insert(model->parameters.end(), group.begin(), group.end());
  for (std::size_t i = 0; i < model->parameters.size(); ++i)
    model->places[model->parameters[i].name].index = i;
  model_ = model;
  const Group &embedding = whole.front(), table{embedding.front()}, bias = output_bias(plan.model);
  const Group norm = plan.cuts_vocabulary() ? final_norm_program(plan.model).parameters() : Group();
  Group head = whole.back();  // without the bias
  std::erase_if(head, [&](const ParamSpec& spec) { return !bias.empty() && spec.name == bias.front().name; });
  Groups all;
  for (int r = 0; r < schedule.num_ranks(); ++r) {
    std::set<int> held;
    for (const Instruction& i : schedule.ranks[static_cast<std::size_t>(r)])
      if (!is_of_head(i.op)) held.insert(i.stage);
    held_.emplace_back(held.begin(), held.end());
    std::vector<std::vector<const Group*>> groups;  // of what each has
    for (int s : held_.back()) {
      const StageSlice& slice = slices_[static_cast<std::size_t>(s)];
      if (slice.embedding) groups.push_back({&embedding});
      for (std::int64_t layer = slice.layers.begin; layer < slice.layers.end; ++layer)
        groups.push_back({&whole[static_cast<std::size_t>(layer) + 1]});
      if (!slice.head) continue;
      groups.push_back({slice.vocabulary_is_cut ? &norm : &head});
      const bool has_table = held.contains(0);
      if (shares_table_ && !has_table) groups.back().push_back(&table);
      if (!slice.vocabulary_is_cut)
        (plan.model.tied_embedding && has_table ? groups.front() : groups.back()).push_back(&bias);
    }
    Group part;
    if (plan.cuts_vocabulary()) {
      part = bias;
      part.insert(part.begin(), output_matrix(plan.model));
      for (ParamSpec& spec : part) {
        spec.parts = schedule.num_ranks();
        spec.part = r;
      }
      groups.push_back({&part});
    }
    for (const auto& group : groups)
      for (const Group* some : group)
        for (const ParamSpec& spec : *some) {
          auto& holders = model->places.at(spec.name).holders;
          if (holders.empty() || holders.back() != r) holders.push_back(r);
        }
    all.emplace_back();
    for (int ep_index = 0; ep_index < plan.mesh.ep; ++ep_index) {
      const Range experts = experts_of(plan, ep_index);
      const auto is_here = [&](const ParamSpec& spec) {
        return spec.expert < 0 || (spec.expert >= experts.begin && spec.expert < experts.end);
      };
      auto& here = all.back().emplace_back();
      for (const auto& group : groups) {
        Group& own = here.emplace_back();
        for (const Group* some : group)
          std::copy_if(some->begin(), some->end(), std::back_inserter(own), is_here);
      }
    }
  }
  groups_ = std::make_shared<const Groups>(std::move(all));
}

const HeldModel::Place& HeldModel::place_of(const std::string& name) const {
  const auto found = places.find(name);
  check(found != places.end() && !found->second.holders.empty(),
        "a parameter of the model, on some pipeline rank");
  return found->second;
}

std::vector<int> PipelineLayout::holders_of(const ParamSpec& parameter) const {
  if (parameter.parts > 1) return {parameter.part};
  return model_->place_of(parameter.name).holders;
}

int PipelineLayout::first_group(int pp_rank, int stage) const {
  int group = 0;
  for (int s : stages_of(pp_rank)) {
    if (s == stage) return group;
    const StageSlice& slice = slices_[static_cast<std::size_t>(s)];
    group += static_cast<int>(slice.layers.size()) + slice.embedding + slice.head;
  }
  throw InvariantError("a rank has the groups of the stages that it holds");
}

int PipelineLayout::output_group(int pp_rank) const {
  const auto& groups = groups_of(pp_rank, 0);
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (const ParamSpec& spec : groups[g])
      if (spec.name == output_name_) return static_cast<int>(g);
  throw InvariantError("a rank has an output layer where it holds its matrix");
}

std::set<int> PipelineLayout::late_groups(int pp_rank) const {
  std::set<int> late;
  const auto& groups = groups_of(pp_rank, 0);
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (const ParamSpec& spec : groups[g])
      if (holders_of(spec).size() > 1) late.insert(static_cast<int>(g));
  if (ties_on(pp_rank)) late.insert(0);  // the embedding's
  return late;
}

bool keeps_tied_gradient_apart(const Plan& plan, const PipelineLayout& pipeline, int dp_rank, int pp_rank) {
  const std::vector<Range> batches = microbatches(plan, dp_rank);
  return pipeline.ties_on(pp_rank) &&
         (plan.numerics == Numerics::invariant || (batches.size() > 1 && batches[1].size() > 0));
}

// A custom schedule may leave a rank without stages.
bool PipelineLayout::ties_on(int pp_rank) const {
  return shares_table_ && ends_on(pp_rank) && stages_of(pp_rank).front() == 0;
}

bool PipelineLayout::ends_on(int pp_rank) const {
  const std::vector<int>& stages = stages_of(pp_rank);
  return !stages.empty() && stages.back() + 1 == static_cast<int>(slices_.size());
}

}  // namespace echelon

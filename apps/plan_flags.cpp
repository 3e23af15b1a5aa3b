#include "apps/plan_flags.h"
#include "train/dry_run.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "apps/flag_values.h"
#include "apps/help.h"
#include "apps/plan_field_flags.h"
#include "base/error.h"
#include "base/open_file.h"
#include "base/real.h"
#include "plan/launch.h"
#include "plan/packed_attention.h"

namespace echelon {
void PlanSearchFlags::add_to(CLI::App& app) {
  app_ = &app;
  const auto text = [&](const char* name, std::string& value, const char* description, const char* type) {
    app.add_option(name, value, description)->type_name(type);
  };
  heading(app, common_flags);
  // A field of the workload, or one to which the search can be pinned.
  const auto field = [&](const PlanField& one, const std::string& shown_default = "") {
    add_field(app, one, values_, shown_default)->type_name(one.priced != nullptr ? one.priced : one.values());
  };
  field(*find_field("model"), "llama-3-8b");
  app.add_option("--machine", machine_, "Preset, or TOML file (from `echelon calibrate`, or your own)")
      ->type_name("NAME|FILE")
      ->capture_default_str();
  add_number(app, "--gpus", gpus_,
             "Number of devices (default: those of a node, or the product of the axes)");
  field(*find_field("global-batch"), "1024");
  field(*find_field("seq-len"), "4096, or the model's longest");
  app.add_flag("--explain", explain, "Show where each second goes, and why the other plans lose");
  text("--out", out, "Write the best plan as a TOML file for train and verify", "PLAN.toml");
  app.add_flag("--json", json, "One JSON object on standard output");
  heading(app, "Export to other programs");
  text("--launch-for", launch_for, "Write the files that start this program with the best plan",
       "megatron-core|megatron-bridge|torchtitan|nanotron|deepspeed");
  text("--launch-out", launch_out, "Directory for it: launch.sh, and the files that it names", "DIR");
  heading(app, "What is planned for");
  app.add_option("--software", software_, "Training software: preset or TOML file")
      ->type_name("NAME|FILE")
      ->capture_default_str();
  app.add_option("--precision", dtype_, "Precision of the matrix products")
      ->type_name("f32|bf16|fp8|fp4")
      ->capture_default_str();
  add_number(app, "--nodes-of", nodes_of_, "Devices in a node");
  add_number(app, "--expert-imbalance", imbalance_,
             "Load of the busiest rank of experts over the mean (1), of routers that do not balance");
  text("--expert-load", expert_load_, "Or a file with the load of each expert, of which that follows",
       "FILE");
  text("--expert-placement", expert_placement_,
       "Which ranks have which of these experts: in their order, or so that loads are most even",
       "order|load");
  add_number(app, "--expert-replicas", expert_replicas_,
             "Further experts that each rank keeps: copies of those with most load, placed by load");
  text(
      "--document-lengths", document_lengths_,
      "A file with the lengths of documents (and how many have each) that are packed into sequences, under a "
      "document mask",
      "FILE");
  app.add_flag("--dynamic-cp", dynamic_context_,
               "Each of these documents is on as many ranks as its length needs (docs/planning.md)");
  add_number(app, "--memory-margin", margin_, "Fraction of the memory to leave free");
  app.add_option("--objective", objective_, "What to minimise; gpus: the fewest that reach --target-time")
      ->type_name("time|memory|gpus")
      ->capture_default_str();
  add_number(app, "--target-time", target_seconds, "Seconds per step, for --objective gpus");
  heading(app, "What is held fixed (default: searched)");
  text("--plan", plan_file_, "TOML file of a plan, priced as it is; flags on the command line override it",
       "FILE");
  for (const PlanField& one : plan_fields())
    if (one.is_flag_of_plan() && app.get_option_no_throw(one.flag()) == nullptr) field(one);
  heading(app, "The life of a run");
  add_number(app, "--tokens", tokens_,
             "Days, GPU-hours and energy of training on this many tokens, such as 15T");
  add_number(app, "--price", price_, "Price of a GPU for an hour");
  add_number(app, "--mtbf-hours", mtbf_hours_, "Mean time between failures of one GPU");
  add_number(app, "--restart-time", restart_, "Seconds from a failure until training continues (0)");
  add_number(app, "--save-time", save_, "Seconds that a checkpoint halts training (0)");
  add_number(app, "--write-time", write_, "Seconds from then until it can be read: asynchronous saves (0)");
  add_number(app, "--spares", spares_,
             "GPUs that take the place of failed ones (default: there is always one)");
  add_number(app, "--repair-hours", repair_hours_, "Hours until a failed GPU is a spare (0)");
  heading(app, "Reports");
  add_number(app, "--top", top_, "How many plans to show");
  text("--against", against_text, "Explain why a named alternative loses, as tp=8,pp=4,schedule=1f1b",
       "KEY=VALUE,...");
  text("--html", html, "Write the best plans as one page", "FILE");
  text("--sweep", sweep, "Plan for each value: gpus=64..16384 (doubling), or gpus|seq-len|global-batch=A,B,C",
       "KEY=VALUES");
  text("--sweep-out", sweep_out, "Write the sweep: a table as .csv or a chart as .svg", "FILE");
  heading(app, "Terminal");
  colour.add_to(app);
}

// What each flag needs to have an effect: an axis that is pinned to one rank leaves no choice.
static std::vector<FlagNeed> search_needs(const SearchRequest& r, const std::string& sweep,
                                          const std::string& objective) {
  constexpr int several = 1000, most = 30'000;  // its square is an int
  Plan free = r.work.plan;
  for (Axis axis : all_axes)
    free.mesh.set(axis, r.has(axis_name(axis)) ? std::min(free.mesh.size(axis), most) : several);
  if (free.chunks == 1) free.chunks = 0;
  std::vector<FlagNeed> needs = plan_needs(free);
  const bool sweeps = !sweep.empty();
  const auto is_swept = [&](const char* key) { return sweep.starts_with(std::string(key) + "="); };
  const std::vector<FlagNeed> own{
      {"--target-time",
       objective == "gpus",
       fmt::format("with --objective {}", objective),
       {advice("--objective", "gpus")}},
      {"--objective", !sweeps || objective != "gpus", "with --sweep", {}},
      {"--top", !sweeps, "with --sweep", {}},
      {"--out", !sweeps, "with --sweep", {}},
      {"--html", !sweeps, "with --sweep", {}},
      {"--against", !sweeps, "with --sweep", {}},
      {"--explain", !sweeps, "with --sweep", {}},
      {"--sweep-out", sweeps, "without --sweep", {advice("--sweep", "KEY=VALUES")}},
      {"--gpus", !is_swept("gpus"), "with --sweep " + sweep, {}},
      {"--seq-len", !is_swept("seq-len"), "with --sweep " + sweep, {}},
      {"--global-batch", !is_swept("global-batch"), "with --sweep " + sweep, {}},
  };
  needs.insert(needs.end(), own.begin(), own.end());
  return needs;
}

SearchRequest PlanSearchFlags::request() const {
  const auto is_given = [&](const std::string& name) { return echelon::is_given(*app_, name); };
  SearchRequest r;
  Plan& plan = r.work.plan;
  const bool has_plan = is_given("--plan");
  if (has_plan) {
    r.pin_all(plan_from_toml(read_text(plan_file_, "--plan"), "--plan " + plan_file_));
  } else {
    plan.model = load_model("llama-3-8b");
    plan.global_batch = 1024;
  }
  for (const PlanField& field : plan_fields()) {
    if (!field.is_flag_of_plan() || !is_given(field.flag())) continue;
    read_field(field, plan, values_.at(field.name()), field.flag());
    if (field.is_searched()) r.pinned.insert(field.name());
  }
  if (!has_plan && !is_given("--seq-len")) plan.seq_len = std::min<std::int64_t>(4096, plan.model.max_seq);
  if (plan.chunks > 1 && !r.has("schedule")) r.pin("schedule", "interleaved");
  const Priced by = plan.priced;
  // A plan's file is priced for what it was made for, unless a flag says otherwise.
  const auto made_for = [&](const char* flag, const std::string& text, const std::string& noted) {
    return is_given(flag) || noted.empty() ? text : noted;
  };
  const auto load = [&](const char* flag, const auto& loaded, const std::string& text,
                        const std::string& noted) {
    const std::string name = made_for(flag, text, noted);
    try {
      return loaded(name);
    } catch (const RequestError&) {
      if (name != noted || is_given(flag)) throw;
      refuse("--plan {}: was made for {} {}, which is no preset; say with {} which file it is", plan_file_,
             flag + 2, noted, flag);
    }
  };
  r.work.machine = load("--machine", load_machine, machine_, by.machine);
  const int noted = is_given("--machine") ? 0 : by.node;
  if (const int node = nodes_of_.value_or(noted); nodes_of_ || node != 0) {
    const std::vector<Tier>& tiers = r.work.machine.tiers;
    if (tiers.size() > 1 && (node < 1 || node >= tiers[1].ranks))
      refuse("--nodes-of {}: must be from 1 to {}: {} joins {} devices by the links between nodes", node,
             tiers[1].ranks - 1, r.work.machine.name, tiers[1].ranks);
    if (node < 1) refuse("--nodes-of {}: must be at least 1", node);
    r.work.machine.tiers.front().ranks = node;
    if (const int host = r.work.machine.host_devices; host > 0 && node % host != 0)
      r.work.machine.host_devices = 0;
  }
  r.work.software = load("--software", load_software, software_, by.software);
  r.work.exact_memory = exact_memory();
  r.work.precision = parse_precision(made_for("--precision", dtype_, by.dtype), "--precision");
  const int axes = r.given_ranks(), node = r.work.machine.node();
  r.gpus = gpus_.value_or(r.gives_mesh() || axes > node ? axes : node);
  try {
    std::vector<FlagNeed> needs = search_needs(r, sweep, objective_);
    const bool sweeps = !sweep.empty();
    needs.push_back({"--launch-for", !sweeps, "with --sweep", {}});
    needs.push_back(
        {"--launch-for", !launch_out.empty(), "without --launch-out", {advice("--launch-out", "DIR")}});
    needs.push_back(
        {"--launch-out", !launch_for.empty(), "without --launch-for", {advice("--launch-for", "PROGRAM")}});
    needs.push_back({"--price", tokens_.has_value(), "without --tokens", {advice("--tokens", "X")}});
    needs.push_back({"--mtbf-hours", tokens_.has_value(), "without --tokens", {advice("--tokens", "X")}});
    for (const char* flag : {"--restart-time", "--save-time", "--write-time", "--spares"})
      needs.push_back({flag, mtbf_hours_.has_value(), "without --mtbf-hours", {advice("--mtbf-hours", "X")}});
    needs.push_back({"--repair-hours", spares_.has_value(), "without --spares", {advice("--spares", "N")}});
    needs.push_back({"--dynamic-cp",
                     !document_lengths_.empty(),
                     "without --document-lengths",
                     {advice("--document-lengths", "FILE")}});
    needs.push_back({"--launch-for", document_lengths_.empty(), "with --document-lengths", {}});
    needs.push_back({"--launch-for",
                     expert_replicas_.value_or(0) <= 0,
                     "with --expert-replicas",
                     {advice("--expert-replicas", "0")}});
    needs.push_back({"--launch-for",
                     expert_placement_ != "load",
                     "with --expert-placement load",
                     {advice("--expert-placement", "order")}});
    // With a plan's file, the flag may undo what the file says; if it has an effect there, it is refused
    // elsewhere.
    if (!document_lengths_.empty() && (dynamic_context_ || r.work.software.context_cuts_documents))
      needs.push_back({"--cp-balance",
                       has_plan && plan.context_balance == Plan{}.context_balance,
                       what_cuts_documents(r.work.software, dynamic_context_),
                       {}});
    needs.push_back({"--expert-imbalance", expert_load_.empty(), "with --expert-load", {}});
    for (const char* flag : {"--expert-placement", "--expert-replicas"})
      needs.push_back(
          {flag, !expert_load_.empty(), "without --expert-load", {advice("--expert-load", "FILE")}});
    for (const char* flag : {"--expert-imbalance", "--expert-load"})
      needs.push_back({flag,
                       plan.model.experts != Experts::none,
                       fmt::format("with {}, which has no experts", plan.model.name),
                       {}});
    refuse_idle(*app_, needs);
  } catch (const PlanRefusal& refusal) {
    std::vector<Remedy> legal = refusal.remedies();
    std::erase_if(legal, [&](const Remedy& one) { return !makes_possible(one, r); });
    throw refusal.with(std::move(legal));
  }
  if (!launch_for.empty() && std::find(launched_programs().begin(), launched_programs().end(), launch_for) ==
                                 launched_programs().end())
    refuse("--launch-for {}: no such program; legal: {}", launch_for, fmt::join(launched_programs(), ", "));
  read_expert_load(r.work);
  if (!document_lengths_.empty()) {
    r.work.documents = read_document_lengths(read_text(document_lengths_, "--document-lengths"),
                                             "--document-lengths " + document_lengths_);
    r.work.dynamic_context = dynamic_context_;
    plan.mask = AttentionMask::document;
    if (const std::string why = no_documents(r.work); !why.empty()) refuse("--document-lengths: {}", why);
  }
  r.top = top_;
  r.memory_margin = margin_;
  if (objective_ != "gpus") r.objective = parse_objective(objective_, "--objective");
  if (objective_ == "gpus" && !(target_seconds > 0))
    refuse("--objective gpus: reaches a time that --target-time must give, in seconds above 0");
  return r;
}

void PlanSearchFlags::read_expert_load(Workload& work) const {
  const char* const flag = imbalance_ ? "--expert-imbalance" : "--expert-load";
  if (!imbalance_ && expert_load_.empty()) return;
  const ModelSpec& m = work.plan.model;
  if (work.software.is_this_trainer)
    refuse("{}: what this trainer holds is counted for even loads alone; legal: another --software", flag);
  if (imbalance_ && !(*imbalance_ >= 1 && *imbalance_ <= real(m.num_experts)))
    refuse("--expert-imbalance {}: must be from 1 to the {} experts of {}", *imbalance_, m.num_experts,
           m.name);
  ExpertSkew& load = work.expert_load;
  if (expert_placement_ != "order" && expert_placement_ != "load")
    refuse("--expert-placement {}: legal: order, load", expert_placement_);
  if (expert_replicas_ && (*expert_replicas_ < 0 || *expert_replicas_ >= m.num_experts))
    refuse("--expert-replicas {}: must be from 0 to {}, one less than the experts of {}", *expert_replicas_,
           m.num_experts - 1, m.name);
  load.replicas = expert_replicas_.value_or(0);
  if (load.replicas > 0 && expert_placement_ == "order" && is_given(*app_, "--expert-placement"))
    refuse("--expert-placement order: copies (--expert-replicas {}) are placed by load; legal: load",
           load.replicas);
  load.is_placed = load.replicas > 0 || expert_placement_ == "load";
  if (m.router.most_groups < m.router.groups) load.groups = m.router.groups;
  load.imbalance = imbalance_.value_or(1);
  if (!imbalance_)
    work.expert_load.shares = read_expert_shares(read_text(expert_load_, "--expert-load"), m.num_experts,
                                                 "--expert-load " + expert_load_);
}

std::optional<RunRequest> PlanSearchFlags::life(const SearchRequest& request) const {
  if (!tokens_) return {};
  const auto above_0 = [](const char* flag, const std::optional<double>& value) {
    if (value && !(std::isfinite(*value) && *value > 0)) refuse("{} {}: must be above 0", flag, *value);
    return value.value_or(0);
  };
  constexpr double most_tokens = 1e18, most_price = 1e9, most_hours = 1e9, hour = 3600;
  if (*tokens_ > most_tokens) refuse("--tokens {}: must be at most {}", *tokens_, most_tokens);
  for (const auto& [flag, hours] :
       {std::pair{"--mtbf-hours", mtbf_hours_}, {"--repair-hours", repair_hours_}})
    if (hours > most_hours) refuse("{} {}: must be at most {}", flag, *hours, most_hours);
  if (price_ > most_price) refuse("--price {}: must be at most {}", *price_, most_price);
  RunRequest run{above_0("--tokens", tokens_), above_0("--price", price_)};
  run.failures = {hour * above_0("--mtbf-hours", mtbf_hours_),
                  restart_.value_or(0),
                  save_.value_or(0),
                  write_.value_or(0),
                  spares_,
                  hour * repair_hours_.value_or(0)};
  // Checked before the search; if that looks for the fewest devices, checked for the result afterwards.
  if (mtbf_hours_) validate(run.failures, target_seconds > 0 ? 1 : request.gpus);
  return run;
}

// "tp=8"
static void pin_pair(SearchRequest& request, const std::string& pair) {
  const auto equals = pair.find('=');
  const std::string key = pair.substr(0, equals),
                    value = equals == std::string::npos ? std::string() : pair.substr(equals + 1);
  if (equals == std::string::npos) refuse("--against {}: must be KEY=VALUE,..., as tp=8,pp=4", pair);
  const PlanField* const field = find_field(key);
  if (field == nullptr || !field->is_searched()) {
    std::vector<std::string> legal;
    for (const PlanField& one : plan_fields())
      if (one.is_searched()) legal.push_back(one.name());
    refuse("--against {}: legal keys: {}", pair, fmt::join(legal, ", "));
  }
  request.pin(key, value, "--against " + key);
}

SearchRequest PlanSearchFlags::against(const SearchRequest& request) const {
  SearchRequest other = request;
  other.top = 1;
  std::istringstream in(against_text);
  for (std::string pair; std::getline(in, pair, ',');) pin_pair(other, pair);
  return other;
}

std::vector<std::pair<std::string, SearchRequest>> PlanSearchFlags::against_alone(
    const SearchRequest& request) const {
  std::vector<std::pair<std::string, SearchRequest>> each;
  std::istringstream in(against_text);
  for (std::string pair; std::getline(in, pair, ',');) {
    SearchRequest one = request;
    one.top = 1;
    pin_pair(one, pair);
    each.emplace_back(pair, std::move(one));
  }
  if (each.size() < 2) each.clear();
  return each;
}

}  // namespace echelon

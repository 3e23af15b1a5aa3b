#include "apps/plan_flags.h"
#include "train/dry_run.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <sstream>

#include "apps/flag_needs.h"
#include "apps/flag_values.h"
#include "apps/help.h"
#include "base/error.h"
#include "base/open_file.h"
#include "schedule/schedules.h"

namespace echelon {
namespace {

std::vector<std::int64_t> numbers(const std::string& flag, const std::string& text) {
  std::vector<std::int64_t> list;
  std::istringstream in(text + ",");
  for (std::string number; std::getline(in, number, ',');)
    list.push_back(parse_number<std::int64_t>(flag, number));
  return list;
}

bool on(const std::string& flag, const std::string& text) {
  if (text != "on" && text != "off") refuse("{} {}: legal: on, off", flag, text);
  return text == "on";
}

}  // namespace

void PlanSearchFlags::add_to(CLI::App& app) {
  app_ = &app;
  const auto text = [&](const char* name, std::string& value, const char* description, const char* type) {
    app.add_option(name, value, description)->type_name(type);
  };
  heading(app, common_flags);
  app.add_option("--model", model_, "Preset, Hugging Face directory, or TOML file")
      ->type_name("NAME|DIR|FILE")
      ->capture_default_str();
  app.add_option("--machine", machine_, "Preset, or TOML file (from `echelon calibrate`, or your own)")
      ->type_name("NAME|FILE")
      ->capture_default_str();
  add_number(app, "--gpus", gpus_,
             "Number of devices (default: those of a node, or the product of the axes)");
  add_number(app, "--global-batch", global_batch_, "Sequences per step (default: 1024)");
  add_number(app, "--seq-len", seq_len_, "Tokens in a sequence (default: 4096, or the model's longest)");
  app.add_flag("--explain", explain, "Say where each second goes, and why not the other plans");
  text("--out", out, "Write the best plan as a TOML file for train and verify", "PLAN.toml");
  app.add_flag("--json", json, "One JSON object on standard output");
  heading(app, "What is planned for");
  app.add_option("--software", software_, "Training software: preset or TOML file")
      ->type_name("NAME|FILE")
      ->capture_default_str();
  app.add_option("--dtype", dtype_, "Precision of the matrix products")
      ->type_name("f32|bf16|fp8|fp4")
      ->capture_default_str();
  add_number(app, "--nodes-of", nodes_of_, "Devices in a node");
  add_number(app, "--memory-margin", margin_, "Fraction of the memory to leave free");
  app.add_option("--objective", objective_, "What to minimise; gpus: the fewest that reach --target-time")
      ->type_name("time|memory|gpus")
      ->capture_default_str();
  add_number(app, "--target-time", target_seconds, "Seconds per step, for --objective gpus");
  heading(app, "What is held fixed (default: searched)");
  text("--plan", plan_file_, "TOML file of a plan, priced as it is; flags on the command line override it",
       "FILE");
  add_number(app, "--dp", dp_, "Data-parallel ranks");
  add_number(app, "--tp", tp_, "Tensor-parallel ranks");
  add_number(app, "--pp", pp_, "Pipeline-parallel ranks");
  add_number(app, "--cp", cp_, "Context-parallel ranks");
  add_number(app, "--ep", ep_, "Expert groups, laid over dp x cp");
  add_number(app, "--etp", etp_, "Ranks that one expert is cut over");
  text("--sp", sp_, "Sequence parallelism (default: on where tp > 1)", "on|off");
  text("--cp-kind", cp_kind_, "How context parallelism exchanges keys and values", "ring|ulysses|allgather");
  text("--cp-balance", cp_balance_, "The planner counts balanced parts: zigzag or stripe", "zigzag|stripe");
  add_number(app, "--zero", zero_, "ZeRO stage: 0, 1, 2 or 3");
  add_number(app, "--hsdp", hsdp_, "Replicas of the groups that --zero shards over");
  text("--schedule", schedule_, "Pipeline schedule", "NAME");
  add_number(app, "--chunks", chunks_, "Model chunks per pipeline rank, for interleaved");
  text("--layers-per-stage", layers_per_stage_, "Layers of each stage, or auto: balanced by cost",
       "N,N,...|auto");
  add_number(app, "--micro-batch", micro_batch_, "Sequences that a rank computes at once");
  text("--recompute", recompute_, "What the backward pass computes again", "none|selective|full");
  text("--compress", compress_, "Gradient compression: only none is priced", "none");
  heading(app, "Reports");
  add_number(app, "--top", top_, "How many plans to show");
  text("--against", against_text, "Say why a named alternative loses, as tp=8,pp=4,schedule=1f1b",
       "KEY=VALUE,...");
  text("--html", html, "Write the best plans as one page", "FILE");
  text("--sweep", sweep, "Plan for each value: gpus=64..16384 (doubling), or gpus|seq-len|global-batch=A,B,C",
       "KEY=VALUES");
  text("--sweep-out", sweep_out, "Write the sweep: a table as .csv or a chart as .svg", "FILE");
}

// What each flag needs beside it: an axis that is pinned to one rank leaves nothing to say of it.
static std::vector<FlagNeed> search_needs(const Pins& p, const std::string& sweep,
                                          const std::string& objective) {
  const bool pipeline = p.pp != 1, context = p.cp != 1, sweeps = !sweep.empty();
  const auto is_swept = [&](const char* key) { return sweep.starts_with(std::string(key) + "="); };
  return {
      {"--schedule", pipeline, "with --pp 1", {}},
      {"--layers-per-stage", pipeline, "with --pp 1", {}},
      {"--chunks", pipeline || p.chunks == 1, "with --pp 1", {}},
      {"--sp", p.tp != 1 || p.sequence_parallel == false, "with --tp 1", {}},
      {"--cp-kind", context, "with --cp 1", {}},
      {"--cp-balance", context, "with --cp 1", {}},
      {"--cp-balance", p.context != ContextKind::ulysses, "with --cp-kind ulysses", {}},
      {"--zero", p.zero == 0 || p.dp != 1 || p.cp != 1, "with --dp 1 and --cp 1", {}},
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
}

SearchRequest PlanSearchFlags::request() const {
  const auto is_given = [&](const char* name) { return app_->get_option(name)->count() > 0; };
  SearchRequest r;
  Pins& pins = r.pins;
  std::optional<Plan> plan;
  if (is_given("--plan")) {
    plan = plan_from_toml(read_text(plan_file_, "--plan"), "--plan " + plan_file_);
    pins = pins_of(*plan);
  }
  r.work.model = plan && !is_given("--model") ? plan->model : load_model(model_);
  const Priced by = plan ? plan->priced : Priced{};
  // A plan is priced again for what it was made for, where no flag says otherwise.
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
    if (node < 1 || (r.work.machine.tiers.size() > 1 && node >= r.work.machine.tiers[1].ranks))
      refuse("--nodes-of {}: must be at least 1, and less than the cluster", node);
    r.work.machine.tiers.front().ranks = node;
  }
  r.work.software = load("--software", load_software, software_, by.software);
  r.work.exact_memory = exact_memory();
  r.work.precision = parse_precision(made_for("--dtype", dtype_, by.dtype), "--dtype");
  r.work.global_batch = global_batch_.value_or(plan ? plan->global_batch : 1024);
  r.work.seq_len =
      seq_len_.value_or(plan ? plan->seq_len : std::min<std::int64_t>(4096, r.work.model.max_seq));
  for (const auto& [given, pin] : {std::pair{&dp_, &pins.dp},
                                   {&tp_, &pins.tp},
                                   {&pp_, &pins.pp},
                                   {&cp_, &pins.cp},
                                   {&ep_, &pins.ep},
                                   {&etp_, &pins.etp},
                                   {&zero_, &pins.zero},
                                   {&hsdp_, &pins.hsdp},
                                   {&chunks_, &pins.chunks}})
    if (*given) *pin = *given;
  if (plan && plan->model.experts != Experts::none && plan->mesh.etp == 0 && tp_ && !etp_)
    pins.etp = tp_;  // as MLPs are
  if (micro_batch_) pins.micro_batch = micro_batch_;
  if (is_given("--sp")) pins.sequence_parallel = on("--sp", sp_);
  if (is_given("--schedule")) pins.schedule = schedule_;
  if (is_given("--recompute")) pins.recompute = parse_recompute(recompute_, "--recompute");
  if (is_given("--cp-kind")) pins.context = parse_context_kind(cp_kind_, "--cp-kind");
  if (is_given("--cp-balance") && cp_balance_ != "zigzag" && cp_balance_ != "stripe")
    refuse("--cp-balance {}: the planner counts balanced parts; legal: zigzag, stripe", cp_balance_);
  if (is_given("--compress") && compress_ != "none")
    refuse("--compress {}: is not priced; legal: none", compress_);
  if (is_given("--layers-per-stage")) {
    pins.balance_layers = layers_per_stage_ == "auto";
    pins.layers_per_stage.clear();
    if (!*pins.balance_layers) pins.layers_per_stage = numbers("--layers-per-stage", layers_per_stage_);
  }
  if (pins.chunks && *pins.chunks > 1 && pins.schedule && !pins.schedule->starts_with("interleaved"))
    refuse("--chunks {}: only interleaved takes more than 1, and --schedule is {}", *pins.chunks,
           *pins.schedule);
  if (pins.chunks && *pins.chunks > 1 && !pins.schedule) pins.schedule = "interleaved";
  refuse_idle(*app_, search_needs(pins, sweep, objective_));
  std::int64_t axes = 1;
  const bool whole = pins.dp && pins.tp && pins.pp && pins.cp;
  for (const auto& pin : {pins.dp, pins.tp, pins.pp, pins.cp}) axes *= std::max(1, pin.value_or(1));
  const bool any = pins.dp || pins.tp || pins.pp || pins.cp;
  r.gpus = gpus_.value_or(static_cast<int>(whole                                 ? axes
                                           : any && axes > r.work.machine.node() ? axes
                                                                                 : r.work.machine.node()));
  r.top = top_;
  r.memory_margin = margin_;
  if (objective_ != "gpus") r.objective = parse_objective(objective_, "--objective");
  if (objective_ == "gpus" && !(target_seconds > 0))
    refuse("--objective gpus: reaches a time that --target-time must give, in seconds above 0");
  return r;
}

SearchRequest PlanSearchFlags::against(const SearchRequest& request) const {
  SearchRequest other = request;
  other.top = 1;
  std::istringstream in(against_text);
  for (std::string pair; std::getline(in, pair, ',');) {
    const auto equals = pair.find('=');
    const std::string key = pair.substr(0, equals),
                      value = equals == std::string::npos ? "" : pair.substr(equals + 1);
    const std::string flag = "--against " + key;
    Pins& pins = other.pins;
    const auto count = [&] { return parse_number<int>(flag, value); };
    if (key == "dp")
      pins.dp = count();
    else if (key == "tp")
      pins.tp = count();
    else if (key == "pp")
      pins.pp = count();
    else if (key == "cp")
      pins.cp = count();
    else if (key == "ep")
      pins.ep = count();
    else if (key == "zero")
      pins.zero = count();
    else if (key == "hsdp")
      pins.hsdp = count();
    else if (key == "chunks")
      pins.chunks = count();
    else if (key == "micro-batch")
      pins.micro_batch = count();
    else if (key == "schedule")
      pins.schedule = value;
    else if (key == "recompute")
      pins.recompute = parse_recompute(value, flag);
    else
      refuse(
          "--against {}: legal keys: dp, tp, pp, cp, ep, zero, hsdp, chunks, micro-batch, schedule, "
          "recompute",
          pair);
  }
  return other;
}

}  // namespace echelon

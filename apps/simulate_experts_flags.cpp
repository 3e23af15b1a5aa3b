#include "apps/simulate_experts_flags.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <sstream>

#include "apps/flag_needs.h"
#include "apps/flag_values.h"
#include "apps/help.h"
#include "apps/simulate_drawing.h"
#include "base/error.h"
#include "base/open_file.h"
#include "base/units.h"

namespace echelon {
namespace {

// Flags of both kinds of simulation.
const std::vector<std::string> shared_flags{"--help",  "--compare", "--steps", "--format", "--out",
                                            "--width", "--colour",  "--json",  "--moe"};

}  // namespace

void ExpertsFlags::add_to(CLI::App& app) {
  app_ = &app;
  heading(app, "Mixture of experts (with --moe)");
  app.add_flag(
      "--moe", moe,
      "Simulate how a router of popular experts loads the devices, and what balancing does about it");
  const auto mine = [&](CLI::Option* option) {
    names_.push_back(option->get_name());
    return option;
  };
  mine(app.add_option(
              "--model", model_,
              "Model that gives experts, top k, scores, groups and C; flags on the command line override it")
           ->type_name("NAME|DIR|FILE"));
  mine(add_number(app, "--experts", experts_, "Experts in a layer"));
  mine(add_number(app, "--top-k", top_k_, "Experts per token"));
  mine(app.add_option("--scores", scores_, "How the router scores its logits")
           ->type_name("softmax|sigmoid")
           ->capture_default_str());
  mine(add_number(app, "--ep", ep_, "Devices, each with an equal share of the experts"));
  mine(add_number(app, "--groups", groups_, "Groups of experts (default: the model's, or one a device)"));
  mine(add_number(
      app, "--most-groups", most_groups_,
      "Groups that a token's experts may be in, under node-limit (default: the model's, or half)"));
  mine(add_number(app, "--tokens", tokens_, "Tokens per step, over all devices"));
  mine(add_number(app, "--hidden", hidden_, "C: numbers sent for a token"));
  mine(app.add_option("--dtype", dtype_, "Type of these numbers")
           ->type_name("bf16|f32")
           ->capture_default_str());
  CLI::Option* zipf = mine(
      add_number(app, "--zipf", zipf_,
                 "Popularity: expert e is wanted in proportion to 1 / (e + 1) to this power; 0: all alike"));
  CLI::Option* one =
      mine(app.add_option("--popular-expert", popular_expert_,
                          "Popularity: expert E is the first choice of this share of the tokens")
               ->type_name("E:SHARE"));
  CLI::Option* file = mine(app.add_option("--popularity", popularity_,
                                          "Popularity: a number above 0 for each expert, here or in a file")
                               ->type_name("X,...|FILE"));
  zipf->excludes(one)->excludes(file);
  one->excludes(file);
  mine(add_number(app, "--aux-loss", balancing_.expert_loss, "Coefficient of aux-loss, as train's"));
  mine(add_number(app, "--device-loss", balancing_.device_loss, "Coefficient of device-loss, as train's"));
  mine(add_number(app, "--communication-loss", balancing_.communication_loss,
                  "Coefficient of communication-loss, as train's"));
  mine(add_number(app, "--bias-rate", balancing_.bias_rate,
                  "Rate of bias, the loss-free balancing, as train's"));
  mine(add_number(app, "--capacity", balancing_.capacity,
                  "Capacity of capacity, over a device's tokens, as train's"));
  mine(app.add_option("--drop", drop_, "Which tokens an expert keeps: the likeliest, or the first")
           ->type_name("probability|position")
           ->default_str("probability"));
  mine(app.add_option("--capacities", capacities_, "Capacities whose drops are shown for every way")
           ->type_name("X,X,...")
           ->capture_default_str());
  mine(add_number(app, "--router-lr", router_lr_,
                  "How far a step moves the logits against the losses' gradient"));
  mine(app.add_option("--heat", heat_, "Rows of the heat map")
           ->type_name("experts|devices")
           ->capture_default_str());
  mine(add_number(app, "--seed", seed_, "Seed of the tokens"));
}

void ExpertsFlags::refuse_strangers(const CLI::App& app) const {
  for (const CLI::Option* option : app.get_options()) {
    const std::string name = option->get_name();
    if (option->count() == 0 || contains(shared_flags, name)) continue;
    const bool is_mine = contains(names_, name);
    if (moe && !is_mine) refuse("{}: is of pipeline schedules, and --moe simulates experts; drop one", name);
    if (!moe && is_mine) refuse("{}: is of mixtures of experts; add --moe", name);
  }
}

std::vector<double> ExpertsFlags::popularities(std::int64_t experts) const {
  if (is_given("--popular-expert")) {
    const auto [expert, share] = parse_pair<std::int64_t, double>("--popular-expert", popular_expert_,
                                                                  "an expert and its share, as 0:0.5");
    if (expert < 0 || expert >= experts)
      refuse("--popular-expert {}: expert {} is none of 0 to {}", popular_expert_, expert, experts - 1);
    if (!(share > 0 && share < 1))
      refuse("--popular-expert {}: the share must be between 0 and 1", popular_expert_);
    return one_popular_expert(experts, expert, share);
  }
  if (is_given("--popularity")) {
    std::error_code none;
    const bool is_file =
        popularity_.find(',') == popularity_.npos || std::filesystem::exists(popularity_, none);
    std::string text = is_file ? read_text(popularity_, "--popularity") : popularity_;
    if (!is_file) std::replace(text.begin(), text.end(), ',', ' ');
    std::istringstream in(text);
    std::vector<double> values;
    for (std::string word; in >> word;)
      values.push_back(parse_number<double>("--popularity " + popularity_, word));
    if (std::ssize(values) != experts)
      refuse("--popularity {}: has {}; legal: one of each of the {} experts", popularity_,
             counted(std::ssize(values), "number"), experts);
    for (double value : values)
      if (!(value > 0 && std::isfinite(value)))
        refuse("--popularity {}: {} must be a number above 0", popularity_, value);
    return values;
  }
  if (!(zipf_ >= 0 && zipf_ <= 10)) refuse("--zipf {}: must be from 0 to 10", zipf_);
  return zipf_popularity(experts, zipf_);
}

// The model's router with the given flags; by default one group for each device.
void ExpertsFlags::read_router(const ModelSpec& model, RoutingRequest& r) const {
  r.router = model.router;
  if (is_given("--scores")) {
    if (scores_ != "softmax" && scores_ != "sigmoid")
      refuse("--scores {}: no such scores; legal: softmax, sigmoid", scores_);
    r.router.scores = scores_ == "softmax" ? RouterScores::softmax : RouterScores::sigmoid;
  }
  if (is_given("--groups"))
    r.router.groups = groups_;
  else if (r.router.groups == 1)
    r.router.groups = r.ep;
  if (is_given("--most-groups")) {
    r.router.most_groups = most_groups_;
  } else if (r.router.groups != model.router.groups || model.router.most_groups == model.router.groups) {
    const std::int64_t size =
        std::max<std::int64_t>(1, r.experts / std::max<std::int64_t>(1, r.router.groups));
    r.router.most_groups = std::max((r.experts_per_token + size - 1) / size, (r.router.groups + 1) / 2);
  }
}

// What each flag needs to have an effect, including the balancing methods that are asked for.
void ExpertsFlags::refuse_idle(const Request& request) const {
  const auto any = [&](const auto& fits) {
    return std::any_of(request.methods.begin(), request.methods.end(), fits);
  };
  const auto any_with = [&](double Balancing::*number) {
    return balancing_.*number == 0 || any([=](const auto& m) { return m.balancing.*number > 0; });
  };
  std::string names;
  for (const BalanceMethod& m : request.methods) names += (names.empty() ? "" : ",") + m.name;
  const std::string ways = "with --compare " + names;
  const auto way = [](const char* name) { return std::vector<Remedy>{advice("--compare", name)}; };
  const std::vector<Remedy> devices{advice("--ep", "2")};
  echelon::refuse_idle(
      *app_,
      {{"--aux-loss", any_with(&Balancing::expert_loss), ways, way("aux-loss")},
       {"--device-loss", any_with(&Balancing::device_loss), ways, way("device-loss")},
       {"--communication-loss", any_with(&Balancing::communication_loss), ways, way("communication-loss")},
       {"--bias-rate", any_with(&Balancing::bias_rate), ways, way("bias")},
       {"--capacity", any_with(&Balancing::capacity), ways, way("capacity")},
       {"--drop", any([](const auto& m) { return m.balancing.capacity > 0; }), ways, way("capacity")},
       {"--router-lr", any([](const auto& m) { return m.balancing.has_losses(); }), ways, way("aux-loss")},
       {"--most-groups", any([](const auto& m) { return m.node_limit; }), ways, way("node-limit")},
       {"--hidden", request.routing.ep > 1, "with --ep 1", devices},
       {"--dtype", request.routing.ep > 1, "with --ep 1", devices}});
}

ExpertsFlags::Request ExpertsFlags::read(SimulateFlags& shared) const {
  read_format(shared, {"text", "svg", "csv"});
  check_text_options(shared);
  refuse_idle_drawing(shared, *app_, !shared.out.empty() || !shared.json);
  Request request;
  RoutingRequest& r = request.routing;
  ModelSpec model;
  if (is_given("--model")) {
    model = load_model(model_);
    if (model.experts == Experts::none) refuse("--model {}: {} has no experts", model_, model.name);
  }
  const bool has_model = is_given("--model");
  const auto chosen = [&](const char* flag, std::int64_t line, std::int64_t of_model) {
    return has_model && !is_given(flag) ? of_model : line;
  };
  r.experts = chosen("--experts", experts_, model.num_experts);
  r.experts_per_token = chosen("--top-k", top_k_, model.experts_per_token);
  request.hidden = chosen("--hidden", hidden_, model.hidden);
  if (request.hidden < 1) refuse("--hidden {}: must be at least 1", request.hidden);
  r.ep = ep_;
  r.tokens = tokens_;
  r.steps = shared.is_steps_given ? shared.steps : 100;
  r.seed = seed_;
  r.router_lr = router_lr_;
  r.balancing = balancing_;
  if (is_given("--drop")) r.balancing.drop = parse_choice<DropPolicy>(drop_, "--drop");
  read_router(model, r);
  for (const std::string& factor : split(capacities_, ","))
    r.capacities.push_back(parse_number<double>("--capacities", factor));
  if (r.experts >= 2 && r.experts <= 4096) r.popularity = popularities(r.experts);
  validate(r);
  for (const std::string& name : shared.compare.empty() ? balance_methods(r) : split(shared.compare, ","))
    request.methods.push_back(parse_balance_method(name, "--compare", r.balancing));
  if (dtype_ != "bf16" && dtype_ != "f32") refuse("--dtype {}: no such type; legal: bf16, f32", dtype_);
  request.element_bytes = dtype_ == "bf16" ? 2 : 4;
  if (heat_ != "experts" && heat_ != "devices") refuse("--heat {}: legal: experts, devices", heat_);
  request.shows_devices = heat_ == "devices";
  refuse_idle(request);
  return request;
}

}  // namespace echelon

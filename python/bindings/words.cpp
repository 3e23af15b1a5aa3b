#include "bindings/words.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <memory>

#include "apps/flag_needs.h"
#include "apps/generate_flags.h"
#include "apps/help.h"
#include "apps/plan_flags.h"
#include "apps/simulate_experts_flags.h"
#include "apps/simulate_flags.h"
#include "apps/train_flags.h"
#include "apps/verify_flags.h"
#include "base/edits.h"
#include "base/error.h"
#include "spec/plan_fields.h"

namespace echelon::python {
namespace {

const Names everywhere{"help", "json"};

Names with_everywhere(Names names) {
  names.insert(everywhere.begin(), everywhere.end());
  return names;
}

std::string flag_name(std::string keyword) {
  while (keyword.ends_with('_')) keyword.pop_back();  // from_, as Python has its own `from`
  std::replace(keyword.begin(), keyword.end(), '_', '-');
  return keyword;
}

std::string keyword_name(std::string flag) {
  std::replace(flag.begin(), flag.end(), '-', '_');
  return flag == "from" ? "from_" : flag;
}

bool is_keyword(const CLI::Option& option, const Names& hidden) {
  return !option.get_group().empty() && !option.get_lnames().empty() &&
         !hidden.contains(option.get_lnames().front());
}

bool is_switch(const CLI::Option& option) { return option.get_items_expected_max() == 0; }
bool is_list(const CLI::Option& option) { return option.get_items_expected_max() > 1; }

}  // namespace

const Names not_of_plan = with_everywhere(
    {"explain", "out", "html", "against", "launch-for", "launch-out", "sweep", "sweep-out", "colour"});
const Names not_of_train = with_everywhere({"dry-run", "comm", "record", "report", "colour"});
const Names not_of_verify = with_everywhere({"comm", "record", "colour"});
const Names not_of_simulate = with_everywhere({"compare", "out", "format", "width", "colour"});
const Names not_of_generate = with_everywhere({"prompts", "chat", "chat-format", "system"});

// simulate has flags of schedules, and of experts.
Names not_of_simulate_experts() {
  CLI::App app;
  SimulateFlags of_schedules;
  of_schedules.add_to(app);
  Names hidden = with_everywhere({"moe", "heat"});
  for (const CLI::Option* option : app.get_options())
    for (const std::string& name : option->get_lnames()) hidden.insert(name);
  hidden.erase("compare");
  hidden.erase("steps");
  return hidden;
}

void read_words(CLI::App& verb, const Words& words, const Names& hidden) {
  std::vector<std::string> arguments;
  for (const auto& [keyword, values] : words) {
    const std::string name = flag_name(keyword), flag = "--" + name;
    const CLI::Option* const option = verb.get_option_no_throw(flag);
    if (option == nullptr || !is_keyword(*option, hidden)) {
      std::vector<std::string> legal;
      for (const CLI::Option* one : verb.get_options())
        if (is_keyword(*one, hidden)) legal.push_back(keyword_name(one->get_lnames().front()));
      refuse("{}: no such argument{}; legal: {}", flag, did_you_mean(keyword, legal), fmt::join(legal, ", "));
    }
    const std::string value = fmt::format("{}", fmt::join(values, ","));
    if (is_switch(*option)) {
      if (value != "on" && value != "off") refuse("{} {}: legal: True, False", flag, value);
      if (value == "on") arguments.push_back(flag);
      continue;
    }
    for (const std::string& one : is_list(*option) ? values : std::vector<std::string>{value}) {
      if (one.find('\0') != std::string::npos) refuse("{}: its value has a character of code 0", flag);
      if (one.empty())  // "--prompt=" would take the next word
        arguments.insert(arguments.end(), {flag, one});
      else
        arguments.push_back(flag + "=" + one);
    }
  }
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 takes them
  verb.parse_complete_callback([&verb] { refuse_empty_values(verb); });
  try {
    verb.parse(std::move(arguments));
  } catch (const CLI::ParseError& error) {
    refuse("{}", error.what());
  }
}

std::vector<Keyword> keywords_of(const std::string& verb) {
  CLI::App app;
  Names hidden;
  PlanSearchFlags plan;
  SimulateFlags simulate;
  ExpertsFlags experts;
  const auto train = std::make_shared<TrainFlags>();
  const auto verify = std::make_shared<VerifyFlags>();
  const auto generate = std::make_shared<GenerateFlags>();
  if (verb == "plan") {
    plan.add_to(app);
    hidden = not_of_plan;
  } else if (verb == "train" || verb == "dry_run") {
    add_train_flags(app, train);
    hidden = not_of_train;
  } else if (verb == "verify") {
    add_verify_flags(app, verify);
    hidden = not_of_verify;
  } else if (verb == "simulate") {
    simulate.add_to(app);
    hidden = not_of_simulate;
  } else if (verb == "simulate_experts") {
    simulate.add_to(app);
    experts.add_to(app);
    hidden = not_of_simulate_experts();
  } else if (verb == "generate") {
    add_generate_flags(app, generate);
    hidden = not_of_generate;
  } else {
    refuse("--verb {}: legal: plan, simulate, simulate_experts, train, dry_run, verify, generate", verb);
  }
  std::vector<Keyword> keywords;
  for (const CLI::Option* option : app.get_options()) {
    if (!is_keyword(*option, hidden)) continue;
    const std::string flag = option->get_lnames().front();
    if (verb == "dry_run" && !is_of_dry_run(flag)) continue;
    keywords.push_back({keyword_name(flag), option->get_type_name(), option->get_description(),
                        option->get_default_str(), is_switch(*option), is_list(*option)});
  }
  return keywords;
}

}  // namespace echelon::python

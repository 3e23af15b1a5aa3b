// Plans as TOML files.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <sstream>
#include <string_view>

#include "base/edits.h"
#include "base/error.h"
#include "base/on_off.h"
#include "spec/plan.h"
#include "spec/plan_fields.h"
#include "spec/toml_text.h"

namespace echelon {
namespace {

// "mesh" of "mesh.dp"; empty for what is in no table.
std::string table_of(const PlanField& field) {
  const std::string key = field.key;
  return key.substr(0, key.find('.') == key.npos ? 0 : key.find('.'));
}

// What only some plans have.
bool is_left_out(const PlanField& field, const Plan& plan) {
  return (table_of(field) == "priced" && plan.priced == Priced{}) ||
         (field.key == std::string_view("mesh.etp") && plan.mesh.etp == 0);
}

void insert_value(toml::table& table, const PlanField& field, const Plan& plan) {
  if (field.key == std::string_view("model")) {
    ModelSpec model = plan.model;
    model.tuning = {};  // has a field of its own
    table.insert("model", toml::parse(to_toml(model)));
  } else if (field.key == std::string_view("layers-per-stage") && !plan.balance_layers) {
    toml::array layers;
    for (std::int64_t count : plan.layers_per_stage) layers.push_back(count);
    table.insert("layers-per-stage", layers);
  } else {
    with_value(field, plan, [&](const auto& value) { table.insert(field.name(), value); });
  }
}

// As its flag would take it.
std::string text_in(const toml::node& node, const PlanField& field, const std::string& where) {
  const auto wrong = [&](const std::string& legal) {
    refuse("{}: {} = {} is not legal: give {}", where, field.key, shown(node), legal);
  };
  const bool is_double = std::holds_alternative<double& (*)(Plan&)>(field.member);
  if (std::holds_alternative<bool& (*)(Plan&)>(field.member)) {
    if (!node.is_boolean()) wrong("true or false");
    return on_or_off(**node.as_boolean());
  }
  if (field.is_number()) {
    if (!node.is_integer() && !(is_double && node.is_floating_point()))
      wrong(fmt::format("a {}number {}", is_double ? "" : "whole ", range_text(field)));
    return node.is_integer() ? fmt::format("{}", **node.as_integer())
                             : fmt::format("{}", **node.as_floating_point());
  }
  if (const toml::array* list = node.as_array(); list && field.key == std::string_view("layers-per-stage")) {
    std::vector<std::int64_t> counts;
    for (const toml::node& count : *list) {
      if (!count.is_integer()) wrong("a list of whole numbers, or \"auto\"");
      counts.push_back(**count.as_integer());
    }
    return fmt::format("{}", fmt::join(counts, ","));
  }
  if (!node.is_string()) wrong("a text");
  return **node.as_string();
}

void read_value(const toml::node& node, const PlanField& field, const std::string& where, Plan& plan) {
  const toml::table* model = field.key == std::string_view("model") ? node.as_table() : nullptr;
  if (model != nullptr) {
    std::ostringstream text;
    text << *model;
    plan.model = model_from_toml(text.str(), where + ": [model]");
    return;
  }
  read_text(field, plan, text_in(node, field, where), fmt::format("{}: {}", where, field.key));
  if (is_out_of_range(field, plan))
    refuse("{}: {} = {} is not legal: give a {}number {}", where, field.key, shown(node),
           node.is_integer() ? "whole " : "", range_text(field));
}

// With the tables' own keys written as "mesh.dp".
void refuse_unknown_keys(const toml::table& table, const std::string& prefix, const std::string& where) {
  std::vector<std::string> legal;
  for (const PlanField& field : plan_fields())
    if (const std::string key = field.key; key.starts_with(prefix))
      if (const std::string name = key.substr(0, key.find('.', prefix.size()));
          std::find(legal.begin(), legal.end(), name) == legal.end())
        legal.push_back(name);
  for (const auto& [key, node] : table) {
    const std::string name = prefix + std::string(key.str());
    if (std::find(legal.begin(), legal.end(), name) == legal.end())
      refuse("{}: unknown key \"{}\"{}; legal: {}", where, name, did_you_mean(name, legal),
             fmt::join(legal, ", "));
    if (prefix.empty() && (name == "mesh" || name == "priced")) {
      if (!node.is_table()) refuse("{}: {} = {} is not legal: give a table", where, name, shown(node));
      refuse_unknown_keys(*node.as_table(), name + ".", where);
    }
  }
}

}  // namespace

std::string to_toml(const Plan& plan) {
  toml::table all;
  for (const PlanField& field : plan_fields()) {
    if (is_left_out(field, plan)) continue;
    const std::string table = table_of(field);
    if (!table.empty()) all.insert(table, toml::table());  // where it is not there yet
    insert_value(table.empty() ? all : *all[table].as_table(), field, plan);
  }
  std::ostringstream out;
  out << all << "\n";
  return out.str();
}

Plan plan_from_toml(const std::string& text, const std::string& where) {
  const toml::table table = parse_toml(text, where);
  refuse_unknown_keys(table, "", where);
  if (!table.contains("model")) refuse("{}: model is missing: a table or the name of a preset", where);
  Plan plan;
  plan.sequence_parallel = true;                  // where tp > 1
  for (const PlanField& field : plan_fields()) {  // the model first
    if (const toml::node* node = table.at_path(field.key).node()) read_value(*node, field, where, plan);
    if (field.key == std::string_view("model"))
      plan.seq_len = std::min<std::int64_t>(plan.model.max_seq, 1024);
  }
  return plan;
}

}  // namespace echelon

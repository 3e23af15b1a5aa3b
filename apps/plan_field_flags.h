// A plan's fields as flags, and what these flags need.
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <string>
#include <vector>

#include "apps/flag_needs.h"
#include "spec/plan_fields.h"

namespace echelon {

// The flag's value goes to `values`, by the field's name.
CLI::Option* add_field(CLI::App& app, const PlanField& field, std::map<std::string, std::string>& values,
                       const std::string& shown_default);

// Reads the field's text, or for a schedule its file. RequestError naming `flag`.
void read_field(const PlanField& field, Plan& plan, const std::string& value, const std::string& flag);

// What flags of the plan's fields need to have an effect in this plan.
std::vector<FlagNeed> plan_needs(const Plan& plan);

}  // namespace echelon

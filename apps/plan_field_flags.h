// The fields of a plan as flags, and what these need beside them.
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <string>
#include <vector>

#include "apps/flag_needs.h"
#include "spec/plan_fields.h"

namespace echelon {

// What it is given goes to `values`, by its name.
CLI::Option* add_field(CLI::App& app, const PlanField& field, std::map<std::string, std::string>& values,
                       const std::string& shown_default);

// As the field's text, or for a schedule the file that has it. RequestError naming `flag`.
void read_field(const PlanField& field, Plan& plan, const std::string& value, const std::string& flag);

// A flag that is given beside the rest of the plan and changes nothing of it.
std::vector<FlagNeed> plan_needs(const Plan& plan);

}  // namespace echelon

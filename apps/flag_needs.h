// What flags need to have an effect, as a table for each verb. A flag that is given and cannot act is
// refused, all in one form. A value that asks for nothing ("--zero 0", "--sp off") holds anyway, and so does
// a bound that nothing comes near ("--timeout" of one rank).
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "spec/plan_refusal.h"

namespace echelon {

struct FlagNeed {
  std::string flag;
  bool acts;          // with all other settings as they are
  std::string where;  // it does not: "with --pp 1", "without --checkpoint"
  std::vector<Remedy> remedies;
};

inline bool is_given(const CLI::App& app, const std::string& flag) {
  return app.get_option(flag)->count() > 0;
}

// PlanRefusal for the first flag of the table that is given and cannot act, as if `also_given` were too.
// Flags that the verb does not have are passed over.
void refuse_idle(const CLI::App& app, const std::vector<FlagNeed>& needs, const std::string& also_given = "");

// What would make a flag act that is none of a plan's: not tried, so always true.
inline Remedy advice(const std::string& flag, std::string value) {
  return {flag.substr(2), std::move(value)};
}

// RequestError for a flag of a parsed verb that is given an empty text where a name, a path or a list is to
// be.
void refuse_empty_values(const CLI::App& program);

// RequestError where a flag of a parsed verb would have a file written that another one of its names: one
// that it reads, or is to write as well.
void refuse_lost_files(const CLI::App& program);

}  // namespace echelon

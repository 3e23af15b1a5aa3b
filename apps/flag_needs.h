// What flags need to have an effect, as a table for each verb. A flag that is given but has no effect is
// refused, always in the same form. Accepted are values that ask for nothing ("--zero 0", "--sp off"), and
// bounds that are never reached ("--timeout" with one rank).
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "spec/plan_refusal.h"

namespace echelon {

struct FlagNeed {
  std::string flag;
  bool acts;          // with all other settings as they are
  std::string where;  // if it does not act: "with --pp 1", "without --checkpoint"
  std::vector<Remedy> remedies;
};

inline bool is_given(const CLI::App& app, const std::string& flag) {
  return app.get_option(flag)->count() > 0;
}

// PlanRefusal for the first flag of the table that is given and has no effect, as if `also_given` were given
// too. Flags that the verb does not have are skipped.
void refuse_idle(const CLI::App& app, const std::vector<FlagNeed>& needs, const std::string& also_given = "");

// Advice to make a flag act that is not a field of the plan: it is not tried, and so always counts as
// possible.
inline Remedy advice(const std::string& flag, std::string value) {
  return {flag.substr(2), std::move(value)};
}

// RequestError if a flag of `app`, or of its verbs that were parsed, is given an empty text instead of a
// name, a path or a list.
void refuse_empty_values(const CLI::App& app);

// RequestError if a flag of a parsed verb would overwrite a file that another of its flags names, to read or
// to write.
void refuse_lost_files(const CLI::App& program);

}  // namespace echelon

// Why a plan cannot be, and what to try instead. Whoever knows all that a plan must pass keeps of the
// remedies those that pass it.
#pragma once

#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "spec/plan.h"

namespace echelon {

// Another value of a flag, which may stand for all below or above it.
struct Remedy {
  enum class Kind { value, at_most, at_least };
  std::string flag, value;
  std::function<void(Plan&)> apply;
  Kind kind = Kind::value;
};
template <class T>
Remedy remedy(const char* flag, T Plan::*member, std::type_identity_t<T> value,
              Remedy::Kind kind = Remedy::Kind::value) {
  return {flag, fmt::format("{}", value), [=](Plan& plan) { plan.*member = value; }, kind};
}
Remedy remedy(Axis axis, int size, Remedy::Kind kind = Remedy::Kind::value);

// "--tp 3: the 4 heads do not divide; legal: 1, 2, 4": of the flag that is refused values alone, of other
// flags their names too.
class PlanRefusal : public RequestError {
 public:
  PlanRefusal(std::string flag, std::string problem, std::vector<Remedy> remedies);
  // Of a flag that changes nothing: "--chunks 2: has no effect with --pp 1; leave it out, or give --pp 2". Of
  // the remedies the first is shown.
  static PlanRefusal without_effect(std::string flag, const std::string& problem,
                                    std::vector<Remedy> remedies);

  const std::string& flag() const { return flag_; }
  const std::vector<Remedy>& remedies() const { return remedies_; }
  bool is_idle() const { return is_idle_; }
  // The same with fewer.
  PlanRefusal with(std::vector<Remedy> remedies) const;

 private:
  PlanRefusal(std::string flag, std::string problem, std::vector<Remedy> remedies, bool is_idle);

  std::string flag_, problem_;
  std::vector<Remedy> remedies_;
  bool is_idle_ = false;
};

// `check` throws for a plan that cannot be; the flag that a remedy sets is told too, and "" where none is. Of
// a PlanRefusal's remedies those stay with which the whole plan passes. Where none does, those stay after
// which something else is refused, which has remedies of its own; a flag without effect can be left out
// instead.
using PlanCheck = std::function<void(const Plan& plan, const std::string& also_given)>;
void check_with_remedies(const Plan& plan, const PlanCheck& check);

}  // namespace echelon

// Why a plan cannot be, and what to try instead. Whoever knows all that a plan must pass keeps of the
// remedies those that pass it.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/error.h"
#include "spec/plan.h"

namespace echelon {

// Another value of a plan's field, which may stand for all below or above it, or for all its divisors; or of
// another flag, which is not tried.
struct Remedy {
  enum class Kind { value, at_most, at_least, divisors };
  std::string field, value;
  Kind kind = Kind::value;
};
template <class T>
Remedy remedy(std::string field, const T& value, Remedy::Kind kind = Remedy::Kind::value) {
  return {std::move(field), fmt::format("{}", value), kind};
}

// Its value cannot be with all the others as they are.
struct Refusal {
  std::string field, problem;
  std::vector<Remedy> remedies{};

  // With each of the divisors.
  std::vector<Remedy> all_remedies() const;
};
template <class... Args>
Refusal refused(std::string field, std::vector<Remedy> remedies, fmt::format_string<Args...> form,
                Args&&... args) {
  return {std::move(field), fmt::format(form, std::forward<Args>(args)...), std::move(remedies)};
}

// "--tp 3: the 4 heads do not divide"
std::string sentence(const Plan& plan, const Refusal& refusal);

// "--tp 3: the 4 heads do not divide; legal: 1, 2, 4": of the flag that is refused values alone, of other
// flags their names too.
class PlanRefusal : public RequestError {
 public:
  PlanRefusal(const Plan& plan, const Refusal& refusal);
  // Of a flag that changes nothing: "--chunks 2: has no effect with --pp 1; leave it out, or give --pp 2". Of
  // the remedies the first is shown.
  static PlanRefusal without_effect(const std::string& field, const std::string& sentence,
                                    std::vector<Remedy> remedies);

  const std::string& field() const { return field_; }
  const std::vector<Remedy>& remedies() const { return remedies_; }
  bool is_idle() const { return is_idle_; }
  // The same with fewer.
  PlanRefusal with(std::vector<Remedy> remedies) const;

 private:
  PlanRefusal(std::string field, std::string sentence, std::vector<Remedy> remedies, bool is_idle);

  std::string field_, sentence_;
  std::vector<Remedy> remedies_;
  bool is_idle_ = false;
};

// Throws it of a plan.
template <class... Args>
[[noreturn]] void refuse_field(const Plan& plan, std::string field, std::vector<Remedy> remedies,
                               fmt::format_string<Args...> form, Args&&... args) {
  throw PlanRefusal(plan, refused(std::move(field), std::move(remedies), form, std::forward<Args>(args)...));
}

// `check` throws for a plan that cannot be; the field that a remedy sets is told too, and "" where none is.
// Of a PlanRefusal's remedies those stay with which the whole plan passes. Where none does, those stay after
// which something else is refused, which has remedies of its own; a flag without effect can be left out
// instead.
using PlanCheck = std::function<void(const Plan& plan, const std::string& also_given)>;
void check_with_remedies(const Plan& plan, const PlanCheck& check);

}  // namespace echelon

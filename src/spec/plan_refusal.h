// Why a plan is refused, and what to try instead. Of the suggested remedies, the user sees those with which
// the plan passes all checks.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/error.h"
#include "spec/plan.h"

namespace echelon {

// A suggestion: another value for a plan's field (or all values up to it, all from it on, or all its
// divisors), or for another flag, which is then not tried out.
struct Remedy {
  enum class Kind { value, at_most, at_least, divisors };
  std::string field, value;
  Kind kind = Kind::value;
};
template <class T>
Remedy remedy(std::string field, const T& value, Remedy::Kind kind = Remedy::Kind::value) {
  return {std::move(field), fmt::format("{}", value), kind};
}

// The value of `field` is impossible as long as all the others stay as they are.
struct Refusal {
  std::string field, problem;
  std::vector<Remedy> remedies{};

  // The remedies, with `divisors` expanded into one remedy for each divisor.
  std::vector<Remedy> all_remedies() const;
};
template <class... Args>
Refusal refused(std::string field, std::vector<Remedy> remedies, fmt::format_string<Args...> form,
                Args&&... args) {
  return {std::move(field), fmt::format(form, std::forward<Args>(args)...), std::move(remedies)};
}

// "--tp 3: the 4 heads do not divide"
std::string sentence(const Plan& plan, const Refusal& refusal);

// "--tp 3: the 4 heads do not divide; legal: 1, 2, 4". Remedies for the refused flag appear as values only,
// others with their flag's name.
class PlanRefusal : public RequestError {
 public:
  PlanRefusal(const Plan& plan, const Refusal& refusal);
  // For a flag that changes nothing: "--chunks 2: has no effect with --pp 1; leave it out, or give --pp 2".
  // The message shows only the first remedy.
  static PlanRefusal without_effect(const std::string& field, const std::string& sentence,
                                    std::vector<Remedy> remedies);

  const std::string& field() const { return field_; }
  const std::vector<Remedy>& remedies() const { return remedies_; }
  bool is_idle() const { return is_idle_; }
  // The same refusal with other remedies.
  PlanRefusal with(std::vector<Remedy> remedies) const;

 private:
  PlanRefusal(std::string field, std::string sentence, std::vector<Remedy> remedies, bool is_idle);

  std::string field_, sentence_;
  std::vector<Remedy> remedies_;
  bool is_idle_ = false;
};

// Throws the refusal of a plan's field.
template <class... Args>
[[noreturn]] void refuse_field(const Plan& plan, std::string field, std::vector<Remedy> remedies,
                               fmt::format_string<Args...> form, Args&&... args) {
  throw PlanRefusal(plan, refused(std::move(field), std::move(remedies), form, std::forward<Args>(args)...));
}

// Runs `check`, and rethrows its PlanRefusal with only the remedies that help: those with which the whole
// plan passes or, if none does, those after which something else is refused, which has remedies of its own.
// (A flag without effect can simply be left out, so it keeps only the first kind.) `check` throws for a plan
// that is impossible; it is also given the field that the remedy sets, or "".
using PlanCheck = std::function<void(const Plan& plan, const std::string& also_given)>;
void check_with_remedies(const Plan& plan, const PlanCheck& check);

}  // namespace echelon

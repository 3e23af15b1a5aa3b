#include "spec/plan_refusal.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace echelon {
namespace {

std::string bounded(const Remedy& r, bool is_own) {
  if (r.kind == Remedy::Kind::value) return r.value;
  if (r.kind == Remedy::Kind::at_most) return "up to " + r.value;
  return (is_own ? "at least " : "of at least ") + r.value;
}

// "1, 2, or --zero 1, 2, 3, or --dp of at least 2"
std::string remedies_text(const std::string& flag, const std::vector<Remedy>& remedies) {
  std::vector<std::string> flags{flag};
  for (const Remedy& r : remedies)
    if (std::find(flags.begin(), flags.end(), r.flag) == flags.end()) flags.push_back(r.flag);
  std::string text;
  for (const std::string& one : flags) {
    std::string values;
    for (const Remedy& r : remedies)
      if (r.flag == one) values += (values.empty() ? "" : ", ") + bounded(r, one == flag);
    if (values.empty()) continue;
    text += (text.empty() ? "" : ", or ") + (one == flag ? values : one + " " + values);
  }
  return text;
}

std::string message(const std::string& flag, const std::string& problem, const std::vector<Remedy>& remedies,
                    bool is_idle) {
  if (remedies.empty()) return is_idle ? problem + "; leave it out" : problem;
  if (is_idle) return problem + "; leave it out, or give " + remedies_text("", {remedies.front()});
  return problem + "; legal: " + remedies_text(flag, remedies);
}

enum class Outcome { passes, fails_elsewhere, fails };

// Of the plan with a remedy for what was said of `flag`. It is no step forward where a flag loses its effect:
// to leave that one out could lead back.
Outcome outcome(Plan plan, const Remedy& remedy, const PlanCheck& check, const std::string& flag) {
  try {
    remedy.apply(plan);
    check(plan, remedy.flag);
    return Outcome::passes;
  } catch (const PlanRefusal& refusal) {
    return refusal.is_idle() || refusal.flag() == flag ? Outcome::fails : Outcome::fails_elsewhere;
  } catch (const RequestError& error) {
    const std::string text = error.what();
    return text.substr(0, text.find_first_of(" :")) == flag ? Outcome::fails : Outcome::fails_elsewhere;
  }
}

}  // namespace

Remedy remedy(Axis axis, int size, Remedy::Kind kind) {
  return {fmt::format("--{}", axis_name(axis)), fmt::format("{}", size),
          [=](Plan& plan) { plan.mesh.set(axis, size); }, kind};
}

PlanRefusal::PlanRefusal(std::string flag, std::string problem, std::vector<Remedy> remedies, bool is_idle)
    : RequestError(message(flag, problem, remedies, is_idle)),
      flag_(std::move(flag)),
      problem_(std::move(problem)),
      remedies_(std::move(remedies)),
      is_idle_(is_idle) {}

PlanRefusal::PlanRefusal(std::string flag, std::string problem, std::vector<Remedy> remedies)
    : PlanRefusal(std::move(flag), std::move(problem), std::move(remedies), false) {}

PlanRefusal PlanRefusal::without_effect(std::string flag, const std::string& problem,
                                        std::vector<Remedy> remedies) {
  return {std::move(flag), problem, std::move(remedies), true};
}

PlanRefusal PlanRefusal::with(std::vector<Remedy> remedies) const {
  return {flag_, problem_, std::move(remedies), is_idle_};
}

void check_with_remedies(const Plan& plan, const PlanCheck& check) {
  try {
    check(plan, "");
  } catch (const PlanRefusal& refusal) {
    std::vector<Remedy> pass, further;
    for (const Remedy& r : refusal.remedies()) {
      if (!r.apply) continue;
      const Outcome found = outcome(plan, r, check, refusal.flag());
      if (found == Outcome::passes) pass.push_back(r);
      if (found == Outcome::fails_elsewhere) further.push_back(r);
    }
    throw refusal.with(pass.empty() && !refusal.is_idle() ? further : pass);
  }
}

}  // namespace echelon

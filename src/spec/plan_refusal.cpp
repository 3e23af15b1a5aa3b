#include "spec/plan_refusal.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "spec/plan_fields.h"

namespace echelon {
namespace {

std::string bounded(const Remedy& r, bool is_own) {
  if (r.kind == Remedy::Kind::value) return r.value;
  if (r.kind == Remedy::Kind::at_most) return "up to " + r.value;
  return (is_own ? "at least " : "of at least ") + r.value;
}

// "1, 2, or --zero 1, 2, 3, or --dp of at least 2"
std::string remedies_text(const std::string& field, const std::vector<Remedy>& remedies) {
  std::vector<std::string> fields{field};
  for (const Remedy& r : remedies)
    if (std::find(fields.begin(), fields.end(), r.field) == fields.end()) fields.push_back(r.field);
  std::string text;
  for (const std::string& one : fields) {
    std::string values;
    for (const Remedy& r : remedies)
      if (r.field == one) values += (values.empty() ? "" : ", ") + bounded(r, one == field);
    if (values.empty()) continue;
    text += (text.empty() ? "" : ", or ") + (one == field ? values : "--" + one + " " + values);
  }
  return text;
}

std::string message(const std::string& field, const std::string& sentence,
                    const std::vector<Remedy>& remedies, bool is_idle) {
  if (remedies.empty()) return is_idle ? sentence + "; leave it out" : sentence;
  if (is_idle) return sentence + "; leave it out, or give " + remedies_text("", {remedies.front()});
  return sentence + "; legal: " + remedies_text(field, remedies);
}

enum class Outcome { passes, fails_elsewhere, fails };

// Of the plan with a remedy for what was said of `flag`. It is no step forward where a flag loses its effect:
// to leave that one out could lead back.
Outcome outcome(Plan plan, const Remedy& remedy, const PlanCheck& check, const std::string& field) {
  try {
    read_text(*find_field(remedy.field), plan, remedy.value, "");
    check(plan, remedy.field);
    return Outcome::passes;
  } catch (const PlanRefusal& refusal) {
    return refusal.is_idle() || refusal.field() == field ? Outcome::fails : Outcome::fails_elsewhere;
  } catch (const RequestError& error) {
    const std::string text = error.what();
    return text.substr(0, text.find_first_of(" :")) == "--" + field ? Outcome::fails
                                                                    : Outcome::fails_elsewhere;
  }
}

}  // namespace

std::vector<Remedy> Refusal::all_remedies() const {
  std::vector<Remedy> all;
  for (const Remedy& one : remedies) {
    if (one.kind != Remedy::Kind::divisors) all.push_back(one);
    const std::int64_t of = one.kind == Remedy::Kind::divisors ? std::stoll(one.value) : 0;
    for (std::int64_t n = 1; n <= of; ++n)
      if (of % n == 0) all.push_back(remedy(one.field, n));
  }
  return all;
}

std::string sentence(const Plan& plan, const Refusal& refusal) {
  return fmt::format("--{} {}: {}", refusal.field, text_of(*find_field(refusal.field), plan),
                     refusal.problem);
}

PlanRefusal::PlanRefusal(std::string field, std::string sentence, std::vector<Remedy> remedies, bool is_idle)
    : RequestError(message(field, sentence, remedies, is_idle)),
      field_(std::move(field)),
      sentence_(std::move(sentence)),
      remedies_(std::move(remedies)),
      is_idle_(is_idle) {}

PlanRefusal::PlanRefusal(const Plan& plan, const Refusal& refusal)
    : PlanRefusal(refusal.field, sentence(plan, refusal), refusal.all_remedies(), false) {}

PlanRefusal PlanRefusal::without_effect(const std::string& field, const std::string& sentence,
                                        std::vector<Remedy> remedies) {
  return {field, sentence, std::move(remedies), true};
}

PlanRefusal PlanRefusal::with(std::vector<Remedy> remedies) const {
  return {field_, sentence_, std::move(remedies), is_idle_};
}

void check_with_remedies(const Plan& plan, const PlanCheck& check) {
  try {
    check(plan, "");
  } catch (const PlanRefusal& refusal) {
    std::vector<Remedy> pass, further;
    for (const Remedy& r : refusal.remedies()) {
      if (find_field(r.field) == nullptr) continue;
      const Outcome found = outcome(plan, r, check, refusal.field());
      if (found == Outcome::passes) pass.push_back(r);
      if (found == Outcome::fails_elsewhere) further.push_back(r);
    }
    throw refusal.with(pass.empty() && !refusal.is_idle() ? further : pass);
  }
}

}  // namespace echelon

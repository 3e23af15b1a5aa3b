// The fields of a Plan, each declared once: files, flags, pins of the planner, help and refusals read this
// list. A new field is a member of Plan and an entry here.
#pragma once

#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "spec/plan.h"

namespace echelon {

// A value that has a text of its own.
struct TextMember {
  std::string (*write)(const Plan&);
  // RequestError naming `field` and what is legal.
  void (*read)(Plan&, const std::string& text, const std::string& field);
  std::string values;  // as --help shows them
};
struct Bytes {
  std::int64_t& (*of)(Plan&);
};
using PlanMember = std::variant<bool& (*)(Plan&), int& (*)(Plan&), std::int64_t& (*)(Plan&),
                                double& (*)(Plan&), std::string& (*)(Plan&), Bytes, TextMember>;

enum class FieldUse {
  file,    // no flag
  train,   // a flag of train and verify
  both,    // of plan too
  pinned,  // of plan too, which searches for it where it is not given
  plan     // of plan alone, which searches for it
};

struct PlanField {
  const char* key;  // in TOML; "mesh.dp" stands in a table
  PlanMember member;
  std::string help;
  FieldUse use = FieldUse::train;
  double least = 0, most = 0;     // of numbers
  const char* priced = nullptr;   // the values that the planner prices, by '|'; null: all
  const char* heading = nullptr;  // in --help; null: among the common flags

  std::string name() const;  // its flag, without dashes
  std::string flag() const { return "--" + name(); }
  std::string values() const;  // as --help shows them
  bool is_number() const;
  bool is_searched() const { return use == FieldUse::pinned || use == FieldUse::plan; }
  bool is_flag_of_train() const { return use != FieldUse::file && use != FieldUse::plan; }
  bool is_flag_of_plan() const { return use != FieldUse::file && use != FieldUse::train; }
};

const std::vector<PlanField>& plan_fields();
// The one that has this flag; null: none.
const PlanField* find_field(std::string_view name);

// `use` gets its value: a bool, a number or a text.
template <class Use>
auto with_value(const PlanField& field, const Plan& plan, const Use& use) {
  return std::visit(
      [&](const auto& member) {
        Plan& unchanged = const_cast<Plan&>(plan);
        if constexpr (std::is_same_v<std::remove_cvref_t<decltype(member)>, TextMember>)
          return use(member.write(plan));
        else if constexpr (std::is_same_v<std::remove_cvref_t<decltype(member)>, Bytes>)
          return use(std::as_const(member.of(unchanged)));
        else
          return use(std::as_const(member(unchanged)));
      },
      field.member);
}

// As its flag takes it; empty for what has no name, as the even split of layers.
std::string text_of(const PlanField& field, const Plan& plan);
// RequestError naming `where` unless the text is of such a value. Numbers may be out of range.
void read_text(const PlanField& field, Plan& plan, const std::string& text, const std::string& where);

// A number that is in no plan, whatever the other fields are.
bool is_out_of_range(const PlanField& field, const Plan& plan);
// "from 0 to 3", "of at least 1"
std::string range_text(const PlanField& field);

}  // namespace echelon

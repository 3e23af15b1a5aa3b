// The fields of a Plan, each declared once. Files, flags, the planner's constraints, help and refusals all
// read this list. A new field is a member of Plan and an entry here.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "spec/plan.h"

namespace echelon {

// A field with a text form of its own.
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
  file,    // only in files, without a flag
  train,   // a flag of train and verify
  both,    // also a flag of plan
  pinned,  // also a flag of plan, which searches over the field unless it is given
  plan     // a flag of plan alone, which searches over the field
};

struct PlanField {
  const char* key;  // in TOML; "mesh.dp" is dp in the table mesh
  PlanMember member;
  std::string help;
  FieldUse use = FieldUse::train;
  double least = 0, most = 0;     // of numbers
  const char* priced = nullptr;   // values that the planner can predict, separated by '|'; null: all
  const char* heading = nullptr;  // its section of --help; null: the common flags

  std::string name() const;  // the flag without dashes
  std::string flag() const { return "--" + name(); }
  std::string values() const;  // as --help shows them
  bool is_number() const;
  bool is_searched() const { return use == FieldUse::pinned || use == FieldUse::plan; }
  bool is_flag_of_train() const { return use != FieldUse::file && use != FieldUse::plan; }
  bool is_flag_of_plan() const { return use != FieldUse::file && use != FieldUse::train; }
};

const std::vector<PlanField>& plan_fields();
// The field with this flag name; null: none.
const PlanField* find_field(std::string_view name);

// Calls `use` with the field's value: a bool, a number or a text.
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

// The value as its flag takes it; empty for one that has no text, such as the even split of layers.
std::string text_of(const PlanField& field, const Plan& plan);
// The texts of all fields but these, as a key of what does not depend on these.
std::string text_but(std::initializer_list<std::string_view> names, const Plan& plan);
// Sets the field from text. RequestError naming `where` if the text is of the wrong type; numbers are not
// checked for range.
void read_text(const PlanField& field, Plan& plan, const std::string& text, const std::string& where);

// Whether the field's number is legal in no plan, whatever the other fields are.
bool is_out_of_range(const PlanField& field, const Plan& plan);
// "from 0 to 3", "of at least 1"
std::string range_text(const PlanField& field);

}  // namespace echelon

// What of a configuration is given; the search goes over the rest.
#pragma once

#include <fmt/format.h>

#include <functional>
#include <set>
#include <string>
#include <string_view>

#include "spec/plan.h"

namespace echelon {

struct Pins {
  Plan plan;                                 // with the values that are given
  std::set<std::string, std::less<>> names;  // of its fields that are

  bool has(std::string_view name) const { return names.contains(name); }
  // RequestError naming `where` unless the text is of such a value.
  void read(const std::string& name, const std::string& text, const std::string& where);
  template <class T>
  void set(const std::string& name, const T& value) {
    read(name, fmt::format("{}", value), name);
  }
};

// All that is searched, as the plan has it.
Pins pins_of(const Plan& plan);

// The product of the axes that are given, and whether all are.
std::int64_t given_ranks(const Pins& pins);
bool gives_mesh(const Pins& pins);

}  // namespace echelon

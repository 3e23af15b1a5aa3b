// A plain struct of numbers, texts and switches as a flat TOML table: each field is declared once.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <map>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "spec/toml_text.h"

namespace echelon {

template <class T>
struct Field {
  const char* key;
  std::variant<double T::*, bool T::*, int T::*> member;
  double least = 0, most = 1e30;  // of numbers
};

// Reads those that the table has; `seen` gets their keys. RequestError naming the key, the value and what is
// legal.
template <class T>
void read_fields(const toml::table& table, const std::vector<Field<T>>& fields, const std::string& where,
                 T& into, std::set<std::string>& seen) {
  for (const Field<T>& field : fields) {
    const toml::node* node = table.get(field.key);
    if (node == nullptr) continue;
    seen.insert(field.key);
    const auto wrong = [&](const std::string& legal) {
      refuse("{}: {} = {} is not legal: give {}", where, field.key, shown(*node), legal);
    };
    if (const auto* flag = std::get_if<bool T::*>(&field.member)) {
      if (!node->is_boolean()) wrong("true or false");
      into.*(*flag) = **node->as_boolean();
      continue;
    }
    const auto value = node->value<double>();
    if (node->is_boolean() || !value || !(*value >= field.least) || *value > field.most)
      wrong(fmt::format("a number from {} to {}", field.least, field.most));
    if (const auto* whole = std::get_if<int T::*>(&field.member)) {
      if (!node->is_integer()) wrong("a whole number");
      into.*(*whole) = static_cast<int>(*value);
    } else {
      into.*std::get<double T::*>(field.member) = *value;
    }
  }
}

template <class T>
std::string write_fields(const T& from, const std::vector<Field<T>>& fields) {
  std::string text;
  for (const Field<T>& field : fields)
    std::visit([&](auto member) { text += fmt::format("{} = {}\n", field.key, from.*member); }, field.member);
  return text;
}

inline void refuse_other_keys(const toml::table& table, const std::set<std::string>& seen,
                              const std::string& where, const std::string& legal) {
  for (const auto& [key, value] : table)
    if (!seen.contains(std::string(key.str())))
      refuse("{}: unknown key {} = {}; {}", where, key.str(), shown(value), legal);
}

}  // namespace echelon

// Reads and writes a plain struct of numbers and switches as a flat TOML table. Each field is declared once.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "base/edits.h"
#include "spec/provenance.h"
#include "spec/toml_text.h"

namespace echelon {

template <class T>
struct Field {
  const char* key;
  std::variant<double T::*, bool T::*, int T::*> member;
  double least = 0, most = 1e30;  // of numbers
  const char* unit = "a number";
};

// Reads the fields that the table has and adds all their keys to `legal`. RequestError naming the key, the
// value and what is legal.
template <class T>
void read_fields(const toml::table& table, const std::vector<Field<T>>& fields, const std::string& where,
                 T& into, std::set<std::string>& legal) {
  for (const Field<T>& field : fields) {
    legal.insert(field.key);
    const toml::node* node = table.get(field.key);
    if (node == nullptr) continue;
    const auto wrong = [&](const std::string& values) {
      refuse("{}: {} = {} is not legal: give {}", where, field.key, shown(*node), values);
    };
    if (const auto* flag = std::get_if<bool T::*>(&field.member)) {
      if (!node->is_boolean()) wrong("true or false");
      into.*(*flag) = **node->as_boolean();
      continue;
    }
    const auto value = node->value<double>();
    if (node->is_boolean() || !value || !(*value >= field.least) || *value > field.most)
      wrong(fmt::format("{} from {} to {}", field.unit, field.least, field.most));
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

// The name that the file says, or else its own without the extension. RequestError if it is not a text, or
// one that a terminal would not print as it is.
inline std::string read_name(const toml::table& table, const std::string& where,
                             std::set<std::string>& legal) {
  legal.insert("name");
  const toml::node* node = table.get("name");
  if (node != nullptr && !node->is_string())
    refuse("{}: name = {} is not legal: give a name in quotes", where, shown(*node));
  const auto is_control = [](unsigned char c) { return c < 0x20 || c == 0x7f; };
  if (const std::string name = table["name"].value_or(std::string());
      std::any_of(name.begin(), name.end(), is_control))
    refuse("{}: name = {} is not legal: give a name without control characters", where, shown(*node));
  return table["name"].value_or(std::filesystem::path(where).stem().string());
}

// An optional list: an empty list in the file differs from none.
template <class Value, class Entry>
void read_list(const toml::table& table, const char* key, const std::string& where,
               std::optional<std::vector<Entry>>& into, std::set<std::string>& legal) {
  legal.insert(key);
  const toml::node* node = table.get(key);
  if (node == nullptr) return;
  into.emplace();
  if (node->is_array())
    for (const toml::node& entry : *node->as_array())
      if (const auto value = entry.value_exact<Value>()) into->push_back(static_cast<Entry>(*value));
  if (!node->is_array() || into->size() != node->as_array()->size())
    refuse("{}: {} = {} is not legal: give a list of {}", where, key, shown(*node),
           std::is_same_v<Value, std::string> ? "names" : "whole numbers");
}

template <class Entry>
std::string list_text(const char* key, const std::optional<std::vector<Entry>>& list) {
  if (!list) return {};
  if (list->empty()) return fmt::format("{} = []\n", key);
  if constexpr (std::is_same_v<Entry, std::string>)
    return fmt::format("{} = [\"{}\"]\n", key, fmt::join(*list, "\", \""));
  else
    return fmt::format("{} = [{}]\n", key, fmt::join(*list, ", "));
}

// RequestError if an entry is not a key of the table.
inline void read_provenance(const toml::table& table, const std::string& where, Provenance& into,
                            std::set<std::string>& legal) {
  for (const auto& [key, list] :
       {std::pair{"measured", &into.measured}, {"published", &into.published}, {"fitted", &into.fitted}}) {
    read_list<std::string>(table, key, where, *list, legal);
    for (const std::string& name : list->value_or(std::vector<std::string>{}))
      if (!table.contains(name))
        refuse("{}: {} = {} is not legal: give keys that this file has", where, key, name);
  }
}
inline std::string provenance_text(const Provenance& from) {
  return list_text("measured", from.measured) + list_text("published", from.published) +
         list_text("fitted", from.fitted);
}

// `list`: where they are all listed.
inline void refuse_other_keys(const toml::table& table, const std::set<std::string>& legal,
                              const std::string& where, const std::string& list) {
  for (const auto& [key, value] : table)
    if (!legal.contains(std::string(key.str())))
      refuse("{}: unknown key {} = {}{}; {}", where, key.str(), shown(value),
             did_you_mean(key.str(), {legal.begin(), legal.end()}), list);
}

}  // namespace echelon

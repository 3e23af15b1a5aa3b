// An object of a tokenizer file, whose fields are all known: what is not understood is refused by its name.
#pragma once

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace echelon {

class JsonFields {
 public:
  JsonFields(const nlohmann::json& object, std::string where, const std::vector<std::string_view>& legal)
      : JsonFields(object, std::move(where)) {
    for (const auto& [name, value] : object.items())
      if (name != "type" && std::find(legal.begin(), legal.end(), name) == legal.end())
        refuse("{}: the field {} is not known; legal: type, {}", where_, name, fmt::join(legal, ", "));
  }
  JsonFields(const nlohmann::json& object, std::string where) : object_(&object), where_(std::move(where)) {
    if (!object.is_object()) refuse("{}: {} is no object", where_, shortened(object));
  }

  const std::string& where() const { return where_; }
  bool has(const char* name) const { return object_->contains(name) && !(*object_)[name].is_null(); }
  const nlohmann::json& at(const char* name) const {
    if (!has(name)) refuse("{}: there is no {}", where_, name);
    return (*object_)[name];
  }
  const nlohmann::json& list(const char* name) const {
    if (!at(name).is_array()) refuse("{}.{}: {} is no list", where_, name, shortened(at(name)));
    return at(name);
  }
  std::string text(const char* name) const {
    if (!at(name).is_string()) refuse("{}.{}: {} is no text", where_, name, shortened(at(name)));
    return at(name).get<std::string>();
  }
  std::string text(const char* name, const std::string& otherwise) const {
    return has(name) ? text(name) : otherwise;
  }
  bool flag(const char* name, bool otherwise) const {
    if (!has(name)) return otherwise;
    if (!at(name).is_boolean()) refuse("{}.{}: {}; legal: true, false", where_, name, shortened(at(name)));
    return at(name).get<bool>();
  }
  std::int64_t number(const char* name, std::int64_t least, std::int64_t most) const {
    const nlohmann::json& value = at(name);
    if (!value.is_number_integer() || value.get<double>() < static_cast<double>(least) ||
        value.get<double>() > static_cast<double>(most))
      refuse("{}.{}: {}; legal: {} to {}", where_, name, shortened(value), least, most);
    return value.get<std::int64_t>();
  }
  std::int32_t id(const char* name) const { return static_cast<std::int32_t>(number(name, 0, largest_id)); }

  static std::string shortened(const nlohmann::json& value) {
    std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
    if (text.size() > 60) text = text.substr(0, 57) + "...";
    return text;
  }
  static constexpr std::int64_t largest_id = (1 << 24) - 1;

 private:
  const nlohmann::json* object_;
  std::string where_;
};

}  // namespace echelon

#include "base/json_text.h"

#include <nlohmann/json.hpp>

#include "base/error.h"

namespace echelon {

std::string json_text(const nlohmann::ordered_json& value) {
  return value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

nlohmann::json parse_json(const std::string& text, const std::string& where) {
  using nlohmann::json;
  static constexpr int deepest = 100;
  const auto watch = [&where](int depth, json::parse_event_t, json&) {
    if (depth > deepest)
      refuse("{}: JSON that is nested too deeply; legal: at most {} levels", where, deepest);
    return true;
  };
  try {
    return json::parse(text, watch);
  } catch (const json::exception& error) {
    refuse("{}: not JSON: {}", where, without_library_name(error.what()));
  }
}

}  // namespace echelon

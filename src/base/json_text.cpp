#include "base/json_text.h"

#include <cctype>
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

// In texts it stays.
static std::string with_quoted_infinity(const std::string& text) {
  const std::string word = "Infinity";
  std::string quoted;
  bool in_text = false;
  char before = ' ';  // what is no space
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool is_value = before == ':' || before == ',' || before == '[';
    if (!in_text && is_value && text.compare(i, word.size(), word) == 0) {
      quoted += R"({"__float__": "Infinity"})";
      i += word.size() - 1;
      before = 'y';
      continue;
    }
    quoted += text[i];
    if (in_text && text[i] == '\\' && i + 1 < text.size())
      quoted += text[++i];
    else if (text[i] == '"')
      in_text = !in_text;
    if (std::isspace(static_cast<unsigned char>(text[i])) == 0) before = text[i];
  }
  return quoted;
}

nlohmann::json parse_python_json(const std::string& text, const std::string& where) {
  return parse_json(with_quoted_infinity(text), where);
}

}  // namespace echelon

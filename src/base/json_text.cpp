#include "base/json_text.h"

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>

#include "base/error.h"

namespace echelon {

std::string json_text(const nlohmann::ordered_json& value) {
  return value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

template <class Json>
static Json parsed(const std::string& text, const std::string& where) {
  static constexpr int deepest = 100;
  const auto watch = [&where](int depth, typename Json::parse_event_t, Json&) {
    if (depth > deepest)
      refuse("{}: JSON that is nested too deeply; legal: at most {} levels", where, deepest);
    return true;
  };
  // The parser takes it for the end, whatever follows.
  if (const std::size_t at = text.find('\0'); at != std::string::npos)
    refuse("{}: not JSON: byte {} is zero", where, at + 1);
  try {
    return Json::parse(text, watch);
  } catch (const typename Json::exception& error) {
    // Without what was read last, which may be all of it, and of one line without its number.
    std::string why = without_library_name(error.what());
    why.resize(std::min(why.find("; last read: "), why.size()));
    const std::string line = "at line 1, ";
    if (const std::size_t at = why.find(line);
        at != std::string::npos && text.find('\n') == std::string::npos)
      why.replace(at, line.size(), "at ");
    refuse("{}: not JSON: {}", where, why);
  }
}

nlohmann::json parse_json(const std::string& text, const std::string& where) {
  return parsed<nlohmann::json>(text, where);
}

nlohmann::ordered_json parse_ordered_json(const std::string& text, const std::string& where) {
  return parsed<nlohmann::ordered_json>(text, where);
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

// JSON as it is written, to files and to standard output, and as it is read from files.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace echelon {

// On one line. What is not UTF-8, as a path may be, becomes U+FFFD: JSON has no other way to say it.
std::string json_text(const nlohmann::ordered_json& value);

// RequestError that begins with `where` for what is not JSON, or is nested so deeply that walking through it
// would overflow a stack.
nlohmann::json parse_json(const std::string& text, const std::string& where);
// The same with the keys of objects in their order.
nlohmann::ordered_json parse_ordered_json(const std::string& text, const std::string& where);

// As Python and with it older versions of transformers may have written it: a value Infinity, which JSON has
// no word for, is read as what newer versions write, {"__float__": "Infinity"}.
nlohmann::json parse_python_json(const std::string& text, const std::string& where);

}  // namespace echelon

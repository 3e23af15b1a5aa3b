// JSON, as written to files and standard output, and as read from files.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace echelon {

// On one line. Bytes that are not UTF-8, possible in a path, become U+FFFD, since JSON cannot express them.
std::string json_text(const nlohmann::ordered_json& value);

// RequestError beginning with `where` if the text is not JSON, or is nested so deeply that walking it would
// overflow the stack.
nlohmann::json parse_json(const std::string& text, const std::string& where);
// The same, keeping the order of keys in objects.
nlohmann::ordered_json parse_ordered_json(const std::string& text, const std::string& where);

// JSON as Python, and so older versions of transformers, may have written it: the value Infinity, which JSON
// lacks, is read as what newer versions write, {"__float__": "Infinity"}.
nlohmann::json parse_python_json(const std::string& text, const std::string& where);

}  // namespace echelon

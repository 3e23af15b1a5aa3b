// JSON as it is written, to files and to standard output.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace echelon {

// On one line. What is not UTF-8, as a path may be, becomes U+FFFD: JSON has no other way to say it.
std::string json_text(const nlohmann::ordered_json& value);

}  // namespace echelon

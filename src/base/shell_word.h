// A text as one word of a command that is shown to be typed.
#pragma once

#include <string>

namespace echelon {

// In quotes where a shell would take it for several words or for more than it is.
std::string shell_word(const std::string& text);

}  // namespace echelon

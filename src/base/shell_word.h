// Quotes text for commands that are shown to be typed.
#pragma once

#include <string>

namespace echelon {

// The text as one word of a shell: quoted if the shell would split it or interpret it.
std::string shell_word(const std::string& text);

}  // namespace echelon

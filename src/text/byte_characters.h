// GPT-2's way to write bytes as characters: printable ones as themselves, the others from U+0100 on.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace echelon {

std::string bytes_as_characters(std::string_view bytes);
// Nothing where a character stands for no byte.
std::optional<std::string> characters_as_bytes(std::string_view characters);

}  // namespace echelon

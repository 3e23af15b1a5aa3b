// What Unicode says of text and its characters. All text here is UTF-8.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace echelon {

// The text with U+FFFD for each maximal part of a character that is not whole (Unicode 3.9).
std::string replace_broken(std::string_view text);
bool is_whole_utf8(std::string_view text);

// The character that whole UTF-8 has at `at`, which moves behind it.
char32_t next_character(std::string_view text, std::size_t& at);
void append_character(std::string& text, char32_t character);
std::vector<char32_t> characters_of(std::string_view text);

enum class NormalForm { nfc, nfd, nfkc, nfkd };
std::string normalized(std::string_view text, NormalForm form);

std::string lower_case(std::string_view text);  // each character by itself, whatever is around it

// As Unicode maps it whatever the language: a letter may become several. `title`: of one character.
enum class LetterCase { lower, upper, title };
std::string in_case(std::string_view text, LetterCase letters);
bool is_cased(std::string_view character);
bool is_printable(std::string_view character);  // as Python quotes texts

bool is_space(char32_t character);            // White_Space
bool is_number(char32_t character);           // N
bool is_punctuation(char32_t character);      // P
bool is_mark(char32_t character);             // M
bool is_nonspacing_mark(char32_t character);  // Mn
bool is_other(char32_t character);            // C, but what is not assigned
bool is_word_character(char32_t character);   // \w

// Whether a property of \p{...} is a script; and what is short for a general category, any other name as it
// is.
bool is_script(const std::string& name);
std::string short_category(const std::string& name);

// Where the grapheme clusters of the text end.
std::vector<std::size_t> grapheme_ends(std::string_view text);

}  // namespace echelon

// What filters and methods of templates share: texts as Python handles them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/template_value.h"

namespace echelon {

// Throws RequestError: there is no such thing of such a value.
[[noreturn]] void refuse_of(std::string_view name, const TemplateValue& of);
const std::string& text_of(std::string_view name, const TemplateValue& of);  // which has to be one
std::int64_t whole_number(const TemplateValue& value);

// The first letter of each word large, or of the text alone, the others small. Python's words begin behind
// what is no letter, Jinja's behind spaces, hyphens and opening brackets.
enum class Words { python, jinja, one };
std::string titled(const std::string& text, Words words);
std::vector<std::string> characters(const std::string& text);  // as pieces of UTF-8
std::string stripped(const std::string& text, const std::string& what, bool left, bool right);  // "": spaces
// At most so many times; below 0: all.
std::string replaced(const std::string& text, const std::string& from, const std::string& to,
                     std::int64_t most);
TemplateValue::List split(const std::string& text, const TemplateValue* separator, std::int64_t most,
                          bool from_right);
TemplateValue::List split_lines(const std::string& text, bool keep_ends);  // as Python's splitlines()
// Python's int() and float() of a text; nothing of what is no number.
std::optional<std::int64_t> whole_number_in(const std::string& text, std::int64_t base);
std::optional<double> number_in(const std::string& text);
std::string joined(const TemplateValue::List& list, const std::string& by, const TemplateValue* attribute);

constexpr std::size_t largest_template_text = std::size_t{1} << 26, largest_template_list = 1 << 20;

}  // namespace echelon

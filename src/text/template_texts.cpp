#include "text/template_texts.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <set>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "text/template_functions.h"
#include "text/unicode.h"

namespace echelon {

using Value = TemplateValue;
using List = Value::List;

// What Python's str.isspace() calls so, as UTF-8.
static bool is_white(std::string_view character) {
  static const std::set<std::string_view> white{
      "\t",     "\n",     "\v",     "\f",     "\r",     "\x1c",   "\x1d",   "\x1e",   "\x1f",   " ",
      "\u0085", "\u00a0", "\u1680", "\u2000", "\u2001", "\u2002", "\u2003", "\u2004", "\u2005", "\u2006",
      "\u2007", "\u2008", "\u2009", "\u200a", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"};
  return white.contains(character);
}

void refuse_of(std::string_view name, const Value& of) { refuse("{} is not known of {}", name, of.kind()); }

const std::string& text_of(std::string_view name, const Value& of) {
  const auto* text = of.as<std::string>();
  if (text == nullptr) refuse_of(name, of);
  return *text;
}

std::int64_t whole_number(const Value& value) {
  if (const auto* i = value.as<std::int64_t>()) return *i;
  if (const bool* b = value.as<bool>()) return *b ? 1 : 0;
  refuse("{} is no whole number", value.shown());
}

std::string titled(const std::string& text, Words words) {
  std::string out, rest;  // the small letters behind a large one are told as one
  bool begins = true;
  const auto small = [&] { out += in_case(std::exchange(rest, ""), LetterCase::lower); };
  for (const std::string& character : characters(text)) {
    if (begins) {
      small();
      out += in_case(character, words == Words::jinja ? LetterCase::upper : LetterCase::title);
    } else {
      rest += character;
    }
    begins = words == Words::python ? !is_cased(character)
             : words == Words::jinja
                 ? is_white(character) || std::string_view("-({[<").find(character) != std::string_view::npos
                 : false;
  }
  small();
  return out;
}

std::vector<std::string> characters(const std::string& text) {
  std::vector<std::string> all;
  for (const char c : text) {
    if (all.empty() || (static_cast<unsigned char>(c) & 0xc0) != 0x80) all.emplace_back();
    all.back() += c;
  }
  return all;
}

// The character of UTF-8 that begins at `at`, and the one that ends there.
static std::string_view character_from(const std::string& text, std::size_t at) {
  std::size_t end = at + 1;
  while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) ++end;
  return std::string_view(text).substr(at, end - at);
}
static std::string_view character_to(const std::string& text, std::size_t at) {
  std::size_t begin = at - 1;
  while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xc0) == 0x80) --begin;
  return std::string_view(text).substr(begin, at - begin);
}

std::string stripped(const std::string& text, const std::string& what, bool left, bool right) {
  const std::vector<std::string> named = characters(what);
  const auto goes = [&](std::string_view character) {
    return what.empty() ? is_white(character)
                        : std::find(named.begin(), named.end(), character) != named.end();
  };
  std::size_t begin = 0, end = text.size();
  while (left && begin < end && goes(character_from(text, begin)))
    begin += character_from(text, begin).size();
  while (right && begin < end && goes(character_to(text, end))) end -= character_to(text, end).size();
  return text.substr(begin, end - begin);
}

std::string replaced(const std::string& text, const std::string& from, const std::string& to,
                     std::int64_t most) {
  if (from.empty()) refuse("replace has nothing to look for");
  std::string out;
  std::size_t at = 0;
  for (std::int64_t n = 0; most < 0 || n < most; ++n) {
    const std::size_t found = text.find(from, at);
    if (found == std::string::npos) break;
    out += text.substr(at, found - at) + to;
    at = found + from.size();
    if (out.size() > largest_template_text) refuse("a text is too long");
  }
  return out + text.substr(at);
}

// From the right, between spaces.
static List split_from_right(const std::string& text, std::int64_t most) {
  List parts;
  const auto before = [&](std::size_t at, bool white) {
    while (at > 0 && is_white(character_to(text, at)) == white) at -= character_to(text, at).size();
    return at;
  };
  for (std::size_t at = before(text.size(), true); at > 0;) {
    const std::size_t begin = most >= 0 && std::ssize(parts) >= most ? 0 : before(at, false);
    parts.emplace_back(text.substr(begin, at - begin));
    at = before(begin, true);
  }
  std::reverse(parts.begin(), parts.end());
  return parts;
}

List split(const std::string& text, const Value* separator, std::int64_t most, bool from_right) {
  List parts;
  if (separator == nullptr || separator->as<None>() != nullptr) {
    if (from_right) return split_from_right(text, most);
    const auto behind = [&](std::size_t at, bool white) {
      while (at < text.size() && is_white(character_from(text, at)) == white)
        at += character_from(text, at).size();
      return at;
    };
    for (std::size_t at = behind(0, true); at < text.size();) {
      const std::size_t end = most >= 0 && std::ssize(parts) >= most ? text.size() : behind(at, false);
      parts.emplace_back(text.substr(at, end - at));
      at = behind(end, true);
    }
    return parts;
  }
  const std::string& by = text_of("split", *separator);
  if (by.empty()) refuse("split has an empty separator");
  std::string rest = text;
  while (most < 0 || std::ssize(parts) < most) {
    const std::size_t found = from_right ? rest.rfind(by) : rest.find(by);
    if (found == std::string::npos) break;
    if (from_right) {
      parts.emplace_back(rest.substr(found + by.size()));
      rest.resize(found);
    } else {
      parts.emplace_back(rest.substr(0, found));
      rest.erase(0, found + by.size());
    }
  }
  parts.emplace_back(rest);
  if (from_right) std::reverse(parts.begin(), parts.end());
  return parts;
}

List split_lines(const std::string& text, bool keep_ends) {
  static const std::set<std::string_view> ends{"\n",   "\r",   "\v",     "\f",     "\x1c",
                                               "\x1d", "\x1e", "\u0085", "\u2028", "\u2029"};
  List lines;
  std::size_t begin = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::string_view character = character_from(text, at);
    const std::size_t end = at;
    at += character.size();
    if (!ends.contains(character)) continue;
    if (character == "\r" && at < text.size() && text[at] == '\n') ++at;
    lines.emplace_back(text.substr(begin, (keep_ends ? at : end) - begin));
    begin = at;
  }
  if (begin < text.size()) lines.emplace_back(text.substr(begin));
  return lines;
}

// Without the spaces around a number, and the underscores between its digits; nothing where one stands
// elsewhere.
static std::optional<std::string> digits_in(const std::string& text) {
  const std::string given = stripped(text, "", true, true);
  std::string digits;
  for (std::size_t i = 0; i < given.size(); ++i) {
    const auto is_digit = [&](std::size_t at) {
      return at < given.size() && std::isalnum(static_cast<unsigned char>(given[at])) != 0;
    };
    if (given[i] != '_')
      digits += given[i];
    else if (i == 0 || !is_digit(i - 1) || !is_digit(i + 1))
      return {};
  }
  if (digits.starts_with('+') && !digits.starts_with("+-")) digits.erase(0, 1);
  return digits;
}

std::optional<std::int64_t> whole_number_in(const std::string& text, std::int64_t base) {
  if (base < 2 || base > 36) refuse("int: base {} is not known; legal: 2 to 36", base);
  std::optional<std::string> digits = digits_in(text);
  if (!digits || digits->empty()) return {};
  const bool negative = digits->front() == '-';
  const std::size_t at = negative ? 1 : 0;
  if (digits->size() > at + 2 && (*digits)[at] == '0') {
    const int letter = std::tolower(static_cast<unsigned char>((*digits)[at + 1]));
    if ((letter == 'x' && base == 16) || (letter == 'o' && base == 8) || (letter == 'b' && base == 2))
      digits->erase(at, 2);
  }
  std::int64_t value = 0;
  const char* const end = digits->data() + digits->size();
  const auto read = std::from_chars(digits->data(), end, value, static_cast<int>(base));
  if (read.ec == std::errc::result_out_of_range) refuse("{} is too large a number", text);
  return read.ec == std::errc{} && read.ptr == end ? std::optional(value) : std::nullopt;
}

std::optional<double> number_in(const std::string& text) {
  const std::optional<std::string> digits = digits_in(text);
  if (!digits || digits->empty() || digits->find('(') != std::string::npos) return {};
  double value = 0;
  const char* const end = digits->data() + digits->size();
  const auto read = std::from_chars(digits->data(), end, value);
  if (read.ec == std::errc::result_out_of_range) refuse("{} is no number that is kept here", text);
  return read.ec == std::errc{} && read.ptr == end ? std::optional(value) : std::nullopt;
}

std::string joined(const List& list, const std::string& by, const Value* attribute) {
  std::string out;
  for (std::size_t i = 0; i < list.size(); ++i) {
    out +=
        (i > 0 ? by : "") + (attribute != nullptr ? template_attribute(list[i], *attribute) : list[i]).text();
    if (out.size() > largest_template_text) refuse("a text is too long");
  }
  return out;
}

}  // namespace echelon

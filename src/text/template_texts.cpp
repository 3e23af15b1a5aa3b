#include "text/template_texts.h"

#include <algorithm>
#include <cctype>
#include <set>
#include <string_view>

#include "base/error.h"
#include "text/template_functions.h"

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

void refuse_of(const std::string& name, const Value& of) { refuse("{} is not known of {}", name, of.kind()); }

const std::string& text_of(const std::string& name, const Value& of) {
  const auto* text = of.as<std::string>();
  if (text == nullptr) refuse_of(name, of);
  return *text;
}

std::int64_t whole_number(const Value& value) {
  if (const auto* i = value.as<std::int64_t>()) return *i;
  if (const bool* b = value.as<bool>()) return *b ? 1 : 0;
  refuse("{} is no whole number", value.shown());
}

std::string in_case(std::string text, int (*change)(int)) {
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x80) c = static_cast<char>(change(static_cast<unsigned char>(c)));
  return text;
}

std::string titled(std::string text, bool all_words) {
  bool first = true;
  for (char& c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x80) c = static_cast<char>(first ? std::toupper(byte) : std::tolower(byte));
    first = all_words && (byte < 0x80 && std::isalpha(byte) == 0);
  }
  return text;
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

List split(const std::string& text, const Value* separator, std::int64_t most, bool from_right) {
  List parts;
  if (separator == nullptr || separator->as<None>() != nullptr) {
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

std::string joined(const List& list, const std::string& by, const Value* attribute) {
  std::string out;
  for (std::size_t i = 0; i < list.size(); ++i) {
    out += (i > 0 ? by : "") + (attribute != nullptr ? template_item(list[i], *attribute) : list[i]).text();
    if (out.size() > largest_template_text) refuse("a text is too long");
  }
  return out;
}

}  // namespace echelon

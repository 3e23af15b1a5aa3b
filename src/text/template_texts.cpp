#include "text/template_texts.h"

#include <algorithm>
#include <cctype>

#include "base/error.h"
#include "text/template_functions.h"

namespace echelon {

using Value = TemplateValue;
using List = Value::List;

static constexpr const char* white = " \t\n\r\v\f";

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

std::string stripped(const std::string& text, const std::string& characters, bool left, bool right) {
  const std::string& what = characters.empty() ? white : characters;
  const std::size_t begin = left ? text.find_first_not_of(what) : 0;
  if (begin == std::string::npos) return "";
  const std::size_t end = right ? text.find_last_not_of(what) : text.size() - 1;
  return text.empty() || end == std::string::npos ? "" : text.substr(begin, end - begin + 1);
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
    for (std::size_t at = 0; (at = text.find_first_not_of(white, at)) != std::string::npos;) {
      const std::size_t end = most >= 0 && std::ssize(parts) >= most
                                  ? text.size()
                                  : std::min(text.find_first_of(white, at), text.size());
      parts.emplace_back(stripped(text.substr(at, end - at), "", false, true));
      at = end;
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

#include "apps/command_text.h"

#include <algorithm>
#include <string_view>

namespace echelon {

std::string shell_word(const std::string& text) {
  constexpr std::string_view plain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=.,:/@%";
  if (!text.empty() && text.find_first_not_of(plain) == std::string::npos) return text;
  std::string word = "'";
  for (const char c : text) word += c == '\'' ? "'\\''" : std::string(1, c);
  return word + "'";
}

std::string command_text(const CLI::App& verb, const std::set<std::string>& left_out) {
  std::string text = "echelon " + verb.get_name(), behind;
  for (const CLI::Option* option : verb.get_options()) {
    const std::string name = option->get_name();
    if (option->count() == 0 || left_out.contains(name)) continue;
    const bool is_flag = option->get_items_expected_max() == 0;
    std::string& words = option->get_positional() ? behind : text;
    if (!option->get_positional()) words += " " + name;
    if (!is_flag)
      for (const std::string& value : option->results()) words += " " + shell_word(value);
  }
  return text + behind;
}

}  // namespace echelon

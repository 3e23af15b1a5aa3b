#include "apps/command_text.h"

#include "base/shell_word.h"

namespace echelon {

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

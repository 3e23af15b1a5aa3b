#include "apps/help.h"

#include <algorithm>
#include <memory>
#include <sstream>
#include <string>
#include <utility>

#include "apps/terminal.h"

namespace echelon {
namespace {

// Below a flag's name if lines are short.
std::size_t description_column(int columns) { return columns < 60 ? 8 : 28; }

class HelpFormat : public CLI::Formatter {
 public:
  HelpFormat() {
    label("OPTIONS", "FLAGS");
    label("SUBCOMMAND", "VERB");
    for (const char* name : {"Positionals", "POSITIONALS"}) label(name, "Arguments");  // CLI11 2.6 has the second
    label("REQUIRED", "(required)");
    label("Excludes", "not with");
  }
  std::string make_option(const CLI::Option* option, bool is_positional) const override {
    return help_line(make_option_name(option, is_positional) + make_option_opts(option),
                     make_option_desc(option), columns_);
  }
  std::string make_subcommand(const CLI::App* verb) const override {
    return help_line(verb->get_name(), verb->get_description(), columns_);
  }
  std::string make_description(const CLI::App* app) const override {
    return in_lines(app->get_description(), 0, columns_) + "\n";
  }
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override {
    std::string text = CLI::Formatter::make_help(app, std::move(name), mode);
    for (std::size_t at; (at = text.find(" \n")) != std::string::npos;) text.erase(at, 1);  // of CLI11 2.6
    for (std::size_t at; (at = text.find("\n\n\n")) != std::string::npos;) text.erase(at, 1);
    return text;
  }

 private:
  int columns_ = help_columns();
};

}  // namespace

int help_columns() { return is_terminal(stdout) ? std::min(100, terminal_columns(stdout, 80)) : 80; }

std::string in_lines(const std::string& text, std::size_t begin, int columns) {
  std::string lines;
  std::size_t column = begin;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (column > begin && column + 1 + word.size() > static_cast<std::size_t>(columns)) {
      lines += "\n" + std::string(begin, ' ');
      column = begin;
    }
    if (column > begin) lines += ' ', ++column;
    lines += word;
    column += word.size();
  }
  return lines;
}

std::string help_of(const CLI::Option& flag) { return HelpFormat().make_option(&flag, false); }

std::string help_line(const std::string& name, const std::string& text, int columns) {
  const std::size_t begin = description_column(columns);
  std::string line = "  " + name;
  if (line.size() + 2 > begin)
    line += "\n" + std::string(begin, ' ');
  else
    line.resize(begin, ' ');
  return line + in_lines(text, begin, columns) + "\n";
}

void arrange_help(CLI::App& program) {
  static const CLI::App untouched;  // CLI11's own names of groups, which differ between versions
  program.formatter(std::make_shared<HelpFormat>());
  for (CLI::Option* option : program.get_options([](const CLI::Option*) { return true; }))
    if (option->get_group() == untouched.get_help_ptr()->get_group())
      option->group(common_flags);  // --help, which CLI11 adds
  for (CLI::App* verb : program.get_subcommands([](const CLI::App*) { return true; })) {
    if (verb->get_group() == untouched.get_group()) verb->group("Verbs");
    arrange_help(*verb);
  }
}

}  // namespace echelon

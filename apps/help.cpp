#include "apps/help.h"

#include <memory>
#include <sstream>
#include <string>
#include <utility>

namespace echelon {
namespace {

constexpr std::size_t help_columns = 80, description_column = 28;

// Words of the text in lines that start at this column; the first line is there already.
std::string in_lines(const std::string& text, std::size_t begin) {
  std::string lines;
  std::size_t column = begin;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (column > begin && column + 1 + word.size() > help_columns) {
      lines += "\n" + std::string(begin, ' ');
      column = begin;
    }
    if (column > begin) lines += ' ', ++column;
    lines += word;
    column += word.size();
  }
  return lines;
}

class HelpFormat : public CLI::Formatter {
 public:
  std::string make_option(const CLI::Option* option, bool is_positional) const override {
    std::string line = "  " + make_option_name(option, is_positional) + make_option_opts(option);
    if (line.size() + 2 > description_column)
      line += "\n" + std::string(description_column, ' ');
    else
      line.resize(description_column, ' ');
    return line + in_lines(make_option_desc(option), description_column) + "\n";
  }
  std::string make_subcommand(const CLI::App* verb) const override {
    std::string line = "  " + verb->get_name();
    line.resize(description_column, ' ');
    return line + in_lines(verb->get_description(), description_column) + "\n";
  }
  std::string make_description(const CLI::App* app) const override {
    return in_lines(app->get_description(), 0) + "\n";
  }
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override {
    std::string text = CLI::Formatter::make_help(app, std::move(name), mode);
    for (std::size_t at; (at = text.find("\n\n\n")) != std::string::npos;) text.erase(at, 1);
    return text;
  }
};

}  // namespace

void arrange_help(CLI::App& program) {
  program.formatter(std::make_shared<HelpFormat>());
  for (CLI::Option* option : program.get_options([](const CLI::Option*) { return true; }))
    if (option->get_group() == "Options") option->group(common_flags);  // --help, which CLI11 adds itself
  for (CLI::App* verb : program.get_subcommands([](const CLI::App*) { return true; })) arrange_help(*verb);
}

}  // namespace echelon

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>

#include "apps/describe.h"

namespace echelon {
namespace {

// Text for roff: hyphens that can be copied, and no backslashes or lines that act as commands.
std::string roff(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '-')
      out += "\\-";
    else if (c == '\\')
      out += "\\e";
    else
      out += c;
  }
  return out.starts_with('.') || out.starts_with('\'') ? "\\&" + out : out;
}

std::string upper(std::string text) {
  for (char& c : text) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

std::string entry(const FlagDescription& flag) {
  std::vector<std::string> names;
  for (const std::string& name : flag.names) names.push_back("\\fB" + roff(name) + "\\fR");
  std::string text = flag.is_positional
                         ? fmt::format(".TP\n\\fI{}\\fR", roff(flag.type))
                         : fmt::format(".TP\n{}{}", fmt::join(names, ", "),
                                       flag.type.empty() ? "" : " \\fI" + roff(flag.type) + "\\fR");
  text += "\n" + roff(flag.text);
  if (!flag.fallback.empty() && flag.text.find("(default") == std::string::npos)
    text += fmt::format(" (default: {})", roff(flag.fallback));
  return text + "\n";
}

std::string flags_of(const CommandDescription& command, const char* section) {
  std::string text, heading;
  for (const FlagDescription& flag : command.flags) {
    if (flag.heading != heading) text += fmt::format(".{} {}\n", section, roff(flag.heading));
    heading = flag.heading;
    text += entry(flag);
  }
  if (!command.footer.empty()) text += ".PP\n" + roff(command.footer) + "\n";
  return text;
}

std::string synopsis(const CommandDescription& command) {
  std::string text = fmt::format("\\fBechelon{}{}\\fR", command.words.empty() ? "" : " ",
                                 roff(fmt::format("{}", fmt::join(command.words, " "))));
  for (const FlagDescription& flag : command.flags)
    if (flag.is_positional) text += " \\fI" + roff(flag.type) + "\\fR";
  return text + (command.verbs.empty() ? " [\\fIflags\\fR]" : " \\fIverb\\fR [\\fIflags\\fR]") + "\n";
}

}  // namespace

std::string man_page(const CommandDescription& command, const std::string& version) {
  const bool is_program = command.words.empty();
  const std::string name = is_program ? "echelon" : "echelon-" + command.words.front();
  std::string first = command.text.substr(0, command.text.find_first_of(".:;("));
  while (first.ends_with(' ')) first.pop_back();
  first[0] = static_cast<char>(std::tolower(static_cast<unsigned char>(first[0])));
  std::string page =
      fmt::format(".TH {} 1 \"\" \"echelon {}\" \"User Commands\"\n", upper(roff(name)), version);
  page += fmt::format(".SH NAME\n{} \\- {}\n", roff(name), roff(first));
  page += ".SH SYNOPSIS\n";
  if (command.verbs.empty() || is_program) page += synopsis(command);
  if (!is_program)
    for (const CommandDescription& verb : command.verbs) page += synopsis(verb) + ".br\n";
  page += fmt::format(".SH DESCRIPTION\n{}{}\n", roff(command.text), command.text.ends_with('.') ? "" : ".");
  if (is_program) {
    page += ".SH VERBS\n";
    for (const CommandDescription& verb : command.verbs)
      page += fmt::format(".TP\n\\fB{0}\\fR\n{1}; see \\fBechelon\\-{0}\\fR(1)\n", roff(verb.words.front()),
                          roff(verb.text));
  }
  page += ".SH OPTIONS\n" + flags_of(command, "SS");
  if (!is_program)
    for (const CommandDescription& verb : command.verbs)
      page += fmt::format(".SH {}\n{}.\n", upper(roff(fmt::format("{}", fmt::join(verb.words, " ")))),
                          roff(verb.text)) +
              flags_of(verb, "SS");
  page +=
      ".SH EXIT STATUS\n.TP\n0\nyes, or done\n.TP\n1\nit ran, and the answer is no\n.TP\n2\nthe request is "
      "wrong"
      "\n.TP\n3\nit failed while running\n";
  std::vector<std::string> others;
  if (is_program)
    for (const CommandDescription& verb : command.verbs)
      others.push_back("\\fBechelon\\-" + roff(verb.words.front()) + "\\fR(1)");
  else
    others.push_back("\\fBechelon\\fR(1)");
  return page +
         fmt::format(
             ".SH SEE ALSO\n{}\n.PP\nThe documents that are named here lie in share/echelon, beside the "
             "presets of models and machines.\n",
             fmt::join(others, ", "));
}

}  // namespace echelon

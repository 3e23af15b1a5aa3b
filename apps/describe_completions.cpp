#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <map>

#include "apps/describe.h"

namespace echelon {
namespace {

using Command = CommandDescription;
using Flag = FlagDescription;

// Visits every command, each before its verbs.
void visit(const Command& command, const std::function<void(const Command&)>& see) {
  see(command);
  for (const Command& verb : command.verbs) visit(verb, see);
}

std::string path_of(const Command& command) { return fmt::format("{}", fmt::join(command.words, " ")); }

std::string verbs_of(const Command& command) {
  std::vector<std::string> names;
  for (const Command& verb : command.verbs) names.push_back(verb.words.back());
  return fmt::format("{}", fmt::join(names, " "));
}

// In single quotes, for any of these shells.
std::string quoted(const std::string& text, const char* quote_mark) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string(quote_mark) : std::string(1, c);
  return out + "'";
}

std::string with_backslash_before(const std::string& text, const std::string& special) {
  std::string out;
  for (const char c : text) out += (special.find(c) == std::string::npos ? "" : "\\") + std::string(1, c);
  return out;
}

// The beginning of a flag's description, for lists with one line for each candidate.
std::string short_text(const std::string& text) { return text.substr(0, text.find_first_of(";:(")); }

std::string case_of(const char* name, const std::string& lines) {
  return fmt::format("_echelon_{}() {{\n  case $1 in\n{}  esac\n}}\n", name, lines);
}

constexpr const char* bash_function = R"bash(_echelon() {
  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} at='' word taken
  COMPREPLY=()
  # bash takes --flag=value for three words.
  if [[ $current == = ]]; then current=''
  elif [[ $before == = ]]; then before=${COMP_WORDS[COMP_CWORD-2]}; fi
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    if [[ $word == -- ]]; then at=
    elif [[ " $(_echelon_verbs "$at") " == *" $word "* ]]; then at="${at:+$at }$word"; fi
  done
  taken=$(_echelon_values "$at $before")
  if [[ -n $taken && $current != -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W "${taken#* }" -- "$current")
  elif [[ $current == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$(_echelon_flags "$at")" -- "$current")
    return
  else
    mapfile -t COMPREPLY < <(compgen -W "$(_echelon_verbs "$at")" -- "$current")
    taken=$(_echelon_positionals "$at")
    [[ $taken == words* ]] && mapfile -t COMPREPLY < <(compgen -W "${taken#* }" -- "$current")
  fi
  if [[ $taken == files* ]]; then
    compopt -o filenames 2>/dev/null
    mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "$current")
  fi
}
complete -F _echelon echelon
)bash";

constexpr const char* zsh_functions = R"zsh(_echelon_name_or_file() {
  local none=1
  compadd -- "$@" && none=0
  _files && none=0
  return none
}
# Of launch: after -- comes a command line of its own.
_echelon_training() {
  [[ $words[1] == -- ]] && { shift words; (( CURRENT-- )) }
  words=(echelon "${words[@]}")
  (( CURRENT++ ))
  _echelon
}
)zsh";

constexpr const char* fish_function = R"fish(
    set -l at ''
    for word in (commandline -opc)[2..-1]
        if test "$word" = --
            set at ''
        else if contains -- (string trim "$at $word") $commands
            set at (string trim "$at $word")
        end
    end
    test "$at" = "$argv[1]"
end
complete -c echelon -f
)fish";

}  // namespace

std::string bash_completion(const Command& program) {
  std::string verbs, flags, values, positionals;
  // Flags with the same values share a line.
  std::map<std::string, std::vector<std::string>> takers;
  visit(program, [&](const Command& command) {
    const std::string path = path_of(command);
    if (!command.verbs.empty()) verbs += fmt::format("    '{}') echo '{}' ;;\n", path, verbs_of(command));
    std::vector<std::string> names;
    for (const Flag& flag : command.flags) {
      if (flag.is_positional) {
        const std::string line =
            fmt::format("    '{}') echo '{}' ;;\n", path,
                        flag.takes_path ? "files" : fmt::format("words {}", fmt::join(flag.values, " ")));
        if (positionals.find(line) == std::string::npos) positionals += line;
        continue;
      }
      names.push_back(flag.names.front());
      if (!flag.takes_value) continue;
      takers[(flag.takes_path ? "files " : "words ") + fmt::format("{}", fmt::join(flag.values, " "))]
          .push_back(fmt::format("'{} {}'", path, flag.names.front()));
    }
    flags += fmt::format("    '{}') echo '{}' ;;\n", path, fmt::join(names, " "));
  });
  for (const auto& [what, who] : takers)
    values += fmt::format("    {}) echo '{}' ;;\n", fmt::join(who, "|"), what);
  return "# Completion of echelon for bash. Written by `echelon describe`.\n" + case_of("verbs", verbs) +
         case_of("flags", flags) + "# What a flag takes: files or not, then words.\n" +
         case_of("values", values) + case_of("positionals", positionals) + bash_function;
}

std::string zsh_completion(const Command& program) {
  std::string functions;
  visit(program, [&](const Command& command) {
    std::string specs;
    const auto spec = [&](const std::string& text) { specs += " \\\n    " + quoted(text, "'\\''"); };
    const auto plain = [](const std::string& text) { return with_backslash_before(text, "\\[]:"); };
    for (const Flag& flag : command.flags) {
      std::string action;
      if (flag.takes_value) {
        std::string choice = flag.takes_path ? "_files" : " ";
        if (!flag.values.empty())
          choice = fmt::format(fmt::runtime(flag.takes_path ? " _echelon_name_or_file {}" : "({})"),
                               fmt::join(flag.values, " "));
        action = fmt::format(":{}:{}", plain(flag.type), choice);
      }
      if (flag.is_positional)
        spec(command.words == std::vector<std::string>{"launch"} ? "*::training:_echelon_training"
                                                                 : "*" + action);
      else
        for (const std::string& name : flag.names)
          spec(fmt::format("{}{}[{}]{}", flag.takes_value ? "*" : "", name, plain(short_text(flag.text)),
                           action));
    }
    std::string name = "_echelon";
    for (const std::string& word : command.words) name += "_" + word;
    if (command.verbs.empty()) {
      functions += fmt::format("{}() {{\n  _arguments -S{}\n}}\n", name, specs);
      return;
    }
    std::string list, calls;
    for (const Command& verb : command.verbs) {
      list +=
          fmt::format("\n    {}", quoted(verb.words.back() + ":" + plain(short_text(verb.text)), "'\\''"));
      calls += fmt::format("\n        {}) {}_{} ;;", verb.words.back(), name, verb.words.back());
    }
    functions += fmt::format(
        "{}() {{\n  local context state state_descr line\n  typeset -A opt_args\n  local -a verbs=({})\n"
        "  _arguments -C{} \\\n    '1: :->verb' '*:: :->rest'\n  case $state in\n    verb) _describe verb "
        "verbs ;;\n"
        "    rest)\n      case $words[1] in{}\n      esac ;;\n  esac\n}}\n",
        name, list, specs, calls);
  });
  return "#compdef echelon\n# Completion of echelon for zsh. Written by `echelon describe`.\n" +
         std::string(zsh_functions) + functions + "_echelon \"$@\"\n";
}

std::string fish_completion(const Command& program) {
  std::vector<std::string> paths;
  std::string lines;
  visit(program, [&](const Command& command) {
    const std::string here = fmt::format("complete -c echelon -n \"__echelon_is '{}'\"", path_of(command));
    const auto words = [](const std::string& text) {
      return quoted(with_backslash_before(text, "\\"), "\\'");
    };
    if (!command.words.empty()) paths.push_back("'" + path_of(command) + "'");
    for (const Command& verb : command.verbs)
      lines += fmt::format("{} -f -a {} -d {}\n", here, verb.words.back(), words(short_text(verb.text)));
    for (const Flag& flag : command.flags) {
      if (flag.is_positional) {
        if (flag.takes_path) lines += here + " -F\n";
        if (!flag.values.empty()) lines += fmt::format("{} -f -a '{}'\n", here, fmt::join(flag.values, " "));
        continue;
      }
      lines += here;
      for (const std::string& name : flag.names)
        lines += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
      if (flag.takes_value) lines += flag.takes_path ? " -r -F" : " -x";
      if (!flag.values.empty()) lines += fmt::format(" -a '{}'", fmt::join(flag.values, " "));
      lines += " -d " + words(short_text(flag.text)) + "\n";
    }
  });
  return fmt::format(
             "# Completion of echelon for fish. Written by `echelon describe`.\nfunction __echelon_is\n    "
             "set -l commands {}",
             fmt::join(paths, " ")) +
         fish_function + lines;
}

}  // namespace echelon

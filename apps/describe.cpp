#include "apps/describe.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <memory>
#include <system_error>

#include "apps/flag_values.h"
#include "apps/help.h"
#include "apps/topics.h"
#include "base/output_file.h"
#include "schedule/schedules.h"
#include "spec/machine.h"
#include "spec/model_spec.h"
#include "spec/software.h"

namespace echelon {
namespace {

// "on", "zb-h1" and "f32" are literal values; "N", "FILE.toml" and "topk:R" describe values.
bool is_literal(const std::string& part) {
  return !part.empty() && std::all_of(part.begin(), part.end(), [](unsigned char c) {
    return std::islower(c) || std::isdigit(c) || c == '-' || c == '_';
  });
}

std::vector<std::string> names_for(const std::string& flag) {
  if (flag == "--model") return model_preset_names();
  if (flag == "--machine") return machine_preset_names();
  if (flag == "--software") return software_preset_names();
  if (flag == "--schedule") return schedule_names();
  if (flag == "topic") return topic_names();
  return {};
}

FlagDescription describe(const CLI::Option& option) {
  FlagDescription flag;
  flag.is_positional = option.get_positional();
  if (flag.is_positional) flag.names = {option.get_name(true)};
  for (const std::string& name : option.get_lnames()) flag.names.push_back("--" + name);
  for (const std::string& name : option.get_snames()) flag.names.push_back("-" + name);
  flag.takes_value = option.get_items_expected_max() > 0;
  flag.text = option.get_description();
  flag.heading = option.get_group();
  if (!flag.takes_value) return flag;
  flag.type = option.get_type_name();
  flag.fallback = option.get_default_str();
  for (const std::string& part : split(flag.type, "|")) {
    if (is_literal(part)) flag.values.push_back(part);
    if (part == "NAME" || part == "TOPIC")
      for (const std::string& name : names_for(flag.names.front())) flag.values.push_back(name);
    for (const char* path : {"FILE", "DIR", "PATH", "PLAN"})
      flag.takes_path = flag.takes_path || part == path || part.starts_with(std::string(path) + ".");
  }
  return flag;
}

CommandDescription describe(const CLI::App& app, std::vector<std::string> words) {
  CommandDescription command;
  command.words = std::move(words);
  command.text = app.get_description();
  command.footer = app.get_footer();
  while (command.footer.ends_with('\n')) command.footer.pop_back();
  for (const std::string& group : app.get_groups())
    for (const CLI::Option* option : app.get_options())
      if (!group.empty() && option->get_group() == group) command.flags.push_back(describe(*option));
  for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (verb->get_group().empty()) continue;
    std::vector<std::string> more = command.words;
    more.push_back(verb->get_name());
    command.verbs.push_back(describe(*verb, std::move(more)));
  }
  return command;
}

void write(const std::filesystem::path& path, const std::string& text) {
  std::error_code error;
  std::filesystem::create_directories(path.parent_path(), error);  // if this fails, so does writing
  write_output("describe", path.string(), text);
}

}  // namespace

CommandDescription describe(const CLI::App& app) { return describe(app, {}); }

void add_describe(CLI::App& program, int& status) {
  CLI::App& app = *program.add_subcommand("describe", "Write man pages and completions");
  app.group("");
  const auto directory = std::make_shared<std::filesystem::path>();
  heading(app, common_flags);
  app.add_option("directory", *directory, "Where to")->type_name("DIR")->required();
  app.callback([directory, &program, &status] {
    const CommandDescription all = describe(program);
    const std::string version = program.version();
    write(*directory / "man1/echelon.1", man_page(all, version));
    for (const CommandDescription& verb : all.verbs)
      write(*directory / fmt::format("man1/echelon-{}.1", verb.words.front()), man_page(verb, version));
    write(*directory / "bash/echelon", bash_completion(all));
    write(*directory / "zsh/_echelon", zsh_completion(all));
    write(*directory / "fish/echelon.fish", fish_completion(all));
    status = 0;
  });
}

}  // namespace echelon

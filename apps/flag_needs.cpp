#include "apps/flag_needs.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>

#include "apps/flag_values.h"
#include "base/error.h"
#include "base/output_file.h"

namespace echelon {

void refuse_idle(const CLI::App& app, const std::vector<FlagNeed>& needs, const std::string& also_given) {
  for (const FlagNeed& need : needs) {
    const CLI::Option* const option = app.get_option_no_throw(need.flag);
    if (option == nullptr || need.acts || (option->count() == 0 && need.flag != "--" + also_given)) continue;
    const std::string value =
        option->get_items_expected_max() == 0 ? "" : fmt::format(" {}", fmt::join(option->results(), ","));
    throw PlanRefusal::without_effect(need.flag.substr(2),
                                      fmt::format("{}{}: has no effect {}", need.flag, value, need.where),
                                      need.remedies);
  }
}

void refuse_empty_values(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    // An empty prompt is legal.
    if (option->count() == 0 || option->get_items_expected_max() == 0 || option->get_positional() ||
        option->get_name() == "--prompt")
      continue;
    for (const std::string& value : option->results())
      if (value.empty()) refuse("{}: its value is empty", option->get_name());
  }
  for (const CLI::App* verb : app.get_subcommands()) refuse_empty_values(*verb);
}

void refuse_lost_files(const CLI::App& program) {
  static const std::vector<std::string> outputs{"--block",        "--html",   "--log",
                                                "--out",          "--report", "--sweep-out",
                                                "--software-out", "--trace",  "--timeline"};
  for (const CLI::App* verb : program.get_subcommands()) {
    std::vector<NamedFile> written, read;
    for (const CLI::Option* option : verb->get_options()) {
      const bool is_output = contains(outputs, option->get_name());
      for (const std::string& value : option->results()) {
        std::error_code error;
        // The file's name is not the prefix itself.
        if (option->get_type_name() == "PREFIX") continue;
        if (is_output || std::filesystem::is_regular_file(value, error))
          (is_output ? written : read).push_back({option->get_name(), value});
      }
    }
    check_apart(written, read);
    refuse_lost_files(*verb);
  }
}

}  // namespace echelon

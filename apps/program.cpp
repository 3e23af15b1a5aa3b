#include "apps/program.h"

#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <thread>

#include "apps/describe.h"
#include "apps/flag_needs.h"
#include "apps/flag_values.h"
#include "apps/help.h"
#include "apps/launch_words.h"
#include "apps/launched.h"
#include "apps/terminal.h"
#include "apps/topics.h"
#include "apps/verbs.h"
#include "base/edits.h"
#include "base/error.h"
#include "schedule/schedules.h"
#include "spec/machine.h"
#include "spec/model_spec.h"

namespace echelon {
namespace {

// Names of its verbs, without those that --help does not list.
std::vector<std::string> names_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; }))
    if (!verb->get_group().empty()) names.push_back(verb->get_name());
  return names;
}

// Flags of other programs, and their names here; of several names, the first that the verb has.
struct Elsewhere {
  const char* theirs;
  std::vector<const char*> ours;
};
const std::vector<Elsewhere>& names_elsewhere() {
  static const std::vector<Elsewhere> all{
      {"batch-size", {"global-batch"}},
      {"global-batch-size", {"global-batch"}},
      {"micro-batch-size", {"micro-batch"}},
      {"batch", {"global-batch"}},
      {"epochs", {"steps"}},
      {"iterations", {"steps"}},
      {"max-steps", {"steps"}},
      {"train-iters", {"steps"}},
      {"learning-rate", {"lr"}},
      {"seq-length", {"seq-len"}},
      {"sequence-length", {"seq-len"}},
      {"context-length", {"seq-len"}},
      {"max-new-tokens", {"max-tokens"}},
      {"length", {"max-tokens", "seq-len"}},
      {"tensor-parallel", {"tp"}},
      {"tensor-model-parallel-size", {"tp"}},
      {"pipeline-parallel", {"pp"}},
      {"pipeline-model-parallel-size", {"pp"}},
      {"context-parallel-size", {"cp"}},
      {"expert-model-parallel-size", {"ep"}},
      {"data-parallel", {"dp"}},
      {"stages", {"pp"}},
      {"world-size", {"gpus", "ranks", "dp"}},
      {"nproc", {"ranks", "dp"}},
      {"num-gpus", {"gpus", "dp"}},
      {"dtype", {"precision"}},
      {"ckpt", {"checkpoint"}},
      {"save", {"checkpoint"}},
      {"load", {"checkpoint", "from"}},
      {"output", {"out"}},
      {"dataset", {"data"}},
      {"optimizer-offload", {"offload"}},
      {"activation-offload", {"offload"}},
      {"cpu-offloading", {"offload"}},
      {"verbose", {"explain"}},
  };
  return all;
}

std::string without_dashes(const std::string& flag) {
  return flag.substr(std::min(flag.find_first_not_of('-'), flag.size()));
}

// " (did you mean --dp?)", or for another verb's flag, which verbs have it.
std::string flag_that_was_meant(const CLI::App& program, const CLI::App& app, const std::string& given) {
  const std::string name = without_dashes(given.substr(0, given.find('=')));
  std::vector<std::string> flags, others;
  for (const CLI::Option* option : app.get_options())
    if (!option->get_group().empty())
      flags.insert(flags.end(), option->get_lnames().begin(), option->get_lnames().end());
  for (const Elsewhere& one : names_elsewhere())
    for (const char* ours : one.ours)
      if (name == one.theirs && std::find(flags.begin(), flags.end(), ours) != flags.end())
        return fmt::format(" (did you mean --{}?)", ours);
  if (const std::string meant = nearest(name, flags); !meant.empty())
    return " (did you mean --" + meant + "?)";
  for (const CLI::App* verb : program.get_subcommands([](const CLI::App*) { return true; }))
    if (const CLI::Option* option = verb->get_option_no_throw("--" + name);
        option != nullptr && !option->get_group().empty())
      others.push_back(verb->get_name());
  return others.empty()
             ? ""
             : fmt::format(" ({} {})", fmt::join(others, ", "), others.size() > 1 ? "have" : "has");
}

// " (did you mean --model llama-tiny?)" for a word where the verb takes none, by what the word names.
std::string word_that_was_meant(const CLI::App& app, const std::string& word) {
  const auto asks = [&](const char* flag, bool fits) {
    return fits && app.get_option_no_throw(flag) != nullptr
               ? fmt::format(" (did you mean {} {}?)", flag, word)
               : std::string();
  };
  const auto is_one_of = [&](const std::vector<std::string>& names) {
    return std::find(names.begin(), names.end(), word) != names.end();
  };
  std::error_code error;
  for (const std::string& one :
       {asks("--model", is_one_of(model_preset_names())),
        asks("--machine", is_one_of(machine_preset_names())), asks("--schedule", is_one_of(schedule_names())),
        asks("--data", std::filesystem::exists(word, error)),
        asks("--checkpoint", std::filesystem::is_directory(word, error)), asks("--prompt", true)})
    if (!one.empty()) return one;
  return "";
}

[[noreturn]] void refuse_verb(const CLI::App& app, const std::string& word) {
  if (app.get_parent() == nullptr && app.get_option_no_throw("--" + word) != nullptr)
    refuse("{}: no such verb (did you mean --{}?)", word, word);
  const std::vector<std::string> names = names_of(app);
  refuse("{}: no such verb{}; legal: {}", word, did_you_mean(word, names), fmt::join(names, ", "));
}

// CLI11 would take a misspelt verb before --help for a question about the program.
void refuse_help_on_no_verb(const CLI::App& program, const std::vector<std::string>& words) {
  const CLI::App* app = &program;
  for (const std::string& word : words) {
    if (word.starts_with("-") || names_of(*app).empty()) return;
    const std::vector<const CLI::App*> verb =
        app->get_subcommands([&](const CLI::App* one) { return one->check_name(word); });
    if (verb.empty()) refuse_verb(*app, word);
    app = verb.front();
  }
}

// If a launcher starts several processes, each would do all the work, and write the same files. Accepted are
// verbs that train, which divide the work, and verbs that start a training or examine each host's devices.
void refuse_copies(const CLI::App& program) {
  const int processes = launched_processes();
  for (const CLI::App* verb : program.get_subcommands())
    if (processes > 1 && !contains({"train", "verify", "launch", "devices"}, verb->get_name()))
      refuse("{}: is the work of one process, and {} were started; legal: one", verb->get_name(), processes);
}

// Refuses in our words what CLI11 complains about.
[[noreturn]] void refuse_parse(CLI::App& program, const CLI::ParseError& error) {
  std::string words = program.get_name();
  CLI::App* app = &program;
  while (!app->get_subcommands().empty()) {
    app = app->get_subcommands().front();
    words += " " + app->get_name();
  }
  const std::vector<std::string> names = names_of(*app);
  // The verb's own first: with "launch --timeout 9 -- train", 9 is taken for launch's command, and the
  // program is left with the verb train.
  std::vector<std::string> unknown = app->remaining();
  if (unknown.empty()) unknown = program.remaining(true);
  if (!unknown.empty()) {
    const std::string first = unknown.front().empty() ? "\"\"" : unknown.front();
    if (!names.empty() && !first.starts_with("-")) refuse_verb(*app, first);
    const bool is_flag = first.starts_with("-");
    if (is_flag && app->get_option_no_throw(first.substr(0, first.find('='))) != nullptr)
      refuse("{}: stands before the verb that has it; put it behind {}", first, words);
    refuse("{}: {} has no such {}{}; {} --help lists what it has{}", first, words,
           is_flag ? "flag" : "argument",
           is_flag ? flag_that_was_meant(program, *app, first) : word_that_was_meant(*app, first), words,
           app->get_name() == "launch"
               ? ", and what belongs to the training comes after --: launch ... -- train ..."
               : "");
  }
  const std::string text = error.what(), flag = text.substr(0, text.find(':'));
  if (error.get_name() == "ArgumentMismatch" && text.ends_with("missing"))
    refuse("{}: its value is missing", flag);
  if (error.get_name() == "ArgumentMismatch") refuse("{}: given more than once", flag);
  if (error.get_name() == "RequiredError") {
    const std::string what = text.substr(0, text.find(' '));
    refuse("{}: {} is missing; {} --help says what it is", words.substr(words.find(' ') + 1),
           what.starts_with("-") ? what : "its argument " + what, words);
  }
  if (error.get_name() == "ExcludesError") refuse("{}; give one of the two", text);
  refuse("{}", text);
}

// CLI11 takes the word behind "--data=" for the flag's value. What comes after "--" is the words of another.
std::vector<std::string> with_empty_values(const std::vector<std::string>& words) {
  std::vector<std::string> all;
  bool ours = true;
  for (const std::string& word : words) {
    ours = ours && word != "--";
    if (ours && word.size() > 3 && word.starts_with("--") && word.find('=') == word.size() - 1)
      all.insert(all.end(), {word.substr(0, word.size() - 1), ""});
    else
      all.push_back(word);
  }
  return all;
}

int run(CLI::App& program, int argc, char** argv) {
  int status = 0;
  add_verbs(program, status);
  add_help(program);
  add_describe(program, status);
  arrange_help(program);
  // Before CLI11 parses, which would run the verb that the help is about.
  const std::vector<std::string> words(argv + 1, argv + std::max(argc, 1));
  if (!words.empty() && words.front() == "help" &&
      std::none_of(words.begin(), words.end(),
                   [](const std::string& word) { return word.starts_with("-"); })) {
    fmt::print("{}", help_on(program, {words.begin() + 1, words.end()}, help_columns()));
    return 0;
  }
  // Before the verb's own callback.
  program.parse_complete_callback([&program] {
    refuse_copies(program);
    refuse_empty_values(program);
    refuse_lost_files(program);
  });
  if (std::any_of(words.begin(), words.end(),
                  [](const std::string& word) { return word == "--help" || word == "-h"; }))
    refuse_help_on_no_verb(program, words);
  try {
    std::vector<std::string> last_first = with_empty_values(words);
    std::reverse(last_first.begin(), last_first.end());
    program.parse(std::move(last_first));
  } catch (const CLI::Success& done) {  // --help, --version
    return program.exit(done);
  } catch (const CLI::ParseError& error) {
    refuse_parse(program, error);
  }
  if (program.get_subcommands().empty())
    refuse("a verb is missing; legal: {}; echelon help describes them", fmt::join(names_of(program), ", "));
  return status;
}

}  // namespace

void complain(const std::string& message) {
  // Standard error may be on a full disk: fmt would throw, out of a handler.
  std::fputs(fitted("echelon: " + message + "\n", line_columns(stderr)).c_str(), stderr);
}

int run_program(int argc, char** argv) {
  CLI::App program{"Echelon plans, simulates and runs distributed training, and checks it against one rank.",
                   "echelon"};
  program.require_subcommand(0, 1);
  program.set_version_flag("--version", ECHELON_VERSION, "Print the version");
  try {
    const int status = run(program, argc, argv);
    const bool was_lost = std::ferror(stdout) != 0;  // before: then the reason is gone
    if (std::fflush(stdout) != 0) fail("standard output cannot be written: {}", std::strerror(errno));
    if (was_lost) fail("standard output cannot be written: some of it is lost");
    return status;
  } catch (const AlreadySaid& said) {
    return said.status;
  } catch (const RequestError& error) {
    if (!is_another_process()) {
      complain(error.what());
      return 2;
    }
    // The first process reports what it refuses too: when it ends, mpirun ends the others. One that is not
    // ended was started with other words. In short waits: time in which all of them are stopped does not
    // count.
    for (int waits = 0; waits < 50; ++waits) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    complain(fmt::format("rank {}: {}", launched_rank(), error.what()));
    return 2;
  }
}

}  // namespace echelon

// Every command that README.md, CONTRIBUTING.md and docs/ show runs and ends as they say. Commands are the
// lines of ```sh blocks, those after "$ " in ```console blocks, whose other lines are output, and `echelon
// VERB --flags` in the text; a block of another kind holds none. What a ```console block shows of `plan` and
// `simulate`, and of a dry run, is what they print. They run in the order of their document, in a directory
// of its own. A comment "# refused: ..." expects exit status 2, "# no: ..." 1; other_endings() has what is
// said otherwise.
//
// A block with title="FILE" is a part of that file of the repository, or a file that the commands find.
//
// They run at the sizes of class Small. What is not run is in not_run(), with the reason.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "run_command.h"
#include "temporary_directory.h"

namespace echelon::documents_test {
namespace {

namespace fs = std::filesystem;
using namespace checks;
using Words = std::vector<std::string>;

// ---- what the documents show

// What the text around a command says of its end.
struct Ending {
  const char* command;  // ends so
  int status;
};
const std::vector<Ending>& other_endings() {
  static const std::vector<Ending> list{
      {"--global-batch 8 --zero 0 --tp 1 --pp 1 --cp 1", 1},             // does not fit without ZeRO
      {"--seq-len 4096 --recompute full --zero 0", 1},                   // nor does 70B
      {"--model mixtral-tiny --data build/bible.txt --dp 2 --ep 4", 2},  // no such expert groups
  };
  return list;
}

struct Command {
  int line = 0;
  std::string text, comment;
  Words output = {};  // the lines that are shown
  int status() const {
    for (const Ending& ending : other_endings())
      if (text.ends_with(ending.command)) return ending.status;
    return comment.starts_with("refused") ? 2 : comment.starts_with("no:") ? 1 : 0;
  }
};

// Up to a # that begins a word outside quotes.
Command parse_command(const std::string& line, int number) {
  Command command{number, line, ""};
  char quote = 0;
  for (std::size_t i = 0; i < line.size(); ++i) {
    if (quote != 0) {
      if (line[i] == quote) quote = 0;
    } else if (line[i] == '"' || line[i] == '\'') {
      quote = line[i];
    } else if (line[i] == '#' && (i == 0 || line[i - 1] == ' ')) {
      command.text = line.substr(0, i);
      command.comment = line.substr(std::min(line.size(), line.find_first_not_of("# ", i)));
      break;
    }
  }
  command.text.erase(command.text.find_last_not_of(' ') + 1);
  return command;
}

bool looks_like_a_command(const std::string& line) {
  static const std::regex form(
      R"(^(\$ )?(echelon|mpirun|srun|make|cmake|ctest|python3|build/release/\S+) .*)");
  return std::regex_match(line, form);
}

// `echelon train --flags` in running text, which may go on in the next line. `text` begins in this line.
void add_inline(const std::string& text, int line, std::vector<Command>& commands) {
  static const std::regex span("`(echelon (?:(?:bench|checkpoint|data) )?[a-z]+ [^`]*--[^`]*)`");
  for (std::sregex_iterator it(text.begin(), text.end(), span), end; it != end; ++it) {
    const auto lines = std::count(text.begin(), text.begin() + it->position(), '\n');
    std::string command = (*it)[1];
    std::replace(command.begin(), command.end(), '\n', ' ');
    commands.push_back({line + static_cast<int>(lines), command, ""});
  }
}

std::vector<Command> commands_of(const fs::path& document) {
  std::ifstream in(document);
  std::vector<Command> commands;
  std::optional<std::string> block;  // its kind, inside one
  Words* shown = nullptr;            // what the command before prints
  int number = 0, prose_begin = 1;
  std::string line, prose;
  while (++number, std::getline(in, line)) {
    if (line.starts_with("```")) {
      block = block ? std::nullopt : std::optional(line.substr(3));
      shown = nullptr;
      if (block) add_inline(prose, prose_begin, commands);
      prose.clear();
      prose_begin = number + 1;
      continue;
    }
    if (!block) {
      prose += line + "\n";
      continue;
    }
    const int first = number;
    for (std::string more; line.ends_with("\\") && std::getline(in, more); ++number) {
      line.pop_back();
      line += more;
    }
    const bool prompted = line.starts_with("$ ");
    if (*block == "console" && !prompted && shown != nullptr) shown->push_back(line);
    if (*block != "sh" && !(*block == "console" && prompted)) {
      EXPECT_FALSE(looks_like_a_command(line))
          << document << ":" << first
          << ": commands stand in ```sh blocks, or after \"$ \" in ```console blocks";
      continue;
    }
    const Command command = parse_command(prompted ? line.substr(2) : line, first);
    if (command.text.empty()) continue;
    commands.push_back(command);
    shown = prompted ? &commands.back().output : nullptr;
  }
  add_inline(prose, prose_begin, commands);
  for (const Command& command : commands)
    EXPECT_EQ(command.text.find("..."), std::string::npos)
        << document << ":" << command.line << ": is not whole";
  return commands;
}

// ```KIND title="FILE"
struct File {
  int line = 0;
  std::string name, text;
  bool is_of_repository() const { return fs::exists(fs::path(ECHELON_SOURCE_DIR) / name); }
};
std::vector<File> files_of(const fs::path& document) {
  std::ifstream in(document);
  std::vector<File> files;
  bool inside = false, is_file = false;
  int number = 0;
  static const std::regex title("```.* title=\"([^\"]+)\"");
  for (std::string line; ++number, std::getline(in, line);) {
    std::smatch match;
    if (line.starts_with("```")) {
      inside = !inside;
      is_file = inside && std::regex_match(line, match, title);
      if (is_file) files.push_back({number, match[1], ""});
    } else if (is_file) {
      files.back().text += line + "\n";
    }
  }
  return files;
}

// Whether it prints the same on every machine. Its size is left as it stands.
bool is_compared(const Command& command) {
  static const std::regex form("echelon (simulate|plan) .*|echelon train .*--dry-run( .*)?");
  return !command.output.empty() && std::regex_match(command.text, form);
}

// How long the planner took is another time each time.
std::string without_time(const std::string& line) {
  static const std::regex took("in [0-9.]+ (us|ms|s)\\b");
  std::string text = std::regex_replace(line, took, "in T");
  return text.erase(text.find_last_not_of(' ') + 1);
}

// What a command that takes long says meanwhile, as "plan: 2048 GPUs, 10%, 1m30s": where a machine is slow.
bool is_progress(const std::string& line) {
  static const std::regex form("[a-z]+: (.*, )?([0-9]+h)?([0-9]+m)?[0-9]+s");
  return std::regex_match(line, form);
}

// The lines that are shown stand in the output, in this order; "..." is any number of others.
void expect_shown(const Words& shown, const std::string& output) {
  Words lines;
  std::istringstream in(output);
  for (std::string line; std::getline(in, line);)
    if (!is_progress(line)) lines.push_back(without_time(line));
  auto at = lines.begin();
  bool may_skip = false;
  for (const std::string& given : shown) {
    const std::string line = without_time(given);
    if (line.find_first_not_of(' ') != std::string::npos && line.substr(line.find_first_not_of(' ')) == "...") {
      may_skip = true;
      continue;
    }
    const auto found = std::find(at, lines.end(), line);
    if (found == lines.end() || (found != at && !may_skip)) {
      ADD_FAILURE() << "shown:   " << line << "\nprinted: " << (at == lines.end() ? "(no more)" : *at);
      return;
    }
    at = found + 1;
    may_skip = false;
  }
  EXPECT_TRUE(may_skip || at == lines.end()) << "not shown: " << *at;
}

// ---- how they are run

Words words_of(const std::string& text) {
  Words words{""};
  char quote = 0;
  for (char c : text) {
    if (quote == 0 && c == ' ') {
      if (!words.back().empty()) words.emplace_back();
      continue;
    }
    if (quote == 0 && (c == '"' || c == '\''))
      quote = c;
    else if (c == quote)
      quote = 0;
    words.back() += c;
  }
  if (words.back().empty()) words.pop_back();
  return words;
}

// What the documents leave to the reader, and what only some machines have.
std::string filled_in(std::string text) {
  static const std::vector<std::pair<std::string, std::string>> values{
      {"srun -n 8 --mpi=pmix ", "mpirun -n 8 --oversubscribe "},  // no Slurm here
      {"srun --mpi=pmix ", "mpirun -n 8 --oversubscribe "},
      {"--zero S", "--zero 2"},
      {"--schedule S", "--schedule zb-h1"},
      {"--seq-len T", "--seq-len 64"},
      {"--cp N", "--cp 2"},
      {"--ranks N", "--ranks 2"},
      {"--global-batch G", "--global-batch 4"},
      {"--zero-prefetch P", "--zero-prefetch 1"}};
  for (const auto& [what, value] : values)
    for (std::size_t at; (at = text.find(what)) != std::string::npos;) text.replace(at, what.size(), value);
  return text;
}

// Words behind flags become smaller, flags that are missing are added: the same command at a size for tests.
class Small {
 public:
  explicit Small(const std::string& text) : words_(words_of(text)) {}

  std::string text() {
    const std::string verb = find_verb();
    if (std::find(words_.begin(), words_.end(), "--dry-run") != words_.end()) {
      shorten_sequences();
    } else if (verb == "train") {
      // A hundredth of the steps, so that what resumes still goes on further.
      for (const char* flag : {"--steps", "--save-every", "--eval-every"})
        change(flag, [](std::int64_t n) { return (n + 99) / 100; });
      add("--steps", "2");
      add("--eval-samples", "1");
      add("--sample", "8");
      add("--threads", "1");
      take_a_tiny_model();
      shorten_sequences();
    } else if (verb == "verify") {
      change("--steps", [](std::int64_t n) { return std::min<std::int64_t>(n, 2); });
      add("--steps", "1");
      shorten_sequences();
    } else if (verb == "generate") {
      add("--max-tokens", "8");
    } else if (verb == "bench train") {
      add("--model", "gpt2-tiny");
      add("--steps", "1");
      change("--steps", [](std::int64_t) { return 1; });
      take_a_tiny_model();
      shorten_sequences();
    } else if (verb == "bench comm") {
      add("--repeats", "1");
      add("--size", "0.1");
      *value_of("--repeats") = "1";
      *value_of("--size") = "0.1";
      change("--ranks", [](std::int64_t n) { return std::min<std::int64_t>(n, 4); });
    } else if (verb == "bench kernels") {
      add("--model", "gpt2-tiny");
      add("--repeats", "1");
      take_a_tiny_model();
      shorten_sequences();
    } else if (verb == "bench context") {
      add("--repeats", "1");
      shorten_sequences();
    }
    return fmt::format("{}", fmt::join(words_, " "));
  }

 private:
  // "train" of `launch -- train` too.
  std::string find_verb() const {
    for (const char* before : {"--", "build/release/echelon", "echelon"}) {
      const auto found = std::find(words_.begin(), words_.end(), before);
      if (found == words_.end() || found + 1 == words_.end()) continue;
      if (found[1] == "bench" && found + 2 < words_.end()) return "bench " + found[2];
      return found[1];
    }
    return "";
  }

  std::string* value_of(const std::string& flag) {
    const auto found = std::find(words_.begin(), words_.end(), flag);
    return found == words_.end() || found + 1 == words_.end() ? nullptr : &found[1];
  }
  template <class Change>
  void change(const std::string& flag, const Change& changed) {
    if (std::string* value = value_of(flag)) *value = std::to_string(changed(std::stoll(*value)));
  }
  void add(const std::string& flag, const std::string& value) {
    if (value_of(flag) == nullptr) words_.insert(words_.end(), {flag, value});
  }
  void take_a_tiny_model() {
    std::string* const model = value_of("--model");
    if (model == nullptr) return;
    if (*model == "llama-42m") *model = "llama-tiny";
    if (*model == "gpt2-124m") *model = "gpt2-tiny";
  }
  void shorten_sequences() {
    change("--seq-len", [](std::int64_t n) { return std::min<std::int64_t>(n, 64); });
    if (value_of("--plan") == nullptr) add("--seq-len", "64");
  }

  Words words_;
};

// Commands that begin so are not run; each stands in a document.
struct NotRun {
  const char* begin;
  const char* why;
};
const std::vector<NotRun>& not_run() {
  static const std::vector<NotRun> list{
      {"make ", "builds and tests all of this; CI runs it"},
      {"cmake ", "configures another build; CI runs it"},
      {"ctest ", "runs this test"},
      {"pip download ", "needs the network"},
      {"tests/several_hosts.sh", "a test by itself, which needs network namespaces"},
      {"build/release/tests/", "a test by itself"},
      {"echelon view runs/first", "serves until it is ended; view_test.cpp does both"},
      {"sbatch ", "needs Slurm; cluster_examples_test.cpp runs the script"},
      {"docker ", "needs Docker"},
      {"kubectl ", "needs Kubernetes"},
      {"apptainer ", "needs Apptainer"},
  };
  return list;
}

// Left to the slow suite, where all documents run.
bool is_slow(const Command& command) {
  return command.text.starts_with("mpirun ") || command.text.starts_with("echelon bench ");
}
bool runs_all() { return std::getenv("ECHELON_ALL_DOCUMENTS") != nullptr; }

// A make command's target, or a preset, must be there all the same.
void check_unrun(const Command& command) {
  const Words words = words_of(command.text);
  const std::string makefile = read_bytes(fs::path(ECHELON_SOURCE_DIR) / "Makefile");
  const std::string presets = read_bytes(fs::path(ECHELON_SOURCE_DIR) / "CMakePresets.json");
  for (std::size_t i = 0; i + 1 < words.size(); ++i) {
    if (words[i] == "make") {
      EXPECT_NE(makefile.find("\n" + words[i + 1] + ":"), std::string::npos) << command.text;
    }
    if (words[i].ends_with("preset")) {
      EXPECT_NE(presets.find("\"name\": \"" + words[i + 1] + "\""), std::string::npos) << command.text;
    }
  }
  for (const std::string& word : words)
    if (word.ends_with(".sh") || word.starts_with("examples/")) {
      EXPECT_TRUE(fs::exists(fs::path(ECHELON_SOURCE_DIR) / word)) << command.text;
    }
}

// A directory in which commands of a document run one after the other.
class Place {
 public:
  Place() {
    fs::create_directories(root_ / "build/release");
    fs::create_symlink(ECHELON_BINARY, root_ / "build/release/echelon");
    fs::copy(fs::path(ECHELON_SOURCE_DIR) / "docs", root_ / "docs");
    fs::create_directories(root_ / "examples");
    fs::copy(fs::path(ECHELON_SOURCE_DIR) / "examples/questions.jsonl", root_ / "examples");
    std::string text;  // as `make train` leaves it
    for (int i = 0; i < 400; ++i)
      text += "And God said, Let there be light number " + std::to_string(i) + ".\n";
    write_text((root_ / "build/bible.txt").string(), text);
  }

  void write(const File& file) const { write_text((root_ / file.name).string(), file.text); }

  void run(const Command& command) const {
    SCOPED_TRACE(fmt::format("line {}: {}", command.line, command.text));
    const auto is_begun = [&](const NotRun& n) { return command.text.starts_with(n.begin); };
    if (std::any_of(not_run().begin(), not_run().end(), is_begun)) return check_unrun(command);
    if (is_slow(command) && !runs_all()) return;
    // What is refused at its full size is refused at once.
    const std::string filled = filled_in(command.text);
    const bool compared = is_compared(command);
    const std::string small = command.status() == 2 || compared ? filled : Small(filled).text();
    const auto begin = std::chrono::steady_clock::now();
    const CommandResult result = run_command(
        fmt::format("export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 && cd '{}' && "
                    "export XDG_CACHE_HOME=$PWD/cache && "
                    "export COLUMNS=120 && PATH=$PWD/build/release:$PATH && {} </dev/null",
                    root_.string(), small));
    EXPECT_EQ(result.status, command.status()) << small << "\n" << result.output;
    if (compared) expect_shown(command.output, result.output);
    if (command.status() == 2) {
      EXPECT_NE(result.output.find("echelon: "), std::string::npos) << result.output;
    }
    if (std::getenv("ECHELON_SHOW_COMMANDS") != nullptr)
      fmt::print("{:6.2f} s  {}\n",
                 std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), small);
  }

 private:
  const TemporaryDirectory directory_;
  const fs::path root_ = directory_.path();
};

// Without the kernels that the documents' runs take there is nothing to show.
bool has_f32() { return std::string(ECHELON_TEST_DTYPE) == "f32"; }

void run_document(const fs::path& document) {
  SCOPED_TRACE(document.filename().string());
  const Place place;
  for (const File& file : files_of(document))
    if (!file.is_of_repository()) place.write(file);
  for (const Command& command : commands_of(document)) place.run(command);
}

// What `make train` runs, and what it says then.
TEST(Documents, TheQuickStartGoesOnAsItSays) {  // long
  if (!has_f32()) GTEST_SKIP() << "this build has f64 alone";
  std::string makefile = read_bytes(fs::path(ECHELON_SOURCE_DIR) / "Makefile");
  for (const auto& [variable, value] :
       {std::pair{"$(RUN)", "runs/now"}, {"$(DATA)", "build/bible.txt"}, {"$(STEPS)", "200"}, {"\\\n\t", ""}})
    for (std::size_t at; (at = makefile.find(variable)) != std::string::npos;)
      makefile.replace(at, std::string(variable).size(), value);
  const Place place;
  std::istringstream lines(makefile);
  int number = 0, trains = 0, others = 0;
  for (std::string line; ++number, std::getline(lines, line);) {
    const std::size_t begin = line.find_first_not_of(" \t");
    if (begin == std::string::npos || begin == 0 || line.compare(begin, 14, "build/release/") != 0) continue;
    place.run({number, line.substr(begin), ""});
    (line.find("echelon train ") != std::string::npos ? trains : others) += 1;
  }
  EXPECT_EQ(trains, 1);
  EXPECT_EQ(others, 3);
}

std::vector<fs::path> documents() {
  std::vector<fs::path> list{fs::path(ECHELON_SOURCE_DIR) / "CONTRIBUTING.md",
                             fs::path(ECHELON_SOURCE_DIR) / "README.md"};
  for (const auto& entry : fs::directory_iterator(fs::path(ECHELON_SOURCE_DIR) / "docs"))
    if (entry.path().extension() == ".md") list.push_back(entry.path());
  std::sort(list.begin(), list.end());
  return list;
}

// This is slow: the fast suite sees that commands are marked as what they are, and whole.
TEST(Documents, EveryCommandRuns) {
  if (!has_f32()) GTEST_SKIP() << "this build has f64 alone";
  std::size_t count = 0;
  for (const fs::path& document : documents()) {
    count += commands_of(document).size();
    for (const File& file : files_of(document))
      if (file.is_of_repository()) {
        const std::string whole = read_bytes(fs::path(ECHELON_SOURCE_DIR) / file.name);
        EXPECT_NE(whole.find(file.text), std::string::npos)
            << document << ":" << file.line << ": is no part of " << file.name;
      }
    if (runs_all()) run_document(document);
  }
  EXPECT_GT(count, 90u);
}

// The files and tests that the documents call by name are there.
TEST(Documents, WhatIsNamedIsThere) {
  const fs::path root = ECHELON_SOURCE_DIR;
  std::set<std::string> tests, files;
  static const std::regex declared("\nTEST(?:_[FP])?\\((\\w+), (\\w+)\\)");
  for (const auto& entry : fs::recursive_directory_iterator(root / "tests")) {
    if (entry.path().extension() != ".cpp") continue;
    files.insert(entry.path().stem());
    const std::string text = read_bytes(entry.path());
    for (std::sregex_iterator at(text.begin(), text.end(), declared), end; at != end; ++at)
      tests.insert((*at)[1].str() + "." + (*at)[2].str());
  }
  // `src/plan/memory` is a header and its source; a name with NAME or * stands for many.
  static const std::regex path("`((?:src|apps|tests|bench|configs|examples|site)/[A-Za-z0-9_/.]+)`"),
      test("`([A-Z]\\w+\\.[A-Z]\\w+)`"), suite("`ctest -R (\\w+)`");
  std::size_t paths = 0, named = 0, suites = 0;
  for (const fs::path& document : documents()) {
    const std::string text = read_bytes(document);
    const auto each = [&](const std::regex& form, const auto& visit) {
      for (std::sregex_iterator at(text.begin(), text.end(), form), end; at != end; ++at)
        visit((*at)[1].str());
    };
    each(path, [&](const std::string& name) {
      ++paths;
      EXPECT_TRUE(name.find("NAME") != std::string::npos || fs::exists(root / name) ||
                  fs::exists(root / (name + ".h")))
          << document << ": " << name;
    });
    each(test, [&](const std::string& name) {
      ++named;
      EXPECT_TRUE(tests.contains(name)) << document << ": " << name;
    });
    each(suite, [&](const std::string& name) {
      ++suites;
      EXPECT_TRUE(files.contains(name + "_test")) << document << ": " << name;
    });
  }
  EXPECT_GT(paths, 100u);
  EXPECT_GT(named, 10u);
  EXPECT_GT(suites, 5u);
}

// docs/extending.md lists the places that know of a kind of thing: each of them is there, and knows all that there are.
TEST(Documents, WhatIsAddedIsAddedWhereTheyAllAre) {
  const auto read = [](const std::string& path) {
    const std::string text = read_bytes(fs::path(ECHELON_SOURCE_DIR) / path);
    EXPECT_FALSE(text.empty()) << path;
    return text;
  };
  const std::string recipes = read("docs/extending.md");
  static const std::regex path("`((?:src|tests|configs|docs)/[A-Za-z0-9_/.]+)`");
  int paths = 0;
  for (std::sregex_iterator at(recipes.begin(), recipes.end(), path), end; at != end; ++at, ++paths) {
    const std::string name = (*at)[1];
    const bool is_pattern = name.find("NAME") != std::string::npos;
    EXPECT_TRUE(is_pattern || fs::exists(fs::path(ECHELON_SOURCE_DIR) / name)) << name;
  }
  EXPECT_GT(paths, 20);
  const auto names_in = [&](const std::string& file, const char* form) {
    const std::string text = read(file);
    const std::regex each(form);
    std::vector<std::string> names;
    for (std::sregex_iterator at(text.begin(), text.end(), each), end; at != end; ++at) names.push_back((*at)[1]);
    EXPECT_FALSE(names.empty()) << file;
    return names;
  };
  const auto all_in = [&](const std::vector<std::string>& names, const Words& files) {
    for (const std::string& file : files) {
      const Words found = names_in(file, "(\\w+)");
      const std::set<std::string> words(found.begin(), found.end());
      for (const std::string& name : names) EXPECT_TRUE(words.contains(name)) << name << " in " << file;
    }
  };
  all_in(names_in("src/tensor/kernel_backend.h", "virtual void (\\w+)\\("),
         {"src/tensor/kernels.h", "src/tensor/kernels.cpp", "tests/queued_kernels.h", "tests/sleeping_kernels.h",
          "tests/timed_kernels.h"});
  all_in(names_in("src/model/op.h", "make_(\\w+)_op"), {"src/spec/block.h"});
  all_in(names_in("src/model/op.h", "(make_\\w+_op)"), {"src/model/op.cpp"});
  all_in(names_in("src/schedule/schedules.h", "\nSchedule (\\w+)\\("), {"src/schedule/registry.cpp"});
  all_in(names_in("src/comm/collectives.h", "\nvoid (\\w+)\\("),
         {"src/comm/algorithm_communicator.cpp", "tests/collective_costs_test.cpp"});
}

}  // namespace
}  // namespace echelon::documents_test

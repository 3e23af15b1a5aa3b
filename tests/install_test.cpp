// What `cmake --install` puts into a directory works from there: the binary, its man pages and completions;
// and for Consumers, which take longer, the library by find_package and by pkg-config.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "run_command.h"
#include "temporary_directory.h"

namespace echelon::install_test {
namespace {

namespace fs = std::filesystem;
using namespace checks;
using Words = std::vector<std::string>;

bool is_here(const char* program) { return output_of(fmt::format("command -v {}", program)).status == 0; }

// Of the flags that --help shows of a verb.
std::set<std::string> flags_of(const std::string& verb) {
  std::set<std::string> flags;
  std::istringstream help(output_of(fmt::format("{} {} --help", ECHELON_BINARY, verb)).output);
  for (std::string line; std::getline(help, line);)
    if (line.starts_with("  --")) flags.insert(line.substr(2, line.find_first_of(" ,", 2) - 2));
  EXPECT_FALSE(flags.empty()) << verb;
  return flags;
}
// The verbs that have flags, by the page that is to tell of them.
const std::map<std::string, Words> pages{
    {"echelon", {}},
    {"echelon-train", {"train"}},
    {"echelon-verify", {"verify"}},
    {"echelon-plan", {"plan"}},
    {"echelon-calibrate", {"calibrate"}},
    {"echelon-devices", {"devices"}},
    {"echelon-simulate", {"simulate"}},
    {"echelon-checkpoint", {"checkpoint export", "checkpoint import"}},
    {"echelon-data", {"data tokenize"}},
    {"echelon-launch", {"launch"}},
    {"echelon-generate", {"generate"}},
    {"echelon-bench", {"bench train", "bench kernels", "bench comm", "bench context"}},
    {"echelon-view", {"view"}}};

std::string version_of_project() {
  const std::string text = read_bytes(fs::path(ECHELON_SOURCE_DIR) / "CMakeLists.txt");
  const std::string before = "project(echelon VERSION ";
  const std::size_t at = text.find(before) + before.size();
  return text.substr(at, text.find(' ', at) - at);
}

// The build's tree, installed once and then moved: nothing may remember where it was.
class Installed : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    place_ = std::make_unique<TemporaryDirectory>();
    const CommandResult r = run_command(fmt::format("'{}' --install '{}' --prefix '{}'", ECHELON_CMAKE,
                                                    ECHELON_BUILD_DIR, *place_ / "first"));
    ASSERT_EQ(r.status, 0) << r.output;
    fs::rename(*place_ / "first", *place_ / "moved");
  }
  static void TearDownTestSuite() { place_.reset(); }

  static fs::path prefix() { return *place_ / "moved"; }
  static fs::path share() { return prefix() / "share"; }
  static std::string binary() { return (prefix() / "bin/echelon").string(); }
  // Where the library's files are, which is lib or has the name of the architecture.
  static fs::path libdir() {
    for (const auto& entry : fs::recursive_directory_iterator(prefix()))
      if (entry.path().filename() == "libechelon.a") return entry.path().parent_path();
    ADD_FAILURE() << "no libechelon.a";
    return {};
  }

 private:
  static inline std::unique_ptr<TemporaryDirectory> place_;
};
using Install = Installed;
using Consumers = Installed;

TEST_F(Install, TheProgramRunsWhereItWasMovedTo) {
  const CommandResult version = output_of(fmt::format("cd / && '{}' --version", binary()));
  EXPECT_EQ(version.status, 0);
  EXPECT_EQ(version.output, version_of_project() + "\n");
  const CommandResult plan = run_command(fmt::format(
      "cd / && '{}' plan --model llama-3-8b --machine h100 --gpus 8 --global-batch 64 --top 1", binary()));
  EXPECT_EQ(plan.status, 0) << plan.output;
  EXPECT_NE(plan.output.find("llama-3-8b on 8 h100"), std::string::npos) << plan.output;
}

TEST_F(Install, PresetsDocumentsAndExamplesLieBeside) {
  for (const char* path : {"configs/models/llama-tiny.toml", "configs/machines/h100.toml", "docs/cluster.md",
                           "examples/01_all_reduce.cpp", "README.md", "CHANGELOG.md"})
    EXPECT_EQ(read_bytes(share() / "echelon" / path), read_bytes(fs::path(ECHELON_SOURCE_DIR) / path))
        << path;
  // A preset can be copied and changed.
  const std::string copy = (share() / "echelon/configs/models/llama-tiny.toml").string();
  const CommandResult r = run_command(fmt::format("'{}' train --dry-run --model '{}'", binary(), copy));
  EXPECT_EQ(r.status, 0) << r.output;
}

// Of a document: what its links name, without addresses on the web.
Words linked_files(const std::string& text) {
  Words files;
  for (std::size_t at = text.find("]("); at != std::string::npos; at = text.find("](", at + 1)) {
    const std::size_t end = std::min(text.find_first_of(")#: \n", at + 2), text.size() - 1);
    const bool is_file = end > at + 2 && (text[end] == ')' || text[end] == '#');
    if (is_file) files.push_back(text.substr(at + 2, end - at - 2));
  }
  return files;
}

TEST_F(Install, DocumentsLinkToWhatIsThere) {
  int documents = 0, links = 0;
  for (const fs::path& directory : {share() / "echelon", share() / "echelon/docs"})
    for (const auto& entry : fs::directory_iterator(directory)) {
      if (entry.path().extension() != ".md") continue;
      ++documents;
      const std::string text = read_bytes(entry.path());
      for (const std::string& file : linked_files(text)) {
        ++links;
        EXPECT_TRUE(fs::exists(directory / file)) << entry.path() << ": " << file;
      }
    }
  EXPECT_GT(documents, 20);
  EXPECT_GT(links, 100);
}

TEST_F(Install, TheChangelogBeginsWithThisVersion) {
  const std::string changes = read_bytes(share() / "echelon/CHANGELOG.md");
  const std::size_t at = changes.find("\n## ") + 4;
  EXPECT_TRUE(changes.substr(at).starts_with(version_of_project())) << changes.substr(at, 40);
}

// Who installs may be another user than who built.
TEST_F(Install, WritesNothingIntoTheBuildButItsList) {
  const auto listing = [] {
    std::map<std::string, fs::file_time_type> files;
    for (const auto& entry : fs::directory_iterator(ECHELON_BUILD_DIR))
      if (!entry.path().filename().string().starts_with("install_manifest"))
        files[entry.path().string()] = {};
    for (const auto& entry : fs::recursive_directory_iterator(fs::path(ECHELON_BUILD_DIR) / "described"))
      files[entry.path().string()] = entry.last_write_time();
    return files;
  };
  const auto before = listing();
  const TemporaryDirectory other;
  const CommandResult r = run_command(fmt::format("'{}' --install '{}' --prefix '{}'", ECHELON_CMAKE,
                                                  ECHELON_BUILD_DIR, other.path().string()));
  EXPECT_EQ(r.status, 0) << r.output;
  EXPECT_EQ(listing(), before);
}

TEST_F(Install, ManPagesHaveEveryFlag) {  // long
  if (!is_here("man")) GTEST_SKIP() << "man is not installed";
  for (const auto& [page, verbs] : pages) {
    const std::string file = (share() / "man/man1" / (page + ".1.gz")).string();
    ASSERT_TRUE(fs::exists(file)) << file;
    const CommandResult warnings = run_command(
        fmt::format("MANWIDTH=80 MANROFFOPT=-ww man --warnings=w -l -Tutf8 '{}' 2>&1 >/dev/null", file));
    EXPECT_EQ(warnings.output, "") << page;
    const CommandResult shown =
        output_of(fmt::format("MANWIDTH=200 LC_ALL=C.UTF-8 man -l -P cat '{}' | sed 's/.\\x08//g'", file));
    EXPECT_EQ(shown.status, 0);
    EXPECT_NE(shown.output.find("NAME\n"), std::string::npos) << shown.output;
    EXPECT_NE(shown.output.find(page + " - "), std::string::npos) << shown.output;
    for (const std::string& verb : verbs)
      for (const std::string& flag : flags_of(verb))
        EXPECT_NE(shown.output.find(flag), std::string::npos) << page << " " << flag;
  }
}

// A command line, and words of what can come next; `without`: what cannot.
struct Completion {
  std::string line;
  Words with;
  std::string without;
};
const std::vector<Completion> completions{
    {"echelon ", {"train", "bench", "checkpoint"}, "describe"},
    {"echelon tr", {"train"}, "verify"},
    {"echelon train --mo", {"--model"}, "--dp"},
    {"echelon train --model llama-3.", {"llama-3.1-8b", "llama-3.2-1b"}, "gpt2"},
    {"echelon plan --machine b", {"b200", "b300"}, "h100"},
    {"echelon simulate --schedule zb", {"zb-h1", "zb-v"}, "1f1b"},
    {"echelon train --resume --sp o", {"on", "off"}, "--"},
    {"echelon bench ", {"train", "kernels", "comm", "context"}, "verify"},
    {"echelon bench comm --r", {"--ranks", "--repeats"}, "--seq-len"},
    {"echelon checkpoint exp", {"export"}, "import"},
    {"echelon help zer", {"zero"}, "pipeline"},
};

void expect_offered(const Completion& completion, const std::string& offered) {
  SCOPED_TRACE(completion.line);
  for (const std::string& word : completion.with) EXPECT_NE(offered.find(word), std::string::npos) << offered;
  EXPECT_EQ(offered.find(completion.without), std::string::npos) << offered;
}

TEST_F(Install, BashCompletes) {
  if (!is_here("bash")) GTEST_SKIP() << "bash is not installed";
  const fs::path file = share() / "bash-completion/completions/echelon";
  const TemporaryDirectory place;
  // As bash itself calls it: the line cut into words, the last of which is begun.
  write_text(place / "complete", fmt::format(R"(source '{}'
[[ $(complete -p echelon) == 'complete -F _echelon echelon' ]] || exit 9
read -ra COMP_WORDS <<<"$1"
[[ $1 == *' ' ]] && COMP_WORDS+=('')
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_echelon 2>&1
printf '%s\n' "${{COMPREPLY[@]}}"
)",
                                             file.string()));
  const auto offered = [&](const std::string& line) {
    const CommandResult r =
        run_command(fmt::format("cd '{}' && bash complete '{}'", place.path().string(), line));
    EXPECT_EQ(r.status, 0) << r.output;
    return r.output;
  };
  for (const Completion& one : completions) expect_offered(one, offered(one.line));
  EXPECT_EQ(offered("echelon launch --ranks 2 -- train --sched"), "--schedule\n");
  EXPECT_EQ(offered("echelon train --model = llama-t"), "llama-tiny\n");  // --model=llama-t
  EXPECT_EQ(offered("echelon train --data com"), "complete\n") << "a file";
  for (const std::string& verb : {std::string("train"), std::string("bench comm")}) {
    std::set<std::string> all;
    std::istringstream lines(offered("echelon " + verb + " --"));
    for (std::string flag; std::getline(lines, flag);) all.insert(flag);
    const std::set<std::string> of_help = flags_of(verb);
    EXPECT_TRUE(std::includes(all.begin(), all.end(), of_help.begin(), of_help.end())) << verb;
    EXPECT_EQ(all.size(), of_help.size() + 1) << verb << ": and --help, which has a short form before it";
  }
}

TEST_F(Install, ZshCompletes) {
  if (!is_here("zsh")) GTEST_SKIP() << "zsh is not installed";
  const fs::path directory = share() / "zsh/site-functions";
  const TemporaryDirectory place;
  // At a terminal of its own, where Tab notes what is offered. "REA''DY" is typed; READY is shown by the
  // prompt alone.
  write_text(place / "complete", R"zsh(zmodload zsh/zpty || exit 9
zpty z zsh -f -i
zpty -w z 'source ./setup'
zpty -r -m z line '*READY*'
for words; do
  : >offered
  zpty -w -n z "$words"$'\t'
  zpty -r -m z line '*END*'
  cat offered
  print -r -- '====='
done
zpty -d z
)zsh");
  write_text(place / "setup", fmt::format("fpath=('{}' $fpath)", directory.string()) + R"zsh(
autoload -Uz compinit; compinit -u -D
compadd() {  # which zsh's own functions also ask what would be offered, with -O, -A or -D
  [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\ * ]] && { builtin compadd "$@"; return }
  local -a found; builtin compadd -O found "$@"; print -rl -- $found >>offered
  builtin compadd "$@"
}
show() { zle list-choices; zle kill-whole-line; print -r -- EN''D }
zle -N show; bindkey '^I' show; PS1=REA''DY
)zsh");
  std::string lines;
  for (const Completion& one : completions) lines += " '" + one.line + "'";
  const CommandResult r =
      run_command(fmt::format("cd '{}' && TERM=dumb zsh -f complete{}", place.path().string(), lines));
  EXPECT_EQ(r.status, 0) << r.output;
  std::size_t at = 0;
  for (const Completion& one : completions) {
    const std::size_t end = r.output.find("=====", at);
    ASSERT_NE(end, std::string::npos) << r.output;
    expect_offered(one, r.output.substr(at, end - at));
    at = end + 6;
  }
}

TEST_F(Install, FishCompletes) {
  if (!is_here("fish")) GTEST_SKIP() << "fish is not installed";
  const fs::path file = share() / "fish/vendor_completions.d/echelon.fish";
  const TemporaryDirectory home;
  for (const Completion& one : completions) {
    const CommandResult r = run_command(
        fmt::format("cd '{0}' && HOME='{0}' fish --no-config -c 'source {1}; complete -C \"{2}\"' | cut -f1",
                    home.path().string(), file.string(), one.line));
    EXPECT_EQ(r.status, 0) << r.output;
    expect_offered(one, r.output);
  }
}

// A project of another person's: an example, and every header by itself, and what asks for a vendor's
// libraries where the build has them.
void write_consumer(const TemporaryDirectory& place, const fs::path& headers) {
  write_text(place / "main.cpp", read_bytes(fs::path(ECHELON_SOURCE_DIR) / "examples/01_all_reduce.cpp"));
  std::string all;
  for (const auto& entry : fs::recursive_directory_iterator(headers))
    if (entry.path().extension() == ".h") {
      all += fmt::format("#include \"{}\"\n", fs::relative(entry.path(), headers).string());
      // Which this machine may have where every compiler looks, and another has not.
      EXPECT_EQ(read_bytes(entry.path()).find("#include <cu"), std::string::npos) << entry.path();
    }
  all += "std::shared_ptr<echelon::DeviceDriver> driver() { return echelon::make_cuda_driver(); }\n";
  EXPECT_GT(std::count(all.begin(), all.end(), '\n'), 100);
  write_text(place / "headers.cpp", all);
}

TEST_F(Consumers, BuildWithFindPackage) {
  const TemporaryDirectory place;
  write_consumer(place, prefix() / "include/echelon");
  write_text(place / "CMakeLists.txt", fmt::format(R"(cmake_minimum_required(VERSION 3.25)
project(consumer LANGUAGES CXX)
find_package(echelon {} REQUIRED)
add_executable(consumer main.cpp headers.cpp)
target_link_libraries(consumer PRIVATE echelon::echelon)
)",
                                                   version_of_project()));
  const CommandResult built = run_command(fmt::format(
      "cd '{0}' && '{1}' -S . -B b -DCMAKE_PREFIX_PATH='{2}' -DCMAKE_CXX_FLAGS='{3}' && '{1}' --build b",
      place.path().string(), ECHELON_CMAKE, prefix().string(), ECHELON_SANITIZE_FLAGS));
  ASSERT_EQ(built.status, 0) << built.output;
  const CommandResult ran = run_command(place / "b/consumer");
  EXPECT_EQ(ran.status, 0) << ran.output;
}

TEST_F(Consumers, BuildWithPkgConfig) {
  if (!is_here("pkg-config")) GTEST_SKIP() << "pkg-config is not installed";
  const TemporaryDirectory place;
  write_consumer(place, prefix() / "include/echelon");
  const std::string path = (libdir() / "pkgconfig").string();
  const CommandResult version =
      output_of(fmt::format("PKG_CONFIG_PATH='{}' pkg-config --modversion echelon", path));
  EXPECT_EQ(version.output, version_of_project() + "\n");
  const CommandResult built = run_command(fmt::format(
      "cd '{}' && export PKG_CONFIG_PATH='{}' && c++ -std=c++20 {} main.cpp headers.cpp -o consumer "
      "$(pkg-config --cflags --libs echelon)",
      place.path().string(), path, ECHELON_SANITIZE_FLAGS));
  ASSERT_EQ(built.status, 0) << built.output;
  const CommandResult ran = run_command(place / "consumer");
  EXPECT_EQ(ran.status, 0) << ran.output;
}

}  // namespace
}  // namespace echelon::install_test

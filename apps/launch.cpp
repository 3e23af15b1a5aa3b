// echelon launch: runs a training, and runs it again from its last whole checkpoint when it fails.
#include <fmt/core.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <thread>

#include "apps/flag_needs.h"
#include "apps/flags.h"
#include "apps/help.h"
#include "apps/stop_signals.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/units.h"
#include "train/checkpoint.h"

namespace echelon {
namespace {

using Words = std::vector<std::string>;

struct Host {
  std::string name;
  int slots = 1;
};

struct LaunchFlags {
  int ranks = 0, max_restarts = 3;
  std::string hosts, agent = "ssh";
  bool elastic = false;
  Words command;
};

std::vector<Host> parse_hosts(const std::string& text) {
  std::vector<Host> hosts;
  std::istringstream in(text);
  for (std::string word; std::getline(in, word, ',');) {
    const std::size_t colon = word.find(':');
    Host host{word.substr(0, colon), 1};
    if (colon != std::string::npos) host.slots = parse_number<int>("--hosts", word.substr(colon + 1));
    if (host.name.empty() || host.slots < 1)
      refuse("--hosts {}: must be names and how many ranks each takes, as a:4,b:4", text);
    hosts.push_back(host);
  }
  return hosts;
}

// --dp=2 as two words, of the flags that are read or changed here.
Words separated(const Words& command) {
  Words words;
  for (const std::string& word : command) {
    const std::size_t equals = word.find('=');
    const std::string flag = word.substr(0, equals);
    const bool splits =
        equals != std::string::npos && (flag == "--checkpoint" || flag == "--plan" || flag == "--dp" ||
                                        flag == "--tp" || flag == "--pp" || flag == "--cp");
    words.push_back(splits ? flag : word);
    if (splits) words.push_back(word.substr(equals + 1));
  }
  return words;
}

// The value of a flag of the command; nullptr where it is not there.
std::string* value_of(Words& command, const std::string& flag) {
  const auto at = std::find(command.begin(), command.end(), flag);
  return at == command.end() || at + 1 == command.end() ? nullptr : &*(at + 1);
}

int axis_size(Words& command, const std::string& flag) {
  const std::string* text = value_of(command, flag);
  return text == nullptr ? 1 : parse_number<int>(flag, *text);
}

// Runs commands one after another, and hands on to them what asks this process to stop; a second request ends
// them at once. The signals are blocked and waited for: none is lost between two commands.
class Commands {
 public:
  Commands() {
    sigaddset(&signals_, SIGCHLD);
    sigprocmask(SIG_BLOCK, &signals_, &before_);
  }
  ~Commands() { sigprocmask(SIG_SETMASK, &before_, nullptr); }
  Commands(const Commands&) = delete;
  Commands& operator=(const Commands&) = delete;

  bool asked_to_stop() const { return asked_at_.has_value(); }

  // Its exit status, or 128 + the signal that ended it.
  int run(const Words& words) {
    const pid_t child = start(words);
    for (bool to_hand_on = false;;) {
      constexpr timespec now_and_then{0, 20'000'000};
      const int signal =
          to_hand_on ? sigtimedwait(&signals_, nullptr, &now_and_then) : sigwaitinfo(&signals_, nullptr);
      int status = 0;
      if (signal == SIGCHLD && ::waitpid(child, &status, WNOHANG) == child)
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      if (signal > 0 && signal != SIGCHLD) {
        if (!asked_at_) {
          asked_at_ = Clock::now();
          to_hand_on = true;
        } else if (Clock::now() - *asked_at_ >= one_stop_request) {
          ::kill(child, signal);
        }
      }
      // On SIGTERM mpirun gives the ranks a second, and returns 1; SIGUSR1 it hands on, and they end
      // after their step.
      if (!to_hand_on || (words[0] == "mpirun" && !has_children(child))) continue;
      ::kill(child, SIGUSR1);
      to_hand_on = false;
    }
  }

 private:
  pid_t start(const Words& words) const {
    std::vector<char*> arguments;
    for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    const pid_t parent = ::getpid(), child = ::fork();
    if (child < 0) fail("launch: no process: {}", std::strerror(errno));
    if (child > 0) return child;
    // A terminal, and timeout(1), signal whole groups of processes: the command is to hear of it from here
    // alone, once. So it does not end with the group either, but with this process.
    ::setpgid(0, 0);
    if (std::freopen("/dev/null", "r", stdin) == nullptr) std::_Exit(3);  // not the terminal's any more
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) std::_Exit(3);
    sigprocmask(SIG_SETMASK, &before_, nullptr);
    ::execvp(arguments[0], arguments.data());
    fmt::print(stderr, "echelon: {}: {}\n", words[0], std::strerror(errno));
    std::_Exit(127);
  }

  // Before it has started its ranks, mpirun takes a signal and forgets it. One that starts them otherwise
  // than from its first thread has had two seconds.
  bool has_children(pid_t process) const {
    std::ifstream children(fmt::format("/proc/{0}/task/{0}/children", process));
    pid_t first = 0;
    return !children.is_open() || children >> first || Clock::now() - *asked_at_ > std::chrono::seconds(2);
  }

  sigset_t signals_ = stop_signals(), before_{};
  std::optional<Clock::time_point> asked_at_;
};

class Launch {
 public:
  Launch(const LaunchFlags& flags, const CLI::App& app)
      : flags_(flags), command_(separated(flags.command)), hosts_(parse_hosts(flags.hosts)) {
    if (command_.empty() || command_.front() != "train")
      refuse(
          "launch: what it runs is missing; as in: echelon launch --max-restarts 3 -- train --checkpoint DIR "
          "...");
    if (flags_.ranks < 0) refuse("--ranks {}: must be at least 0", flags_.ranks);
    if (!hosts_.empty() && is_given(app, "--ranks") && flags_.ranks != num_slots())
      refuse("--ranks {}: --hosts {} takes {}; leave --ranks out, or give {}", flags_.ranks, flags_.hosts,
             num_slots(), num_slots());
    refuse_idle(
        app,
        {{"--agent", !hosts_.empty(), "without --hosts", {advice("--hosts", "HOST:N,...")}},
         {"--elastic", flags_.max_restarts != 0, "with --max-restarts 0", {advice("--max-restarts", "3")}}});
    if (flags_.max_restarts < 0) refuse("--max-restarts {}: must be at least 0", flags_.max_restarts);
    const std::string* directory = value_of(command_, "--checkpoint");
    if (directory == nullptr && flags_.max_restarts > 0)
      refuse(
          "launch: without --checkpoint DIR after `train` there is nothing to restart from; legal: "
          "--max-restarts 0");
    if (directory != nullptr) directory_ = *directory;
    if (flags_.elastic && hosts_.size() < 2)
      refuse("--elastic: a training can do with fewer hosts only where --hosts names at least two");
    if (flags_.elastic && value_of(command_, "--dp") == nullptr)
      refuse("--elastic: --dp is what shrinks when a host is gone; name it after `train`");
    if (flags_.elastic && value_of(command_, "--plan") != nullptr)
      refuse("--elastic: --plan {}: the ranks are counted by --dp, --tp, --pp and --cp; name those instead",
             *value_of(command_, "--plan"));
  }

  int run_until_done() {
    for (int restarts = 0;; ++restarts) {
      const int status = commands_.run(words());
      if (status <= 2) return status;
      if (commands_.asked_to_stop()) return 3;  // before it listened, or by a second signal
      if (restarts == flags_.max_restarts) {
        fmt::print(stderr, "echelon: launch: ended with status {} after {}\n", status,
                   counted(restarts, "restart"));
        return 3;
      }
      if (flags_.elastic) shrink();
      if (commands_.asked_to_stop()) return 3;
      go_on();
      fmt::print(
          stderr, "echelon: launch: ended with status {}; restart {} of {} {}\n", status, restarts + 1,
          flags_.max_restarts,
          latest_.empty() ? "from the beginning: there is no whole checkpoint yet" : "from " + latest_);
    }
  }

 private:
  Words words() const {
    Words words;
    const int ranks = hosts_.empty() ? flags_.ranks : num_slots();
    if (ranks > 0) {
      words = {"mpirun", "-n", std::to_string(ranks), "--oversubscribe"};
      if (!hosts_.empty()) {
        Words named;
        for (const Host& host : hosts_) named.push_back(fmt::format("{}:{}", host.name, host.slots));
        words.insert(words.end(), {"--host", fmt::format("{}", fmt::join(named, ",")), "--mca",
                                   "plm_rsh_agent", flags_.agent});
      }
    }
    words.push_back(std::filesystem::read_symlink("/proc/self/exe").string());
    words.insert(words.end(), command_.begin(), command_.end());
    return words;
  }

  int num_slots() const {
    int slots = 0;
    for (const Host& host : hosts_) slots += host.slots;
    return slots;
  }

  void go_on() {
    const auto whole = list_checkpoints(directory_);
    latest_ = whole.empty() ? "" : whole.back();
    const auto resume = std::find(command_.begin(), command_.end(), "--resume");
    if (!whole.empty() && resume == command_.end()) command_.push_back("--resume");
  }

  // Whether the agent reaches the host and comes back within ten seconds.
  bool is_there(const std::string& host) {
    return commands_.run({"timeout", "10", flags_.agent, host, "true"}) == 0;
  }

  // Leaves out the hosts that are gone, and as many data-parallel ranks as the others have no room for.
  void shrink() {
    std::vector<Host> there;
    for (const Host& host : hosts_)
      if (is_there(host.name)) there.push_back(host);
    if (there.size() == hosts_.size()) return;
    hosts_ = there;
    std::string& dp = *value_of(command_, "--dp");
    const int others =
        axis_size(command_, "--tp") * axis_size(command_, "--pp") * axis_size(command_, "--cp");
    const int room = num_slots() / others;
    if (room < 1)
      fail("launch: {} of the hosts left, with room for {}; the model is cut over {}", hosts_.size(),
           counted(num_slots(), "rank"), others);
    dp = std::to_string(std::min(room, parse_number<int>("--dp", dp)));
    // No more processes than ranks: the last host has some to spare.
    for (int spare = num_slots() - std::stoi(dp) * others; spare > 0;) {
      const int fewer = std::min(spare, hosts_.back().slots);
      hosts_.back().slots -= fewer;
      spare -= fewer;
      if (hosts_.back().slots == 0) hosts_.pop_back();
    }
    fmt::print(stderr, "echelon: launch: {} left; going on with --dp {}\n",
               counted(static_cast<std::int64_t>(hosts_.size()), "host"), dp);
  }

  LaunchFlags flags_;
  Commands commands_;
  Words command_;
  std::vector<Host> hosts_;
  std::string directory_, latest_;
};

}  // namespace

void add_launch(CLI::App& program, int& status) {
  auto flags = std::make_shared<LaunchFlags>();
  CLI::App& app = *program.add_subcommand(
      "launch",
      "Run a training, and restart it from its last checkpoint when it fails: launch ... -- train ...");
  heading(app, common_flags);
  add_number(app, "--ranks", flags->ranks, "Processes to start with mpirun; 0: thread ranks in one process");
  app.add_option("--hosts", flags->hosts, "Hosts to start them on, and how many on each")
      ->type_name("HOST:N,...");
  app.add_option("--agent", flags->agent, "Program that runs a command on a host: AGENT HOST COMMAND...")
      ->type_name("PROGRAM")
      ->capture_default_str();
  add_number(app, "--max-restarts", flags->max_restarts, "How often to restart");
  app.add_flag("--elastic", flags->elastic, "Continue with fewer --dp ranks when a host is gone");
  app.add_option("command", flags->command, "After --: train and its flags")->type_name("train ...");
  app.callback([flags, &app, &status] { status = Launch(*flags, app).run_until_done(); });
}

}  // namespace echelon

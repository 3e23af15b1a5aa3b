#include "apps/commands.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <utility>

#include "apps/launch_words.h"
#include "apps/stop_signals.h"
#include "base/error.h"
#include "base/random_name.h"
#include "base/units.h"

namespace echelon {
namespace {

using namespace std::chrono_literals;

// How long to wait for a training that has reported its end; and from SIGTERM until SIGKILL.
constexpr auto after_its_end = 2s, after_sigterm = 2s;

// All processes that this one started, directly or not: orphaned ones become children of this process.
std::vector<pid_t> descendants() {
  std::multimap<pid_t, pid_t> children;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", none)) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::string stat;
    std::getline(std::ifstream(entry.path() / "stat"), stat);
    const std::size_t end_of_name = stat.rfind(')');  // the name may contain anything
    char state = 0;
    pid_t parent = 0;
    if (end_of_name != std::string::npos &&
        std::sscanf(stat.c_str() + end_of_name + 1, " %c %d", &state, &parent) == 2 && state != 'Z')
      children.emplace(parent, std::stoi(name));
  }
  std::vector<pid_t> all{::getpid()};
  for (std::size_t i = 0; i < all.size(); ++i)
    for (auto [at, end] = children.equal_range(all[i]); at != end; ++at) all.push_back(at->second);
  all.erase(all.begin());
  return all;
}

}  // namespace

struct Commands::Child {
  pid_t pid = -1;
  bool is_mpirun = false;
  int pipe = -1;
  bool pipe_ended = false;
  std::optional<int> status{};
  std::function<void()> hear{};  // what it has reported
  Ended ended{};
  bool to_hand_on = false;
  Clock::time_point heard{}, said_at{}, forced_at{};

  ~Child() {
    if (pipe >= 0) ::close(pipe);
  }
};

Commands::Commands(const Patience& patience, const Time& time)
    : patience_(patience), time_(time), signals_(stop_signals()) {
  sigaddset(&signals_, SIGCHLD);
  sigprocmask(SIG_BLOCK, &signals_, &before_);
  signal_fd_ = ::signalfd(-1, &signals_, SFD_CLOEXEC | SFD_NONBLOCK);
  if (signal_fd_ < 0) fail("launch: cannot wait for signals: {}", std::strerror(errno));
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
}

Commands::~Commands() {
  ::close(signal_fd_);
  sigprocmask(SIG_SETMASK, &before_, nullptr);
}

namespace {

// In the child process: becomes the command. `words_to`: the descriptor for its reports to this process; -1:
// none.
[[noreturn]] void become(const std::vector<std::string>& words, pid_t parent, const sigset_t& signals,
                         const std::string& variable, int words_to, bool over_stderr) {
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  // Terminals and timeout(1) signal whole process groups: the command should get signals only from here,
  // once. So it does not end with the group either, but with this process.
  ::setpgid(0, 0);
  if (std::freopen("/dev/null", "r", stdin) == nullptr) std::_Exit(3);  // it must not read the terminal
  if (!variable.empty()) ::setenv(launch_variable, variable.c_str(), 1);
  if (words_to >= 0 && over_stderr) ::dup2(words_to, STDERR_FILENO);
  if (words_to >= 0 && !over_stderr) ::fcntl(words_to, F_SETFD, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) std::_Exit(3);
  sigprocmask(SIG_SETMASK, &signals, nullptr);
  ::execvp(arguments[0], arguments.data());
  fmt::print(stderr, "echelon: {}: {}\n", words[0], std::strerror(errno));
  std::_Exit(127);
}

// Before it has started its ranks, mpirun ignores signals. An mpirun that starts ranks from another than its
// first thread counts as having children after two seconds.
bool has_children(pid_t process, Clock::duration since_asked) {
  std::ifstream children(fmt::format("/proc/{0}/task/{0}/children", process));
  pid_t first = 0;
  return !children.is_open() || children >> first || since_asked > 2s;
}

void signal_all(int signal) {
  for (const pid_t process : descendants()) ::kill(process, signal);
}

// Ends ranks that outlived their mpirun.
void end_ranks_left() {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  for (const pid_t process : descendants()) {
    std::error_code gone;
    if (std::filesystem::read_symlink(fmt::format("/proc/{}/exe", process), gone).string() == program)
      ::kill(process, SIGKILL);
  }
  while (::waitpid(-1, nullptr, WNOHANG) > 0) {
  }
}

}  // namespace

int Commands::run(const std::vector<std::string>& words) {
  Child child;
  const pid_t parent = ::getpid();
  child.pid = ::fork();
  if (child.pid < 0) fail("launch: no process: {}", std::strerror(errno));
  if (child.pid == 0) become(words, parent, before_, "", -1, false);
  wait(child);
  return child.ended.status;
}

Commands::Ended Commands::train(const std::vector<std::string>& words) {
  const std::string token = random_name();
  std::array<int, 2> ends{-1, -1};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) fail("launch: no pipe: {}", std::strerror(errno));
  Child child;
  child.heard = time_.now();
  child.pipe = ends[0];
  child.is_mpirun = words[0] == "mpirun";
  const std::string variable = fmt::format("{}:{}", child.is_mpirun ? STDERR_FILENO : ends[1], token);
  const pid_t parent = ::getpid();
  child.pid = ::fork();
  if (child.pid == 0) become(words, parent, before_, variable, ends[1], child.is_mpirun);
  ::close(ends[1]);
  if (child.pid < 0) fail("launch: no process: {}", std::strerror(errno));
  ::fcntl(child.pipe, F_SETFL, O_NONBLOCK);
  LaunchWords heard(
      token,
      [](std::string_view text) {
        std::fwrite(text.data(), 1, text.size(), stderr);
        std::fflush(stderr);
      },
      [&](LaunchWords::Word word, int status) {
        child.heard = time_.now();
        child.ended.began = true;
        if (word == LaunchWords::Word::lasts) child.ended.lasting = true;
        if (word != LaunchWords::Word::ended || child.ended.said) return;
        child.ended.said = status;
        child.said_at = child.heard;
      });
  child.hear = [&] {
    std::array<char, 4096> bytes{};
    ssize_t got = 0;
    while ((got = ::read(child.pipe, bytes.data(), bytes.size())) > 0)
      heard.read({bytes.data(), static_cast<std::size_t>(got)});
    child.pipe_ended = got == 0;
  };
  wait(child);
  end_ranks_left();
  child.hear();
  heard.end();
  return child.ended;
}

void Commands::sleep(std::chrono::milliseconds time) {
  pollfd fd{signal_fd_, POLLIN, 0};
  const auto until = time_.now() + time;
  Child none;
  while (!asked_at_ && time_.now() < until) {
    ::poll(&fd, 1, 50);
    take_signals(none);
  }
}

void Commands::take_signals(Child& child) {
  signalfd_siginfo info{};
  while (::read(signal_fd_, &info, sizeof info) == sizeof info) {
    const int signal = static_cast<int>(info.ssi_signo);
    if (signal == SIGCHLD) continue;
    if (!asked_at_) {
      asked_at_ = time_.now();
      child.to_hand_on = true;
    } else if (time_.now() - *asked_at_ >= one_stop_request && child.pid > 0) {
      ::kill(child.pid, signal);
    }
  }
  int status = 0;
  for (pid_t ended = 0; (ended = ::waitpid(-1, &status, WNOHANG)) > 0;)
    if (ended == child.pid) child.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

std::string Commands::overdue(const Child& child) const {
  const auto now = time_.now();
  const auto shown = [](auto time) { return format_seconds(std::chrono::duration<double>(time).count()); };
  if (asked_at_ && now - *asked_at_ >= std::max<Clock::duration>(patience_.grace - 3s, 0s))
    return fmt::format("was asked to stop {} ago; --grace gives it more time", shown(now - *asked_at_));
  if (child.ended.said && now - child.said_at >= after_its_end)
    return fmt::format("had said its end {} ago", shown(now - child.said_at));
  if (!child.is_mpirun || child.ended.said) return "";
  if (now - child.heard < patience_.silence) return "";
  const std::string silent = shown(now - child.heard);
  return child.ended.began ? "no rank had said a word for " + silent : "no rank had begun after " + silent;
}

void Commands::wait(Child& child) {
  for (;;) {
    std::array<pollfd, 2> fds{pollfd{signal_fd_, POLLIN, 0}, pollfd{child.pipe, POLLIN, 0}};
    ::poll(fds.data(), child.pipe_ended ? 1 : 2, 50);
    take_signals(child);
    if (child.hear) child.hear();
    if (child.status) break;
    // On SIGTERM mpirun gives its ranks one second, and returns 1; it forwards SIGUSR1, and ranks end after
    // their step.
    if (child.to_hand_on && (!child.is_mpirun || has_children(child.pid, time_.now() - *asked_at_))) {
      ::kill(child.pid, SIGUSR1);
      child.to_hand_on = false;
    }
    if (child.ended.forced.empty()) {
      child.ended.forced = overdue(child);
      if (child.ended.forced.empty()) continue;
      child.forced_at = time_.now();
      signal_all(SIGTERM);
    } else if (time_.now() - child.forced_at >= after_sigterm) {
      signal_all(SIGKILL);
    }
  }
  child.ended.status = *child.status;
}

}  // namespace echelon

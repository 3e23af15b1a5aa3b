// echelon launch: runs a training, and after a failure runs it again from its last intact checkpoint.
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>

#include "apps/commands.h"
#include "apps/flag_needs.h"
#include "apps/flags.h"
#include "apps/help.h"
#include "apps/launch_words.h"
#include "apps/terminal.h"
#include "apps/train_flags.h"
#include "base/error.h"
#include "base/units.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/directory_lock.h"
#include "spec/mesh.h"
#include "train/session.h"

namespace echelon {
namespace {

using Words = std::vector<std::string>;

struct Host {
  std::string name;
  int slots = 1;
};

constexpr double longest_pause = 300;  // seconds between restarts

struct LaunchFlags {
  int ranks = 0, max_restarts = 3;
  double grace = 10, pause = 5;  // seconds
  std::string hosts, agent = "ssh";
  bool elastic = false;
  Words command;
};

std::vector<Host> parse_hosts(const std::string& text) {
  std::vector<Host> hosts;
  std::int64_t ranks = 0;
  std::istringstream in(text);
  for (std::string word; std::getline(in, word, ',');) {
    const std::size_t colon = word.find(':');
    Host host{word.substr(0, colon), 1};
    if (colon != std::string::npos) host.slots = parse_number<int>("--hosts", word.substr(colon + 1));
    if (host.name.empty() || host.slots < 1)
      refuse("--hosts {}: must be names and how many ranks each takes, as a:4,b:4", text);
    // mpirun and ssh would look for a host of that name.
    if (host.name.find_first_of("[] \t") != std::string::npos)
      refuse(
          "--hosts {}: \"{}\" is no name of a host; legal: one name in each place, without blanks, as "
          "a:4,b:4 (of Slurm's lists `scontrol show hostnames` makes names)",
          text, host.name);
    hosts.push_back(host);
    ranks += host.slots;
  }
  if (ranks > Mesh::most_ranks)
    refuse("--hosts {}: takes {} ranks; legal: up to {}", text, ranks, Mesh::most_ranks);
  return hosts;
}

// Splits --dp=2 into two words, for flags that are read or changed here.
Words separated(const Words& command) {
  Words words;
  for (const std::string& word : command) {
    const std::size_t equals = word.find('=');
    const std::string flag = word.substr(0, equals);
    const bool splits =
        equals != std::string::npos &&
        (flag == "--checkpoint" || flag == "--from" || flag == "--plan" || flag == "--dp" || flag == "--tp" ||
         flag == "--pp" || flag == "--cp" || flag == "--comm" || flag == "--timeout");
    words.push_back(splits ? flag : word);
    if (splits) words.push_back(word.substr(equals + 1));
  }
  return words;
}

// The value of a flag of the command; nullptr if the flag is missing.
std::string* value_of(Words& command, const std::string& flag) {
  const auto at = std::find(command.begin(), command.end(), flag);
  return at == command.end() || at + 1 == command.end() ? nullptr : &*(at + 1);
}

int axis_size(Words& command, const std::string& flag) {
  const std::string* text = value_of(command, flag);
  const int size = text == nullptr ? 1 : parse_number<int>(flag, *text);
  if (size < 1) refuse("{} {}: must be at least 1", flag, size);
  return size;
}

class Launch {
 public:
  Launch(const LaunchFlags& flags, const CLI::App& app)
      : flags_(flags),
        command_(separated(flags.command)),
        hosts_(parse_hosts(flags.hosts)),
        commands_(patience()) {
    if (!command_.empty() && command_.front() != "train" && !command_.front().starts_with("-"))
      refuse("launch: {}: the only verb that it runs is train, as in: echelon launch -- train ...",
             command_.front());
    if (command_.empty() || command_.front() != "train")
      refuse(
          "launch: the command to run is missing; as in: echelon launch --max-restarts 3 -- train "
          "--checkpoint DIR ...");
    if (flags_.ranks < 0) refuse("--ranks {}: must be at least 0", flags_.ranks);
    if (!hosts_.empty() && is_given(app, "--ranks") && flags_.ranks != num_slots())
      refuse("--ranks {}: --hosts {} takes {}; leave --ranks out, or give {}", flags_.ranks, flags_.hosts,
             num_slots(), num_slots());
    refuse_idle(
        app,
        {{"--agent", !hosts_.empty(), "without --hosts", {advice("--hosts", "HOST:N,...")}},
         {"--elastic", flags_.max_restarts != 0, "with --max-restarts 0", {advice("--max-restarts", "3")}},
         {"--pause", flags_.max_restarts != 0, "with --max-restarts 0", {advice("--max-restarts", "3")}}});
    if (!(flags_.pause >= 0) || flags_.pause > longest_pause)
      refuse("--pause {}: must be from 0 to {} seconds", flags_.pause, longest_pause);
    const std::string* const comm = value_of(command_, "--comm");
    if (starts_processes() && comm != nullptr && *comm != "mpi")
      refuse(
          "--comm {}: --{} starts processes, each of which would be a whole training; legal: mpi, or none of "
          "it",
          *comm, hosts_.empty() ? "ranks" : "hosts");
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
    if (!flags_.elastic) return;
    axis_size(command_, "--dp");
    constexpr std::int64_t most = std::numeric_limits<int>::max();  // larger values have no type to hold them
    for (const char* axis : {"--tp", "--pp", "--cp"})
      others_ = std::min(others_ * axis_size(command_, axis), most);
  }

  int run_until_done() {
    for (int restarts = 0;; ++restarts) {
      go_on();
      const std::string before = last_checkpoint();
      const Commands::Ended ended = commands_.train(words());
      const std::string how = description(ended);
      const int status = ended.said.value_or(starts_processes() ? 3 : ended.status);
      if (status == 2 && fewer_) {
        say("the training cannot go on with {}, which is what the hosts that are left have room for: with "
            "these it was refused, as said above",
            *fewer_);
        return 3;
      }
      if (status <= 2) {
        if (!ended.forced.empty()) say("{}", how);
        return status;
      }
      if (commands_.asked_to_stop()) {  // before it listened, by a second signal, or by force
        say("{}, as it was asked to stop", how);
        return 3;
      }
      if (ended.lasting) {
        say("{}; it is not restarted, since the same would come again", how);
        return 3;
      }
      if (restarts == flags_.max_restarts) {
        say("{} after {}", how, counted(restarts, "restart"));
        return 3;
      }
      const bool is_smaller = flags_.elastic && shrink();
      // mpirun itself could not begin: root's without leave, or without a program. On other hosts it may be
      // the network.
      if (restarts == 0 && !ended.began && starts_processes() && hosts_.empty() && ended.forced.empty()) {
        say("{}; it is not restarted, since the same would come again", how);
        return 3;
      }
      if (!directory_.empty()) wait_for_lock();
      const double pause = is_smaller ? 0 : next_pause(last_checkpoint() != before);
      say("{}; restart {} of {}{}", how, restarts + 1, flags_.max_restarts,
          pause > 0 ? " in " + format_seconds(pause) : "");
      commands_.sleep(in_ms(pause));
      if (commands_.asked_to_stop()) {
        say("not restarted, as it was asked to stop");
        return 3;
      }
    }
  }

 private:
  Words words() const {
    Words words;
    const int ranks = hosts_.empty() ? flags_.ranks : num_slots();
    if (ranks > 0) {
      words = {"mpirun", "-n", std::to_string(ranks), "--oversubscribe", "-x", launch_variable};
      if (!hosts_.empty()) {
        Words named;
        for (const Host& host : hosts_) named.push_back(fmt::format("{}:{}", host.name, host.slots));
        words.insert(words.end(), {"--host", fmt::format("{}", fmt::join(named, ",")), "--mca",
                                   "plm_rsh_agent", flags_.agent});
      }
    }
    words.push_back(std::filesystem::read_symlink("/proc/self/exe").string());
    const Words train = train_words();
    words.insert(words.end(), train.begin(), train.end());
    return words;
  }

  Words train_words() const {
    Words words;
    const auto from = std::find(command_.begin(), command_.end(), "--from");
    const bool resumes = std::find(command_.begin(), command_.end(), "--resume") != command_.end();
    words.insert(words.end(), command_.begin(), from);
    // A checkpoint has the weights that the training began with, as it has trained them since.
    const auto rest = std::min(resumes ? 2 : 0, static_cast<int>(command_.end() - from));
    words.insert(words.end(), from + rest, command_.end());
    return words;
  }

  int num_slots() const {
    int slots = 0;
    for (const Host& host : hosts_) slots += host.slots;
    return slots;
  }

  template <class... Args>
  static void say(fmt::format_string<Args...> form, Args&&... args) {
    show(stderr, "echelon: launch: {}\n", fmt::format(form, std::forward<Args>(args)...));
  }

  bool starts_processes() const { return flags_.ranks > 0 || !hosts_.empty(); }

  static std::chrono::milliseconds in_ms(double seconds) {
    return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
  }

  std::string last_checkpoint() const {
    const std::vector<std::string> all = list_checkpoints(directory_);
    return all.empty() ? "" : all.back();
  }

  // Seconds until the next restart: none after a run that has saved something, or the first that has not.
  // From then on --pause, doubled each time, so that what is down (a host, a disk, a network) has time to
  // return.
  double next_pause(bool has_saved) {
    if (has_saved) fruitless_ = 0;
    return fruitless_++ == 0
               ? 0
               : std::min(flags_.pause * std::pow(2, std::min(fruitless_ - 2, 20)), longest_pause);
  }

  Commands::Patience patience() {
    using std::chrono::milliseconds;
    if (!(flags_.grace >= 4) || flags_.grace > 1e6)
      refuse("--grace {}: must be from 4 to 1000000 seconds", flags_.grace);
    // Ranks that wait for one another report that after --timeout; if nothing is reported, no rank is left.
    const std::string* const given = value_of(command_, "--timeout");
    const milliseconds timeout =
        given == nullptr ? RunOptions{}.timeout : in_ms(parse_number<double>("--timeout", *given));
    return {in_ms(flags_.grace), std::max<milliseconds>(timeout, std::chrono::seconds(10))};
  }

  // What a status says of a signal.
  static std::string signal_of(const Commands::Ended& ended) {
    const int signal = ended.said ? 0 : ended.status - 128;
    if (signal < 1 || signal >= NSIG) return "";
    // What is not killed here the system has killed, most often.
    if (signal == SIGKILL && ended.forced.empty()) return " (killed by signal 9, as when memory runs out)";
    return fmt::format(" (signal {}, {})", signal, strsignal(signal));
  }

  std::string description(const Commands::Ended& ended) const {
    const std::string status =
        fmt::format("ended with status {}{}", ended.said.value_or(ended.status), signal_of(ended));
    std::string text = status;
    if (starts_processes() && !ended.said)
      text = fmt::format("mpirun {}, and no rank has {}", status, ended.began ? "said why" : "begun");
    return ended.forced.empty() ? text : fmt::format("{}; it was ended by force: {}", text, ended.forced);
  }

  // Continues a training in this directory, whoever started it.
  void go_on() {
    const auto resume = std::find(command_.begin(), command_.end(), "--resume");
    const bool has_any = !directory_.empty() && !list_checkpoints(directory_).empty();
    if (has_any && resume == command_.end()) {
      say("{} holds checkpoints: the training goes on from the last", directory_);
      command_.push_back("--resume");
    }
    if (!has_any && resume != command_.end()) {
      say("{} holds no checkpoint yet: the training begins", directory_);
      command_.erase(resume);
    }
  }

  // Waits until the last rank of the run before releases the directory: on another host this may take a
  // moment, and if that host is lost, until the file server drops its locks, which NFS does after 90 s.
  void wait_for_lock() {
    constexpr int most_tenths = 1800;
    for (int tenths = 0;
         tenths < most_tenths && !commands_.asked_to_stop() && std::filesystem::exists(directory_);
         ++tenths) {
      try {
        DirectoryLock(directory_, "--checkpoint").leave_no_trace();
        return;
      } catch (const RequestError& error) {
        if (tenths == 10)
          say("waits up to {} until the directory is free: {}", format_seconds(most_tenths / 10),
              error.what());
        commands_.sleep(std::chrono::milliseconds(100));
      }
    }
  }

  // Whether the agent reaches the host and returns within ten seconds.
  bool is_there(const std::string& host) {
    return commands_.run({"timeout", "10", flags_.agent, host, "true"}) == 0;
  }

  // Whether a training with the command's plan can begin, as far as its flags and its checkpoints say:
  // experts and replicas are shared out over certain numbers of ranks alone.
  bool has_legal_plan() const {
    CLI::App app;
    const auto flags = std::make_shared<TrainFlags>();
    add_train_flags(app, flags);
    try {
      const Words words = train_words();
      app.parse(Words(words.rbegin(), words.rend() - 1));  // CLI11 takes the last word first
      (void)flags->read_plan([] { return 0; });
      return true;
    } catch (const RequestError&) {
      return false;
    }
  }

  // Removes hosts that are gone, and the data-parallel ranks for which the others have no room; false if none
  // is gone.
  bool shrink() {
    std::vector<Host> there;
    std::vector<std::string> gone;
    for (const Host& host : hosts_)
      if (is_there(host.name))
        there.push_back(host);
      else
        gone.push_back(host.name);
    if (gone.empty()) return false;
    hosts_ = there;
    go_on();  // the model may be that of a checkpoint
    if (value_of(command_, asked_dp_flag) == nullptr) {
      const std::string asked = *value_of(command_, "--dp");
      command_.insert(command_.end(), {asked_dp_flag, asked});
    }
    std::string& dp = *value_of(command_, "--dp");
    const std::int64_t room = num_slots() / others_;
    if (room < 1)
      fail(
          "launch: {} cannot be reached by {} within 10 s; {} left, with room for {}, and the model is cut "
          "over {}",
          fmt::join(gone, ", "), flags_.agent,
          hosts_.empty() ? "no host is"
                         : counted(std::ssize(hosts_), "host") + (hosts_.size() == 1 ? " is" : " are"),
          counted(num_slots(), "rank"), others_);
    const std::int64_t most = std::min<std::int64_t>(room, axis_size(command_, "--dp"));
    std::int64_t ranks = most;
    for (dp = std::to_string(ranks); ranks > 1 && !has_legal_plan(); dp = std::to_string(ranks)) --ranks;
    if (!has_legal_plan()) dp = std::to_string(most);  // the training says what it cannot have
    // Starts no more processes than ranks: the last hosts leave slots unused.
    for (std::int64_t spare = num_slots() - std::stoi(dp) * others_; spare > 0;) {
      const int fewer = static_cast<int>(std::min<std::int64_t>(spare, hosts_.back().slots));
      hosts_.back().slots -= fewer;
      spare -= fewer;
      if (hosts_.back().slots == 0) hosts_.pop_back();
    }
    fewer_ = fmt::format("--dp {} in place of {}", dp, *value_of(command_, asked_dp_flag));
    say("{} left; going on with {}", counted(static_cast<std::int64_t>(hosts_.size()), "host"), *fewer_);
    return true;
  }

  LaunchFlags flags_;
  Words command_;
  std::vector<Host> hosts_;
  Commands commands_;
  std::string directory_;
  std::int64_t others_ = 1;  // ranks of each data-parallel replica, if the training is elastic
  std::optional<std::string> fewer_;  // what it goes on with since a host is gone
  int fruitless_ = 0;                 // failures since it last saved anything
};

}  // namespace

void add_launch(CLI::App& program, int& status) {
  auto flags = std::make_shared<LaunchFlags>();
  CLI::App& app = *program.add_subcommand(
      "launch",
      "Run a training and restart it from its last checkpoint when it fails: launch ... -- train ...");
  heading(app, common_flags);
  add_number(app, "--ranks", flags->ranks, "Processes to start with mpirun; 0: thread ranks in one process");
  app.add_option("--hosts", flags->hosts, "Hosts to start them on, and how many on each")
      ->type_name("HOST:N,...");
  app.add_option("--agent", flags->agent, "Program that runs a command on a host: AGENT HOST COMMAND...")
      ->type_name("PROGRAM")
      ->capture_default_str();
  add_number(app, "--max-restarts", flags->max_restarts, "How often to restart");
  add_number(app, "--pause", flags->pause,
             "Seconds before a restart after two failures without a checkpoint between; doubled each time");
  add_number(app, "--grace", flags->grace, "Seconds from a request to stop until what still runs is killed");
  app.add_flag("--elastic", flags->elastic, "Continue with fewer --dp ranks when a host is gone");
  app.add_option("command", flags->command, "After --: train and its flags")->type_name("train ...");
  app.callback([flags, &app, &status] { status = Launch(*flags, app).run_until_done(); });
}

}  // namespace echelon

#include "apps/job.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "apps/launch_words.h"
#include "apps/launched.h"
#include "apps/terminal.h"
#include "apps/verbs.h"
#include "base/error.h"

namespace echelon {

namespace fs = std::filesystem;

Job::Job() = default;
Job::~Job() = default;

void Job::add_to(CLI::App& app) {
  option_ = app.add_option("--comm", comm_,
                           "What a rank is: a thread of one process, or a process started by mpirun or srun "
                           "(default: mpi under mpirun or srun, else threads)")
                ->type_name("threads|mpi");
  app.add_option("--record", record_,
                 "Directory for the flight records of a run that fails, in a new one for each run "
                 "(default: TMPDIR, else /tmp)")
      ->type_name("DIR");
}

bool Job::wants_processes() const {
  if (option_->count() == 0 && launched_rank() < 0 && launched_processes() > 1)
    refuse(
        "{} processes were started, and none was told its rank for MPI: each would do all the work; legal: "
        "srun --mpi=pmix, mpirun, or one process",
        launched_processes());
  if (option_->count() == 0) return launched_rank() >= 0;
  if (comm_ == "nccl") refuse("--comm nccl: not built yet; legal: threads, mpi");
  if (comm_ != "threads" && comm_ != "mpi") refuse("--comm {}: legal: threads, mpi", comm_);
  if (comm_ == "threads" && launched_processes() > 1)
    refuse(
        "--comm threads: {} processes were started, and each would run all ranks by itself; legal: --comm "
        "mpi, or one process",
        launched_processes());
  return comm_ == "mpi";
}

void Job::make_record_directory() {
  std::string made;
  refuse_together(processes_.get(), [&] {
    if (processes_ && !processes_->is_first_on_this_node()) return;
    made = make_private_directory(record_, "echelon-flight", "--record");
    made_records_ = true;
  });
  const auto directories = processes_ ? processes_->gather_from_first_on_nodes(made) : std::vector{made};
  std::vector<std::string> places;
  for (std::size_t r = 0; processes_ && r < directories.size(); ++r) {
    const std::string place = fmt::format("on {} in {}", processes_->nodes()[r], directories[r]);
    if (std::find(places.begin(), places.end(), place) == places.end()) places.push_back(place);
  }
  where_records_are_ =
      places.size() > 1 ? fmt::format("{}", fmt::join(places, ", ")) : "in " + directories.front();
  records_.open(directories[processes_ ? static_cast<std::size_t>(processes_->rank()) : 0]);
}

void Job::remove_record_directory() const {
  std::error_code not_empty;
  if (made_records_) fs::remove(records_.directory(), not_empty);
}

FailureHooks Job::hooks() {
  FailureHooks hooks;
  hooks.report = [this](const std::string& report) {
    if (std::exchange(said_, true)) return;
    std::string text = fmt::format("echelon: {}\n", report);
    if (report.find('\n') != std::string::npos && !records_.directory().empty())
      text += fmt::format("echelon: the last operations of each rank are in flight-rank-*.jsonl {}\n",
                          where_records_are_);
    if (std::fputs(text.c_str(), stderr) < 0)
      fail("standard error cannot be written: {}", std::strerror(errno));
  };
  hooks.record = [this](int rank, const std::string& lines) {
    if (records_.directory().empty()) return;  // it failed before it began
    const std::string why = records_.append(fmt::format("flight-rank-{}.jsonl", rank), lines);
    if (!why.empty())
      std::fputs(
          fmt::format("echelon: the flight record of rank {} cannot be written: {}\n", rank, why).c_str(),
          stderr);
  };
  hooks.last_resort = [] {
    std::fflush(stdout);
    tell_launch_end(3);
    std::_Exit(3);
  };
  return hooks;
}

int Job::run(const RunFlags& flags, const std::function<int()>& body) {
  if (wants_processes())
    processes_ = std::make_unique<ProcessWorld>(flags.timeout(), hooks());
  else
    hooks_ = hooks();
  const LaunchBeat beat;
  try {
    make_record_directory();
    if (processes_) {
      std::shared_ptr<DeviceDriver> driver;
      refuse_together(processes_.get(), [&] { driver = flags.driver(); });
      device_ids_ = gather_device_ids(*processes_, driver.get());
    }
    const int status = body();
    if (leads()) tell_launch_end(status);  // even if mpirun does not end
    processes_.reset();
    remove_record_directory();
    return status;
  } catch (const RequestError& error) {
    if (!processes_) {
      remove_record_directory();
      if (said_) throw AlreadySaid{2};
      throw;
    }
    // The first process reports what all of them refuse, before the others can leave MPI: when the first
    // process ends, mpirun ends the others. What only this process refuses must be sent to the others.
    if (dynamic_cast<const JointRefusal*>(&error) == nullptr || processes_->failed()) {
      processes_->fail(error);
    } else if (leads()) {
      show(stderr, "echelon: {}\n", error.what());
      std::fflush(stderr);
    }
    processes_.reset();
    remove_record_directory();
    throw AlreadySaid{2};
  } catch (const std::exception& error) {
    if (dynamic_cast<const LastingError*>(&error) != nullptr) tell_launch_it_lasts();
    const bool quiet = said_ || processes_;
    if (processes_) processes_->fail(error);  // one of them reports it
    processes_.reset();
    if (quiet) throw AlreadySaid{3};
    remove_record_directory();  // for a job of one rank, which keeps no records
    throw;
  }
}

RunOptions Job::options(const RunFlags& flags, const Plan& plan) const {
  RunOptions options = flags.options(plan, processes_.get());
  options.processes = processes_.get();
  options.device_ids = device_ids_;
  options.failure_hooks = hooks_;
  return options;
}

std::string Job::describe(const Mesh& mesh) const {
  if (!processes_) return "";
  const std::vector<std::string>& nodes = processes_->nodes();
  std::string text = fmt::format("nodes   {}\n", describe_nodes(nodes));
  int split = 0, groups = 0;
  std::string example;
  for (int rank = 0; rank < mesh.num_ranks(); ++rank) {
    if (mesh.coordinate(rank, Axis::tp) > 0) continue;
    ++groups;
    const std::vector<int> group = mesh.group(rank, Axis::tp);
    for (int other : group)
      if (nodes[static_cast<std::size_t>(other)] != nodes[static_cast<std::size_t>(rank)]) {
        if (split++ == 0)
          example =
              fmt::format("ranks {}, on {} and {}", fmt::join(group, ", "),
                          nodes[static_cast<std::size_t>(rank)], nodes[static_cast<std::size_t>(other)]);
        break;
      }
  }
  if (split > 0)
    text += fmt::format(
        "warning {} of {} tp groups leave a node ({}): each layer's activations cross the network several "
        "times; with tp {} start a multiple of {} ranks on each node\n",
        split, groups, example, mesh.size(Axis::tp), mesh.size(Axis::tp));
  return text;
}

}  // namespace echelon

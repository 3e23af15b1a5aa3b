#include "apps/job.h"

#include <fmt/chrono.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <mutex>

#include "apps/launch_words.h"
#include "apps/verbs.h"
#include "base/error.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;

// The rank that a launcher gave this process; -1: none did. (Open MPI, PMIx, MPICH and srun name it so.)
int launched_rank() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"})
    if (const char* const text = std::getenv(name)) return std::atoi(text);
  return -1;
}

}  // namespace

bool is_another_process() { return launched_rank() > 0; }

Job::Job() = default;
Job::~Job() = default;

void Job::add_to(CLI::App& app) {
  option_ = app.add_option("--comm", comm_,
                           "What a rank is: a thread of one process, or a process started by mpirun or srun "
                           "(default: mpi under mpirun or srun, else threads)")
                ->type_name("threads|mpi");
}

bool Job::wants_processes() const {
  if (option_->count() == 0) return launched_rank() >= 0;
  if (comm_ == "nccl") refuse("--comm nccl: not built yet; legal: threads, mpi");
  if (comm_ != "threads" && comm_ != "mpi") refuse("--comm {}: legal: threads, mpi", comm_);
  return comm_ == "mpi";
}

FailureHooks Job::hooks() {
  // For this run alone: process numbers come again.
  record_directory_ =
      (fs::temp_directory_path() /
       fmt::format("echelon-flight-{:%Y%m%d-%H%M%S}-{}", fmt::localtime(std::time(nullptr)), ::getpid()))
          .string();
  FailureHooks hooks;
  hooks.report = [this](const std::string& report) {
    if (std::exchange(said_, true)) return;
    fmt::print(stderr, "echelon: {}\n", report);
    if (report.find('\n') != std::string::npos)
      fmt::print(stderr, "echelon: the last operations of each rank are in {}/flight-rank-*.jsonl\n",
                 record_directory_);
    std::fflush(stderr);
  };
  hooks.record = [this](int rank, const std::string& lines) {
    std::error_code none;
    fs::create_directories(record_directory_, none);
    std::ofstream(fs::path(record_directory_) / fmt::format("flight-rank-{}.jsonl", rank)) << lines;
  };
  hooks.last_resort = [] {
    std::fflush(stdout);
    std::_Exit(3);
  };
  return hooks;
}

int Job::run(const RunFlags& flags, const std::function<int()>& body) {
  if (wants_processes())
    processes_ = std::make_unique<ProcessWorld>(flags.timeout(), hooks());
  else
    hooks_ = hooks();
  // One directory for all of them.
  if (processes_) record_directory_ = processes_->gather(record_directory_).front();
  const LaunchBeat beat;
  try {
    const int status = body();
    if (leads()) tell_launch_end(status);  // whatever becomes of mpirun
    processes_.reset();
    return status;
  } catch (const RequestError& error) {
    if (!processes_) {
      if (said_) throw AlreadySaid{2};
      throw;
    }
    // Before the others can leave MPI: when the first process ends, mpirun ends those that have not.
    if (!said_ && leads() && !processes_->failed()) {
      fmt::print(stderr, "echelon: {}\n", error.what());
      std::fflush(stderr);
    }
    processes_.reset();
    throw AlreadySaid{2};
  } catch (const std::exception& error) {
    if (dynamic_cast<const LastingError*>(&error) != nullptr) tell_launch_it_lasts();
    const bool quiet = said_ || (processes_ && processes_->failed());
    processes_.reset();
    if (quiet) throw AlreadySaid{3};
    throw;
  }
}

RunOptions Job::options(const RunFlags& flags, const Plan& plan) const {
  RunOptions options = flags.options(plan, processes_.get());
  options.processes = processes_.get();
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
        "times; "
        "with tp {} start a multiple of {} ranks on each node\n",
        split, groups, example, mesh.size(Axis::tp), mesh.size(Axis::tp));
  return text;
}

}  // namespace echelon

// Where the ranks of train and verify live, what is said when they fail, and by whom.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>

#include "apps/flags.h"
#include "comm/process_world.h"

namespace echelon {

class Job {
 public:
  Job();
  ~Job();
  void add_to(CLI::App& app);

  // Starts processes where --comm says so or a launcher started this one, and calls body, which returns the
  // exit status. Flight records go to a new directory in the system's temporary one.
  int run(const RunFlags& flags, const std::function<int()>& body);

  // Inside run().
  ProcessWorld* processes() const { return processes_.get(); }
  bool leads() const { return !processes_ || processes_->rank() == 0; }
  // What the ranks are run with.
  RunOptions options(const RunFlags& flags, const Plan& plan) const;
  // "nodes   2 nodes: ..." and a warning where tp groups leave a node; empty with threads.
  std::string describe(const Mesh& mesh) const;

 private:
  FailureHooks hooks();
  bool wants_processes() const;

  std::string comm_;
  CLI::Option* option_ = nullptr;
  std::unique_ptr<ProcessWorld> processes_;
  std::string record_directory_;
  FailureHooks hooks_;  // of thread ranks
  bool said_ = false;
};

}  // namespace echelon

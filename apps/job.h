// Where the ranks of train and verify run; and what is reported if they fail, and by which process.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>

#include "apps/flags.h"
#include "base/private_directory.h"
#include "comm/process_world.h"

namespace echelon {

class Job {
 public:
  Job();
  ~Job();
  void add_to(CLI::App& app);

  // Starts processes if --comm says so or a launcher started this process, and calls body, which returns the
  // exit status. Flight records go to a private directory of this run, below --record or the temporary
  // directory, which is created on each node before the run begins; if the run has not failed, it is removed
  // if it is empty.
  int run(const RunFlags& flags, const std::function<int()>& body);

  // Only valid inside run().
  ProcessWorld* processes() const { return processes_.get(); }
  bool leads() const { return !processes_ || processes_->rank() == 0; }
  // The options with which ranks are run.
  RunOptions options(const RunFlags& flags, const Plan& plan) const;
  // "nodes   2 nodes: ...", and a warning if tp groups span nodes; empty with threads.
  std::string describe(const Mesh& mesh) const;

 private:
  FailureHooks hooks();
  bool wants_processes() const;
  void make_record_directory();
  // After a run that has not failed.
  void remove_record_directory() const;
  std::string comm_, record_;
  CLI::Option* option_ = nullptr;
  PrivateFiles records_;
  std::string where_records_are_;  // "in DIR", or for each node "on NODE in DIR"
  bool made_records_ = false;      // by this process, for its node
  std::unique_ptr<ProcessWorld> processes_;
  std::vector<std::string> device_ids_;  // of processes, by rank
  FailureHooks hooks_;  // of thread ranks
  bool said_ = false;
};

}  // namespace echelon

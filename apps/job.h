// Where the ranks of train and verify live, what is said when they fail, and by whom.
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

  // Starts processes where --comm says so or a launcher started this one, and calls body, which returns the
  // exit status. Flight records go to a private directory of this run, in --record or the temporary one, that
  // is there before the run begins, on each node; one that is still empty when the run has not failed goes
  // again.
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
  void make_record_directory();
  // After a run that has not failed.
  void remove_record_directory() const;
  std::string comm_, record_;
  CLI::Option* option_ = nullptr;
  PrivateFiles records_;
  std::string where_records_are_;  // "in DIR", or of each node "on NODE in DIR"
  bool made_records_ = false;      // by this process, for its node
  std::unique_ptr<ProcessWorld> processes_;
  std::vector<std::string> device_ids_;  // by rank, of processes
  FailureHooks hooks_;  // of thread ranks
  bool said_ = false;
};

}  // namespace echelon

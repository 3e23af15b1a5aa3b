// One parameter server, from the first batch to the checkpoint.
#pragma once

#include "train/asynchronous.h"
#include "train/shared_run.h"

namespace echelon {

class ServerRun {
 public:
  // The references must outlive it. The first server fills the summary.
  ServerRun(const SharedRun& shared, const Rank& rank, TrainSummary& summary);

  // The whole run. Throws as ParameterServer and Communicator do.
  void run();

 private:
  void report(const ServedStep& step);
  // Over the whole run: as workers come in any order, no step is typical.
  void summarize(const StalenessMeasures& staleness);
  bool leads() const { return rank_.index() == 0; }

  const SharedRun& shared_;
  const Rank& rank_;
  AsynchronousRun run_;
  ParameterServerRank server_;
  TrainSummary& summary_;
  std::int64_t tokens_ = 0;
  double seconds_ = 0;
};

}  // namespace echelon

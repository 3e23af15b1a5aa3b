// What the pipeline ranks of a plan hold under this repository's trainer. Each rank is walked: a dry run
// computes its memory exactly (ExactMemory). That takes longer than a simulation, so the rank that likely
// holds most comes first, and results are remembered for later requests of a search.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "plan/memory.h"
#include "plan/stages.h"

namespace echelon {

// The ranks of one plan: the bytes that formulas count for each, and for walked ranks the difference to the
// exact bytes. The difference varies little between neighbouring ranks, so ranks that were not walked are
// estimated from it.
class WalkedRanks {
 public:
  explicit WalkedRanks(std::vector<double> counted) : counted_(std::move(counted)), gaps_(counted_.size()) {}

  void set(int rank, double bytes);
  bool is_walked(int rank) const { return gaps_[static_cast<std::size_t>(rank)].has_value(); }
  double likely(int rank) const;
  // The ranks to walk first: both ends of the pipeline, and the rank with most by formula.
  std::vector<int> first() const;
  // The rank not walked yet that likely holds most; -1 if all were walked.
  int next() const;
  std::vector<int> not_walked() const;
  // A rank between one that was walked and fits, and one that was walked and does not; -1 if there is none.
  int between(double most_bytes) const;

 private:
  std::vector<double> counted_;
  std::vector<std::optional<double>> gaps_;
};

class WalkedMemory {
 public:
  // `work` must outlive this.
  explicit WalkedMemory(const Workload& work) : work_(work) {}

  // For a rank of a plan with this shape. What its activations do on the host is for a whole step.
  StepMemory of(const Plan& plan, const StageShape& shape, int rank) {
    return of(plan, shape, std::vector{rank})[0];
  }
  // For several ranks, walked in parallel.
  std::vector<StepMemory> of(const Plan& plan, const StageShape& shape, const std::vector<int>& ranks);

 private:
  // The parts of a plan that all ranks depend on, and the part that one rank does.
  static std::string shared_key(const Plan& plan);
  static std::string own_key(const Plan& plan, const StageShape& shape, int rank);
  void lay_out(const Plan& plan, const StageShape& shape, const std::string& shared);

  const Workload& work_;
  std::map<std::string, StepMemory> known_;  // by all of a plan that a rank depends on
  std::string last_;                         // the plan, as text
  std::optional<Plan> last_plan_;            // the same, as the trainer runs it
  std::optional<PipelineLayout> last_layout_;
};

}  // namespace echelon

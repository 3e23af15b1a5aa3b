// What the pipeline ranks of a plan of this repository's trainer hold. Each is walked (ExactMemory), which
// takes longer than a simulation, so the one that is likely to hold most comes first, and what a search asks
// for again is remembered.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "plan/memory.h"
#include "plan/stages.h"

namespace echelon {

// The ranks of one plan: what is counted of each by formula, and of those that were walked by how much that
// is too little. It is little more or less on a rank between two others, and that is all that is known of
// one that was not walked.
class WalkedRanks {
 public:
  explicit WalkedRanks(std::vector<double> counted) : counted_(std::move(counted)), gaps_(counted_.size()) {}

  void set(int rank, double bytes);
  bool is_walked(int rank) const { return gaps_[static_cast<std::size_t>(rank)].has_value(); }
  double likely(int rank) const;
  // Both ends of the pipeline, and the one that is counted to hold most: they come first.
  std::vector<int> first() const;
  // Of those that were not walked the one that is likely to hold most; -1 where all were walked.
  int next() const;
  std::vector<int> not_walked() const;
  // A rank between one that was walked to fit and one that was walked not to; -1 where there is none.
  int between(double most_bytes) const;

 private:
  std::vector<double> counted_;
  std::vector<std::optional<double>> gaps_;
};

class WalkedMemory {
 public:
  // `work` outlives this.
  explicit WalkedMemory(const Workload& work) : work_(work) {}

  // Of a rank whose plan has this shape. What its activations do on the host is of a whole step.
  StepMemory of(const Plan& plan, const StageShape& shape, int rank) {
    return of(plan, shape, std::vector{rank})[0];
  }
  // Of several, walked side by side.
  std::vector<StepMemory> of(const Plan& plan, const StageShape& shape, const std::vector<int>& ranks);

 private:
  // What all ranks see of a plan, and what one does.
  static std::string shared_key(const Plan& plan);
  static std::string own_key(const Plan& plan, const StageShape& shape, int rank);
  void lay_out(const Plan& plan, const StageShape& shape, const std::string& shared);

  const Workload& work_;
  std::map<std::string, StepMemory> known_;  // by all of a plan that a rank sees
  std::string last_;                         // plan, as text
  std::optional<Plan> last_plan_;            // the same, as it is trained
  std::optional<PipelineLayout> last_layout_;
};

}  // namespace echelon

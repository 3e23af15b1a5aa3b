// Sweeps of plan.
#pragma once

#include <string>
#include <vector>

#include "plan/run_life.h"
#include "plan/search.h"

namespace echelon {

struct SweepPoint {
  std::int64_t value = 0;
  int gpus = 0;
  std::optional<Estimate> best;
  std::string why_not;
  std::optional<RunCost> run{};  // of the best, if one was asked for
};
struct Sweep {
  std::string key;  // gpus, seq-len, global-batch
  std::optional<RunRequest> life{};
  std::string notes{};  // lines on what was assumed of the machine and the program
  std::vector<SweepPoint> points{};
  bool any_fits() const;
};

// "gpus=64..1024" doubles, "seq-len=4096,8192" lists. RequestError otherwise. With a whole run of each best
// plan, if `life` says which.
Sweep run_sweep(const SearchRequest& request, const std::string& text, const std::optional<RunRequest>& life);
std::string sweep_table(const Sweep& sweep);
std::string sweep_csv(const Sweep& sweep);
std::string sweep_json(const Sweep& sweep);
std::string sweep_svg(const Sweep& sweep);  // tokens/s per device, with its interval

}  // namespace echelon

// Sweeps of plan.
#pragma once

#include <string>
#include <vector>

#include "plan/search.h"

namespace echelon {

struct SweepPoint {
  std::int64_t value = 0;
  int gpus = 0;
  std::optional<Estimate> best;
  std::string why_not;
};
struct Sweep {
  std::string key;  // gpus, seq-len, global-batch
  std::vector<SweepPoint> points;
  bool any_fits() const;
};

// "gpus=64..1024" doubles, "seq-len=4096,8192" lists. RequestError otherwise.
Sweep run_sweep(const SearchRequest& request, const std::string& text);
std::string sweep_table(const Sweep& sweep);
std::string sweep_csv(const Sweep& sweep);
std::string sweep_json(const Sweep& sweep);
std::string sweep_svg(const Sweep& sweep);  // tokens/s per device, with its interval

}  // namespace echelon

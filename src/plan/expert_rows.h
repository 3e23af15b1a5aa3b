// Of a plan's mixtures of experts, how many rows of a microbatch are where on a rank.
#pragma once

#include "plan/workload.h"

namespace echelon {

// Under sequence parallelism a rank has a part of the rows. A program whose ranks gather all rows over tp
// before they send copies of them to experts (Software::gathers_before_experts) has copies of all on each
// rank, as there are without sequence parallelism; where experts are cut over tp their sums are added up over
// it. Of another each rank sends copies of its part, which are gathered where experts are cut.
struct ExpertRows {
  double routed = 0;    // that its router chooses for
  double copies = 0;    // that it sends to experts, and that come back; of the rank with most
  double computed = 0;  // that its experts get
  bool adds_up_over_tp = false, gathers_copies = false;
};
ExpertRows expert_rows(const Workload& work, const Plan& c);

}  // namespace echelon

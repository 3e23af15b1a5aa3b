// For a plan's mixtures of experts: how many rows of a microbatch are where on a rank.
#pragma once

#include "plan/workload.h"

namespace echelon {

// Under sequence parallelism a rank has a part of the rows. Programs differ in what they do with it:
//  * If ranks gather all rows over tp before they send copies to experts (Software::gathers_before_experts),
//    each rank has copies of all rows, as without sequence parallelism; experts that are cut over tp yield
//    partial sums, which are added up over tp.
//  * Otherwise each rank sends copies of its own part, and copies are gathered where experts are cut.
struct ExpertRows {
  double routed = 0;    // for which its router chooses experts
  double copies = 0;    // sent to experts and returned; of the rank with most
  double computed = 0;  // that its experts compute
  bool adds_up_over_tp = false, gathers_copies = false;
};
ExpertRows expert_rows(const Workload& work, const Plan& c);

}  // namespace echelon

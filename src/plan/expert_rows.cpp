#include "plan/expert_rows.h"

#include "base/real.h"
#include "plan/expert_skew.h"

namespace echelon {

ExpertRows expert_rows(const Workload& work, const Plan& c) {
  const double tokens = real(c.micro_batch * c.seq_len) / c.mesh.cp();
  ExpertRows rows;
  rows.routed = c.shards_sequence() ? tokens / c.mesh.tp() : tokens;
  const bool of_all = work.software.gathers_before_experts || !c.shards_sequence(),
             are_cut = c.mesh.expert_cut() > 1;
  rows.copies = busiest_rank(work.expert_load, c.mesh, work.machine) * (of_all ? tokens : rows.routed) *
                real(c.model.experts_per_token);
  rows.adds_up_over_tp = of_all && are_cut;
  rows.gathers_copies = !of_all && are_cut;
  rows.computed = rows.gathers_copies ? rows.copies * c.mesh.expert_cut() : rows.copies;
  return rows;
}

}  // namespace echelon

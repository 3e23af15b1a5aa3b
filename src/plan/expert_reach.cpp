#include "plan/expert_reach.h"

#include <algorithm>
#include <cmath>

#include "base/real.h"

namespace echelon {

// The probability that none of `chosen` distinct draws out of `all` is among `part` of them.
static double probability_of_none(double all, double part, std::int64_t chosen) {
  double none = 1;
  for (std::int64_t i = 0; i < chosen; ++i) none *= std::max(0.0, all - part - real(i)) / (all - real(i));
  return none;
}

static double choices_of(double all, std::int64_t chosen) {
  double choices = 1;
  for (std::int64_t i = 0; i < chosen; ++i) choices *= std::max(0.0, all - real(i)) / real(i + 1);
  return choices;
}

double reached_parts(const ModelSpec& m, double parts) {
  const double experts = real(m.num_experts), part = experts / parts;
  // If parts cut groups unevenly, the limit on groups is ignored.
  const double all_groups = real(m.router.groups), per_part = all_groups / parts;
  const bool whole = per_part <= 1 ? std::fmod(parts, all_groups) == 0 : std::fmod(all_groups, parts) == 0;
  const double groups = whole ? all_groups : 1, size = experts / groups;
  const std::int64_t open = whole ? m.router.most_groups : 1;
  const double candidates = real(open) * size;
  if (parts >= groups)
    return parts * real(open) / groups * (1 - probability_of_none(candidates, part, m.experts_per_token));
  // Summed over how many of the part's groups are open.
  double none = 0;
  for (std::int64_t n = 0; n <= open; ++n)
    none += choices_of(per_part, n) * choices_of(groups - per_part, open - n) / choices_of(groups, open) *
            probability_of_none(candidates, real(n) * size, m.experts_per_token);
  return parts * (1 - none);
}

}  // namespace echelon

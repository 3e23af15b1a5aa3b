#include "schedule/over_time.h"

#include <algorithm>

#include "base/error.h"
#include "schedule/schedules.h"
#include "schedule/step_programs.h"

namespace echelon {

std::vector<HeldCurve> held_over_time(const Schedule& schedule, const Timeline& timeline,
                                      const std::vector<double>& of_stage) {
  std::vector<HeldCurve> curves;
  for (const auto& spans : timeline.ranks) {
    // By time; at equal times releases come first, to make room for what begins.
    std::vector<std::pair<double, double>> changes;
    for (const Span& span : spans) {
      each_write(schedule, span.instruction, [&](const Value& v) {
        if (v.kind == ValueKind::saved)
          changes.emplace_back(span.begin, of_stage.at(static_cast<std::size_t>(v.stage)));
      });
      each_release(span.instruction, [&](const Value& v) {
        if (v.kind == ValueKind::saved)
          changes.emplace_back(span.end, -of_stage.at(static_cast<std::size_t>(v.stage)));
      });
    }
    std::sort(changes.begin(), changes.end());
    HeldCurve& curve = curves.emplace_back();
    double held = 0;
    for (const auto& [time, change] : changes) {
      held += change;
      if (!curve.empty() && curve.back().first == time)
        curve.back().second = held;
      else
        curve.emplace_back(time, held);
    }
  }
  return curves;
}

Schedule two_steps(const Schedule& schedule) {
  check(is_synchronous(schedule), "the schedule flushes");
  return repeated(schedule, 2);
}

}  // namespace echelon

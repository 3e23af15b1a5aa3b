#include "schedule/timeline.h"

#include <algorithm>
#include <iterator>
#include <limits>

namespace echelon {

double Timeline::makespan() const {
  double first = std::numeric_limits<double>::infinity(), last = 0;
  for (const auto& spans : ranks)
    for (const Span& span : spans) {
      first = std::min(first, span.begin);
      last = std::max(last, span.end);
    }
  return last > first ? last - first : 0;
}

double Timeline::busy(int rank) const {
  double sum = 0, until = -std::numeric_limits<double>::infinity();
  for (const Span& span : ranks[static_cast<std::size_t>(rank)]) {
    if (!is_compute(span.instruction.op)) continue;
    sum += std::max(0.0, span.end - std::max(span.begin, until));  // an overlapped pair counts once
    until = std::max(until, span.end);
  }
  return sum;
}

double Timeline::work() const {
  double sum = 0;
  for (std::size_t r = 0; r < ranks.size(); ++r) sum += busy(static_cast<int>(r));
  return ranks.empty() ? 0 : sum / static_cast<double>(ranks.size());
}

double Timeline::bubble_fraction() const {
  const double all = makespan();
  return all > 0 ? std::max(0.0, 1 - work() / all) : 0;
}

double Timeline::local_bubble() const {
  double largest = 0;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    double first = std::numeric_limits<double>::infinity(), last = 0;
    for (const Span& span : ranks[r])
      if (is_compute(span.instruction.op)) {
        first = std::min(first, span.begin);
        last = std::max(last, span.end);
      }
    if (last > first) largest = std::max(largest, last - first - busy(static_cast<int>(r)));
  }
  return largest;
}

Timeline last_steps(const Timeline& timeline, int step_microbatches, int steps) {
  Timeline result;
  for (const auto& spans : timeline.ranks) {
    auto begin = spans.end();
    for (int ends = 0; begin != spans.begin(); --begin) {
      const Instruction& i = std::prev(begin)->instruction;
      ends += i.op == Op::step && (i.microbatch + 1) % step_microbatches == 0;
      if (ends > steps) break;
    }
    result.ranks.emplace_back(begin, spans.end());
  }
  return result;
}

}  // namespace echelon

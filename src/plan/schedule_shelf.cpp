#include "plan/schedule_shelf.h"

#include <algorithm>

#include "base/error.h"
#include "schedule/schedules.h"
#include "schedule/simulate.h"
#include "schedule/vocabulary.h"

namespace echelon {
namespace {

// How many activations and gradients each rank sends to other ranks, per microbatch.
std::vector<double> sends_of(const Schedule& schedule) {
  constexpr int nobody = -1;
  const auto microbatches = static_cast<std::size_t>(schedule.num_microbatches);
  std::vector<int> readers(2 * static_cast<std::size_t>(value_rows(schedule)) * microbatches, nobody);
  const auto reader = [&](const Value& v) -> int& {
    const ValuePlace place = value_place(schedule, v);
    return readers[static_cast<std::size_t>(2 * place.row + place.column) * microbatches +
                   static_cast<std::size_t>(v.microbatch)];
  };
  for (std::size_t r = 0; r < schedule.ranks.size(); ++r)
    for (const Instruction& i : schedule.ranks[r])
      each_read(schedule, i, [&](const Value& v) {
        if (travels(v)) reader(v) = static_cast<int>(r);
      });
  std::vector<double> sends(schedule.ranks.size());
  for (std::size_t r = 0; r < schedule.ranks.size(); ++r) {
    for (const Instruction& i : schedule.ranks[r])
      each_write(schedule, i, [&](const Value& v) {
        if (travels(v) && reader(v) != nobody && reader(v) != static_cast<int>(r)) ++sends[r];
      });
    sends[r] /= schedule.num_microbatches;
  }
  return sends;
}

}  // namespace

ScheduleFacts facts_of(const Schedule& schedule) {
  ScheduleFacts facts;
  facts.num_stages = schedule.num_stages;
  facts.stage_fraction = schedule.stage_fraction();
  facts.parameter_copies = parameter_copies(schedule);
  facts.peak = peak_activations(schedule);
  facts.held = held_at_peaks(schedule);
  facts.sends = sends_of(schedule);
  facts.vocabulary_problem = vocabulary_problem(schedule);
  for (const auto& list : schedule.ranks) {
    std::vector<int> forwards(static_cast<std::size_t>(schedule.num_stages));
    for (const Instruction& i : list) {
      if (i.op == Op::F) ++forwards[static_cast<std::size_t>(i.stage)];
      facts.splits_backward |= i.op == Op::W;
      facts.overlaps |= i.overlaps_next;
    }
    auto& uses = facts.uses.emplace_back();
    for (int stage = 0; stage < schedule.num_stages; ++stage)
      if (const int count = forwards[static_cast<std::size_t>(stage)]; count > 0)
        uses.push_back({stage, static_cast<double>(count) / schedule.num_microbatches});
  }
  return facts;
}

const ScheduleFacts& ScheduleShelf::facts(const std::string& name, int ranks, int microbatches, int chunks) {
  const int shown = steady_microbatches(name, ranks, microbatches);
  const Key key{name, ranks, shown, chunks};
  auto found = facts_.find(key);
  if (found == facts_.end()) {
    ScheduleFacts facts;
    try {
      facts = facts_of(make_schedule(name, ranks, shown, chunks));
    } catch (const RequestError& error) {
      facts.problem = error.what();
    }
    found = facts_.emplace(key, std::move(facts)).first;
  }
  return found->second;
}

const Schedule& ScheduleShelf::schedule(const std::string& name, int ranks, int microbatches, int chunks) {
  constexpr std::size_t most_kept = 16;
  const Key key{name, ranks, microbatches, chunks};
  const auto found =
      std::find_if(schedules_.begin(), schedules_.end(), [&](const auto& kept) { return kept.first == key; });
  if (found != schedules_.end()) return found->second;
  if (schedules_.size() == most_kept) schedules_.pop_back();
  return schedules_.emplace_front(key, make_schedule(name, ranks, microbatches, chunks)).second;
}

}  // namespace echelon

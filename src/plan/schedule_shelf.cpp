#include "plan/schedule_shelf.h"

#include "base/error.h"
#include "schedule/schedules.h"
#include "schedule/simulate.h"
#include "schedule/vocabulary.h"

namespace echelon {
namespace {

// Activations and gradients that each rank hands to another one, over the microbatches.
std::vector<double> sends_of(const Schedule& schedule) {
  std::map<std::tuple<ValueKind, int, int>, std::size_t> readers;
  const auto key = [](const Value& v) { return std::tuple{v.kind, v.stage, v.microbatch}; };
  for (std::size_t r = 0; r < schedule.ranks.size(); ++r)
    for (const Instruction& i : schedule.ranks[r])
      each_read(schedule, i, [&](const Value& v) {
        if (travels(v)) readers[key(v)] = r;
      });
  std::vector<double> sends(schedule.ranks.size());
  for (std::size_t r = 0; r < schedule.ranks.size(); ++r) {
    for (const Instruction& i : schedule.ranks[r])
      each_write(schedule, i, [&](const Value& v) {
        const auto reader = travels(v) ? readers.find(key(v)) : readers.end();
        if (reader != readers.end() && reader->second != r) ++sends[r];
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
    std::map<int, int> forwards;
    for (const Instruction& i : list) {
      if (i.op == Op::F) ++forwards[i.stage];
      facts.splits_backward |= i.op == Op::W;
      facts.overlaps |= i.overlaps_next;
    }
    auto& uses = facts.uses.emplace_back();
    for (const auto& [stage, count] : forwards)
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
  auto& kept = schedules_[{name, ranks, microbatches, chunks}];
  if (!kept) kept = std::make_unique<Schedule>(make_schedule(name, ranks, microbatches, chunks));
  return *kept;
}

}  // namespace echelon

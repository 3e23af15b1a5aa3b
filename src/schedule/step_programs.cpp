#include "schedule/step_programs.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "base/error.h"
#include "schedule/lower.h"
#include "schedule/repeats.h"
#include "schedule/schedules.h"

namespace echelon {
namespace {

// Where the pieces of the steps end in a rank's list: after the optimizer step of the last microbatch.
std::vector<std::size_t> ends_of_steps(const std::vector<Instruction>& list, int microbatches) {
  std::vector<std::size_t> ends;
  for (std::size_t k = 0; k < list.size(); ++k)
    if (list[k].op == Op::step && (list[k].microbatch + 1) % microbatches == 0) ends.push_back(k + 1);
  return ends;
}

// The number of messages to another rank among a rank's first instructions.
std::ptrdiff_t sent_by(const Schedule& lowered, std::size_t from, std::size_t to, std::size_t until) {
  const auto first = lowered.ranks[from].begin();
  return std::count_if(first, first + static_cast<std::ptrdiff_t>(until), [&](const Instruction& i) {
    return i.op == Op::send && i.peer == static_cast<int>(to);
  });
}

// Instructions [begin, end) of each rank, completed so that no message is in flight after them: what another
// rank sends in its piece and is read later here is received at the end of this one.
Schedule cut(const Schedule& lowered, const std::vector<std::size_t>& begin,
             const std::vector<std::size_t>& end) {
  const std::size_t ranks = lowered.ranks.size();
  Schedule piece{lowered.name, lowered.num_stages, lowered.num_microbatches, {}, lowered.vocabulary_parts};
  for (std::size_t r = 0; r < ranks; ++r) {
    const auto& list = lowered.ranks[r];
    auto& out = piece.ranks.emplace_back();
    std::vector<std::ptrdiff_t> received(ranks, 0);  // so far, of each peer
    std::vector<std::ptrdiff_t> before(ranks), due(ranks);
    for (std::size_t from = 0; from < ranks; ++from) {
      before[from] = sent_by(lowered, from, r, begin[from]);
      due[from] = sent_by(lowered, from, r, end[from]);
    }
    std::vector<Instruction> early;
    for (std::size_t k = 0; k < list.size(); ++k) {
      const Instruction& i = list[k];
      if (i.op == Op::recv) {
        const auto from = static_cast<std::size_t>(i.peer);
        const std::ptrdiff_t index = received[from]++;
        if (index < before[from] || index >= due[from]) {
          check(index < before[from] || k >= end[r], "a piece needs a message that is sent after it");
          continue;
        }
        (k < end[r] ? out : early).push_back(i);
      } else if (k >= begin[r] && k < end[r]) {
        out.push_back(i);
      }
    }
    out.insert(out.end(), early.begin(), early.end());
  }
  return piece;
}

Schedule cut_step(const Schedule& lowered, int microbatches, int step) {
  std::vector<std::size_t> begin, end;
  for (const auto& list : lowered.ranks) {
    const auto ends = ends_of_steps(list, microbatches);
    begin.push_back(step == 0 ? 0 : ends[static_cast<std::size_t>(step - 1)]);
    end.push_back(ends[static_cast<std::size_t>(step)]);
  }
  return cut(lowered, begin, end);
}

// A rank's first instructions, up to the given number of forward passes and what these send.
std::size_t behind_forwards(const std::vector<Instruction>& list, std::size_t forwards) {
  std::size_t k = 0;
  for (std::size_t left = forwards; left > 0; ++k) left -= list[k].op == Op::F;
  while (k > 0 && k < list.size() && list[k].op == Op::send) ++k;
  return k;
}

// Lets rank r of P run P-1-r forward passes of its first stage before the validation: as many as fit until
// the last rank ends its step, or fewer if their inputs are not sent before it. What they send is also
// received before it, so that they can run again.
Schedule with_validation(const Schedule& lowered) {
  const std::size_t ranks = lowered.ranks.size();
  std::vector<std::size_t> begin(ranks, 0), forwards(ranks, 0), ahead(ranks, 0), end;
  for (std::size_t r = 0; r < ranks; ++r) {
    const auto& list = lowered.ranks[r];
    for (const Instruction& i : list) {
      if (i.op == Op::send || i.op == Op::recv) continue;
      if (forwards[r] == ranks - 1 - r || i.op != Op::F || i.stage != static_cast<int>(r) || i.overlaps_next)
        break;
      ++forwards[r];
    }
    ahead[r] = behind_forwards(list, forwards[r]);
    end.push_back(list.size());
  }
  const auto has_inputs = [&](std::size_t r) {
    std::vector<std::ptrdiff_t> received(ranks, 0);  // of each peer
    for (std::size_t k = 0; k < ahead[r]; ++k)
      if (const Instruction& i = lowered.ranks[r][k]; i.op == Op::recv)
        ++received[static_cast<std::size_t>(i.peer)];
    for (std::size_t from = 0; from < ranks; ++from)
      if (received[from] > sent_by(lowered, from, r, ahead[from])) return false;
    return true;
  };
  for (bool is_changed = true; std::exchange(is_changed, false);)
    for (std::size_t r = 0; r < ranks; ++r)
      while (!has_inputs(r)) {
        ahead[r] = behind_forwards(lowered.ranks[r], --forwards[r]);
        is_changed = true;
      }
  Schedule result = cut(lowered, begin, ahead);
  const Schedule rest = cut(lowered, ahead, end);
  for (std::size_t r = 0; r < ranks; ++r) {
    auto& list = result.ranks[r];
    list.push_back({Op::validate});
    list.insert(list.end(), rest.ranks[r].begin(), rest.ranks[r].end());
  }
  return result;
}

}  // namespace

StepPrograms::StepPrograms(const Schedule& flushing, bool barrier)
    : schedule_(flushing), microbatches_(flushing.num_microbatches) {
  const Schedule lowered = lower(flushing);
  programs_.push_back({barrier ? lowered : with_validation(lowered)});
}

StepPrograms::StepPrograms(const std::string& name, int ranks, int microbatches)
    : microbatches_(microbatches),
      updates_(name == "pipedream" ? microbatches : 1),
      // Rank 0's forward passes are P-1 microbatches ahead of its backward passes.
      begin_((ranks - 2 + microbatches) / microbatches),
      reach_(begin_) {
  check(ranks > 1, "a stream needs a pipeline");
  for (int step = 0; step <= begin_; ++step) {
    auto& by_left = programs_.emplace_back();
    for (int left = 1; left <= reach_ + 1; ++left)
      by_left.push_back(
          cut_step(lower(make_schedule(name, ranks, microbatches, 0, step + left)), microbatches, step));
  }
  schedule_ = make_schedule(name, ranks, microbatches, 0, shown_steps());
}

StepPrograms StepPrograms::of_rank(int rank) const {
  check(flushes(), "what repeats in a stream is a step");
  const auto r = static_cast<std::size_t>(rank);
  StepPrograms one;
  Schedule lowered{schedule_.name, schedule_.num_stages, 0, {}, schedule_.vocabulary_parts};
  lowered.ranks.resize(schedule_.ranks.size());
  lowered.ranks[r] = without_repeats(programs_[0][0], rank);
  for (const Instruction& i : lowered.ranks[r])
    lowered.num_microbatches = std::max(lowered.num_microbatches, i.microbatch + 1);
  one.schedule_ = lowered;
  std::erase_if(one.schedule_.ranks[r], [](const Instruction& i) {
    return i.op == Op::send || i.op == Op::recv || i.op == Op::validate;
  });
  one.microbatches_ = lowered.num_microbatches;
  one.programs_.push_back({std::move(lowered)});
  return one;
}

StepPrograms::Program StepPrograms::program(int step, int steps_left) const {
  const int like = std::min(step, begin_), shift = step - like;
  const auto left = static_cast<std::size_t>(std::min(steps_left, reach_ + 1));
  if (flushes()) return {&programs_[0][0], 0, 0, true};
  return {&programs_[static_cast<std::size_t>(like)][left - 1], shift * microbatches_, shift * updates_,
          steps_left == 1};
}

Schedule repeated(const Schedule& flushing, int steps) {
  Schedule result = flushing;
  result.num_microbatches = flushing.num_microbatches * steps;
  for (auto& list : result.ranks) {
    const std::vector<Instruction> once = list;
    for (int step = 1; step < steps; ++step)
      for (Instruction i : once) {
        i.microbatch += step * flushing.num_microbatches;
        list.push_back(i);
      }
  }
  return result;
}

std::vector<int> staleness(const Schedule& schedule) {
  std::vector<int> latest;
  for (const auto& list : schedule.ranks) {
    latest.push_back(0);
    int oldest = std::numeric_limits<int>::max();  // version read by a backward pass since the last step
    for (const Instruction& i : list) {
      if (i.op == Op::B || i.op == Op::BW) oldest = std::min(oldest, i.version);
      if (i.op != Op::step) continue;
      latest.back() = std::max(latest.back(), i.version - oldest);
      oldest = std::numeric_limits<int>::max();
    }
  }
  return latest;
}

}  // namespace echelon

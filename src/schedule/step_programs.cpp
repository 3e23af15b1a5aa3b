#include "schedule/step_programs.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "base/error.h"
#include "schedule/lower.h"
#include "schedule/schedules.h"

namespace echelon {
namespace {

// Where the pieces of the steps end in a rank's list: behind the optimizer step of their last microbatch.
std::vector<std::size_t> ends_of_steps(const std::vector<Instruction>& list, int microbatches) {
  std::vector<std::size_t> ends;
  for (std::size_t k = 0; k < list.size(); ++k)
    if (list[k].op == Op::step && (list[k].microbatch + 1) % microbatches == 0) ends.push_back(k + 1);
  return ends;
}

// The piece of one step. A message that another rank sends in its piece and that is read later here is
// received at the end of this one.
Schedule cut_step(const Schedule& lowered, int microbatches, int step) {
  const std::size_t ranks = lowered.ranks.size();
  std::vector<std::size_t> begin(ranks), end(ranks);
  for (std::size_t r = 0; r < ranks; ++r) {
    const auto ends = ends_of_steps(lowered.ranks[r], microbatches);
    begin[r] = step == 0 ? 0 : ends[static_cast<std::size_t>(step - 1)];
    end[r] = ends[static_cast<std::size_t>(step)];
  }
  const auto sent_by = [&](std::size_t from, std::size_t to, std::size_t until) {
    const auto first = lowered.ranks[from].begin();
    return std::count_if(first, first + static_cast<std::ptrdiff_t>(until), [&](const Instruction& i) {
      return i.op == Op::send && i.peer == static_cast<int>(to);
    });
  };
  Schedule piece{lowered.name, lowered.num_stages, lowered.num_microbatches, {}};
  for (std::size_t r = 0; r < ranks; ++r) {
    const auto& list = lowered.ranks[r];
    auto& out = piece.ranks.emplace_back();
    std::vector<std::ptrdiff_t> received(ranks, 0);  // so far, of each peer
    std::vector<std::ptrdiff_t> before(ranks), due(ranks);
    for (std::size_t from = 0; from < ranks; ++from) {
      before[from] = step == 0 ? 0 : sent_by(from, r, begin[from]);
      due[from] = sent_by(from, r, end[from]);
    }
    std::vector<Instruction> early;
    for (std::size_t k = 0; k < list.size(); ++k) {
      const Instruction& i = list[k];
      if (i.op == Op::recv) {
        const auto from = static_cast<std::size_t>(i.peer);
        const std::ptrdiff_t index = received[from]++;
        if (index < before[from] || index >= due[from]) {
          check(index < before[from] || k >= end[r], "a step needs a message that is sent after it");
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

}  // namespace

StepPrograms::StepPrograms(const Schedule& flushing)
    : schedule_(flushing), microbatches_(flushing.num_microbatches), programs_{{lower(flushing)}} {}

StepPrograms::StepPrograms(const std::string& name, int ranks, int microbatches)
    : microbatches_(microbatches),
      updates_(name == "pipedream" ? microbatches : 1),
      // Rank 0 is P-1 microbatches ahead of its backward passes.
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

StepPrograms::Program StepPrograms::program(int step, int steps_left) const {
  const int like = std::min(step, begin_), shift = step - like;
  const auto left = static_cast<std::size_t>(std::min(steps_left, reach_ + 1));
  if (flushes()) return {&programs_[0][0], 0, 0, true};
  return {&programs_[static_cast<std::size_t>(like)][left - 1], shift * microbatches_, shift * updates_,
          steps_left == 1};
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

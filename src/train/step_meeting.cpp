#include "train/step_meeting.h"

#include <array>
#include <numeric>

#include "base/error.h"

namespace echelon {
namespace {

constexpr std::size_t num_words = 3;

std::vector<int> everyone(int n) {
  std::vector<int> ranks(static_cast<std::size_t>(n));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

StepMeeting::StepMeeting(const Rank& rank)
    : group_(rank.join_aside(everyone(rank.mesh().num_ranks()), "steps")) {}

void StepMeeting::say(const Words& words) {
  check(!said_, "what was said is heard before more is said");
  const std::array<double, num_words> numbers{words.stop ? 1.0 : 0.0, static_cast<double>(words.written),
                                              words.seconds};
  said_ = HostGroup(*group_).begin_gather(numbers);
}

std::vector<StepMeeting::Words> StepMeeting::hear() {
  std::vector<Words> all;
  if (!said_) return all;
  const std::vector<double> heard = said_->get();
  said_.reset();
  for (std::size_t at = 0; at < heard.size(); at += num_words)
    all.push_back({heard[at] != 0, static_cast<std::int64_t>(heard[at + 1]), heard[at + 2]});
  return all;
}

}  // namespace echelon

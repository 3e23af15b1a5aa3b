#include "train/step_meeting.h"

#include <array>

#include "base/error.h"

namespace echelon {

static constexpr std::size_t num_words = 6;

StepMeeting::StepMeeting(const Rank& rank)
    : group_(rank.join_aside(everyone(rank.mesh().num_ranks()), "steps")) {}

void StepMeeting::say(const Words& words) {
  check(!said_, "what was said is heard before more is said");
  const std::array<double, num_words> numbers{words.stop ? 1.0 : 0.0,
                                              static_cast<double>(words.written),
                                              words.seconds,
                                              static_cast<double>(words.fingerprinted),
                                              static_cast<double>(words.fingerprint >> 32),
                                              static_cast<double>(words.fingerprint & 0xffffffff)};
  said_ = HostGroup(*group_).begin_gather(numbers);
}

bool StepMeeting::told_by_first(bool word) {
  std::vector<double> said{word ? 1.0 : 0.0};
  HostGroup(*group_).broadcast(said, 0);
  return said.front() != 0;
}

std::vector<StepMeeting::Words> StepMeeting::hear() {
  std::vector<Words> all;
  if (!said_) return all;
  const std::vector<double> heard = said_->get();
  said_.reset();
  for (std::size_t at = 0; at < heard.size(); at += num_words)
    all.push_back(
        {heard[at] != 0, static_cast<std::int64_t>(heard[at + 1]), heard[at + 2],
         static_cast<std::int64_t>(heard[at + 3]),
         (static_cast<std::uint64_t>(heard[at + 4]) << 32) | static_cast<std::uint64_t>(heard[at + 5])});
  return all;
}

}  // namespace echelon

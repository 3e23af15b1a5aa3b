#include "train/step_meeting.h"

#include <numeric>

#include "base/error.h"

namespace echelon {
namespace {

constexpr std::int64_t num_words = 3;

std::vector<int> everyone(int n) {
  std::vector<int> ranks(static_cast<std::size_t>(n));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

// Its memory is nobody's: predictions of the arena's know nothing of it.
StepMeeting::StepMeeting(const Rank& rank)
    : group_(rank.join_aside(everyone(rank.mesh().num_ranks()), "steps")),
      counts_(static_cast<std::size_t>(group_->size()), num_words),
      memory_(static_cast<std::size_t>((1 + group_->size()) * num_words)) {
  said_ = Tensor::view_of(memory_.data(), DType::f64, {num_words});
  heard_ = Tensor::view_of(memory_.data() + num_words, DType::f64, {group_->size() * num_words});
}

void StepMeeting::say(const Words& words) {
  check(!spoken_, "what was said is heard before more is said");
  double* const w = said_.host<double>();
  w[0] = words.stop;
  w[1] = static_cast<double>(words.written);
  w[2] = words.seconds;
  pending_ = group_->all_gather(said_, heard_, counts_);
  spoken_ = true;
}

std::vector<StepMeeting::Words> StepMeeting::hear() {
  if (!spoken_) return {};
  pending_.wait();
  spoken_ = false;
  std::vector<Words> all;
  for (int r = 0; r < group_->size(); ++r) {
    const double* const w = heard_.host<double>() + r * num_words;
    all.push_back({w[0] != 0, static_cast<std::int64_t>(w[1]), w[2]});
  }
  return all;
}

}  // namespace echelon

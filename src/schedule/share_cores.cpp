#include "schedule/share_cores.h"

#include <algorithm>
#include <limits>
#include <map>

#include "base/error.h"

namespace echelon {
namespace {

constexpr double no_time = std::numeric_limits<double>::infinity();

class CoreSharing {
 public:
  CoreSharing(const Schedule& schedule, const SimulationCosts& costs, const CoreShare& share)
      : schedule_(schedule), costs_(costs), share_(share), ranks_(schedule.ranks.size()) {
    timeline_.ranks.resize(ranks_.size());
  }

  Timeline run() {
    while (true) {
      start_what_can();
      int computing = 0;
      for (const RankState& rank : ranks_) computing += rank.computes;
      const double speed = computing > 0 ? std::min(1.0, share_.cores / (computing * share_.wanted)) : 1;
      double wait = next_arrival_ - now_;
      for (const RankState& rank : ranks_)
        if (rank.computes) wait = std::min(wait, rank.left / speed);
      if (wait == no_time) break;
      pass(wait, speed);
    }
    for (std::size_t r = 0; r < ranks_.size(); ++r)
      check(ranks_[r].next == schedule_.ranks[r].size(), "a schedule that is simulated finishes");
    return std::move(timeline_);
  }

 private:
  struct RankState {
    std::size_t next = 0;
    bool computes = false;
    double begin = 0, left = 0;  // of the instruction: seconds with cores of its own
  };

  // Starts the next instruction of every rank whose inputs are there; instructions without duration end at
  // once.
  void start_what_can() {
    next_arrival_ = no_time;
    for (bool any = true; any;) {
      any = false;
      for (std::size_t r = 0; r < ranks_.size(); ++r) {
        RankState& rank = ranks_[r];
        if (rank.computes || rank.next == schedule_.ranks[r].size()) continue;
        const Instruction& i = schedule_.ranks[r][rank.next];
        const double there = available(r, i);
        if (there > now_) {
          if (there < no_time) next_arrival_ = std::min(next_arrival_, there);
          continue;
        }
        rank.begin = now_;
        rank.left = costs_.of(i);
        rank.computes = rank.left > 0;
        if (!rank.computes) finish(r);
        any = any || !rank.computes;
      }
    }
  }

  // A rank's own values are always there: its list is in order.
  double available(std::size_t r, const Instruction& i) const {
    double there = 0;
    each_read(schedule_, i, [&](const Value& v) {
      if (!travels(v)) return;
      const auto found = made_.find(v);
      if (found == made_.end())
        there = no_time;
      else
        there = std::max(there, found->second.time + (found->second.rank == r ? 0 : costs_.message));
    });
    return there;
  }

  void pass(double seconds, double speed) {
    now_ += seconds;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      RankState& rank = ranks_[r];
      if (!rank.computes) continue;
      const bool ends = rank.left / speed <= seconds;
      rank.left -= seconds * speed;
      if (ends) finish(r);
    }
  }

  void finish(std::size_t r) {
    RankState& rank = ranks_[r];
    const Instruction& i = schedule_.ranks[r][rank.next++];
    rank.computes = false;
    timeline_.ranks[r].push_back({i, rank.begin, now_});
    each_write(schedule_, i, [&](const Value& v) {
      if (travels(v)) made_[v] = {now_, r};
    });
  }

  struct Made {
    double time = 0;
    std::size_t rank = 0;
  };
  const Schedule& schedule_;
  const SimulationCosts& costs_;
  CoreShare share_;
  std::vector<RankState> ranks_;
  std::map<Value, Made> made_;
  double now_ = 0, next_arrival_ = no_time;
  Timeline timeline_;
};

}  // namespace

Timeline simulate_on_cores(const Schedule& schedule, const SimulationCosts& costs, const CoreShare& share) {
  return CoreSharing(schedule, costs, share).run();
}

}  // namespace echelon

// What one rank has done last, kept for the day it fails: the flight record.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "comm/call.h"

namespace echelon {

// Where a rank stood.
struct RankState {
  int rank = 0;
  std::string instruction;     // what it was told to be at: "step 12, 2B1"; empty: nothing was said
  std::string last_finished;   // operation; empty: none
  std::string waits_in;        // operation; empty: it does not wait
  std::vector<int> waits_for;  // world ranks
  double seconds = 0;          // that it has waited, or since its last operation began or ended
  double silent_seconds = 0;   // age of all this, where the rank could not be asked
};
// "waits in dp collective 13 (all_reduce of 4096 f32) for rank 3, for 2.0 s, at step 4, 2F1; last finished
// ..."
std::string describe(const RankState& state);

// The last operations of one rank. Its own thread writes; any thread may look.
class FlightRecorder {
 public:
  using Clock = std::chrono::steady_clock;
  using Ticket = std::uint64_t;
  static constexpr std::size_t num_kept = 256;

  // `group` outlives the recorder. Messages are counted by channel, collectives by group.
  Ticket begin(const std::string& group, std::uint64_t number, const Call& call);
  void finish(Ticket ticket);
  // Between the two the rank sleeps in the operation.
  void sleep(Ticket ticket);
  void wake();
  double waited_seconds() const;  // so far
  // What the rank is at, in the words of its schedule.
  void at(std::string_view instruction);

  RankState state() const;  // without rank and waits_for
  // One JSON object a line, oldest first.
  std::string json_lines(int rank) const;

 private:
  struct Entry {
    const std::string* group = nullptr;
    std::uint64_t number = 0;
    Verb verb = Verb::barrier;
    ReduceOp op = ReduceOp::sum;
    DType dtype = DType::f32;
    int root = 0;
    std::size_t num_counts = 0;
    std::array<std::int64_t, 4> counts{};  // the first ones
    std::int64_t total = 0;                // elements
    Clock::time_point begin{}, end{};
    bool finished = false;
    std::array<char, 32> instruction{};
  };
  static std::string name(const Entry& entry);
  Entry& entry(Ticket ticket) { return entries_[ticket % num_kept]; }
  const Entry& entry(Ticket ticket) const { return entries_[ticket % num_kept]; }

  mutable std::mutex mutex_;
  std::vector<Entry> entries_{num_kept};
  Ticket next_ = 0, last_finished_ = 0, asleep_in_ = 0;
  bool any_finished_ = false, asleep_ = false;
  double waited_seconds_ = 0;
  Clock::time_point slept_at_{}, changed_ = Clock::now();
  std::array<char, 32> instruction_{};
};

}  // namespace echelon

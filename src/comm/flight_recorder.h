// What one rank has done last, kept for the day it fails: the flight record.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "comm/call.h"

namespace echelon {

// Where a rank stood.
struct RankState {
  int rank = 0;
  std::string instruction;     // what it was told to be at: "step 12, 2B1"; empty: nothing was said
  std::string last_finished;   // operation; empty: none
  std::string waits_in;        // operation; empty: it does not wait
  std::vector<int> waits_for;  // world ranks; empty where it waits: not known, or nobody any more
  bool to_take = false;        // those have given their part, and must still take what is sent to them
  double seconds = 0;          // that it has waited, or since its last operation began or ended
  double age_seconds = 0;      // since the rank was heard of, and all this was so
  bool silent = false;         // it was asked and has not answered: what it did since is not known
  bool gone = false;           // its process ended
};
// "waits in dp collective 13 (all_reduce of 4096 f32) for rank 3, for 2.0 s, at step 4, 2F1; last finished
// ..."
std::string describe(const RankState& state);

// The last operations of one rank. Its own thread writes; any thread may look.
class FlightRecorder {
 public:
  using Ticket = std::uint64_t;
  static constexpr std::size_t num_kept = 256;

  explicit FlightRecorder(Time time = {}) : time_(std::move(time)), changed_(time_.now()) {}

  // `group` outlives the recorder. Messages are counted by channel, collectives by group.
  Ticket begin(const std::string& group, std::uint64_t number, const Call& call);
  void finish(Ticket ticket);
  // Between the two the rank sleeps in the operation. It may wake now and then and sleep again: the wait is
  // one from the first sleep until the operation is finished.
  void sleep(Ticket ticket);
  void wake();
  double waited_seconds() const;  // so far
  // What the rank is at, in the words of its schedule.
  void at(std::string_view instruction);

  // Without rank; waits_for of an AnnouncedWait only.
  RankState state() const;
  // That the wait has lasted which the rank sleeps in, or has announced; 0 where there is none.
  double wait_seconds() const;
  // One JSON object a line, oldest first.
  std::string json_lines(int rank) const;

 private:
  friend class AnnouncedWait;
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
  struct Announced {
    std::string what;
    std::vector<int> ranks;
    Clock::time_point since;
  };
  static std::string name(const Entry& entry);
  Entry& entry(Ticket ticket) { return entries_[ticket % num_kept]; }
  const Entry& entry(Ticket ticket) const { return entries_[ticket % num_kept]; }
  std::optional<Clock::time_point> waits_since() const;

  const Time time_;
  mutable std::mutex mutex_;
  std::vector<Entry> entries_{num_kept};
  Ticket next_ = 0, last_finished_ = 0;
  bool any_finished_ = false, asleep_ = false;
  std::optional<Ticket> waits_in_;  // also between two sleeps
  double waited_seconds_ = 0;
  Clock::time_point wait_began_{}, slept_at_{}, changed_;
  std::optional<Announced> announced_;
  std::array<char, 32> instruction_{};
};

// While it lives the rank waits for these world ranks in something that is no operation of a group.
class AnnouncedWait {
 public:
  AnnouncedWait(FlightRecorder& recorder, std::string what, std::vector<int> ranks);
  ~AnnouncedWait();
  AnnouncedWait(const AnnouncedWait&) = delete;
  AnnouncedWait& operator=(const AnnouncedWait&) = delete;

 private:
  FlightRecorder& recorder_;
};

}  // namespace echelon

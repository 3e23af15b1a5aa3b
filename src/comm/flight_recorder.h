// The flight record of a rank: its last operations, for the report of a failure.
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

// The state of a rank at one time.
struct RankState {
  int rank = 0;
  std::string instruction;     // what it announced to be at: "step 12, 2B1"; empty: nothing
  std::string last_finished;   // operation; empty: none
  std::string waits_in;        // operation; empty: it does not wait
  std::vector<int> waits_for;  // world ranks; empty while it waits: unknown, or nobody any more
  bool to_take = false;        // these have sent their part, and must only receive
  double seconds = 0;          // how long it has waited, or since its last operation began or ended
  double age_seconds = 0;      // age of this state: since it was last heard of
  bool silent = false;         // it does not answer, so what it did since is unknown
  bool gone = false;           // its process ended
};
// "waits in dp collective 13 (all_reduce of 4096 f32) for rank 3, for 2.0 s, at step 4, 2F1; last finished
// ..."
std::string describe(const RankState& state);

// Records one rank's last operations. The rank's thread writes; any thread may read.
class FlightRecorder {
 public:
  using Ticket = std::uint64_t;
  static constexpr std::size_t num_kept = 256;

  explicit FlightRecorder(Time time = {}) : time_(std::move(time)), changed_(time_.now()) {}

  // `group` outlives the recorder. Messages are numbered by channel, collectives by group.
  Ticket begin(const std::string& group, std::uint64_t number, const Call& call);
  void finish(Ticket ticket);
  // The rank sleeps in the operation between sleep() and wake(). It may wake and sleep again: its wait lasts
  // from the first sleep until the operation is finished.
  void sleep(Ticket ticket);
  void wake();
  double waited_seconds() const;  // so far
  // Announces what the rank is doing, in the words of its schedule.
  void at(std::string_view instruction);

  // The state, without `rank`; waits_for only of an AnnouncedWait.
  RankState state() const;
  // How long the current wait has lasted, in an operation or announced; 0 if there is none.
  double wait_seconds() const;
  // One JSON object per line, oldest first.
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

// During its lifetime the rank waits for these world ranks, in something other than a group's operation.
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

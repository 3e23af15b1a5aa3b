// What the processes of a job tell each other outside MPI, and what each concludes from it: who is gone, who
// is silent, why the job ends, who is at fault and who reports it. There are no sockets, threads or clocks
// here: events are passed in with their times.
//
// The first failure ends the job; if there are several at one time, all processes agree on one. Every process
// then sends its last words: the state of its rank. The process that found the failure waits for these and
// speaks for all. Every process waits until somebody that was there has spoken: if the speaker is gone or
// silent, another one speaks, and in the end each for itself.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "comm/control_frames.h"

namespace echelon {

class ControlProtocol {
 public:
  using Frame = ControlFrame;
  // A rank that has been silent for this long (twelve beats of the network) is not waited for when all report
  // their states.
  static constexpr std::chrono::milliseconds silence{3000};
  // How long the report waits for further ranks that fail at the same time, for example because a disk is
  // full.
  static constexpr std::chrono::milliseconds settling{500};

  ControlProtocol(int rank, int size, Clock::time_point now);

  // ---- what happens

  // A failure that this process found. The first failure wins.
  void fail(Failure failure, Clock::time_point now);
  void take(int from, Frame type, const std::string& text, Clock::time_point now);
  void lose(int from, Clock::time_point now,
            const std::string& why = "");  // its connection ended, or was closed
  void say_last_words(const RankState& own, Clock::time_point now);
  // This rank's thread has left its operation. `cause`: its own error; empty if it only learned of the
  // failure.
  void come_back(const std::string& cause);
  void finish_round() { ++rounds_; }

  // ---- what follows

  bool failed() const { return failure_.has_value(); }
  // Without a verdict before the report; empty if the job has not failed.
  Failure failure() const { return failure_.value_or(Failure{}); }
  // The failure, each time that this process must tell the others of it.
  std::optional<Failure> failure_to_tell();
  // The failure with its verdict, other ranks' failures at the same time, and each rank's state. Returned
  // once, on the rank that speaks for all.
  struct Report {
    Failure failure;
    std::vector<std::string> further;  // "rank 2 failed too: ..."
    std::vector<RankState> states;
  };
  std::optional<Report> report_when_due(Clock::time_point now);
  // Whether some rank has reported.
  bool reported() const { return reported_; }

  RankState last_heard(int rank, Clock::time_point now) const;
  double unheard_seconds(int rank, Clock::time_point now) const;
  // The ranks that have finished fewer rounds than this one.
  std::vector<int> unfinished() const;

 private:
  struct Peer {
    RankState state;
    Clock::time_point heard_at, stood_at;  // of anything; of the state
    bool gone = false, said_goodbye = false, said_last_words = false, is_back = false;
    std::string cause;        // the rank's own error, if any
    std::int64_t rounds = 0;  // finished by the rank
  };
  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  const Peer& peer(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }
  int num_ranks() const { return static_cast<int>(peers_.size()); }
  bool waits_for_words(Clock::time_point now) const;
  bool waits_for_causes(Clock::time_point now) const;
  int speaker(Clock::time_point now) const;

  int rank_;
  std::vector<Peer> peers_;
  std::optional<Failure> failure_;
  Clock::time_point failed_at_;
  std::optional<Failure> told_;
  bool reported_ = false;
  std::int64_t rounds_ = 0;
};

}  // namespace echelon

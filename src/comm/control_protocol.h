// What the processes of a job tell each other beside MPI, and what each of them concludes from it: who is
// gone, who is silent, why the job ends, who is at fault and who says so. No socket, thread or clock is in
// here: what happens is handed in with the time at which it did.
//
// The first failure ends the job; of several at one time all processes keep the same. Every process then says
// its last words: where its rank stands. The one that found the failure waits for them and speaks for all.
// No process takes it that somebody has spoken before one that was there has: where the speaker is gone, or
// mute, another one speaks, and in the end each for itself.
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
  // A rank that has not been heard of for so long is not waited for when all are to say where they stand:
  // twelve beats of the network.
  static constexpr std::chrono::milliseconds silence{3000};
  // How long the report waits for ranks that fail by themselves at the same time, as on a full disk.
  static constexpr std::chrono::milliseconds settling{500};

  ControlProtocol(int rank, int size, Clock::time_point now);

  // ---- what happens

  // Found by this process. The first failure wins.
  void fail(Failure failure, Clock::time_point now);
  void take(int from, Frame type, const std::string& text, Clock::time_point now);
  void lose(int from, Clock::time_point now, const std::string& why = "");  // its connection ended, or had to
  void say_last_words(const RankState& own, Clock::time_point now);
  // The own rank's thread has left what it was at. `cause`: of its own; empty: it only learned of the
  // failure.
  void come_back(const std::string& cause);
  void finish_round() { ++rounds_; }

  // ---- what follows

  bool failed() const { return failure_.has_value(); }
  // Before the report without a verdict; of a job that has not failed empty.
  Failure failure() const { return failure_.value_or(Failure{}); }
  // The failure, each time that the others are to hear of it from here.
  std::optional<Failure> failure_to_tell();
  // The failure with its verdict, what other ranks failed by at the same time, and how each rank stood: once,
  // on the one rank that speaks for all.
  struct Report {
    Failure failure;
    std::vector<std::string> further;  // "rank 2 failed too: ..."
    std::vector<RankState> states;
  };
  std::optional<Report> report_when_due(Clock::time_point now);
  // Somebody has spoken.
  bool reported() const { return reported_; }

  RankState last_heard(int rank, Clock::time_point now) const;
  double unheard_seconds(int rank, Clock::time_point now) const;
  // Ranks that have finished fewer rounds than this one.
  std::vector<int> unfinished() const;

 private:
  struct Peer {
    RankState state;
    Clock::time_point heard_at, stood_at;  // of anything; of the state
    bool gone = false, said_goodbye = false, said_last_words = false, is_back = false;
    std::string cause;        // why the rank failed by itself
    std::int64_t rounds = 0;  // that the rank has finished
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

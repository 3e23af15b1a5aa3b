// What the processes of a job tell each other beside MPI, and what each of them concludes from it: who is
// gone, who is silent, why the job ends, who is at fault and who says so. No socket, thread or clock is in
// here: what happens is handed in with the time at which it did.
//
// The first failure ends the job; of several at one time all processes keep the same. Every process then says
// its last words: where its rank stands. The one that found the failure waits for them and speaks for all.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "comm/flight_recorder.h"

namespace echelon {

// Why a job ends.
struct Failure {
  int origin = -1;  // the rank at fault; -1: none, or not known
  std::string why;
  bool refused = false;  // the request is wrong, and nothing else
  bool late = false;     // a wait lasted too long: who is at fault is for the records of all ranks to say
  int found_by = -1;     // rank
};

class ControlProtocol {
 public:
  enum class Frame : std::uint8_t { state, failure, last_words, report, done, goodbye };
  // A rank that has not been heard of for so long is not waited for when all are to say where they stand:
  // twelve beats of the network.
  static constexpr std::chrono::milliseconds silence{3000};

  ControlProtocol(int rank, int size, Clock::time_point now);

  // ---- what happens

  // Found by this process. The first failure wins.
  void fail(Failure failure, Clock::time_point now);
  void take(int from, Frame type, const std::string& text, Clock::time_point now);
  void lose(int from, Clock::time_point now);  // its connection ended
  void say_last_words(const RankState& own, Clock::time_point now);
  void finish_round() { ++rounds_; }

  // ---- what follows

  bool failed() const { return failure_.has_value(); }
  // Before the report without a verdict; of a job that has not failed empty.
  Failure failure() const { return failure_.value_or(Failure{}); }
  // The failure with its verdict, and how each rank stood: once, on the one rank that speaks for all.
  struct Report {
    Failure failure;
    std::vector<RankState> states;
  };
  std::optional<Report> report_when_due(Clock::time_point now);
  // Somebody has spoken, or nobody will.
  bool reported() const { return reported_; }

  RankState last_heard(int rank, Clock::time_point now) const;
  double unheard_seconds(int rank, Clock::time_point now) const;
  // Ranks that have finished fewer rounds than this one.
  std::vector<int> unfinished() const;

  static std::string encode(const RankState& state);
  static std::string encode(const Failure& failure);

 private:
  struct Peer {
    RankState state;
    Clock::time_point heard_at, stood_at;  // of anything; of the state
    bool gone = false, said_goodbye = false, said_last_words = false;
    int rounds = 0;  // that the rank has finished
  };
  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  const Peer& peer(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }
  int num_ranks() const { return static_cast<int>(peers_.size()); }
  bool waits_for_words(Clock::time_point now) const;
  int speaker(Clock::time_point now) const;  // -1: nobody any more

  int rank_;
  std::vector<Peer> peers_;
  std::optional<Failure> failure_;
  Clock::time_point failed_at_;
  bool reported_ = false;
  int rounds_ = 0;
};

}  // namespace echelon

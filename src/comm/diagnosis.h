// Why a job stands still: finds the rank at fault from the records of all ranks. A pure function of the
// records, the same for ranks that are threads and ranks that are processes; it reads no clock and asks
// nobody.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "comm/flight_recorder.h"

namespace echelon {

// Whether a rank has waited too long for others. If these have sent their part and only have to receive, the
// rank is slow rather than late, unless one of them has been silent for as long. `unheard_seconds` of a rank;
// always 0 for thread ranks.
bool waits_too_long(const RankState& state, std::chrono::milliseconds patience,
                    const std::function<double(int rank)>& unheard_seconds);

// "dp collective 11 (all_reduce of 1000 f32): rank 0 waited 2000 ms for ranks 1, 2"
std::string describe_late_wait(const RankState& state, std::chrono::milliseconds patience);

struct Diagnosis {
  int at_fault = -1;        // world rank; -1: no single rank
  std::vector<int> circle;  // ranks that wait for each other (deadlock); empty: none
  std::string verdict;      // the same as text, to follow describe_late_wait()
};

// Finds what holds up rank `waiting`, whose wait was given up `given_up_seconds` before these records were
// collected, by following waits from rank to rank. `states` is by rank. The causes, in order of precedence;
// of several ranks with the same cause, the one that has had it for longest:
//   a rank whose process ended;
//   a silent rank: what it waits for is unknown, so no circle goes through it;
//   a rank that does not wait;
//   a rank whose wait began only after the other had been given up: it came too late;
//   a circle: all ranks found wait, none is silent, and all their waits are known and coincided.
// If it is unknown for whom a rank waits, any rank that is gone or silent counts as found; without one nobody
// is blamed. The same holds if a rank waits only until others, who are there, take what it sent.
Diagnosis diagnose(const std::vector<RankState>& states, int waiting, double given_up_seconds = 0);

}  // namespace echelon

// Why a job stands still: from the records of its ranks to the rank at fault. A function of the records
// alone, the same for ranks that are threads and ranks that are processes; it reads no clock and asks nobody.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "comm/flight_recorder.h"

namespace echelon {

// Whether a rank has waited too long for others. Where they have given their part and must only take what is
// sent to them, it is slow rather than late, unless one of them has not been heard of for as long.
// `unheard_seconds` of a rank; of thread ranks always 0.
bool waits_too_long(const RankState& state, std::chrono::milliseconds patience,
                    const std::function<double(int rank)>& unheard_seconds);

// "dp collective 11 (all_reduce of 1000 f32): rank 0 waited 2000 ms for ranks 1, 2"
std::string describe_late_wait(const RankState& state, std::chrono::milliseconds patience);

struct Diagnosis {
  int at_fault = -1;        // world rank; -1: no single one
  std::vector<int> circle;  // those that wait for one another; empty: none do
  std::string verdict;      // the same for people, to stand behind describe_late_wait()
};

// What holds up rank `waiting`, whose wait was given up `given_up_seconds` before these records were put
// together: whoever is found by going from one that waits to those it waits for. `states` by rank. In this
// order, and of several the one that has been so for longest:
//   a rank whose process ended;
//   a rank that is silent: nothing is known of what it waits for, so no circle goes through it;
//   a rank that does not wait;
//   a rank whose wait began only when the other had been given up: it came too late;
//   a circle: all that were found wait, all are heard of, all waits are known and were there at one time.
// Where a rank waits and it is not known for whom, any rank that is gone or silent is as good as found;
// without one nobody is blamed. So it is where a rank waits only until ranks that are there take what it
// sent.
Diagnosis diagnose(const std::vector<RankState>& states, int waiting, double given_up_seconds = 0);

}  // namespace echelon

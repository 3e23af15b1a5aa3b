// From a schedule to the program that ranks run: computations, sends and receives.
//
// The law of messages: a send posts and returns; each directed pair of ranks is one in-order channel, so its
// k-th receive takes its k-th message; a receive waits until that message is there.
#pragma once

#include "schedule/schedule.h"

namespace echelon {

// A value that another rank reads is sent right after the instruction that writes it, and received right
// before the one that reads it, or earlier where the channel's order asks for it: the receiver then holds it.
// When two run together, the first sends before the second receives: neither waits for the other's
// messages, and the pair holds those in between, `(1F3;1A3>2;4G1<5;5BW1)`. Never makes a schedule wait that
// did not wait before: what is received early was sent before something that is needed now.
Schedule lower(const Schedule& schedule);

// Runs the lowered program on paper under that law. Throws RequestError with rank, instruction (counted
// without messages, as in the schedule) and the missing value when it does not finish, when a receive meets
// another message than the one it names, and when a message is never received or never used. What runs
// together counts as done, and its messages as sent, when all of it is: one part must not wait for another.
void prove_finishes(const Schedule& lowered);

}  // namespace echelon

// Lowers a schedule to the program that ranks run: computations, sends and receives.
//
// The message model: a send returns at once. Each ordered pair of ranks is a FIFO channel, so its k-th
// receive takes its k-th message. A receive waits until that message has arrived.
#pragma once

#include "schedule/schedule.h"

namespace echelon {

// Adds the messages. A value that another rank reads is sent right after the instruction that writes it. It
// is received right before the instruction that reads it, or earlier if the channel's order requires; the
// receiver then holds it. When two instructions run together, the first one's sends come before the second
// one's receives, so that neither waits for the other's messages; the pair contains them:
// `(1F3;1A3>2;4G1<5;5BW1)`. Lowering never adds a wait: what is received early was sent before something that
// is needed now.
Schedule lower(const Schedule& schedule);

// Simulates the lowered program in this message model, to prove that it finishes. RequestError with rank,
// instruction (counted without messages, as in the schedule) and the missing value if it does not finish, if
// a receive meets another message than the one it names, or if a message is never received or never used.
// Instructions that run together, and their messages, count as done only when all of them are: one part must
// not wait for another.
void prove_finishes(const Schedule& lowered);

}  // namespace echelon

// Schedules as text, one row per rank, in either of two forms. Ours:
//
//   0F0 0F1 0B0 0W0 0BW1 (0F3;7BW1) .
// is [stage][op][microbatch], separated by spaces. `.` is idle, and # starts a comment. The CSV of
// torch.distributed.pipelining:
//
//   0F0,0F1,,0I0,0W0,0B1,(0F3;7B1)OVERLAP_F_B
// where I is the input's gradient, B the fused backward pass, and an empty cell is idle.
//
// Parentheses hold instructions that run together; in lowered programs, with the messages between them. Our
// form can also express what the CSV cannot. `0F3@2` reads version 2 of the weights, and `0S@2` is the
// optimizer step that replaces version 2. In lowered programs `0A3>1` sends the activation of stage 0,
// microbatch 3 to rank 1, `0A3<0` receives it from rank 0, and `0G3>1` and `0G3<0` do so for the gradient of
// that activation. With vocabulary parallelism `2V3` and `2VW3` are the passes of part 2 of the output layer,
// and its messages are H (its input), D (the gradient of that), L (its sums) and N (its softmax
// denominators).
#pragma once

#include <string>
#include <string_view>

#include "schedule/schedule.h"

namespace echelon {

// Parses either form. `where` names the text in errors and becomes the schedule's name. RequestError with
// line, rank, token and what is legal. Whether the schedule is correct is for validate() to say.
Schedule from_text(std::string_view text, const std::string& where);

std::string to_text(const Schedule& schedule);
// RequestError if the CSV cannot express the schedule (steps, weight versions, messages, parts of the output
// layer).
std::string to_csv(const Schedule& schedule);

}  // namespace echelon

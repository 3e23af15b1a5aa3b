// Schedules as text. One row per rank, in either of two forms:
//
//   0F0 0F1 0B0 0W0 0BW1 (0F3;7BW1) .
// ours: [stage][op][microbatch], spaces between, `.` idle, the rest of a line after # a comment;
//
//   0F0,0F1,,0I0,0W0,0B1,(0F3;7B1)OVERLAP_F_B
// the CSV of torch.distributed.pipelining: I is the input's gradient, B the fused backward, an empty cell is
// idle.
//
// Parentheses hold instructions that run together, in lowered programs with the messages between them. Ours
// also has what the CSV cannot say: `0F3@2` reads version 2 of the weights, `0S@2` is the optimizer step that
// replaces version 2, and in lowered programs `0A3>1` sends the activation of stage 0, microbatch 3 to rank
// 1, `0A3<0` receives it from rank 0, `0G3>1` and `0G3<0` the gradient of that activation. With vocabulary
// parallelism `2V3` and `2VW3` are the passes of part 2 of the output layer, and its messages are H (its
// input), D (the gradient of that), L (its sums) and N (what its softmax is divided by).
#pragma once

#include <string>
#include <string_view>

#include "schedule/schedule.h"

namespace echelon {

// Detects the form. `where` names the text in errors and becomes the schedule's name. Throws RequestError
// with line, rank, token and what is legal. Whether the schedule makes sense is validate()'s question.
Schedule from_text(std::string_view text, const std::string& where);

std::string to_text(const Schedule& schedule);
// Throws RequestError for a schedule that the CSV cannot say (steps, weight versions, messages, parts of the
// output layer).
std::string to_csv(const Schedule& schedule);

}  // namespace echelon

// What one rank did and when, as data: its communication, and its work besides the pipeline's instructions.
// comm/recording records it; draw/rank_rows draws it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spec/traffic.h"

namespace echelon {

// Nanoseconds since the run began, by the rank's own clock. Integers, so that nesting of spans is exact. On a
// device: when its stream of kernels reached that point, instead of the rank's thread.
using TraceTime = std::int64_t;

enum class Activity : std::uint8_t {
  step,                // a training step; activities below that are part of it lie inside it
  load_data,           // the tokens of all the rank's microbatches
  attention_forward,   // with the keys and values of ring index `which`
  attention_backward,  // the same
  reduce_gradients,    // after the passes: the remaining sums over dp, and sums over other axes
  gradient_norm,       // over all ranks
  optimizer,           // clipping, and the update of this rank's part of the weights
  share_parameters,    // ZeRO 1 and 2: all-gathers the updated weights
  count_routing,       // collects the routers' counts for the log
  meet,                // waits for all ranks between steps
  validation,          // on held-out data
  checkpoint_copy,     // while training stands still
  checkpoint_wait,     // for the thread that writes it
  fingerprint,         // copies the weights, to compute it from the copy
  checkpoint_commit,   // rank 0 gives the checkpoint its name
  straggle,            // an artificial delay of this rank
  // Concurrent with the rank's thread:
  keys_arriving,     // the keys and values of ring index `which`, from request to arrival
  checkpoint_write,  // by its own thread
};
const char* activity_name(Activity activity);
// Whether it runs concurrently with the rank's thread, so that it need not nest.
inline bool is_beside(Activity a) { return a == Activity::keys_arriving || a == Activity::checkpoint_write; }

struct WorkSpan {
  Activity activity = Activity::step;
  std::int32_t which = -1;  // ring index; for a step its number, from 1
  TraceTime begin = 0, end = 0;
};

// One call of a communicator. The rank's thread is inside it from `begin` to `posted`, and waits for it from
// `waited` to `end`; in between it does other work, which hides the call. On a device the call runs from
// `begin` to `end` on a stream of its own.
struct CallSpan {
  Axis axis = Axis::pp;
  Verb verb = Verb::barrier;
  bool is_part = false;     // a message inside a collective's algorithm, not a call of the user
  std::int32_t group = 0;   // index into Trace::groups
  std::int32_t peer = -1;   // send, recv: the other rank of the job; broadcast: the root
  std::int32_t number = 0;  // send, recv: index of the message between these two in this direction
  std::int32_t step = 0;    // training step, from 1; 0: between steps
  std::int64_t bytes = 0;   // sent by this rank, as Traffic counts them
  TraceTime begin = 0, posted = 0, waited = 0, end = 0;
};

struct Trace {
  std::vector<WorkSpan> work;   // ordered by end
  std::vector<CallSpan> calls;  // ordered by begin
  std::vector<std::string> groups;
};

}  // namespace echelon

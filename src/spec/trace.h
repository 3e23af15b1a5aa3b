// What one rank did and when, as data: its communication and what it does beside its pipeline's instructions.
// Recorded by comm/recording, drawn by draw/rank_rows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spec/traffic.h"

namespace echelon {

// Nanoseconds since the run began, by the rank's own clock: whole numbers, so that what lies inside
// something else does so exactly. On a device: when that came to it, in the place of the rank's thread its
// stream of kernels.
using TraceTime = std::int64_t;

enum class Activity : std::uint8_t {
  step,                // of training, with all that follows in this list as far as it is a part of it
  load_data,           // the tokens of all microbatches of the rank
  attention_forward,   // with the keys and values of ring index `which`
  attention_backward,  // the same
  reduce_gradients,    // behind the passes: what is left of the sums over dp, and sums over other axes
  gradient_norm,       // over all ranks
  optimizer,           // clipping, and the update of what this rank has to update
  share_parameters,    // ZeRO 1 and 2: everybody's updated values
  count_routing,       // what the routers did, for the log
  meet,                // waits for all ranks, between steps
  validation,          // on the data held out
  checkpoint_copy,     // while the training stands still
  checkpoint_wait,     // for what writes it
  fingerprint,         // a copy of the weights that it is taken of
  checkpoint_commit,   // by rank 0: gives it its name
  straggle,            // a rank made slow on purpose
  // Beside what the rank's thread does.
  keys_arriving,     // those of ring index `which`, from asking until they are there
  checkpoint_write,  // by a thread of its own
};
const char* activity_name(Activity activity);
// Whether it runs beside the rank's thread: then it may begin and end anywhere.
inline bool is_beside(Activity a) { return a == Activity::keys_arriving || a == Activity::checkpoint_write; }

struct WorkSpan {
  Activity activity = Activity::step;
  std::int32_t which = -1;  // ring index; of a step its number, from 1
  TraceTime begin = 0, end = 0;
};

// One call of a communicator's verb. The rank's thread is in it from `begin` to `posted`, and waits for it
// from `waited` to `end`; in between it did other things, and the call was hidden. On a device it runs from
// `begin` to `end` on a stream of its own.
struct CallSpan {
  Axis axis = Axis::pp;
  Verb verb = Verb::barrier;
  bool is_part = false;     // a message of a collective's algorithm: not the caller's own
  std::int32_t group = 0;   // of Trace::groups
  std::int32_t peer = -1;   // send, recv, broadcast: the other rank of the job, or the root
  std::int32_t number = 0;  // send, recv: which message of the group this is between these two, this way
  std::int32_t step = 0;    // of training, from 1; 0: between steps
  std::int64_t bytes = 0;   // sent by this rank, as Traffic counts them
  TraceTime begin = 0, posted = 0, waited = 0, end = 0;
};

struct Trace {
  std::vector<WorkSpan> work;   // in the order of their ends
  std::vector<CallSpan> calls;  // in the order of their begins
  std::vector<std::string> groups;
};

}  // namespace echelon

// The published schedules, one file each. P ranks, M microbatches. docs/schedules.md has the order, peak
// memory and bubble of each.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "schedule/schedule.h"

namespace echelon {

Schedule naive(int ranks, int microbatches);
Schedule gpipe(int ranks, int microbatches);
Schedule one_f_one_b(int ranks, int microbatches);
// `group`: the microbatches that go through a chunk before the next chunk's turn; the last group may be
// smaller; 0: P.
Schedule interleaved(int ranks, int microbatches, int chunks, int group = 0);
// With equal groups of at least P, the largest first: for every M >= P the bubble is that of M mod P = 0.
Schedule interleaved_even(int ranks, int microbatches, int chunks);
std::vector<int> even_groups(int ranks, int microbatches);  // the groups that it uses
Schedule pipedream(int ranks, int microbatches);
// `step_microbatches`: microbatches of one optimizer step, which must divide `microbatches`.
Schedule two_bw(int ranks, int microbatches, int step_microbatches);
Schedule zb_h1(int ranks, int microbatches);
Schedule zb_h2(int ranks, int microbatches);
Schedule zb_v(int ranks, int microbatches);
Schedule v_half(int ranks, int microbatches);
Schedule v_min(int ranks, int microbatches);
// The result of the search in zb_auto.h if all stages cost the same, F = B = W, and no rank may hold more
// than 1f1b does: P activations.
Schedule zb_auto(int ranks, int microbatches);
Schedule dualpipe(int ranks, int microbatches);
Schedule dualpipe_v(int ranks, int microbatches);

// A schedule does not have this number of microbatches. `problem` says it without the flag --microbatches,
// for commands that have the number from others.
struct MicrobatchesError : RequestError {
  MicrobatchesError(int microbatches, std::string why)
      : RequestError(fmt::format("--microbatches {}: {}", microbatches, why)), problem(std::move(why)) {}
  std::string problem;
};

// Throws MicrobatchesError with a formatted problem.
template <class... Args>
[[noreturn]] void refuse_microbatches(int microbatches, fmt::format_string<Args...> form, Args&&... args) {
  throw MicrobatchesError(microbatches, fmt::format(form, std::forward<Args>(args)...));
}

// The names that --schedule accepts.
const std::vector<std::string>& schedule_names();
// RequestError, naming the flag and what is legal, if no schedule of this name has these numbers.
void check_request(const std::string& name, int ranks, int microbatches, int chunks, int steps = 1);
// RequestError if a schedule of any name would be too large to show. Commands that take these numbers from
// the user call it before they build the schedule; training does not, since its data set the number of
// microbatches.
void check_size(int ranks, int microbatches, int chunks, int steps);
// Whether the schedule of this name has no flush: PipeDream and 2BW.
bool is_stream(const std::string& name);
// Builds a schedule. `chunks`: 0 for the schedule's own number. `steps`: how many steps of `microbatches`
// each a schedule without a flush runs. RequestError naming the flag and the least legal value.
Schedule make_schedule(const std::string& name, int ranks, int microbatches, int chunks = 0, int steps = 1);
// A smaller number of microbatches whose step shows everything that a step with `microbatches` does: enough
// for the steady state of the published schedules, with the same remainders by P and by 2, on which
// interleaving and DualPipe depend. It is `microbatches` where the order or the peak depends on their number.
int steady_microbatches(const std::string& name, int ranks, int microbatches);
// Whether all microbatches of a step see the same weights, as no step comes between them.
bool is_synchronous(const Schedule& schedule);

}  // namespace echelon

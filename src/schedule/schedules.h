// The published schedules, one file each. P ranks, M microbatches; order, peak memory and bubble of each in
// docs/schedules.md.
#pragma once

#include <string>
#include <vector>

#include "schedule/schedule.h"

namespace echelon {

Schedule naive(int ranks, int microbatches);
Schedule gpipe(int ranks, int microbatches);
Schedule one_f_one_b(int ranks, int microbatches);
// `group`: microbatches that go through one chunk before the next chunk's turn, the last group smaller; 0: P.
Schedule interleaved(int ranks, int microbatches, int chunks, int group = 0);
// In equal groups of at least P, the largest first: at every M >= P the bubble of M mod P = 0.
Schedule interleaved_even(int ranks, int microbatches, int chunks);
std::vector<int> even_groups(int ranks, int microbatches);  // that it takes
Schedule pipedream(int ranks, int microbatches);
// `step_microbatches`: microbatches of one optimizer step; `microbatches` is a multiple of it.
Schedule two_bw(int ranks, int microbatches, int step_microbatches);
Schedule zb_h1(int ranks, int microbatches);
Schedule zb_h2(int ranks, int microbatches);
Schedule zb_v(int ranks, int microbatches);
Schedule v_half(int ranks, int microbatches);
Schedule v_min(int ranks, int microbatches);
// What the search of zb_auto.h finds where all stages cost the same, F, B and W too, and no rank may hold
// more than 1f1b does: P activations.
Schedule zb_auto(int ranks, int microbatches);
Schedule dualpipe(int ranks, int microbatches);
Schedule dualpipe_v(int ranks, int microbatches);

// Those of --schedule.
const std::vector<std::string>& schedule_names();
// Throws RequestError, naming the flag and what is legal, for numbers that no schedule of that name has.
void check_request(const std::string& name, int ranks, int microbatches, int chunks, int steps = 1);
// Throws RequestError for a schedule that is too large to look at, of any name. Whoever lets a user write
// these numbers asks it before the schedule is made; a training has as many microbatches as its data.
void check_size(int ranks, int microbatches, int chunks, int steps);
// Whether the schedule of this name does not flush: PipeDream and 2BW.
bool is_stream(const std::string& name);
// Throws RequestError naming the flag and the least legal value. `chunks`: 0 for the schedule's own number.
// `steps`: those that a schedule without a flush runs through, `microbatches` each.
Schedule make_schedule(const std::string& name, int ranks, int microbatches, int chunks = 0, int steps = 1);
// Microbatches of a step that shows all there is of one with so many: enough for the steady state of the
// published schedules, with the same remainders by P and by 2, which interleaving and DualPipe depend on. All
// of them where the order depends on their number, or the peak.
int steady_microbatches(const std::string& name, int ranks, int microbatches);
// Whether all microbatches of a step see the same weights: no step between them.
bool is_synchronous(const Schedule& schedule);

}  // namespace echelon

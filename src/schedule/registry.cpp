// Builds schedules by the names of the command line.
#include <fmt/format.h>

#include <algorithm>

#include "base/edits.h"
#include "base/error.h"
#include "schedule/schedules.h"

namespace echelon {

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names{
      "naive", "gpipe", "1f1b",   "interleaved", "interleaved-even", "pipedream", "2bw",      "zb-h1",
      "zb-h2", "zb-v",  "v-half", "v-min",       "zb-auto",          "dualpipe",  "dualpipev"};
  return names;
}

void check_request(const std::string& name, int ranks, int microbatches, int chunks, int steps) {
  const auto& names = schedule_names();
  if (std::find(names.begin(), names.end(), name) == names.end())
    refuse("--schedule {}: unknown{}; legal: {}", name, did_you_mean(name, names), fmt::join(names, ", "));
  if (ranks < 1) refuse("--pp {}: {} needs at least 1", ranks, name);
  if (microbatches < 1) refuse_microbatches(microbatches, "{} needs at least 1", name);
  if (chunks < 0) refuse("--chunks {}: {} needs at least 1", chunks, name);
  const bool folded = name == "zb-v" || name == "v-half" || name == "v-min" || name == "dualpipev";
  if (!name.starts_with("interleaved") && chunks > (folded ? 2 : 1))
    refuse("--chunks {}: {} has {} a rank; only interleaved takes more", chunks, name, folded ? 2 : 1);
  if (steps < 1) refuse("--steps {}: must be at least 1", steps);
  if (steps > 1 && !is_stream(name))
    refuse("--steps {}: {} flushes after every step, so one shows all; legal: 1", steps, name);
}

void check_size(int ranks, int microbatches, int chunks, int steps) {
  constexpr double most_pieces = 1 << 23;  // a gigabyte or two
  double pieces = steps;
  for (int factor : {ranks, microbatches, std::max(chunks, 2)}) pieces *= factor;
  if (pieces > most_pieces)
    refuse("--pp {} x --microbatches {}: with their chunks and steps {} pieces of work; legal: up to {}",
           ranks, microbatches, pieces, most_pieces);
}

bool is_stream(const std::string& name) { return name == "pipedream" || name == "2bw"; }

Schedule make_schedule(const std::string& name, int ranks, int microbatches, int chunks, int steps) {
  check_request(name, ranks, microbatches, chunks, steps);
  if (name == "pipedream") return pipedream(ranks, microbatches * steps);
  if (name == "2bw") return two_bw(ranks, microbatches * steps, microbatches);
  if (name == "interleaved") return interleaved(ranks, microbatches, chunks == 0 ? 2 : chunks);
  if (name == "interleaved-even") return interleaved_even(ranks, microbatches, chunks == 0 ? 2 : chunks);
  if (name == "naive") return naive(ranks, microbatches);
  if (name == "gpipe") return gpipe(ranks, microbatches);
  if (name == "1f1b") return one_f_one_b(ranks, microbatches);
  if (name == "zb-h1") return zb_h1(ranks, microbatches);
  if (name == "zb-h2") return zb_h2(ranks, microbatches);
  if (name == "zb-v") return zb_v(ranks, microbatches);
  if (name == "v-half") return v_half(ranks, microbatches);
  if (name == "v-min") return v_min(ranks, microbatches);
  if (name == "zb-auto") return zb_auto(ranks, microbatches);
  if (name == "dualpipe") return dualpipe(ranks, microbatches);
  check(name == "dualpipev", "a schedule's name without its maker");
  return dualpipe_v(ranks, microbatches);
}

int steady_microbatches(const std::string& name, int ranks, int microbatches) {
  if (name == "gpipe" || name == "interleaved-even" || name == "zb-auto" || is_stream(name))
    return microbatches;
  const int period = ranks % 2 == 0 ? ranks : 2 * ranks, steady = 4 * period;
  return microbatches <= steady ? microbatches : steady + microbatches % period;
}

bool is_synchronous(const Schedule& schedule) {
  for (const auto& list : schedule.ranks)
    for (const Instruction& i : list)
      if (i.op == Op::step) return false;
  return true;
}

}  // namespace echelon

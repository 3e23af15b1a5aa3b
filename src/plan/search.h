// The search over plans. Every legal plan is considered; plans that cannot fit or cannot win are left out, by
// exact memory and by a proven bound on their time; the rest is simulated in the order of that bound, until
// no other plan can enter the ranking.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "plan/search_space.h"
#include "plan/step_model.h"

namespace echelon {

struct Rejected {
  std::int64_t count = 0;
  std::vector<std::string> examples;  // a few, each of another kind
  bool is_asked = false;              // the first example is of what was asked for, not of one way to do it
};

// The plan that comes nearest to fitting, if none fits.
struct Nearest {
  Plan plan;
  double bytes = 0, usable_bytes = 0;
  Memory memory;  // of the rank with most
};

// A plan's place in the ranking. Plans that take at most this fraction longer than the fastest of their rank
// share it: prices are not accurate enough to distinguish them.
inline constexpr double tie = 0.01;
struct Place {
  int rank = 1;  // one more than the plans of earlier ranks
  bool is_shared = false;
};

// The outcome for a plan that was considered.
enum class Fate {
  simulated,  // figure: seconds of its step
  outrun,     // fits, but cannot be among the first; figure: least seconds of its step
  behind,     // fits, but enough plans take no longer than its bound and hold no more
  larger,     // fits, but holds more than the plans ranked by memory; figure: its bytes
  slower,     // too slow with any split and sharding; figure: least seconds of its step; memory unknown
  memory,     // does not fit; figure: the bytes that it would hold
  schedule,   // has no such schedule; `why` says more
  shape,      // has inconsistent sizes; `why` says more
  same,       // equals another plan: its balanced split is the even one
};
struct Outcome {
  Fate fate = Fate::simulated;
  double figure = 0;
  int why = -1;  // index into SearchResult::whys
};

// The plans of a mesh, micro-batch and recomputation, and their outcomes.
struct Looked {
  Mesh mesh;
  ContextKind context_kind{};
  Offload offload = Offload::none;
  std::int64_t micro_batch = 0;                  // 0: any
  std::optional<PipelineRecompute> recompute{};  // no value: any
  std::int64_t count = 0;
  Outcome all{};  // if they were left out together
  // Otherwise the outcome of each: for each pipeline, all shardings.
  std::vector<PipelineChoice> pipelines{};
  std::vector<ShardingChoice> shardings{};
  std::vector<Outcome> each{};
};

struct SearchResult {
  std::int64_t considered = 0, feasible = 0, simulated = 0;
  // By reason: memory, schedule, shape; slower: could not be among the first with any split and sharding;
  // same: its balanced split is the even one.
  std::map<std::string, Rejected> rejected;
  std::vector<Estimate> plans;     // best first; of those that share a rank the one with least memory
  std::vector<Place> places;       // of these plans
  std::optional<Nearest> nearest;  // if nothing fits
  double seconds = 0;              // duration of the search
  // If requested; their counts add up to `considered`.
  std::vector<Looked> looked;
  std::vector<std::string> whys;
};

// If no plan fits, searches again with each of offloading(), unless offloading is given or impossible, and
// takes the best. RequestError naming the flag if no configuration could have these sizes; the values that it
// calls legal make some configuration possible. Plans that take longer than `most_seconds` are not examined
// further.
SearchResult search(const SearchRequest& request, double most_seconds = 1e300);

// Only the best plan, if it takes at most `most_seconds`. No value, too, if no configuration could have what
// is given, as may happen with other sizes or another program.
std::optional<Estimate> best_within(SearchRequest request, double most_seconds);

// The smallest number of devices, up to request.gpus, whose best plan takes at most `target_seconds`. Tries
// every number in ascending order, since more devices are not always faster (a number with few divisors has
// few meshes). No value if none does.
struct LeastGpus {
  int gpus = 0;
  SearchResult result;
};
std::optional<LeastGpus> least_gpus(SearchRequest request, double target_seconds);

}  // namespace echelon

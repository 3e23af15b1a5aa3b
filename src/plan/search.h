// The search over plans: every legal one is looked at, what cannot fit or cannot win is left out by
// exact memory and a proven bound on its time, and the rest is simulated in the order of that bound until no
// other can enter the ranking.
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

// A plan that does not fit, nearest to fitting.
struct Nearest {
  Plan plan;
  double bytes = 0, usable_bytes = 0;
  Memory memory;  // of the rank with most
};

// Where a plan stands. Plans that take at most this much longer than the fastest of their rank share it:
// prices are not so exact that they could tell them apart.
inline constexpr double tie = 0.01;
struct Place {
  int rank = 1;  // one more than plans of earlier ranks
  bool is_shared = false;
};

// What became of a plan that was considered.
enum class Fate {
  simulated,  // figure: seconds of its step
  outrun,     // fits, and cannot come among the first: its step takes at least so many seconds
  behind,     // fits, and as many plans as are ranked take no longer than its bound and hold no more
  larger,     // fits, and holds more than those that are ranked by memory: bytes
  slower,     // whatever its schedule and sharding its step takes at least so many seconds; memory unknown
  memory,     // would hold so many bytes, which do not fit
  schedule,   // has no such schedule; why says more
  shape,      // has sizes that do not go together; why says more
  same,       // is another one: its balanced split is the even one
};
struct Outcome {
  Fate fate = Fate::simulated;
  double figure = 0;
  int why = -1;  // of SearchResult::whys
};

// The plans of a mesh, micro-batch and recomputation, and what became of them.
struct Looked {
  Mesh mesh;
  ContextKind context_kind{};
  Offload offload = Offload::none;
  std::int64_t micro_batch = 0;                  // 0: any
  std::optional<PipelineRecompute> recompute{};  // no value: any
  std::int64_t count = 0;
  Outcome all{};  // where they were left out together
  // Or each: of every pipeline all shardings.
  std::vector<PipelineChoice> pipelines{};
  std::vector<ShardingChoice> shardings{};
  std::vector<Outcome> each{};
};

struct SearchResult {
  std::int64_t considered = 0, feasible = 0, simulated = 0;
  // By reason: memory, schedule, shape; slower: whatever its schedule and sharding it could not come among
  // the first; same: its balanced split is the even one.
  std::map<std::string, Rejected> rejected;
  std::vector<Estimate> plans;     // best first; of those that share a rank the one with least memory
  std::vector<Place> places;       // of these plans
  std::optional<Nearest> nearest;  // where nothing fits
  double seconds = 0;              // that the search took
  // Where that was asked: together as many as were considered.
  std::vector<Looked> looked;
  std::vector<std::string> whys;
};

// Where no plan fits it looks again with each of offloading(), if that is not given and can be, and takes the
// best. Throws RequestError where no configuration could have these sizes, naming the flag; values that it
// calls legal are those with which one can. Of plans that take longer than `most_seconds` nothing is found
// out.
SearchResult search(const SearchRequest& request, double most_seconds = 1e300);

// The best plan alone, if it takes at most `most_seconds`. None, too, where no configuration could have what
// is given: with other sizes, or of another program.
std::optional<Estimate> best_within(SearchRequest request, double most_seconds);

// The fewest devices, up to request.gpus, whose best plan takes at most `target_seconds`: every number is
// looked at from below, for more devices are not always faster (one that has few divisors has few meshes). No
// value where none does.
struct LeastGpus {
  int gpus = 0;
  SearchResult result;
};
std::optional<LeastGpus> least_gpus(SearchRequest request, double target_seconds);

}  // namespace echelon

// ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054): shards over s ranks the state that plain
// data parallelism replicates. A stage says where state lives; the optimizer and the bits of its result do
// not change. With N parameters and r(x) = (s-1)/s x:
//
//   stage   sharded                       elements kept, but for what is in use      sent by a rank in a step
//   0       nothing                       values N, gradients N, moments 2N          2 r(N)
//   1       moments                       N, N, 2N/s                                 r(N) + r(N)
//   2       moments, gradients            N, N/s, 2N/s                               r(N) + r(N)
//   3       moments, gradients, values    N/s, N/s, 2N/s                             r(N) + r(N) for each use
//
// Gradients are reduce-scattered onto their shards (data_parallel.h). Each rank updates its own shard, and up
// to stage 2 all-gathers the new values. In stage 3 a layer's values are gathered ahead of each use and freed
// after it (FSDP, Zhao et al. 2023, https://arxiv.org/abs/2304.11277), in the forward pass and again in the
// backward pass. spec/shard_layout.h defines the shards. HSDP (FSDP's hybrid sharding): s is a part of the
// data-parallel size, and blocks of s neighbouring ranks are replicas.
#pragma once

#include <map>
#include <vector>

#include "base/clock.h"
#include "comm/rank.h"
#include "spec/gather_window.h"

namespace echelon {

// A unit of the shard layout as one rank holds it.
struct ShardedUnit {
  Communicator* group;               // over which it is sharded; outlives this
  Tensor whole, own;                 // flat; own may be its place inside whole
  std::vector<std::int64_t> counts;  // elements of each rank's shard
};

// All-gathers the units: every rank gets each rank's shard.
void all_gather_units(const std::vector<ShardedUnit>& units);

// Stage 3: keeps values only while they are used, a layer group's cut parameters and routed experts at a
// time. All ranks of a block use the same groups in the same order.
class ParameterGather {
 public:
  // `groups`: the units of each layer group. `always`: units that stay throughout a run of uses. `ahead`: see
  // GatherWindow.
  ParameterGather(std::vector<std::vector<ShardedUnit>> groups, std::vector<ShardedUnit> always, int ahead,
                  Time time = {});

  // Begin and end a run of uses.
  void begin(std::vector<int> uses);
  void end();
  // The group's values are present between use() and done().
  void use(int group);
  void done();

  // Measured over the last run of uses.
  struct Measures {
    int gathers = 0;
    // Layer groups that were requested before the use preceding theirs began.
    int ahead = 0;
    // From requesting a gather until its use, summed: the time behind which it may hide.
    double beside_seconds = 0;
    double wait_seconds = 0;  // that uses waited
  };
  const Measures& measures() const { return measures_; }

 private:
  struct UnderWay {
    Pending pending;
    Clock::time_point begin;
  };
  void gather(int group);
  void wait_for(int group);
  void release(int group);

  std::vector<std::vector<ShardedUnit>> groups_;  // the last one: units that always stay
  int ahead_;
  Time time_;
  GatherWindow window_;
  std::map<int, std::vector<UnderWay>> under_way_;
  Measures measures_;
};

}  // namespace echelon

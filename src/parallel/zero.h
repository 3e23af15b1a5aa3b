// ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054): the state that plain data parallelism
// holds once on every rank is cut over s ranks. A stage says where things live; the optimizer and its
// arithmetic stay as they are, and so do the bits of the result. N parameters, r(x) = (s-1)/s x:
//
//   stage   cut over the ranks            elements kept, but for what is in use      sent by a rank in a step
//   0       nothing                       values N, gradients N, moments 2N          2 r(N)
//   1       moments                       N, N, 2N/s                                 r(N) + r(N)
//   2       moments, gradients            N, N/s, 2N/s                               r(N) + r(N)
//   3       moments, gradients, values    N/s, N/s, 2N/s                             r(N) + r(N) for each use
//
// Gradients are summed onto their shards by reduce_scatter (data_parallel.h); each rank updates its own
// shard, and up to stage 2 hands the new values round by all_gather. In stage 3 a layer's values are gathered
// ahead of each use and let go of after it (FSDP, Zhao et al. 2023, https://arxiv.org/abs/2304.11277), in the
// forward pass and again in the backward pass. How things are cut: spec/shard_layout.h. HSDP (FSDP's hybrid
// sharding): s is a part of the data-parallel size, and blocks of s neighbouring ranks are replicas.
#pragma once

#include <map>
#include <vector>

#include "base/clock.h"
#include "comm/rank.h"
#include "spec/gather_window.h"

namespace echelon {

// A unit of the shard layout as one rank holds it.
struct ShardedUnit {
  Communicator* group;               // that it is cut over; outlives this
  Tensor whole, own;                 // flat; own may be its place inside whole
  std::vector<std::int64_t> counts;  // elements of each rank's part
};

// Every rank's own part goes to all ranks of the unit's group.
void all_gather_units(const std::vector<ShardedUnit>& units);

// Stage 3: values that are there while they are used, a layer group's cut parameters and its routed experts
// at a time. All ranks of a block use the same groups in the same order.
class ParameterGather {
 public:
  // The units of each layer group, and what is there throughout a run of uses. `ahead`: see GatherWindow.
  ParameterGather(std::vector<std::vector<ShardedUnit>> groups, std::vector<ShardedUnit> always, int ahead,
                  Time time = {});

  // A run of uses begins, and ends.
  void begin(std::vector<int> uses);
  void end();
  // The unit's values are there from use() to done().
  void use(int group);
  void done();

  // Measured over the last run of uses.
  struct Measures {
    int gathers = 0;
    int ahead = 0;              // layer groups asked for before the use ahead of theirs began
    double beside_seconds = 0;  // from asking for a gather until its use, added up: what it may hide behind
    double wait_seconds = 0;    // that uses waited
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

  std::vector<std::vector<ShardedUnit>> groups_;  // the last one: what is always there
  int ahead_;
  Time time_;
  GatherWindow window_;
  std::map<int, std::vector<UnderWay>> under_way_;
  Measures measures_;
};

}  // namespace echelon

// Asynchronous data parallelism by a parameter server: W workers compute gradients at their own pace, and
// each of S servers holds a shard of the weights and of the optimizer state (Li et al. 2014, "Scaling
// distributed machine learning with the parameter server", OSDI). The staleness s bounds how far workers may
// drift apart (Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel parameter
// server", NIPS):
//
//   A worker's clock is the number of its next batch. It may pull the weights for clock c once every worker
//   has pushed all its batches before c - s, and so sees all their updates. Without a bound it never waits.
//   s = 0: the W gradients of a clock are summed, in the grouping of an all_reduce, and make one update:
//   synchronous data parallelism to the last bit. s > 0: every push is an update of its own, at once.
//
// The first server hands out the batches: `num_clocks` per worker in total, but faster workers take more
// within the bound. Elements sent: N per batch by a worker, and N per batch by the servers together (N
// parameters); so 2N per batch, as in a ring all_reduce over many ranks.
#pragma once

#include <array>
#include <chrono>
#include <functional>
#include <optional>
#include <vector>

#include "base/split.h"
#include "comm/rank.h"
#include "spec/shard_layout.h"

namespace echelon {

// Ranks of the group: workers 0 .. W-1, then the servers.
struct ParameterServerRun {
  int workers = 1, servers = 1;
  std::optional<std::int64_t> staleness;         // empty: no bound
  std::int64_t first_clock = 0, num_clocks = 1;  // all workers start at first_clock
  bool synchronous() const { return staleness == 0; }
};

// What a worker sends along with a gradient.
struct Push {
  std::int64_t clock = 0;
  double loss = 0, num_targets = 0;  // loss: mean over num_targets target tokens
  double norm = 0;                   // of the worker's own gradient; unused if s = 0
  // Like `loss`, of the multi-token prediction; 0 if the model has none.
  double mtp_loss = 0;
};

// A worker's calls and bytes for one batch, pull and push, with elements of `element_bytes`.
VerbTraffic worker_sends(const std::vector<ShardUnit>& units, const ParameterServerRun& run,
                         std::int64_t element_bytes);
VerbTraffic worker_receives(const std::vector<ShardUnit>& units, const ParameterServerRun& run);

class ParameterClient {
 public:
  // `values`: the whole model's weights, flat. `gradients`: returns those of a range of that order, after
  // each batch. `units` are cut into as many shards as there are servers. `group` outlives this.
  ParameterClient(Communicator& group, const ParameterServerRun& run, const std::vector<ShardUnit>& units,
                  Tensor values, std::function<Tensor(Range)> gradients);

  // Waits until the bound allows it, fetches the weights and returns the next batch; empty when all batches
  // are taken.
  std::optional<std::int64_t> pull();
  void push(const Push& push);
  // Called after the last pull: fetches the weights after all workers have finished.
  void finish();

 private:
  void ask(int server, double kind, const Push& push = {});
  void receive_values();

  Communicator& group_;
  ParameterServerRun run_;
  std::vector<std::vector<Range>> shards_;  // of each server
  Tensor values_;
  std::function<Tensor(Range)> gradients_;
  std::int64_t clock_;
};

// Measured over all pushes by the first server; empty on the others.
struct StalenessMeasures {
  // Entry n counts the pushes whose weights were pulled when the slowest worker was n clocks behind.
  std::vector<std::int64_t> histogram;
  // Updates that happened between a push and its pull.
  std::int64_t pushes = 0, sum_updates_late = 0, max_updates_late = 0;
};

class ParameterServer {
 public:
  // Called when a gradient is complete: the sum of all pushes of a clock if s = 0, in the order of workers;
  // otherwise of one push.
  using Update = std::function<void(const std::vector<Push>&, int worker)>;
  // This server's shard: `values`, flat, and `gradient`, a tensor for each unit of which it has a part.
  // `update` changes `values`. `rank` is this server's; it and `group`, whose ranks are those of the world,
  // outlive this.
  ParameterServer(const Rank& rank, Communicator& group, const ParameterServerRun& run,
                  const std::vector<ShardUnit>& units, Tensor values, std::vector<Tensor> gradient,
                  Update update);

  // Returns when every worker has finished.
  void serve();
  const StalenessMeasures& staleness() const { return staleness_; }

 private:
  static constexpr std::size_t header_size = 6;
  struct Worker {
    std::array<double, header_size> header{};
    Pending heard;
    bool listening = false, pulls = false;
    std::int64_t clock = 0;             // of its next push
    std::int64_t lag = 0, updates = 0;  // when it last pulled
    Push push;                          // if s = 0: of this clock
    std::vector<Tensor> gradient;       // receives its push
  };
  bool leads() const { return group_.rank() == run_.workers; }
  std::int64_t slowest() const;
  std::vector<int> heard_from();
  std::vector<int> wait_for_any();
  void listen(int worker);
  void hear(int worker);
  void take(int worker);
  void add_up();
  void answer();
  void send_values(int worker);

  const Rank& rank_;
  Communicator& group_;
  ParameterServerRun run_;
  std::vector<Range> pieces_;  // the shard, message by message
  Tensor values_;
  std::vector<Tensor> gradient_;
  Update update_;
  std::vector<Worker> workers_;
  int finished_ = 0, pushed_ = 0;  // workers; pushed_: in this clock, if s = 0
  std::int64_t granted_ = 0, updates_ = 0;
  StalenessMeasures staleness_;
};

}  // namespace echelon

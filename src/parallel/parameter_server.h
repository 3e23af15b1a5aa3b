// Asynchronous data parallelism by a parameter server: W workers compute gradients at their own pace, and S
// servers each hold a shard of the values and of the optimizer's state (Li et al. 2014, "Scaling distributed
// machine learning with the parameter server", OSDI). How far workers may run apart is bounded by the
// staleness s (Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel parameter
// server", NIPS):
//
//   A worker's clock is the number of its next batch. It may pull the values for clock c when every worker
//   has pushed all its batches before c - s, and so sees all their updates. Without a bound it never waits.
//   s = 0: the W gradients of a clock are added up, in the grouping of an all_reduce, and make one update:
//   synchronous data parallelism to the last bit. s > 0: every push is an update of its own, at once.
//
// The first server gives out the batches: `num_clocks` for each worker in all, but those who are faster take
// more where the bound lets them. Elements sent: by a worker N a batch, by the servers together N a batch to
// each worker (N parameters); so 2N travel for a batch, as in a ring all_reduce over many ranks.
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
  std::optional<std::int64_t> staleness;         // no value: no bound
  std::int64_t first_clock = 0, num_clocks = 1;  // all workers begin at the first
  bool synchronous() const { return staleness == 0; }
};

// What a worker says of the gradient that it pushes.
struct Push {
  std::int64_t clock = 0;
  double loss = 0, num_targets = 0;  // mean over so many target tokens
  double norm = 0;                   // of the worker's own gradient; unused where s = 0
  double mtp_loss = 0;  // as the loss, of the token behind each target; 0 where none is predicted
};

// Calls and bytes of one batch: pull and push by a worker, of `element_bytes` each.
VerbTraffic worker_sends(const std::vector<ShardUnit>& units, const ParameterServerRun& run,
                         std::int64_t element_bytes);
VerbTraffic worker_receives(const std::vector<ShardUnit>& units, const ParameterServerRun& run);

class ParameterClient {
 public:
  // `values`: flat, the whole model. `gradients`: of a range of that order, after each batch. `units`: cut
  // into as many shards as there are servers. `group` outlives this.
  ParameterClient(Communicator& group, const ParameterServerRun& run, const std::vector<ShardUnit>& units,
                  Tensor values, std::function<Tensor(Range)> gradients);

  // The next batch and the values for it, once the bound allows; nothing when all batches are given out.
  std::optional<std::int64_t> pull();
  void push(const Push& push);
  // After the last pull: the values when all workers have finished.
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

// Measured over all pushes, by the first server; the others leave it empty.
struct StalenessMeasures {
  // [n]: pushes whose values were pulled when the slowest worker was n clocks behind.
  std::vector<std::int64_t> histogram;
  // Updates between a push's pull and itself.
  std::int64_t pushes = 0, sum_updates_late = 0, max_updates_late = 0;
};

class ParameterServer {
 public:
  // The gradient is there: of all pushes of a clock where s = 0, in the order of workers, else of one.
  using Update = std::function<void(const std::vector<Push>&, int worker)>;
  // This server's shard: `values` flat, `gradient` a tensor for each unit that it has a part of; `update`
  // changes the values. `rank` is that of the server; it and `group`, whose ranks are those of the world,
  // outlive this.
  ParameterServer(const Rank& rank, Communicator& group, const ParameterServerRun& run,
                  const std::vector<ShardUnit>& units, Tensor values, std::vector<Tensor> gradient,
                  Update update);

  // Until every worker has finished.
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
    Push push;                          // where s = 0: of this clock
    std::vector<Tensor> gradient;       // where its push goes
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
  std::vector<Range> pieces_;  // of the shard, as messages
  Tensor values_;
  std::vector<Tensor> gradient_;
  Update update_;
  std::vector<Worker> workers_;
  int finished_ = 0, pushed_ = 0;  // pushed: of this clock, where s = 0
  std::int64_t granted_ = 0, updates_ = 0;
  StalenessMeasures staleness_;
};

}  // namespace echelon

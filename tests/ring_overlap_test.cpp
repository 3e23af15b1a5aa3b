// What the ring hides: with a delay planted on every hop as long as the computation with a block, attention
// takes little longer than its computation alone. Kernels sleep as long as they would compute, so that the
// result does not depend on what else the machine does.
#include <gtest/gtest.h>

#include <deque>
#include <mutex>
#include <thread>

#include "base/median.h"
#include "comm/threads.h"
#include "context_runs.h"
#include "sleeping_kernels.h"

namespace echelon::ring_overlap_test {
namespace {

using namespace checks;
using std::chrono::milliseconds;

// When each message of a pair of ranks was sent; shared by the threads.
class Departures {
 public:
  void sent(int from, int to) {
    const std::lock_guard lock(mutex_);
    times_[{from, to}].push_back(Clock::now());
  }
  Clock::time_point take(int from, int to) {
    const std::lock_guard lock(mutex_);
    auto& queue = times_[{from, to}];
    const auto time = queue.front();
    queue.pop_front();
    return time;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, int>, std::deque<Clock::time_point>> times_;
};

class SlowArrival final : public Operation {
 public:
  SlowArrival(Pending inner, std::function<Clock::time_point()> ready)
      : inner_(std::move(inner)), ready_(std::move(ready)) {}
  bool progress() override { return false; }
  void wait() override {
    inner_.wait();
    std::this_thread::sleep_until(ready_());
  }

 private:
  Pending inner_;
  std::function<Clock::time_point()> ready_;
};

// A message is there `delay` after it was sent. Collectives are as fast as they are.
class SlowHops final : public Communicator {
 public:
  SlowHops(std::unique_ptr<Communicator> inner, Departures& departures, milliseconds delay)
      : inner_(std::move(inner)), departures_(departures), delay_(delay) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  Pending send(const Tensor& x, int to) override {
    departures_.sent(rank(), to);
    return inner_->send(x, to);
  }
  Pending recv(const Tensor& x, int from) override {
    return Pending(std::make_shared<SlowArrival>(
        inner_->recv(x, from), [this, from] { return departures_.take(from, rank()) + delay_; }));
  }
  Pending all_reduce(const Tensor& x, ReduceOp op) override { return inner_->all_reduce(x, op); }
  Pending all_gather(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) override {
    return inner_->all_gather(in, out, counts);
  }
  Pending reduce_scatter(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) override {
    return inner_->reduce_scatter(in, out, counts);
  }
  Pending all_to_all(const Tensor& in, std::span<const std::int64_t> sends, const Tensor& out,
                     std::span<const std::int64_t> receives) override {
    return inner_->all_to_all(in, sends, out, receives);
  }
  Pending broadcast(const Tensor& x, int root) override { return inner_->broadcast(x, root); }
  Pending barrier() override { return inner_->barrier(); }

 private:
  std::unique_ptr<Communicator> inner_;
  Departures& departures_;
  milliseconds delay_;
};

class SlowWorld final : public ThreadWorld {
 public:
  SlowWorld(int num_ranks, milliseconds delay) : ThreadWorld(num_ranks, patience), delay_(delay) {}
  std::unique_ptr<Communicator> join(int rank, const std::vector<int>& ranks,
                                     const std::string& name) override {
    auto group = ThreadWorld::join(rank, ranks, name);
    if (name != "cp") return group;
    return std::make_unique<SlowHops>(std::move(group), departures_, delay_);
  }

 private:
  Departures departures_;
  milliseconds delay_;
};

constexpr milliseconds block{20};

// Seconds of attention forward and backward on rank 0.
double attention_seconds(int cp, ContextKind kind, milliseconds delay) {
  Plan plan = context_plan(Family::llama, {kind, ContextBalance::zigzag, cp, 1});
  plan.seq_len = plan.model.max_seq = 256;
  const ContextLayout layout(plan);
  std::vector<double> seconds;
  SlowWorld world(cp, delay);
  run_ranks(world, [&](int index) {
    Arena arena;
    SleepingKernels kernels(layout.causal_pairs(0) / cp, block);
    const Rank rank(world, plan.mesh, index, DType::f32, arena, kernels);
    const Attention heads(24, 4, 2, 0);
    const ContextParallel context(rank, plan, heads);
    const Sequences sequences{1, {}};
    const std::int64_t rows = plan.tokens_here();
    const Tensor qkv = rank.activation({rows, heads.qkv_width()}),
                 out = rank.activation({rows, heads.width()}), lse = rank.activation({rows * 24}),
                 dqkv = rank.activation({rows, heads.qkv_width()});
    for (int repeat = 0; repeat < 3; ++repeat) {
      rank.along(Axis::cp).barrier().wait();
      const auto begin = Clock::now();
      const Tensor core = context.enter(sequences, qkv);
      context.forward(sequences, core, out, lse);
      context.backward(sequences, core, out, lse, context.delta(sequences, out, out), dqkv);
      if (index == 0) seconds.push_back(seconds_since(begin));
    }
  });
  return median(seconds);
}

TEST(RingOverlap, HopsHideBehindBlocks) {
  for (int cp : {2, 4}) {
    const double alone = attention_seconds(cp, ContextKind::ring, milliseconds(0));
    const double delayed = attention_seconds(cp, ContextKind::ring, block);
    // Forward one hop a block, backward one for keys and values and one for their gradients.
    const double hops = 3 * (cp - 1) * std::chrono::duration<double>(block).count();
    fmt::print("ring of {}: blocks alone {:.0f} ms, hops {:.0f} ms, together {:.0f} ms ({:+.0f}%)\n", cp,
               1e3 * alone, 1e3 * hops, 1e3 * delayed, 100 * (delayed / alone - 1));
    EXPECT_LE(delayed, 1.2 * alone) << cp;
  }
}

}  // namespace
}  // namespace echelon::ring_overlap_test

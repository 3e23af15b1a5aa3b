// What the algorithms of comm/collectives.h send, and in how many steps: measured, and as they say of
// themselves.
#include <gtest/gtest.h>

#include <bit>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "comm/collectives.h"
#include "comm/recording.h"
#include "rank_runs.h"

namespace echelon::collective_costs_test {
namespace {

using namespace checks;

// Counts the messages that had to wait for one another: a rank is at the step of the latest message that it
// sent or received; a message sent at step t arrives at t + 1.
class StepCounter final : public Communicator {
 public:
  struct Job {
    std::mutex mutex;
    std::map<std::pair<int, int>, std::deque<int>> arrivals;  // of each channel, in order
  };
  StepCounter(Communicator& inner, Job& job) : inner_(inner), job_(job) {}
  int steps() const { return step_; }

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  Pending send(const Tensor& x, int to) override {
    const std::lock_guard lock(job_.mutex);
    job_.arrivals[{rank(), to}].push_back(++step_);
    return inner_.send(x, to);
  }
  Pending recv(const Tensor& x, int from) override {
    class Receive final : public Operation {
     public:
      Receive(StepCounter& counter, int from, Pending inner)
          : counter_(counter), from_(from), inner_(std::move(inner)) {}
      bool progress() override { return false; }
      void wait() override {
        inner_.wait();
        const std::lock_guard lock(counter_.job_.mutex);
        auto& channel = counter_.job_.arrivals[{from_, counter_.rank()}];
        counter_.step_ = std::max(counter_.step_, channel.front());
        channel.pop_front();
      }

     private:
      StepCounter& counter_;
      int from_;
      Pending inner_;
    };
    return Pending(std::make_shared<Receive>(*this, from, inner_.recv(x, from)));
  }
  // Algorithms use nothing else.
  Pending all_reduce(const Tensor&, ReduceOp) override { return unused(); }
  Pending all_gather(const Tensor&, const Tensor&, std::span<const std::int64_t>) override {
    return unused();
  }
  Pending reduce_scatter(const Tensor&, const Tensor&, std::span<const std::int64_t>) override {
    return unused();
  }
  Pending all_to_all(const Tensor&, std::span<const std::int64_t>, const Tensor&,
                     std::span<const std::int64_t>) override {
    return unused();
  }
  Pending broadcast(const Tensor&, int) override { return unused(); }
  Pending barrier() override { return unused(); }

 private:
  static Pending unused() { throw std::logic_error("an algorithm that is written over a collective"); }
  Communicator& inner_;
  Job& job_;
  int step_ = 0;
};

struct Measured {
  std::vector<VerbTraffic> sent;  // by rank
  int steps = 0;
};
Measured measure(int n, const std::function<void(Communicator&)>& algorithm) {
  ThreadWorld world(n, patience);
  std::vector<Traffic> traffic(static_cast<std::size_t>(n));
  std::vector<int> steps(traffic.size());
  StepCounter::Job job;
  run_ranks(world, [&](int rank) {
    const auto at = static_cast<std::size_t>(rank);
    const auto recorded = record_traffic(world.join(rank, everyone(n), "tp"), Axis::tp, traffic[at]);
    StepCounter counter(*recorded, job);
    algorithm(counter);
    steps[at] = counter.steps();
  });
  Measured measured;
  for (const Traffic& t : traffic) measured.sent.push_back(t.at(Axis::tp, Verb::send));
  measured.steps = *std::max_element(steps.begin(), steps.end());
  for (const auto& [channel, arrivals] : job.arrivals) EXPECT_TRUE(arrivals.empty());  // all were received
  return measured;
}

// Elements sent and reduced by all ranks together.
Cost expect_cost(int n, const std::function<void(Communicator&)>& algorithm,
                 const std::function<Cost(int rank)>& cost) {
  const Measured measured = measure(n, algorithm);
  Cost all;
  for (int rank = 0; rank < n; ++rank) {
    const Cost said = cost(rank);
    EXPECT_EQ(measured.sent[static_cast<std::size_t>(rank)].bytes, said.sent * 4) << rank;
    EXPECT_EQ(measured.sent[static_cast<std::size_t>(rank)].calls, said.messages) << rank;
    EXPECT_EQ(measured.steps, said.steps) << rank;
    all += said;
  }
  return all;
}

constexpr std::array<std::int64_t, 9> sizes{0, 1, 2, 5, 7, 8, 9, 1003, 2520};  // 2520: a multiple of every n

int log2_up(int n) { return std::bit_width(static_cast<unsigned>(n - 1)); }

TEST(CollectiveCosts, AllReduce) {
  struct Algorithm {
    void (*run)(Communicator&, const Tensor&, ReduceOp, Scratch&);
    Cost (*cost)(int n, int rank, std::int64_t count);
  };
  const Algorithm ring{ring_all_reduce, ring_all_reduce_cost},
      halving_doubling{halving_doubling_all_reduce, halving_doubling_all_reduce_cost},
      recursive_doubling{recursive_doubling_all_reduce, recursive_doubling_all_reduce_cost};
  for (int n = 1; n <= 9; ++n)
    for (std::int64_t count : sizes) {
      SCOPED_TRACE(testing::Message() << n << " ranks, " << count << " elements");
      const auto all_ranks = [&](const Algorithm& algorithm) {
        return expect_cost(
            n,
            [&](Communicator& group) {
              std::vector<float> x(static_cast<std::size_t>(count));
              Scratch scratch;
              algorithm.run(group, view(x), ReduceOp::sum, scratch);
            },
            [&](int rank) { return algorithm.cost(n, rank, count); });
      };
      // No sum can be had with fewer additions than (n-1) count, and none of the first two makes more.
      const Cost by_ring = all_ranks(ring);
      EXPECT_EQ(by_ring.sent, 2 * (n - 1) * count);
      EXPECT_EQ(by_ring.reduced, (n - 1) * count);
      EXPECT_EQ(by_ring.steps, n * 2 * (n - 1));
      const int p = static_cast<int>(std::bit_floor(static_cast<unsigned>(n))), log2p = log2_up(p);
      const Cost by_halves = all_ranks(halving_doubling);
      EXPECT_EQ(by_halves.sent, 2 * (p - 1) * count + 2 * (n - p) * count);
      EXPECT_EQ(by_halves.reduced, (n - 1) * count);
      EXPECT_EQ(by_halves.steps, n * (2 * log2p + (n == p ? 0 : 2)));
      const Cost by_doubling = all_ranks(recursive_doubling);
      EXPECT_EQ(by_doubling.sent, p * log2p * count + 2 * (n - p) * count);
      EXPECT_EQ(by_doubling.reduced, (p * log2p + n - p) * count);
      EXPECT_EQ(by_doubling.steps, n * (log2p + (n == p ? 0 : 2)));
      if (count % n == 0)
        for (int rank = 0; rank < n; ++rank) {  // the textbook's 2(n-1)/n of the buffer, by every rank
          EXPECT_EQ(ring_all_reduce_cost(n, rank, count).sent, 2 * (n - 1) * (count / n));
          if (n != p) continue;
          EXPECT_EQ(halving_doubling_all_reduce_cost(n, rank, count).sent, 2 * (n - 1) * (count / n));
        }
    }
}

TEST(CollectiveCosts, GatherScatterExchange) {
  for (int n = 1; n <= 9; ++n)
    for (int kind = 0; kind < 4; ++kind) {
      SCOPED_TRACE(testing::Message() << n << " ranks, counts " << kind);
      const auto count_of = [&](int i) -> std::int64_t {
        return kind == 0 ? 0 : kind == 1 ? 12 : kind == 2 ? (i == n - 1 ? 1 : 0) : 7 * i % 5;
      };
      Counts counts;
      for (int i = 0; i < n; ++i) counts.push_back(count_of(i));
      const std::int64_t whole = total(counts);
      const auto buffer = [](std::int64_t count) {
        return std::vector<float>(static_cast<std::size_t>(count));
      };
      const Cost gather = expect_cost(
          n,
          [&](Communicator& group) {
            auto in = buffer(count_of(group.rank())), out = buffer(whole);
            ring_all_gather(group, view(in), view(out), counts);
          },
          [&](int rank) { return ring_all_gather_cost(rank, counts); });
      EXPECT_EQ(gather.sent, (n - 1) * whole);
      EXPECT_EQ(gather.steps, n * (n - 1));
      const Cost scatter = expect_cost(
          n,
          [&](Communicator& group) {
            auto in = buffer(whole), out = buffer(count_of(group.rank()));
            Scratch scratch;
            ring_reduce_scatter(group, view(in), view(out), counts, ReduceOp::sum, scratch);
          },
          [&](int rank) { return ring_reduce_scatter_cost(rank, counts); });
      EXPECT_EQ(scatter.sent, (n - 1) * whole);
      EXPECT_EQ(scatter.reduced, (n - 1) * whole);
      // Rank i sends count_of(i + j) to rank j.
      const auto sends = [&](int i) {
        Counts to;
        for (int j = 0; j < n; ++j) to.push_back(count_of(i + j));
        return to;
      };
      expect_cost(
          n,
          [&](Communicator& group) {
            const Counts to = sends(group.rank());  // symmetric: what i sends to j, j sends to i
            auto in = buffer(total(to)), out = in;
            pairwise_all_to_all(group, view(in), to, view(out), to);
          },
          [&](int rank) { return pairwise_all_to_all_cost(rank, sends(rank)); });
    }
}

TEST(CollectiveCosts, BroadcastAndBarrier) {
  for (int n = 1; n <= 9; ++n) {
    SCOPED_TRACE(n);
    for (int root = 0; root < n; ++root)
      for (std::int64_t count : {0, 1, 10}) {
        const Cost broadcast = expect_cost(
            n,
            [&](Communicator& group) {
              std::vector<float> x(static_cast<std::size_t>(count));
              binomial_broadcast(group, view(x), root);
            },
            [&](int rank) { return binomial_broadcast_cost(n, rank, root, count); });
        EXPECT_EQ(broadcast.sent, (n - 1) * count);
        EXPECT_EQ(broadcast.messages, n - 1);
        EXPECT_EQ(binomial_broadcast_cost(n, root, root, count).sent, log2_up(n) * count);
        EXPECT_EQ(broadcast.steps, n * log2_up(n));
      }
    const Cost barrier =
        expect_cost(n, dissemination_barrier, [&](int) { return dissemination_barrier_cost(n); });
    EXPECT_EQ(barrier.sent, 0);
    EXPECT_EQ(barrier.steps, n * log2_up(n));
  }
}

// auto is what the model of latency and bandwidth says: few steps for small buffers, few bytes for large
// ones.
TEST(CollectiveCosts, TheFastestAllReduceDependsOnSizeAndRanks) {
  using enum AllReduceAlgorithm;
  for (int n : {2, 3, 4, 7, 8, 64, 100}) EXPECT_EQ(fastest_all_reduce(n, 8), recursive_doubling) << n;
  EXPECT_EQ(fastest_all_reduce(2, std::int64_t{1} << 30),
            recursive_doubling);  // one exchange is all that two need
  for (int n : {4, 8, 64}) EXPECT_EQ(fastest_all_reduce(n, std::int64_t{1} << 30), halving_doubling) << n;
  for (int n : {3, 7, 100}) EXPECT_EQ(fastest_all_reduce(n, std::int64_t{1} << 30), ring) << n;
  EXPECT_EQ(fastest_all_reduce(100, 4 << 20), halving_doubling);  // 198 steps are too many
}

}  // namespace
}  // namespace echelon::collective_costs_test

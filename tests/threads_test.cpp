#include "comm/threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <tuple>

#include "rank_runs.h"

namespace echelon::threads_test {
namespace {

using namespace checks;
using namespace std::chrono_literals;

TEST(Threads, SumsDoNotDependOnArrival) {
  std::vector<float> first;
  for (unsigned seed = 0; seed < 8; ++seed) {
    std::vector<float> result;
    with_ranks(5, [&](Communicator& tp) {
      std::mt19937 random(seed * 100 + static_cast<unsigned>(tp.rank()));
      auto x = values<float>(tp.rank(), 100003);
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
      Pending pending = tp.all_reduce(view(x));
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
      pending.wait();
      if (tp.rank() == static_cast<int>(seed % 5)) result = x;
    });
    if (seed == 0) first = result;
    ASSERT_EQ(0, std::memcmp(first.data(), result.data(), first.size() * sizeof(float))) << seed;
  }
}

TEST(Threads, AWaitDoesNotNeedThePeersToWait) {
  // Rank 1 has called, and computes until rank 0 has its result: small, large and a message.
  std::atomic<bool> done{false};
  with_ranks(2, [&](Communicator& tp) {
    std::vector<float> small(10, 1), large(300000, 1), message(5, 1);
    std::vector<Pending> pending;
    pending.push_back(tp.all_reduce(view(small)));
    pending.push_back(tp.all_reduce(view(large)));
    pending.push_back(tp.rank() == 0 ? tp.recv(view(message), 1) : tp.send(view(message), 0));
    if (tp.rank() == 1)
      while (!done) std::this_thread::yield();
    for (Pending& p : pending) p.wait();
    done = true;
    EXPECT_EQ(small[9], 2);
    EXPECT_EQ(large[299999], 2);
  });
}

TEST(Threads, ProgressAloneFinishes) {
  with_ranks(3, [&](Communicator& tp) {
    std::vector<float> x(200000, static_cast<float>(tp.rank()));
    Pending pending = tp.all_reduce(view(x));
    while (!pending.progress()) std::this_thread::yield();
    EXPECT_EQ(x[150000], 3);
    EXPECT_TRUE(pending.progress());
  });
}

TEST(Threads, ADroppedOperationIsStillDone) {
  std::vector<std::vector<float>> x(3, std::vector<float>(100000, 1));
  with_ranks(3, [&](Communicator& tp) {
    std::ignore = tp.all_reduce(view(x[static_cast<std::size_t>(tp.rank())]));
    if (tp.rank() == 2) std::this_thread::sleep_for(5ms);
  });
  for (const auto& each : x) EXPECT_EQ(each, std::vector<float>(100000, 3));
}

TEST(Threads, TensorsGoBackToTheirArenaOnTheirOwnThread) {
  // The arena is not thread-safe: ThreadSanitizer sees it when a peer releases a view.
  with_ranks(4, [&](Communicator& tp) {
    Arena arena;
    for (int i = 0; i < 200; ++i) {
      std::vector<Pending> pending;
      for (int k = 0; k < 3; ++k) {
        const Tensor x(arena, MemoryCategory::other, DType::f32, {i % 2 == 0 ? 100 : 70000});
        std::fill_n(x.host<float>(), x.numel(), 1.0f);
        pending.push_back(tp.all_reduce(x));
      }
      for (Pending& p : pending) p.wait();
    }
    EXPECT_EQ(arena.live().total(), 0);
    EXPECT_LE(arena.system_allocations(), 6);
  });
}

TEST(Threads, GroupsOfOneNeverWait) {
  with_ranks(1, [&](Communicator& self) {
    std::vector<double> in{1, 2, 3}, out(3);
    self.all_reduce(view(in)).wait();
    self.reduce_scatter(view(in), view(out), Counts{3}).wait();
    EXPECT_EQ(out, in);
    in = {4, 5, 6};
    self.all_gather(view(in), view(out), Counts{3}).wait();
    EXPECT_EQ(out, in);
    self.all_gather(view(in), view(in), Counts{3}).wait();
    self.broadcast(view(in), 0).wait();
    self.barrier().wait();
    in = {7, 8, 9};
    self.all_to_all(view(in), Counts{3}, view(out), Counts{3}).wait();
    EXPECT_EQ(out, in);
  });
}

TEST(Threads, OppositeWaitsOnTwoAxesDoNotDeadlock) {
  ThreadWorld world(4, patience);
  run_ranks(world, [&](int rank) {
    const int row = rank / 2, column = rank % 2;
    const auto tp = world.join(rank, {2 * row, 2 * row + 1}, "tp");
    const auto dp = world.join(rank, {column, column + 2}, "dp");
    for (int i = 0; i < 50; ++i) {
      std::vector<float> a(90000, 1), b(90000, 1);
      Pending x, y;
      if (rank % 3 == 0) {
        x = tp->all_reduce(view(a));
        y = dp->all_reduce(view(b));
      } else {
        y = dp->all_reduce(view(b));
        x = tp->all_reduce(view(a));
      }
      (row == 0 ? x : y).wait();
      (row == 0 ? y : x).wait();
      ASSERT_EQ(a[89999] + b[89999], 4);
    }
  });
}

TEST(Threads, AWorldRunsAgain) {
  ThreadWorld world(3, patience);
  for (int i = 0; i < 3; ++i)
    run_ranks(world, [&](int rank) {
      const auto tp = world.join(rank, everyone(3), "tp");
      std::vector<std::int32_t> x{rank};
      tp->all_reduce(view(x)).wait();
      EXPECT_EQ(x[0], 3);
    });
}

}  // namespace
}  // namespace echelon::threads_test

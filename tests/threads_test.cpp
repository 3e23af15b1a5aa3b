#include "comm/threads.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <thread>
#include <tuple>

#include "base/error.h"

namespace echelon {
namespace {

using namespace std::chrono_literals;
using Counts = std::vector<std::int64_t>;

std::vector<int> everyone(int n) {
  std::vector<int> ranks(static_cast<std::size_t>(n));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::int64_t total(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

// Runs body(communicator of all ranks) on n ranks.
void with_ranks(int n, const std::function<void(Communicator&)>& body,
                std::chrono::milliseconds timeout = 20s) {
  ThreadWorld world(n, timeout);
  run_ranks(world, [&](int rank) { body(*world.join(rank, everyone(n), "tp")); });
}

// Runs ranks that must fail, catches what each of them saw, and returns it with what run_ranks threw at the
// end.
struct Outcome {
  std::vector<std::string> seen;  // by rank; "" when it did not fail
  std::string thrown;
};
Outcome failing(int n, const std::function<void(int, ThreadWorld&)>& body,
                std::chrono::milliseconds timeout = 20s) {
  Outcome outcome{std::vector<std::string>(static_cast<std::size_t>(n)), ""};
  ThreadWorld world(n, timeout);
  try {
    run_ranks(world, [&](int rank) {
      try {
        body(rank, world);
      } catch (const std::exception& error) {
        outcome.seen[static_cast<std::size_t>(rank)] = error.what();
        throw;
      }
    });
  } catch (const std::exception& error) {
    outcome.thrown = error.what();
  }
  return outcome;
}

template <class T>
Tensor view(std::vector<T>& data) {
  constexpr DType dtype = std::is_same_v<T, float>    ? DType::f32
                          : std::is_same_v<T, double> ? DType::f64
                                                      : DType::i32;
  static T none;
  return Tensor::view_of(data.empty() ? &none : data.data(), dtype, {static_cast<std::int64_t>(data.size())});
}

// Element i of what rank r brings: no sum of these is exact in f32, so the order of a sum shows.
template <class T>
T value(int rank, std::int64_t i) {
  const std::uint32_t mixed =
      (static_cast<std::uint32_t>(i) * 2654435761u) ^ (static_cast<std::uint32_t>(rank) * 40503u);
  if constexpr (std::is_integral_v<T>) return static_cast<T>(mixed % 2001) - 1000;
  constexpr std::array<double, 5> scales{1.0 / 3e9, 1.0 / 7e6, 1.0 / 11e5, 1.0 / 13e4, 1.0 / 17e8};
  return static_cast<T>(static_cast<double>(static_cast<std::int32_t>(mixed)) *
                        scales[mixed % scales.size()]);
}
template <class T>
std::vector<T> values(int rank, std::int64_t count, std::int64_t from = 0) {
  std::vector<T> data(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) data[static_cast<std::size_t>(i)] = value<T>(rank, from + i);
  return data;
}
template <class T>
T reduced(ReduceOp op, int n, std::int64_t i) {
  T result = value<T>(0, i);
  for (int rank = 1; rank < n; ++rank) {
    const T next = value<T>(rank, i);
    result = op == ReduceOp::max ? std::max(result, next) : static_cast<T>(result + next);
  }
  return result;
}

// Even, uneven and zero shares of n ranks, small and of several pieces.
std::vector<Counts> shares(int n) {
  std::vector<Counts> all;
  for (std::int64_t each : {0, 1, 37}) all.emplace_back(static_cast<std::size_t>(n), each);
  Counts uneven, one(static_cast<std::size_t>(n), 0), large;
  for (int i = 0; i < n; ++i) {
    uneven.push_back((i * 7919) % 53 % (i % 2 == 0 ? 53 : 1));
    large.push_back(i % 3 == 1 ? 0 : 70001 + i);
  }
  one.back() = 129;
  all.insert(all.end(), {uneven, one, large});
  return all;
}

template <class T>
class VerbsOf : public testing::Test {};
using Types = testing::Types<float, double, std::int32_t>;
TYPED_TEST_SUITE(VerbsOf, Types);

constexpr std::array<int, 6> group_sizes{1, 2, 3, 4, 5, 8};

TYPED_TEST(VerbsOf, AllReduceIsTheSumInRankOrder) {
  using T = TypeParam;
  for (int n : group_sizes)
    with_ranks(n, [&](Communicator& tp) {
      for (ReduceOp op : {ReduceOp::sum, ReduceOp::max})
        for (std::int64_t count : {0, 1, 15, 16, 17, 1000, 150001}) {
          auto x = values<T>(tp.rank(), count);
          tp.all_reduce(view(x), op).wait();
          std::vector<T> expected(x.size());
          for (std::int64_t i = 0; i < count; ++i)
            expected[static_cast<std::size_t>(i)] = reduced<T>(op, n, i);
          ASSERT_EQ(x, expected) << n << " ranks, " << count << " elements";
        }
    });
}

TYPED_TEST(VerbsOf, AllGatherIsTheConcatenation) {
  using T = TypeParam;
  for (int n : group_sizes)
    with_ranks(n, [&](Communicator& tp) {
      for (const Counts& counts : shares(n)) {
        const auto mine = static_cast<std::size_t>(tp.rank());
        std::vector<T> expected;
        std::int64_t begin = 0;
        for (int rank = 0; rank < n; ++rank) {
          const auto part = values<T>(rank, counts[static_cast<std::size_t>(rank)]);
          if (rank < tp.rank()) begin += counts[static_cast<std::size_t>(rank)];
          expected.insert(expected.end(), part.begin(), part.end());
        }
        auto in = values<T>(tp.rank(), counts[mine]);
        std::vector<T> out(expected.size(), T{7}), in_place(expected.size(), T{7});
        tp.all_gather(view(in), view(out), counts).wait();
        ASSERT_EQ(out, expected);
        std::copy(in.begin(), in.end(), in_place.begin() + begin);
        const Tensor whole = view(in_place);
        tp.all_gather(whole.flat_range(begin, begin + counts[mine]), whole, counts).wait();
        ASSERT_EQ(in_place, expected);
      }
    });
}

TYPED_TEST(VerbsOf, ReduceScatterIsMyPartOfTheSum) {
  using T = TypeParam;
  for (int n : group_sizes)
    with_ranks(n, [&](Communicator& tp) {
      for (const Counts& counts : shares(n)) {
        auto in = values<T>(tp.rank(), total(counts));
        const auto before = in;
        const auto mine = static_cast<std::size_t>(tp.rank());
        std::vector<T> out(static_cast<std::size_t>(counts[mine])), expected(out.size());
        const std::int64_t begin =
            std::accumulate(counts.begin(), counts.begin() + tp.rank(), std::int64_t{0});
        for (std::size_t i = 0; i < out.size(); ++i)
          expected[i] = reduced<T>(ReduceOp::sum, n, begin + static_cast<std::int64_t>(i));
        tp.reduce_scatter(view(in), view(out), counts).wait();
        ASSERT_EQ(out, expected);
        ASSERT_EQ(in, before);
      }
    });
}

TYPED_TEST(VerbsOf, AllToAllTransposes) {
  using T = TypeParam;
  for (int n : group_sizes)
    for (std::int64_t scale : {1, 9001})
      with_ranks(n, [&](Communicator& tp) {
        // From i to j: nothing where i + j is a multiple of 3.
        const auto count = [&](int i, int j) {
          return (i + j) % 3 == 0 ? 0 : scale * (1 + (2 * i + 5 * j) % 7);
        };
        Counts sends, receives;
        std::vector<T> in, expected;
        for (int peer = 0; peer < n; ++peer) {
          sends.push_back(count(tp.rank(), peer));
          receives.push_back(count(peer, tp.rank()));
          const auto to = values<T>(tp.rank(), sends.back(), 1000 * peer);
          const auto from = values<T>(peer, receives.back(), 1000 * tp.rank());
          in.insert(in.end(), to.begin(), to.end());
          expected.insert(expected.end(), from.begin(), from.end());
        }
        std::vector<T> out(expected.size());
        tp.all_to_all(view(in), sends, view(out), receives).wait();
        ASSERT_EQ(out, expected);
      });
}

TYPED_TEST(VerbsOf, BroadcastCopiesTheRoots) {
  using T = TypeParam;
  for (int n : group_sizes)
    with_ranks(n, [&](Communicator& tp) {
      for (int root = 0; root < n; ++root)
        for (std::int64_t count : {0, 1, 333, 80001}) {
          auto x = values<T>(tp.rank(), count);
          tp.broadcast(view(x), root).wait();
          ASSERT_EQ(x, values<T>(root, count));
        }
    });
}

TYPED_TEST(VerbsOf, MessagesArriveInOrder) {
  using T = TypeParam;
  for (int n : group_sizes)
    with_ranks(n, [&](Communicator& tp) {
      // Everybody sends to everybody, also to itself, before anybody receives; then the other way round.
      const auto count = [](int from, int to, int k) { return k % 5 == 0 ? 0 : 10 * from + to + 300 * k; };
      for (bool receive_first : {false, true}) {
        constexpr int messages = 20;
        std::vector<std::vector<T>> got;
        std::vector<Pending> pending;
        const auto send_all = [&] {
          for (int k = 0; k < messages; ++k)
            for (int to = 0; to < n; ++to) {
              auto x = values<T>(tp.rank(), count(tp.rank(), to, k), k);
              tp.send(view(x), to).wait();
              std::fill(x.begin(), x.end(), T{});  // the message is a copy
            }
        };
        if (!receive_first) send_all();
        for (int k = 0; k < messages; ++k)
          for (int from = 0; from < n; ++from) {
            got.emplace_back(static_cast<std::size_t>(count(from, tp.rank(), k)));
            pending.push_back(tp.recv(view(got.back()), from));
          }
        if (receive_first) send_all();
        for (auto p = pending.rbegin(); p != pending.rend(); ++p) p->wait();
        for (int k = 0; k < messages; ++k)
          for (int from = 0; from < n; ++from)
            ASSERT_EQ(got[static_cast<std::size_t>(k * n + from)],
                      values<T>(from, count(from, tp.rank(), k), k));
        tp.barrier().wait();
      }
    });
}

TEST(Threads, LargeCollectivesPastTheCachesAreTheSame) {
  // More than the size from which copies are streamed, at addresses that are not aligned.
  const Counts counts{1500001, 2000003, 1400002};
  with_ranks(3, [&](Communicator& tp) {
    const auto mine = static_cast<std::size_t>(tp.rank());
    std::vector<float> in(static_cast<std::size_t>(total(counts)) + 1), out(in.size()), part(2000004),
        sum(in.size());
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>((i * 31 + mine * 17) % 1009);
    for (std::size_t i = 0; i < in.size(); ++i)
      for (std::size_t r = 0; r < 3; ++r) sum[i] += static_cast<float>((i * 31 + r * 17) % 1009);
    const Tensor whole = view(in).flat_range(1, total(counts) + 1);
    const Tensor mid = view(part).flat_range(1, 1 + counts[mine]);
    const Tensor all = view(out).flat_range(1, total(counts) + 1);
    tp.reduce_scatter(whole, mid, counts).wait();
    tp.all_gather(mid, all, counts).wait();
    ASSERT_TRUE(std::equal(out.begin() + 1, out.end(), sum.begin() + 1));
    tp.broadcast(whole, 2).wait();
    ASSERT_EQ(in[5], static_cast<float>((5 * 31 + 2 * 17) % 1009));
    tp.all_reduce(whole).wait();
    ASSERT_EQ(in.back(), 3 * static_cast<float>(((in.size() - 1) * 31 + 2 * 17) % 1009));
  });
}

TEST(Threads, MaxPropagatesNan) {
  with_ranks(3, [&](Communicator& tp) {
    std::vector<float> x{tp.rank() == 1 ? std::numeric_limits<float>::quiet_NaN() : 1.0f,
                         static_cast<float>(tp.rank())};
    tp.all_reduce(view(x), ReduceOp::max).wait();
    EXPECT_TRUE(std::isnan(x[0]));
    EXPECT_EQ(x[1], 2.0f);
  });
}

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
        std::fill_n(x.data<float>(), x.numel(), 1.0f);
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

// ---- random programs

// Two overlapping axes of a mesh of 2 x 3: rank = 3 * row + column; tp along a row, dp along a column. Every
// group has a random list of collectives; every rank interleaves the lists of its two groups in its own
// random order, and waits in its own random order at random moments (but never for anything that its peers
// call only after it).
struct Step {
  Verb verb;
  std::int64_t count;
};

class Player {
 public:
  Player(Communicator& communicator, int first_world_rank, const std::vector<Step>& steps)
      : communicator_(communicator), seed_(first_world_rank), steps_(steps) {}

  bool done() const { return next_ == steps_.size(); }

  void post() {
    const Step& step = steps_[next_];
    const int n = communicator_.size(), me = communicator_.rank();
    const auto salt = static_cast<std::int64_t>(next_++) * 1000 + seed_;
    auto& running = running_.emplace_back();
    const auto each = static_cast<std::size_t>(step.count);
    const Counts counts(static_cast<std::size_t>(n), step.count);
    const auto append = [](std::vector<float>& to, const std::vector<float>& more) {
      to.insert(to.end(), more.begin(), more.end());
    };
    const auto sum = [&](std::int64_t from) {
      std::vector<float> result = values<float>(0, step.count, salt + from);
      for (int r = 1; r < n; ++r)
        for (std::size_t i = 0; i < each; ++i)
          result[i] += value<float>(r, salt + from + static_cast<std::int64_t>(i));
      return result;
    };
    switch (step.verb) {
      case Verb::all_reduce:
        running.out = values<float>(me, step.count, salt);
        running.expected = sum(0);
        running.pending = communicator_.all_reduce(view(running.out));
        break;
      case Verb::all_gather:
        running.in = values<float>(me, step.count, salt);
        running.out.resize(each * counts.size());
        for (int r = 0; r < n; ++r) append(running.expected, values<float>(r, step.count, salt));
        running.pending = communicator_.all_gather(view(running.in), view(running.out), counts);
        break;
      case Verb::reduce_scatter:
        running.in = values<float>(me, step.count * n, salt);
        running.out.resize(each);
        running.expected = sum(me * step.count);
        running.pending = communicator_.reduce_scatter(view(running.in), view(running.out), counts);
        break;
      case Verb::all_to_all:
        running.in = values<float>(me, step.count * n, salt);
        running.out.resize(each * counts.size());
        for (int r = 0; r < n; ++r)
          append(running.expected, values<float>(r, step.count, salt + me * step.count));
        running.pending = communicator_.all_to_all(view(running.in), counts, view(running.out), counts);
        break;
      case Verb::broadcast:
        running.out = values<float>(me, step.count, salt);
        running.expected = values<float>(n - 1, step.count, salt);
        running.pending = communicator_.broadcast(view(running.out), n - 1);
        break;
      case Verb::send:  // a ring
        running.in = values<float>(me, step.count, salt);
        running.out.resize(each);
        running.expected = values<float>((me + n - 1) % n, step.count, salt);
        communicator_.send(view(running.in), (me + 1) % n).wait();
        running.pending = communicator_.recv(view(running.out), (me + n - 1) % n);
        break;
      default:
        running.pending = communicator_.barrier();
    }
  }

  // Waits for one of those under way.
  void wait(std::mt19937& random) {
    if (running_.empty()) return;
    const auto k = static_cast<std::ptrdiff_t>(random() % running_.size());
    Running running = std::move(running_[static_cast<std::size_t>(k)]);
    running_.erase(running_.begin() + k);
    running.pending.wait();
    EXPECT_EQ(running.out, running.expected);
  }
  void progress() {
    if (!running_.empty()) running_.front().pending.progress();
  }
  std::size_t under_way() const { return running_.size(); }

 private:
  struct Running {
    std::vector<float> in, out, expected;
    Pending pending;
  };
  Communicator& communicator_;
  int seed_;
  const std::vector<Step>& steps_;
  std::size_t next_ = 0;
  std::vector<Running> running_;
};

void play_random_program(unsigned seed) {
  std::mt19937 common(seed);
  const auto random_steps = [&] {
    std::vector<Step> steps;
    for (int i = 0; i < 30; ++i) {
      constexpr std::array<Verb, 7> verbs{Verb::all_reduce, Verb::all_gather, Verb::reduce_scatter,
                                          Verb::all_to_all, Verb::broadcast,  Verb::send,
                                          Verb::barrier};
      const std::int64_t count = common() % 20 == 0 ? 90000 : static_cast<std::int64_t>(common() % 40);
      steps.push_back({verbs[common() % verbs.size()], count});
    }
    return steps;
  };
  std::vector<std::vector<Step>> rows, columns;
  for (int i = 0; i < 2; ++i) rows.push_back(random_steps());
  for (int i = 0; i < 3; ++i) columns.push_back(random_steps());
  ThreadWorld world(6, 20s);
  run_ranks(world, [&](int rank) {
    std::mt19937 random(seed * 31 + static_cast<unsigned>(rank));
    const int row = rank / 3, column = rank % 3;
    const auto tp = world.join(rank, {3 * row, 3 * row + 1, 3 * row + 2}, "tp");
    const auto dp = world.join(rank, {column, 3 + column}, "dp");
    Player along_tp(*tp, 3 * row, rows[static_cast<std::size_t>(row)]);
    Player along_dp(*dp, column, columns[static_cast<std::size_t>(column)]);
    // In phases: at the end of each, both groups are as far. Within one, the order is free, and waits begin
    // once all of it is posted, so that the program is legal whatever the peers' order.
    while (!along_tp.done() || !along_dp.done()) {
      int tp_steps = 5, dp_steps = 5;
      while (tp_steps + dp_steps > 0) {
        const bool use_tp = dp_steps == 0 || (tp_steps > 0 && random() % 2 == 0);
        Player& player = use_tp ? along_tp : along_dp;
        player.post();
        --(use_tp ? tp_steps : dp_steps);
        if (random() % 4 == 0) player.progress();
        if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      }
      for (auto waits = random() % 12; waits > 0; --waits)
        (random() % 2 == 0 ? along_tp : along_dp).wait(random);
    }
    while (along_tp.under_way() + along_dp.under_way() > 0)
      (random() % 2 == 0 ? along_tp : along_dp).wait(random);
  });
}

TEST(Threads, RandomProgramsOnTwoAxesFinishWithTheRightValues) {
  for (unsigned seed = 1; seed <= 25; ++seed) {
    SCOPED_TRACE(seed);
    play_random_program(seed);
  }
}

TEST(Threads, OppositeWaitsOnTwoAxesDoNotDeadlock) {
  ThreadWorld world(4, 20s);
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

// ---- failures: every rank of the world hears of them, also those outside the group

// Ranks 0 and 2 form the group tp, and 1 and 3; only the first goes wrong.
Outcome mismatch(
    const std::function<Pending(Communicator&, std::vector<float>&, std::vector<double>&)>& first,
    const std::function<Pending(Communicator&, std::vector<float>&, std::vector<double>&)>& second) {
  return failing(4, [&](int rank, ThreadWorld& world) {
    const auto tp = world.join(rank, {rank % 2, rank % 2 + 2}, "tp");
    std::vector<float> x(128);
    std::vector<double> y(128);
    tp->barrier().wait();
    if (rank % 2 == 0) {
      (rank == 0 ? first : second)(*tp, x, y).wait();
    } else {
      const auto all = world.join(rank, everyone(4), "all");
      all->barrier().wait();
    }
  });
}

void expect_everywhere(const Outcome& outcome, const std::string& text) {
  for (const std::string& seen : outcome.seen)
    EXPECT_NE(seen.find(text), std::string::npos) << seen << "\nnot " << text;
  EXPECT_NE(outcome.thrown.find(text), std::string::npos) << outcome.thrown;
}

TEST(ThreadFailure, MismatchOfTheVerb) {
  const Outcome outcome =
      mismatch([](auto& tp, auto& x, auto&) { return tp.all_reduce(view(x)); },
               [](auto& tp, auto& x, auto&) {
                 return tp.all_gather(view(x).flat_range(64, 128), view(x), Counts{64, 64});
               });
  expect_everywhere(
      outcome,
      "tp collective 2: rank 0 called all_reduce of 128 f32, rank 2 called all_gather of [64, 64] f32");
}

TEST(ThreadFailure, MismatchOfCountDtypeOpRootAndShares) {
  expect_everywhere(
      mismatch([](auto& tp, auto& x, auto&) { return tp.all_reduce(view(x)); },
               [](auto& tp, auto& x, auto&) { return tp.all_reduce(view(x).flat_range(0, 127)); }),
      "rank 0 called all_reduce of 128 f32, rank 2 called all_reduce of 127 f32");
  expect_everywhere(mismatch([](auto& tp, auto& x, auto&) { return tp.all_reduce(view(x)); },
                             [](auto& tp, auto&, auto& y) { return tp.all_reduce(view(y)); }),
                    "rank 2 called all_reduce of 128 f64");
  expect_everywhere(mismatch([](auto& tp, auto& x, auto&) { return tp.all_reduce(view(x), ReduceOp::max); },
                             [](auto& tp, auto& x, auto&) { return tp.all_reduce(view(x)); }),
                    "rank 0 called all_reduce (max) of 128 f32, rank 2 called all_reduce of 128 f32");
  expect_everywhere(mismatch([](auto& tp, auto& x, auto&) { return tp.broadcast(view(x), 0); },
                             [](auto& tp, auto& x, auto&) { return tp.broadcast(view(x), 1); }),
                    "rank 2 called broadcast from 1 of 128 f32");
  const auto exchange = [](Counts sends, Counts receives) {
    return [=](Communicator& tp, std::vector<float>& x, std::vector<double>&) {
      static thread_local std::vector<float> to(64);
      return tp.all_to_all(view(x).flat_range(0, total(sends)), sends,
                           view(to).flat_range(0, total(receives)), receives);
    };
  };
  expect_everywhere(mismatch(exchange({1, 2}, {1, 3}), exchange({4, 5}, {2, 5})),
                    "rank 0 called all_to_all sending [1, 2] and receiving [1, 3] f32, "
                    "rank 2 called all_to_all sending [4, 5] and receiving [2, 5] f32");
}

TEST(ThreadFailure, MismatchOfAMessage) {
  for (bool send_first : {true, false})
    for (bool dtype : {true, false}) {
      const Outcome outcome = failing(3, [&](int rank, ThreadWorld& world) {
        const auto pp = world.join(rank, everyone(3), "pp");
        std::vector<float> x(128);
        std::vector<double> y(128);
        if ((rank == 0) != send_first) std::this_thread::sleep_for(3ms);
        if (rank == 0) pp->send(view(x), 1).wait();
        if (rank == 1) pp->recv(dtype ? view(y) : view(x).flat_range(0, 64), 0).wait();
        pp->barrier().wait();
      });
      expect_everywhere(
          outcome, std::string("pp message 1 from rank 0 to rank 1: rank 0 sent 128 f32, rank 1 called ") +
                       (dtype ? "recv of 128 f64" : "recv of 64 f32"));
    }
}

TEST(ThreadFailure, WrongArgumentsOfOneRank) {
  const auto wrong = [](const std::function<Pending(Communicator&, const Tensor&)>& call,
                        const std::string& text) {
    const Outcome outcome = failing(3, [&](int rank, ThreadWorld& world) {
      const auto tp = world.join(rank, everyone(3), "tp");
      std::vector<float> x(12);
      if (rank == 1) call(*tp, view(x)).wait();
      tp->barrier().wait();
    });
    expect_everywhere(outcome, text);
  };
  wrong(
      [](auto& tp, auto& x) {
        return tp.all_gather(x, x, Counts{4, 4, 4});
      },
      "tp: rank 1 called all_gather of [4, 4, 4] f32: in has 12 elements, not 4");
  wrong(
      [](auto& tp, auto& x) {
        return tp.reduce_scatter(x, x, Counts{4, 4, 5});
      },
      "in has 12 elements, not 13");
  wrong(
      [](auto& tp, auto& x) {
        return tp.reduce_scatter(x, x, Counts{6, 6});
      },
      "counts has 2 entries for 3 ranks");
  wrong(
      [](auto& tp, auto& x) {
        return tp.all_to_all(x, Counts{4, 4, 4}, x, Counts{4, 5, 3});
      },
      "sends itself 4 elements but receives 5");
  wrong(
      [](auto& tp, auto& x) {
        return tp.all_to_all(x, Counts{16, -4, 0}, x, Counts{4, 4, 4});
      },
      "negative");
  wrong(
      [](auto& tp, auto& x) {
        return tp.all_reduce(x.reshape({3, 4}).column_range(0, 2));
      },
      "x is not contiguous");
  wrong([](auto& tp, auto&) { return tp.all_reduce(Tensor()); }, "x is not defined");
  wrong([](auto& tp, auto& x) { return tp.broadcast(x, 3); }, "root is 3, not a rank of a group of 3");
  wrong([](auto& tp, auto& x) { return tp.send(x, -1); }, "to is -1");
  wrong([](auto& tp, auto& x) { return tp.recv(x, 7); }, "from is 7");
}

TEST(ThreadFailure, ARankThatThrows) {
  const auto begin = std::chrono::steady_clock::now();
  const Outcome outcome = failing(5, [&](int rank, ThreadWorld& world) {
    const auto tp = world.join(rank, everyone(5), "tp");
    std::vector<float> x(10);
    for (int i = 0; i < 20; ++i) {
      if (rank == 3 && i == 10) throw RunError("disk full");
      tp->all_reduce(view(x)).wait();
    }
  });
  for (int rank : {0, 1, 2, 4})
    EXPECT_EQ(outcome.seen[static_cast<std::size_t>(rank)], "rank 3 failed: disk full");
  EXPECT_EQ(outcome.thrown, "disk full");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
}

TEST(ThreadFailure, ARankThatThrowsInTheMiddleOfOperations) {
  // Its buffers go while the others work on them: AddressSanitizer sees it when one goes on.
  for (int delay = 0; delay < 20; ++delay) {
    const Outcome outcome = failing(4, [&](int rank, ThreadWorld& world) {
      const auto tp = world.join(rank, everyone(4), "tp");
      Arena arena;
      std::vector<Pending> pending;
      for (int i = 0; i < 4; ++i) {
        const Tensor x(arena, MemoryCategory::other, DType::f32, {200000});
        std::fill_n(x.data<float>(), x.numel(), 1.0f);
        pending.push_back(tp->all_reduce(x));
      }
      if (rank == 2) {
        std::this_thread::sleep_for(std::chrono::microseconds(20 * delay));
        throw std::logic_error("wrong");
      }
      for (Pending& p : pending) p.wait();
      tp->barrier().wait();
    });
    EXPECT_EQ(outcome.thrown, "wrong");
    EXPECT_NE(outcome.seen[0].find("rank 2"), std::string::npos) << outcome.seen[0];
  }
}

TEST(ThreadFailure, TheFirstFailureIsRethrown) {
  for (int culprit = 0; culprit < 3; ++culprit) {
    ThreadWorld world(3, 20s);
    EXPECT_THROW(run_ranks(world,
                           [&](int rank) {
                             const auto tp = world.join(rank, everyone(3), "tp");
                             if (rank == culprit) throw std::out_of_range("cause");
                             try {
                               tp->barrier().wait();
                             } catch (const CommError&) {
                               throw std::runtime_error("consequence");
                             }
                           }),
                 std::out_of_range);
  }
}

TEST(ThreadFailure, ARankThatLeaves) {
  // It may leave before or after the others call.
  for (bool late : {false, true}) {
    const Outcome outcome = failing(3, [&](int rank, ThreadWorld& world) {
      const auto tp = world.join(rank, everyone(3), "tp");
      std::vector<float> x(8);
      if ((rank == 1) == late) std::this_thread::sleep_for(5ms);
      if (rank != 1) tp->all_reduce(view(x)).wait();
    });
    for (int rank : {0, 2}) {
      const std::string& seen = outcome.seen[static_cast<std::size_t>(rank)];
      EXPECT_NE(seen.find("tp collective 1: rank 1 has finished, but rank "), std::string::npos) << seen;
      EXPECT_NE(seen.find("called all_reduce of 8 f32"), std::string::npos) << seen;
    }
    const Outcome message = failing(2, [&](int rank, ThreadWorld& world) {
      const auto pp = world.join(rank, everyone(2), "pp");
      std::vector<float> x(8);
      if ((rank == 1) == late) std::this_thread::sleep_for(5ms);
      if (rank == 0) pp->recv(view(x), 1).wait();
    });
    EXPECT_EQ(message.thrown, "pp message 1: rank 1 has finished, but rank 0 waits for it");
  }
}

TEST(ThreadFailure, TimeOutNamesTheMissing) {
  const Outcome outcome = failing(
      3,
      [&](int rank, ThreadWorld& world) {
        const auto tp = world.join(rank, everyone(3), "tp");
        const auto dp = world.join(rank, everyone(3), "dp");
        std::vector<float> x(8);
        tp->all_reduce(view(x)).wait();
        if (rank == 2) std::this_thread::sleep_for(10ms);
        (rank == 1 ? *dp : *tp).barrier().wait();
      },
      300ms);
  // Either side may be the first to give up.
  EXPECT_TRUE(outcome.thrown.find("waited 300 ms for rank ") != std::string::npos) << outcome.thrown;
  const bool tp_first =
      outcome.thrown.starts_with("tp collective 2 (barrier): rank ") &&
      outcome.thrown.find("for rank 1 (waiting in dp collective 1 (barrier))") != std::string::npos;
  const bool dp_first =
      outcome.thrown.starts_with("dp collective 1 (barrier): rank 1 waited") &&
      outcome.thrown.find("rank 0 (waiting in tp collective 2 (barrier))") != std::string::npos;
  EXPECT_TRUE(tp_first || dp_first) << outcome.thrown;
  expect_everywhere(outcome, outcome.thrown);

  std::atomic<bool> gave_up{false};
  const Outcome message = failing(
      2,
      [&](int rank, ThreadWorld& world) {
        const auto pp = world.join(rank, everyone(2), "pp");
        std::vector<float> x(8);
        if (rank == 1)
          while (!gave_up) std::this_thread::yield();
        try {
          pp->recv(view(x), 1).wait();
        } catch (const CommError&) {
          gave_up = true;
          throw;
        }
      },
      30ms);
  EXPECT_EQ(
      message.thrown,
      "pp message 1 from rank 1 to rank 0 (recv of 8 f32): rank 0 waited 30 ms for rank 1 (not waiting)");
}

TEST(ThreadFailure, AbortFromOutside) {
  ThreadWorld world(3, 20s);
  std::thread watcher([&] {
    std::this_thread::sleep_for(5ms);
    world.abort("stopped by the user");
    world.abort("too late");
  });
  try {
    run_ranks(world, [&](int rank) {
      const auto tp = world.join(rank, everyone(3), "tp");
      std::vector<float> x(8);
      for (;;) tp->all_reduce(view(x)).wait();
    });
    ADD_FAILURE() << "not aborted";
  } catch (const CommError& error) {
    EXPECT_STREQ(error.what(), "stopped by the user");
  }
  watcher.join();
}

TEST(ThreadFailure, BadGroupsAreRefused) {
  EXPECT_THROW(ThreadWorld(0, 1s), RequestError);
  ThreadWorld world(2, 1s);
  EXPECT_THROW(world.join(0, {0, 2}, "tp"), RequestError);
  EXPECT_THROW(world.join(0, {0, 0}, "tp"), RequestError);
  EXPECT_THROW(world.join(0, {1}, "tp"), RequestError);
}

TEST(Threads, AWorldRunsAgain) {
  ThreadWorld world(3, 20s);
  for (int i = 0; i < 3; ++i)
    run_ranks(world, [&](int rank) {
      const auto tp = world.join(rank, everyone(3), "tp");
      std::vector<std::int32_t> x{rank};
      tp->all_reduce(view(x)).wait();
      EXPECT_EQ(x[0], 3);
    });
}

}  // namespace
}  // namespace echelon

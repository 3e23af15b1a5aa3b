// What every verb leaves in the buffers.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

#include "rank_runs.h"

namespace echelon {
namespace {

using namespace checks;
using namespace std::chrono_literals;

// The sum of ranks [begin, end), grouped as communicator.h says.
template <class T>
T reduced(ReduceOp op, int begin, int end, std::int64_t i) {
  if (end - begin == 1) return value<T>(begin, i);
  const int middle = begin + (end - begin + 1) / 2;
  const T left = reduced<T>(op, begin, middle, i), right = reduced<T>(op, middle, end, i);
  return op == ReduceOp::max ? std::max(left, right) : static_cast<T>(left + right);
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

constexpr std::array<int, 8> group_sizes{1, 2, 3, 4, 5, 7, 8, 11};

TYPED_TEST(VerbsOf, AllReduceIsTheSumByHalves) {
  using T = TypeParam;
  for (int n : group_sizes)
    with_ranks(n, [&](Communicator& tp) {
      for (ReduceOp op : {ReduceOp::sum, ReduceOp::max})
        for (std::int64_t count : {0, 1, 15, 16, 17, 1000, 150001}) {
          auto x = values<T>(tp.rank(), count);
          tp.all_reduce(view(x), op).wait();
          std::vector<T> expected(x.size());
          for (std::int64_t i = 0; i < count; ++i)
            expected[static_cast<std::size_t>(i)] = reduced<T>(op, 0, n, i);
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
          expected[i] = reduced<T>(ReduceOp::sum, 0, n, begin + static_cast<std::int64_t>(i));
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

TEST(Collectives, LargeCollectivesPastTheCachesAreTheSame) {
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

TEST(Collectives, MaxPropagatesNan) {
  with_ranks(3, [&](Communicator& tp) {
    std::vector<float> x{tp.rank() == 1 ? std::numeric_limits<float>::quiet_NaN() : 1.0f,
                         static_cast<float>(tp.rank())};
    tp.all_reduce(view(x), ReduceOp::max).wait();
    EXPECT_TRUE(std::isnan(x[0]));
    EXPECT_EQ(x[1], 2.0f);
  });
}

}  // namespace
}  // namespace echelon

// What every verb leaves in the buffers.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <thread>

#include "base/error.h"
#include "base/split.h"
#include "case_choice.h"
#include "comm/collectives.h"
#include "rank_runs.h"

namespace echelon::collectives_test {
namespace {

using namespace checks;
using namespace std::chrono_literals;

template <class T>
T reduce_two(ReduceOp op, T left, T right) {
  return op == ReduceOp::max ? std::max(left, right) : static_cast<T>(left + right);
}

// Element i of ranks [begin, end), grouped as communicator.h says. Partial sums are rounded to Partial.
template <class T, class Partial = T>
Partial by_halves(ReduceOp op, int begin, int end, std::int64_t i) {
  if (end - begin == 1) return Partial(value<T>(begin, i));
  const int middle = begin + (end - begin + 1) / 2;
  return reduce_two(op, by_halves<T, Partial>(op, begin, middle, i),
                    by_halves<T, Partial>(op, middle, end, i));
}

// Element i of n ranks, from the one after `last` round the ring.
template <class T>
T round_ring(ReduceOp op, int n, int last, std::int64_t i) {
  T result = value<T>((last + 1) % n, i);
  for (int k = 2; k <= n; ++k) result = reduce_two(op, result, value<T>((last + k) % n, i));
  return result;
}

bool reduces_round_ring(Collectives collectives, int n, std::int64_t bytes) {
  return collectives == Collectives::ring ||
         (collectives == Collectives::automatic && fastest_all_reduce(n, bytes) == AllReduceAlgorithm::ring);
}

template <class T, class Partial = T>
std::vector<T> reduced(ReduceOp op, int n, std::int64_t count, bool ring) {
  std::vector<T> result;
  for (int part = 0; part < n; ++part) {
    const Range range = split_range(count, n, part);
    for (std::int64_t i = range.begin; i < range.end; ++i)
      result.push_back(ring ? round_ring<T>(op, n, part, i) : T(by_halves<T, Partial>(op, 0, n, i)));
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
    large.push_back(i == n / 2 ? 70001 : i % 3 == 1 ? 0 : 2001 + i);
  }
  one.back() = 129;
  all.insert(all.end(), {uneven, one, large});
  return all;
}

template <class T>
class VerbsOf : public testing::Test {};
using Types = testing::Types<float, double, bf16, std::int32_t>;
TYPED_TEST_SUITE(VerbsOf, Types);

constexpr std::array<int, 8> group_sizes{1, 2, 3, 4, 5, 6, 8, 11};

// Runs body(communicator) on n ranks for every n and every way of doing collectives.
void everywhere(const std::function<void(Communicator&, Collectives)>& body) {
  for (int n : group_sizes)
    for (Collectives collectives : every_collectives) {
      if (!is_taken()) continue;
      SCOPED_TRACE(std::to_string(n) + " ranks, " + collectives_name(collectives));
      with_ranks(collectives, n, [&](Communicator& tp) { body(tp, collectives); });
    }
}

TYPED_TEST(VerbsOf, AllReduceIsTheSumInTheOrderOfItsLaw) {
  using T = TypeParam;
  for (int n : group_sizes)
    for (ReduceOp op : {ReduceOp::sum, ReduceOp::max})
      for (std::int64_t count : {0, 1, 15, 17, 1000, n < 6 ? 150001 : 20011}) {
        if (!is_taken()) continue;
        const auto halves = reduced<T>(op, n, count, false), ring = reduced<T>(op, n, count, true);
        const auto at_once = reduced<T, Wide<T>>(op, n, count, false);
        for (Collectives collectives : every_collectives)
          with_ranks(collectives, n, [&](Communicator& tp) {
            auto x = values<T>(tp.rank(), count);
            tp.all_reduce(view(x), op).wait();
            const auto bytes = static_cast<std::int64_t>(sizeof(T)) * count;
            const bool direct = collectives == Collectives::direct;
            ASSERT_EQ(x, direct                                      ? at_once
                         : reduces_round_ring(collectives, n, bytes) ? ring
                                                                     : halves)
                << n << " ranks, " << count << " elements, " << collectives_name(collectives);
          });
        with_ranks(n, [&](Communicator& tp) {
          auto x = values<T>(tp.rank(), count);
          Scratch scratch;
          recursive_doubling_all_reduce(tp, view(x), op, scratch);
          ASSERT_EQ(x, halves) << n << " ranks, " << count << " elements";
        });
      }
}

TYPED_TEST(VerbsOf, AllGatherIsTheConcatenation) {
  using T = TypeParam;
  everywhere([](Communicator& tp, Collectives) {
    for (const Counts& counts : shares(tp.size())) {
      const auto mine = static_cast<std::size_t>(tp.rank());
      std::vector<T> expected;
      std::int64_t begin = 0;
      for (int rank = 0; rank < tp.size(); ++rank) {
        const auto part = values<T>(rank, counts[static_cast<std::size_t>(rank)]);
        if (rank < tp.rank()) begin += counts[static_cast<std::size_t>(rank)];
        expected.insert(expected.end(), part.begin(), part.end());
      }
      auto in = values<T>(tp.rank(), counts[mine]);
      std::vector<T> out(expected.size(), T(7.0f)), in_place(expected.size(), T(7.0f));
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
  everywhere([](Communicator& tp, Collectives collectives) {
    const int n = tp.size();
    for (const Counts& counts : shares(n)) {
      auto in = values<T>(tp.rank(), total(counts));
      const auto before = in;
      std::vector<T> out(static_cast<std::size_t>(counts[static_cast<std::size_t>(tp.rank())])), expected;
      const std::int64_t begin = std::accumulate(counts.begin(), counts.begin() + tp.rank(), std::int64_t{0});
      for (std::int64_t i = begin; i < begin + static_cast<std::int64_t>(out.size()); ++i)
        expected.push_back(collectives == Collectives::direct
                               ? T(by_halves<T, Wide<T>>(ReduceOp::sum, 0, n, i))
                               : round_ring<T>(ReduceOp::sum, n, tp.rank(), i));
      tp.reduce_scatter(view(in), view(out), counts).wait();
      ASSERT_EQ(out, expected);
      ASSERT_EQ(in, before);
      const Tensor whole = view(in);
      tp.reduce_scatter(whole, whole.flat_range(begin, begin + counts[static_cast<std::size_t>(tp.rank())]),
                        counts)
          .wait();
      auto in_place = before;
      std::copy(expected.begin(), expected.end(), in_place.begin() + begin);
      ASSERT_EQ(in, in_place);
    }
  });
}

// Of bf16, where partial sums travel: within (1 + u)^h - 1 of the sum of magnitudes, h hops, of what f64
// says; where they do not, within one rounding and f32's. The bound of the latter is no bound of the former.
TEST(Collectives, Bf16SumsAreWithinTheirBounds) {
  constexpr std::int64_t count = 2000;
  const double u = 0x1p-8, eps = 0x1p-23;
  for (int n : group_sizes)
    for (Collectives collectives : every_collectives)
      with_ranks(collectives, n, [&](Communicator& tp) {
        auto x = values<bf16>(tp.rank(), count);
        tp.all_reduce(view(x)).wait();
        const double levels = std::ceil(std::log2(n));
        const bool ring = reduces_round_ring(collectives, n, 2 * count);
        const double travelled = std::pow(1 + u, ring ? n - 1 : levels) - 1;
        for (std::int64_t i = 0; i < count; ++i) {
          double exact = 0, size = 0;
          for (int r = 0; r < n; ++r) {
            const double term = float{value<bf16>(r, i)};
            exact += term;
            size += std::abs(term);
          }
          const double found = float{x[static_cast<std::size_t>(i)]};
          const double bound = collectives == Collectives::direct
                                   ? u * std::abs(exact) + 2 * levels * eps * size
                                   : (travelled + 2 * n * eps) * size;
          ASSERT_LE(std::abs(found - exact), bound) << n << " ranks, " << collectives_name(collectives);
        }
      });
}

// The law: what all_reduce leaves is what reduce_scatter leaves, in the parts that both cut.
TYPED_TEST(VerbsOf, AllReduceAndReduceScatterGiveTheSameBits) {
  using T = TypeParam;
  for (int n : group_sizes)
    for (Collectives collectives : {Collectives::direct, Collectives::ring})
      with_ranks(collectives, n, [&](Communicator& tp) {
        Counts counts;
        for (int r = 0; r < n; ++r) counts.push_back(split_range(3001, n, r).size());
        auto x = values<T>(tp.rank(), 3001), in = x;
        std::vector<T> out(static_cast<std::size_t>(counts[static_cast<std::size_t>(tp.rank())]));
        tp.all_reduce(view(x)).wait();
        tp.reduce_scatter(view(in), view(out), counts).wait();
        const std::int64_t begin = split_range(3001, n, tp.rank()).begin;
        ASSERT_TRUE(std::equal(out.begin(), out.end(), x.begin() + begin)) << collectives_name(collectives);
      });
}

TYPED_TEST(VerbsOf, AllToAllTransposes) {
  using T = TypeParam;
  everywhere([](Communicator& tp, Collectives) {
    for (std::int64_t scale : {0, 1, tp.size() < 6 ? 9001 : 13}) {
      // From i to j: nothing where i + j is a multiple of 3.
      const auto count = [&](int i, int j) {
        return (i + j) % 3 == 0 ? 0 : scale * (1 + (2 * i + 5 * j) % 7);
      };
      Counts sends, receives;
      std::vector<T> in, expected;
      for (int peer = 0; peer < tp.size(); ++peer) {
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
    }
  });
}

TYPED_TEST(VerbsOf, BroadcastCopiesTheRoots) {
  using T = TypeParam;
  everywhere([](Communicator& tp, Collectives) {
    for (int root = 0; root < tp.size(); ++root)
      for (std::int64_t count : {0, 1, 333, 80001}) {
        if (count > 1000 && root > 0) continue;
        auto x = values<T>(tp.rank(), count);
        tp.broadcast(view(x), root).wait();
        ASSERT_EQ(x, values<T>(root, count));
      }
  });
}

TYPED_TEST(VerbsOf, MessagesArriveInOrder) {
  using T = TypeParam;
  everywhere([](Communicator& tp, Collectives collectives) {
    if (collectives != Collectives::direct && collectives != Collectives::ring) return;
    const int n = tp.size();
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
  everywhere([](Communicator& tp, Collectives) {
    const int n = tp.size();
    std::vector<float> x{tp.rank() == n / 2 ? std::numeric_limits<float>::quiet_NaN() : 1.0f,
                         static_cast<float>(tp.rank())};
    tp.all_reduce(view(x), ReduceOp::max).wait();
    EXPECT_TRUE(std::isnan(x[0]));
    EXPECT_EQ(x[1], static_cast<float>(n - 1));
  });
}

TEST(Collectives, NobodyLeavesABarrierBeforeAllHaveCome) {
  for (Collectives collectives : every_collectives)
    for (int n : group_sizes) {
      std::atomic<int> come{0};
      with_ranks(collectives, n, [&](Communicator& tp) {
        for (int round = 1; round <= 5; ++round) {
          if (tp.rank() == round % n) std::this_thread::sleep_for(1ms);
          ++come;
          tp.barrier().wait();
          EXPECT_GE(come, round * n) << collectives_name(collectives);
          tp.barrier().wait();
        }
      });
    }
}

// Messages sent before a collective and received after it, and received before and sent after, on every
// channel that the collective could use, and of a size it could take for its own.
TEST(Collectives, MessagesDoNotMeetThoseOfACollective) {
  everywhere([](Communicator& tp, Collectives) {
    const int n = tp.size();
    constexpr std::int64_t count = 24;
    const auto part = split_range(count, n, 0).size();
    for (int verb = 0; verb < 5; ++verb) {
      std::vector<std::vector<float>> early, late, got_early, got_late;
      std::vector<Pending> pending;
      const auto message = [&](int from, int to, bool is_late) {
        return values<float>(from, part, 100 * to + (is_late ? 10000 : 0));
      };
      for (int peer = 0; peer < n; ++peer) {
        early.push_back(message(tp.rank(), peer, false));
        late.push_back(message(tp.rank(), peer, true));
        got_early.emplace_back(static_cast<std::size_t>(part));
        got_late.emplace_back(static_cast<std::size_t>(part));
      }
      const auto at = [](int peer) { return static_cast<std::size_t>(peer); };
      for (int peer = 0; peer < n; ++peer) tp.send(view(early[at(peer)]), peer).wait();
      if (tp.rank() % 2 == 0)
        for (int peer = 0; peer < n; ++peer) pending.push_back(tp.recv(view(got_early[at(peer)]), peer));
      auto x = values<float>(tp.rank(), count);
      std::vector<float> y(at(n) * x.size()), part_sum(x.size() / at(n) + 1);
      const Counts same(at(n), count), even = [&] {
        Counts counts;
        for (int i = 0; i < n; ++i) counts.push_back(split_range(count, n, i).size());
        return counts;
      }();
      const Tensor mine = view(part_sum).flat_range(0, even[at(tp.rank())]);
      Pending collective = verb == 0   ? tp.all_reduce(view(x))
                           : verb == 1 ? tp.all_gather(view(x), view(y), same)
                           : verb == 2 ? tp.reduce_scatter(view(x), mine, even)
                           : verb == 3 ? tp.broadcast(view(x), n - 1)
                                       : tp.barrier();
      if (tp.rank() % 2 == 1)
        for (int peer = 0; peer < n; ++peer) pending.push_back(tp.recv(view(got_early[at(peer)]), peer));
      for (int peer = 0; peer < n; ++peer) {
        pending.push_back(tp.recv(view(got_late[at(peer)]), peer));
        tp.send(view(late[at(peer)]), peer).wait();
      }
      collective.wait();
      for (Pending& p : pending) p.wait();
      for (int peer = 0; peer < n; ++peer) {
        ASSERT_EQ(got_early[at(peer)], message(peer, tp.rank(), false)) << verb;
        ASSERT_EQ(got_late[at(peer)], message(peer, tp.rank(), true)) << verb;
      }
    }
  });
}

TEST(Collectives, AlgorithmsRefuseWhatTheDirectFormsRefuse) {
  for (Collectives collectives : every_collectives) {
    const auto wrong = [&](const std::function<Pending(Communicator&, const Tensor&)>& call,
                           const std::string& text) {
      const FailedJob outcome = failing(3, [&](int rank, ThreadWorld& world) {
        const auto tp = join(world, rank, everyone(3), collectives);
        std::vector<double> x(12);
        if (rank == 1) call(*tp, view(x)).wait();
        tp->barrier().wait();
      });
      for (const std::string& seen : outcome.seen)
        EXPECT_NE(seen.find("rank 1 called " + text), std::string::npos) << seen << "\nnot " << text;
    };
    wrong(
        [](auto& tp, auto& x) {
          return tp.all_gather(x, x, Counts{4, 4, 4});
        },
        "all_gather of [4, 4, 4] f64: in has 12 elements, not 4");
    wrong(
        [](auto& tp, auto& x) {
          return tp.reduce_scatter(x, x, Counts{6, 6});
        },
        "reduce_scatter of [6, 6] f64: counts has 2 entries for 3 ranks");
    wrong(
        [](auto& tp, auto& x) {
          return tp.all_to_all(x, Counts{4, 4, 4}, x, Counts{4, 5, 3});
        },
        "all_to_all sending [4, 4, 4] and receiving [4, 5, 3] f64: it sends itself 4 elements but receives "
        "5");
    wrong(
        [](auto& tp, auto& x) {
          return tp.all_reduce(x.reshape({3, 4}).column_range(0, 2));
        },
        "all_reduce of 6 f64: x is not contiguous");
    wrong([](auto& tp, auto& x) { return tp.broadcast(x, 3); },
          "broadcast from 3 of 12 f64: root is 3, not a rank of a group of 3");
  }
}

TEST(Collectives, ARankThatDisagreesOrLeavesFailsEveryRank) {
  for (Collectives collectives : every_collectives) {
    const FailedJob counts = failing(4, [&](int rank, ThreadWorld& world) {
      const auto tp = join(world, rank, everyone(4), collectives);
      std::vector<float> x(rank == 2 ? 41 : 40);
      tp->all_reduce(view(x)).wait();
      tp->barrier().wait();
    });
    for (const std::string& seen : counts.seen) EXPECT_NE(seen, "") << collectives_name(collectives);
    const FailedJob left = failing(4, [&](int rank, ThreadWorld& world) {
      const auto tp = join(world, rank, everyone(4), collectives);
      std::vector<float> x(40);
      if (rank != 3) tp->all_reduce(view(x)).wait();
    });
    for (int rank : {0, 1, 2})
      EXPECT_NE(left.seen[static_cast<std::size_t>(rank)].find("rank 3 has finished"), std::string::npos)
          << left.seen[static_cast<std::size_t>(rank)];
  }
}

TEST(Collectives, AreNamed) {
  for (Collectives collectives : every_collectives)
    EXPECT_EQ(parse_collectives(collectives_name(collectives), "--collectives"), collectives);
  try {
    parse_collectives("tree", "--collectives");
    ADD_FAILURE() << "not refused";
  } catch (const RequestError& error) {
    EXPECT_STREQ(error.what(), "--collectives tree: legal: direct, ring, halving-doubling, auto, nccl");
  }
}

}  // namespace
}  // namespace echelon::collectives_test

// Processes against threads: each process runs a job of as many thread ranks beside it and compares bits.
// Run by mpirun, see CMakeLists.txt.
#include "comm/process_world.h"

#include <gtest/gtest.h>

#include <cstring>

#include "comm/threads.h"
#include "rank_runs.h"

namespace echelon {
namespace {

using namespace checks;

std::unique_ptr<ProcessWorld> job;

Counts uneven(int n, std::int64_t scale) {
  Counts counts;
  for (int r = 0; r < n; ++r) counts.push_back(r % 3 == 1 ? 0 : scale + 7 * r);
  return counts;
}

// What body(group, world rank) leaves in the result, with processes and with threads, to the last bit.
template <class T>
void expect_same(const std::function<std::vector<T>(Communicator&, int)>& body,
                 const std::vector<int>& ranks) {
  const int n = job->num_ranks(), me = job->rank();
  std::vector<T> here;
  std::vector<std::vector<T>> expected(static_cast<std::size_t>(n));
  const auto in_group = [&](int rank) { return std::find(ranks.begin(), ranks.end(), rank) != ranks.end(); };
  job->run([&](int rank) {
    if (in_group(rank)) here = body(*job->join(rank, ranks, "tp"), rank);
  });
  ThreadWorld threads(n, patience);
  threads.run([&](int rank) {
    if (in_group(rank))
      expected[static_cast<std::size_t>(rank)] = body(*threads.join(rank, ranks, "tp"), rank);
  });
  const auto& want = expected[static_cast<std::size_t>(me)];
  ASSERT_EQ(here.size(), want.size());
  EXPECT_TRUE(here.empty() || std::memcmp(here.data(), want.data(), here.size() * sizeof(T)) == 0);
}

// All, the even ones, and all backwards: the order of a sum is that of the group.
std::vector<std::vector<int>> groups() {
  const int n = job->num_ranks();
  std::vector<std::vector<int>> all{everyone(n), {}, everyone(n)};
  for (int r = 0; r < n; r += 2) all[1].push_back(r);
  std::reverse(all[2].begin(), all[2].end());
  return all;
}

// Empty, in the envelope, whole to every rank, cut.
constexpr std::int64_t sizes[] = {0, 1, 37, 300, 1500, 5003, 300001};

template <class T>
void expect_same_sums(std::int64_t largest = 1 << 30) {
  for (const auto& ranks : groups())
    for (std::int64_t count : sizes) {
      if (count > largest) continue;
      for (ReduceOp op : {ReduceOp::sum, ReduceOp::max})
        expect_same<T>(
            [&](Communicator& group, int rank) {
              auto x = values<T>(rank, count);
              group.all_reduce(view(x), op).wait();
              return x;
            },
            ranks);
      expect_same<T>(
          [&](Communicator& group, int rank) {
            const Counts counts = uneven(group.size(), count);
            auto in = values<T>(rank, total(counts));
            std::vector<T> out(static_cast<std::size_t>(counts[static_cast<std::size_t>(group.rank())]));
            group.reduce_scatter(view(in), view(out), counts).wait();
            return out;
          },
          ranks);
    }
}

TEST(ProcessWorld, SumsAreThoseOfThreadsToTheLastBit) {
  expect_same_sums<float>();
  expect_same_sums<double>(6000);
  expect_same_sums<bf16>(6000);
  expect_same_sums<std::int32_t>(6000);
}

template <class T>
void expect_same_moves() {
  for (const auto& ranks : groups())
    for (std::int64_t count : sizes) {
      expect_same<T>(
          [&](Communicator& group, int rank) {
            const Counts counts = uneven(group.size(), count);
            auto in = values<T>(rank, counts[static_cast<std::size_t>(group.rank())]);
            std::vector<T> out(static_cast<std::size_t>(total(counts)));
            group.all_gather(view(in), view(out), counts).wait();
            return out;
          },
          ranks);
      expect_same<T>(
          [&](Communicator& group, int rank) {
            Counts send, receive;
            const auto between = [&](int from, int to) {
              return (from * 5 + to) % 4 == 0 ? 0 : count + from + 2 * to;
            };
            for (int r = 0; r < group.size(); ++r) {
              send.push_back(between(group.rank(), r));
              receive.push_back(between(r, group.rank()));
            }
            auto in = values<T>(rank, total(send));
            std::vector<T> out(static_cast<std::size_t>(total(receive)));
            group.all_to_all(view(in), send, view(out), receive).wait();
            return out;
          },
          ranks);
      expect_same<T>(
          [&](Communicator& group, int rank) {
            auto x = values<T>(rank, count);
            group.broadcast(view(x), group.size() - 1).wait();
            return x;
          },
          ranks);
    }
}

TEST(ProcessWorld, MovesWhatThreadsMove) {
  expect_same_moves<float>();
  expect_same_moves<bf16>();
}

TEST(ProcessWorld, APlaceInsideTheBufferIsLegal) {
  const auto ranks = everyone(job->num_ranks());
  expect_same<float>(
      [](Communicator& group, int rank) {
        const Counts counts = uneven(group.size(), 700);
        std::int64_t begin = 0;
        for (int r = 0; r < group.rank(); ++r) begin += counts[static_cast<std::size_t>(r)];
        auto x = values<float>(rank, total(counts));
        const Tensor whole = view(x);
        const Tensor own = whole.flat_range(begin, begin + counts[static_cast<std::size_t>(group.rank())]);
        group.reduce_scatter(whole, own, counts).wait();
        group.all_gather(own, whole, counts).wait();
        return x;
      },
      ranks);
}

// Many at once, waited for backwards, with messages in between: nothing depends on the order of waits.
TEST(ProcessWorld, ManyAreUnderWayAtOnce) {
  expect_same<double>(
      [](Communicator& group, int rank) {
        const int n = group.size(), next = (group.rank() + 1) % n, before = (group.rank() + n - 1) % n;
        std::vector<std::vector<double>> sums, received;
        std::vector<Pending> pending;
        for (int k = 0; k < 40; ++k) {
          sums.push_back(values<double>(rank, 1 + 97 * k, k));
          received.emplace_back(static_cast<std::size_t>(1 + 61 * k));
        }
        for (std::size_t k = 0; k < sums.size(); ++k) {
          pending.push_back(group.all_reduce(view(sums[k])));
          auto sent = values<double>(rank, static_cast<std::int64_t>(received[k].size()));
          group.send(view(sent), next).wait();  // changed at once: the message was copied
          std::fill(sent.begin(), sent.end(), 0.0);
        }
        for (auto& x : received) group.recv(view(x), before).wait();
        while (!pending.empty()) {
          pending.back().wait();
          pending.pop_back();
        }
        std::vector<double> all;
        for (const auto& x : sums) all.insert(all.end(), x.begin(), x.end());
        for (const auto& x : received) all.insert(all.end(), x.begin(), x.end());
        return all;
      },
      everyone(job->num_ranks()));
}

// A large sum goes on while the ranks compute: they do nothing for it, and the one that waits gets it.
TEST(ProcessWorld, WhatIsUnderWayMovesWhileTheRankComputes) {
  job->run([](int rank) {
    const auto group = job->join(rank, everyone(job->num_ranks()), "tp");
    auto x = values<float>(rank, 1 << 20);
    std::vector<float> sum_of_all = x;
    group->all_reduce(view(sum_of_all)).wait();
    Pending sum = group->all_reduce(view(x));
    // Rank 0 needs a part of the sum from every rank; the others compute until it has them.
    if (rank > 0) wait_until([] { return job->states()[0].instruction == "with the whole sum"; });
    sum.wait();
    job->recorder(rank).at("with the whole sum");
    EXPECT_EQ(x, sum_of_all);
    group->barrier().wait();
    job->recorder(rank).at("");
  });
}

// Dropped without a wait: still done, and its tensor kept until then.
TEST(ProcessWorld, WhatIsDroppedIsStillDone) {
  job->run([](int rank) {
    Arena arena;  // outlives the communicator, as a rank's does
    const auto group = job->join(rank, everyone(job->num_ranks()), "tp");
    for (int k = 0; k < 20; ++k) {
      auto x = values<float>(rank, 4000);
      {
        const Tensor t(arena, MemoryCategory::other, DType::f32, {4000});
        std::memcpy(t.host_bytes(), x.data(), 16000);
        (void)group->all_reduce(t);
        group->all_reduce(view(x)).wait();
      }
      group->barrier().wait();
    }
  });
}

}  // namespace
}  // namespace echelon

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  echelon::job = std::make_unique<echelon::ProcessWorld>(echelon::checks::patience, echelon::FailureHooks{});
  const int status = RUN_ALL_TESTS();
  echelon::job.reset();
  return status;
}

#include "comm/recording.h"

#include <gtest/gtest.h>

#include <vector>

#include "comm/threads.h"
#include "patience.h"

namespace echelon::recording_test {
namespace {

using namespace std::chrono_literals;
using Counts = std::vector<std::int64_t>;

Traffic recorded(int n, int rank_of_interest, const std::function<void(Communicator&)>& body) {
  ThreadWorld world(n, checks::patience);
  std::vector<Traffic> traffic(static_cast<std::size_t>(n));
  std::vector<int> ranks;
  for (int rank = 0; rank < n; ++rank) ranks.push_back(rank);
  run_ranks(world, [&](int rank) {
    const auto tp =
        record_traffic(world.join(rank, ranks, "tp"), Axis::tp, traffic[static_cast<std::size_t>(rank)]);
    EXPECT_EQ(tp->rank(), rank);
    EXPECT_EQ(tp->size(), n);
    body(*tp);
  });
  return traffic[static_cast<std::size_t>(rank_of_interest)];
}

// Every verb once, except broadcast twice, with a ring of messages.
void all_verbs_once(Communicator& tp) {
  const int n = tp.size(), me = tp.rank();
  std::vector<double> whole(100), part(100), other(100);
  const auto view = [](std::vector<double>& data, std::int64_t count) {
    return Tensor::view_of(data.data(), DType::f64, {count});
  };
  Counts counts(static_cast<std::size_t>(n), 10);
  counts[0] = 13;
  const std::int64_t sum = 10 * n + 3, mine = counts[static_cast<std::size_t>(me)];
  tp.all_reduce(view(whole, 10)).wait();
  tp.all_gather(view(part, mine), view(whole, sum), counts).wait();
  tp.reduce_scatter(view(whole, sum), view(part, mine), counts).wait();
  // Rank i sends i + 1 elements to everyone.
  Counts sends(static_cast<std::size_t>(n), me + 1), receives;
  for (int i = 0; i < n; ++i) receives.push_back(i + 1);
  tp.all_to_all(view(whole, n * (me + 1)), sends, view(other, n * (n + 1) / 2), receives).wait();
  for (int root : {0, n - 1}) tp.broadcast(view(whole, 5), root).wait();
  tp.send(view(whole, 7), (me + 1) % n).wait();
  tp.recv(view(part, 7), (me + n - 1) % n).wait();
  tp.barrier().wait();
}

TEST(Recording, CountsCallsAndBytesOfEveryVerb) {
  for (int rank = 0; rank < 4; ++rank) {
    const Traffic traffic = recorded(4, rank, all_verbs_once);
    const std::int64_t mine = rank == 0 ? 13 : 10;
    const std::int64_t segment = rank < 2 ? 3 : 2;  // of 10 elements cut in 4
    Traffic expected;
    expected.at(Axis::tp, Verb::all_reduce) = {1, 8 * (10 - segment + 3 * segment)};
    expected.at(Axis::tp, Verb::all_gather) = {1, 8 * 3 * mine};
    expected.at(Axis::tp, Verb::reduce_scatter) = {1, 8 * (43 - mine)};
    expected.at(Axis::tp, Verb::all_to_all) = {1, 8 * 3 * (rank + 1)};
    expected.at(Axis::tp, Verb::broadcast) = {2, rank == 0 || rank == 3 ? 8 * 3 * 5 : 0};
    expected.at(Axis::tp, Verb::send) = {1, 8 * 7};
    expected.at(Axis::tp, Verb::recv) = {1, 0};
    expected.at(Axis::tp, Verb::barrier) = {1, 0};
    for (Verb verb : all_verbs) {
      EXPECT_EQ(traffic.at(Axis::tp, verb).calls, expected.at(Axis::tp, verb).calls)
          << verb_name(verb) << rank;
      EXPECT_EQ(traffic.at(Axis::tp, verb).bytes, expected.at(Axis::tp, verb).bytes)
          << verb_name(verb) << rank;
    }
    EXPECT_EQ(traffic, expected);  // and nothing on other axes
  }
}

TEST(Recording, AGroupOfOneSendsNothing) { EXPECT_EQ(recorded(1, 0, all_verbs_once), Traffic{}); }

TEST(Recording, ARefusedCallIsNotCounted) {
  ThreadWorld world(2, checks::patience);
  std::vector<Traffic> traffic(2);
  EXPECT_THROW(run_ranks(world,
                         [&](int rank) {
                           const auto tp = record_traffic(world.join(rank, {0, 1}, "tp"), Axis::tp,
                                                          traffic[static_cast<std::size_t>(rank)]);
                           std::vector<float> x(4);
                           const Tensor view = Tensor::view_of(x.data(), DType::f32, {4});
                           tp->all_gather(view, view, Counts{4}).wait();
                         }),
               std::runtime_error);
  EXPECT_EQ(traffic[0], Traffic{});
  EXPECT_EQ(traffic[1], Traffic{});
}

}  // namespace
}  // namespace echelon::recording_test

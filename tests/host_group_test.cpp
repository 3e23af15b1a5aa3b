#include "comm/host_group.h"

#include <gtest/gtest.h>

#include <vector>

#include "comm/imagined.h"
#include "comm/recording.h"
#include "rank_runs.h"

namespace echelon::host_group_test {
namespace {

using Numbers = std::vector<double>;
using Integers = std::vector<std::int32_t>;

TEST(HostGroup, SumsGathersAndExchangesNumbers) {
  checks::with_ranks(3, [](Communicator& group) {
    const int me = group.rank();
    const HostGroup host(group);
    EXPECT_EQ(host.sum(Numbers{1.0 + me, 10}), (Numbers{6, 30}));
    EXPECT_EQ(host.sum(me), 3);
    EXPECT_EQ(host.max(-me), 0);
    EXPECT_EQ(host.max(Numbers{0.5 * me, -0.5 * me}), (Numbers{1, 0}));
    EXPECT_EQ(host.max(Integers{me, -me}), (Integers{2, 0}));
    Numbers said{1.0 * me, 2.0 * me};
    host.broadcast(said, 2);
    EXPECT_EQ(said, (Numbers{2, 4}));
    // Two sums under way, with another between.
    HostNumbers first = host.begin_sum(Numbers{1}), second = host.begin_gather(Numbers{me + 0.5, 7});
    EXPECT_EQ(host.sum(2.0), 6);
    EXPECT_EQ(second.get(), (Numbers{0.5, 7, 1.5, 7, 2.5, 7}));
    EXPECT_EQ(first.get(), Numbers{3});
    // Rank r has 10 r + 2 i and one more for rank i.
    const Integers counts{10 * me, 10 * me + 1, 10 * me + 2, 10 * me + 3, 10 * me + 4, 10 * me + 5};
    EXPECT_EQ(host.exchange(counts),
              (Integers{2 * me, 2 * me + 1, 10 + 2 * me, 11 + 2 * me, 20 + 2 * me, 21 + 2 * me}));
  });
}

// As many of each rank as it has, which may be none.
TEST(HostGroup, GathersRecordsOfEachRank) {
  checks::with_ranks(3, [](Communicator& group) {
    const int me = group.rank();
    const auto all = HostGroup(group).gather_records(Integers(static_cast<std::size_t>(2 - me), 7 + me));
    if (me == 0)
      EXPECT_EQ(all, (std::vector<Integers>{{7, 7}, {8}, {}}));
    else
      EXPECT_TRUE(all.empty());
  });
}

// The order of a sum is the group's: its bits are those of the same sum on tensors.
TEST(HostGroup, SumsHaveTheBitsOfTensors) {
  checks::with_ranks(5, [](Communicator& group) {
    Numbers numbers = checks::values<double>(group.rank(), 33);
    const Numbers sums = HostGroup(group).sum(numbers);
    group.all_reduce(checks::view(numbers)).wait();
    EXPECT_EQ(sums, numbers);
  });
}

TEST(HostGroup, ItsBytesAreTraffic) {
  ThreadWorld world(2, checks::patience);
  std::vector<Traffic> traffic(2), imagined(2);
  const auto speak = [](Communicator& group) {
    const HostGroup host(group);
    (void)host.sum(Numbers{1, 2, 3, 4});
    (void)host.exchange(Integers{1, 2, 3, 4});
    (void)host.begin_gather(Numbers{1}).get();
  };
  run_ranks(world, [&](int rank) {
    speak(*record_traffic(world.join(rank, {0, 1}, "dp"), Axis::dp, traffic[static_cast<std::size_t>(rank)]));
  });
  EXPECT_EQ(traffic[0].at(Axis::dp, Verb::all_reduce), (VerbTraffic{1, 4 * 8}));
  EXPECT_EQ(traffic[0].at(Axis::dp, Verb::all_to_all), (VerbTraffic{1, 2 * 4}));
  EXPECT_EQ(traffic[0].at(Axis::dp, Verb::all_gather), (VerbTraffic{1, 8}));
  for (int rank = 0; rank < 2; ++rank) {
    ImaginedWorld alone(2, rank);
    speak(
        *record_traffic(alone.join(rank, {0, 1}, "dp"), Axis::dp, imagined[static_cast<std::size_t>(rank)]));
  }
  EXPECT_EQ(imagined, traffic);
}

TEST(HostGroup, AmongImaginedRanksNumbersAreOnesOwn) {
  ImaginedWorld world(4, 1);
  const auto group = world.join(1, {0, 1}, "dp");
  const HostGroup host(*group);
  EXPECT_EQ(host.sum(Numbers{3, 4}), (Numbers{3, 4}));
  EXPECT_EQ(host.max(5), 5);
  EXPECT_EQ(host.exchange(Integers{1, 2}), (Integers{1, 2}));
  EXPECT_EQ(host.begin_gather(Numbers{6}).get(), (Numbers{0, 6}));
}

}  // namespace
}  // namespace echelon::host_group_test

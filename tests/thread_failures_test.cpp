// Failures of thread ranks: every rank of the world hears of them, also those outside the group.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "base/error.h"
#include "rank_runs.h"

namespace echelon::thread_failures_test {
namespace {

using namespace checks;
using namespace std::chrono_literals;

// Ranks 0 and 2 form the group tp, and 1 and 3; only the first goes wrong.
FailedJob mismatch(
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

void expect_everywhere(const FailedJob& outcome, const std::string& text) {
  for (const std::string& seen : outcome.seen)
    EXPECT_NE(seen.find(text), std::string::npos) << seen << "\nnot " << text;
  EXPECT_NE(outcome.thrown.find(text), std::string::npos) << outcome.thrown;
}

TEST(ThreadFailure, MismatchOfTheVerb) {
  const FailedJob outcome =
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
      const FailedJob outcome = failing(3, [&](int rank, ThreadWorld& world) {
        const auto pp = world.join(rank, everyone(3), "pp");
        std::vector<float> x(128);
        std::vector<double> y(128);
        if (rank == 0 && !send_first) wait_until([&] { return !world.states()[1].waits_in.empty(); });
        if (rank == 1 && send_first)
          wait_until([&] { return world.states()[0].last_finished.starts_with("pp message 1"); });
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
    const FailedJob outcome = failing(3, [&](int rank, ThreadWorld& world) {
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
  wrong([](auto& tp, auto& x) { return tp.all_reduce(Tensor::view_of(x.host_bytes(), DType::u8, {48})); },
        "u8: u8 is packed bytes, which have no sum");
  wrong(
      [](auto& tp, auto& x) {
        const Tensor bytes = Tensor::view_of(x.host_bytes(), DType::u8, {48});
        return tp.reduce_scatter(bytes, bytes.flat_range(0, 16), Counts{16, 16, 16});
      },
      "u8: u8 is packed bytes, which have no sum");
  wrong([](auto& tp, auto& x) { return tp.broadcast(x, 3); }, "root is 3, not a rank of a group of 3");
  wrong([](auto& tp, auto& x) { return tp.send(x, -1); }, "to is -1");
  wrong([](auto& tp, auto& x) { return tp.recv(x, 7); }, "from is 7");
}

TEST(ThreadFailure, ARankThatThrows) {
  const FailedJob outcome = failing(5, [&](int rank, ThreadWorld& world) {
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
}

TEST(ThreadFailure, ARankThatThrowsInTheMiddleOfOperations) {
  // Its buffers go while the others work on them: AddressSanitizer sees it when one goes on.
  for (int delay = 0; delay < 20; ++delay) {
    const FailedJob outcome = failing(4, [&](int rank, ThreadWorld& world) {
      const auto tp = world.join(rank, everyone(4), "tp");
      Arena arena;
      std::vector<Pending> pending;
      for (int i = 0; i < 4; ++i) {
        const Tensor x(arena, MemoryCategory::other, DType::f32, {200000});
        std::fill_n(x.host<float>(), x.numel(), 1.0f);
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
    ThreadWorld world(3, patience);
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
  // It leaves after the others have called, or whenever it comes to it.
  const auto wait = [](ThreadWorld& world, int for_rank) {
    wait_until([&] { return !world.states()[static_cast<std::size_t>(for_rank)].waits_in.empty(); });
  };
  for (bool late : {false, true}) {
    const FailedJob outcome = failing(3, [&](int rank, ThreadWorld& world) {
      const auto tp = world.join(rank, everyone(3), "tp");
      std::vector<float> x(8);
      for (int other : {0, 2})
        if (rank == 1 && late) wait(world, other);
      if (rank != 1) tp->all_reduce(view(x)).wait();
    });
    for (int rank : {0, 2}) {
      const std::string& seen = outcome.seen[static_cast<std::size_t>(rank)];
      EXPECT_NE(seen.find("tp collective 1: rank 1 has finished, but rank "), std::string::npos) << seen;
      EXPECT_NE(seen.find("called all_reduce of 8 f32"), std::string::npos) << seen;
    }
    const FailedJob message = failing(2, [&](int rank, ThreadWorld& world) {
      const auto pp = world.join(rank, everyone(2), "pp");
      std::vector<float> x(8);
      if (rank == 1 && late) wait(world, 0);
      if (rank == 0) pp->recv(view(x), 1).wait();
    });
    EXPECT_EQ(message.thrown, "pp message 1: rank 1 has finished, but rank 0 waits for it");
  }
}

// Turns the clock once the ranks wait that must.
TimedJob turned_when_asleep(TurnedClock& clock, std::chrono::milliseconds timeout,
                            const std::vector<int>& asleep) {
  return {timeout, clock.time(), [&clock, timeout, asleep](ThreadWorld& world) {
            wait_until([&] {
              const std::vector<RankState> states = world.states();
              return std::all_of(asleep.begin(), asleep.end(), [&](int rank) {
                return !states[static_cast<std::size_t>(rank)].waits_in.empty();
              });
            });
            clock.turn(timeout + 1ms);
          }};
}

TEST(ThreadFailure, RanksThatWaitForOneAnotherAreNamed) {
  TurnedClock clock;
  const FailedJob outcome = failing(
      3,
      [&](int rank, ThreadWorld& world) {
        const auto tp = world.join(rank, everyone(3), "tp");
        const auto dp = world.join(rank, everyone(3), "dp");
        std::vector<float> x(8);
        tp->all_reduce(view(x)).wait();
        (rank == 1 ? *dp : *tp).barrier().wait();
      },
      turned_when_asleep(clock, 300ms, {0, 1, 2}));
  // All three have waited as long, so whichever looks first gives up.
  EXPECT_NE(outcome.thrown.find(" waited 300 ms for rank"), std::string::npos) << outcome.thrown;
  EXPECT_TRUE(outcome.thrown.ends_with(
      "; ranks 0, 1 wait for one another: rank 0 in tp collective 2 (barrier) for rank 1; rank 1 in dp "
      "collective 1 (barrier) for ranks 0, 2"))
      << outcome.thrown;
  expect_everywhere(outcome, outcome.thrown);
}

TEST(ThreadFailure, ARankThatComputesForTooLongIsNamed) {
  TurnedClock clock;
  std::atomic<bool> gave_up{false};
  const FailedJob message = failing(
      2,
      [&](int rank, ThreadWorld& world) {
        const auto pp = world.join(rank, everyone(2), "pp");
        std::vector<float> x(8);
        if (rank == 1) wait_until([&] { return gave_up.load(); });
        try {
          pp->recv(view(x), 1).wait();
        } catch (const CommError&) {
          gave_up = true;
          throw;
        }
      },
      turned_when_asleep(clock, 30ms, {0}));
  EXPECT_EQ(message.thrown,
            "pp message 1 from rank 1 to rank 0 (recv of 8 f32): rank 0 waited 30 ms for rank 1; the rank at "
            "fault is rank 1: it does not wait, since 0.0 s");
}

// A rank that never comes back from where it computes is not waited for, once its time is over.
TEST(ThreadFailure, TheReportDoesNotWaitForARankThatNeverComesBack) {
  TurnedClock clock;
  std::vector<std::string> happened;
  std::atomic<bool> ended{false};
  TimedJob timed = turned_when_asleep(clock, 30ms, {0});
  timed.hooks.report = [&](const std::string& report) { happened.push_back(report); };
  timed.hooks.last_resort = [&] {
    happened.emplace_back("last resort");
    ended = true;
  };
  const auto inner = timed.beside;
  std::atomic<bool> failed{false};
  timed.beside = [&](ThreadWorld& world) {
    inner(world);
    wait_until([&] { return failed.load(); });
    EXPECT_FALSE(ended);
    // Once would be too early where who waits for the ranks has not seen yet that the job was aborted.
    wait_until([&] {
      clock.turn(1500ms);
      return ended.load();
    });
  };
  failing(
      2,
      [&](int rank, ThreadWorld& world) {
        const auto pp = world.join(rank, everyone(2), "pp");
        std::vector<float> x(8);
        if (rank == 1) wait_until([&] { return ended.load(); });
        if (rank == 1) return;
        try {
          pp->recv(view(x), 1).wait();
        } catch (const CommError&) {
          failed = true;
          throw;
        }
      },
      timed);
  ASSERT_GE(happened.size(), 2u);
  EXPECT_NE(happened[0].find("rank 1, at fault: does not wait"), std::string::npos) << happened[0];
  EXPECT_EQ(happened[1], "last resort");
}

TEST(ThreadFailure, AbortFromOutside) {
  ThreadWorld world(3, patience);
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

}  // namespace
}  // namespace echelon::thread_failures_test

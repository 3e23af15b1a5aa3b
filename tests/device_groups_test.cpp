// Collectives by a device's library: what every rank gets, in which order, and how it ends, on a library that
// behaves as NCCL on devices that are this machine's memory (fake_collectives.h).
#include "comm/device_groups.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "base/philox.h"
#include "expert_runs.h"
#include "fake_collectives.h"
#include "pipeline_runs.h"
#include "rank_runs.h"
#include "tensor/host.h"
#include "tensor/kernels.h"

namespace echelon::device_groups_test {
namespace {

using namespace checks;

constexpr std::uint64_t num_orders = 6;  // seeds

struct Here {
  Communicator& group;
  Arena& arena;
  World& world;
  DeviceGroups& groups;
  int rank;
};

// Runs body(here) on so many ranks, with a device each.
void on_devices(FakeDriver& driver, int n, const std::function<void(const Here&)>& body,
                std::chrono::milliseconds timeout = patience, const Time& time = {}) {
  ThreadWorld world(n, timeout, {}, time);
  run_ranks(world, [&](int rank) {
    Arena arena(&driver, rank);
    DeviceGroups groups(world, rank, driver.collectives());
    const auto tp = groups.join(world.join(rank, everyone(n), "tp"), "tp", everyone(n));
    body({*tp, arena, world, groups, rank});
  });
}

void expect_clean(const FakeDriver& driver) {
  EXPECT_EQ(driver.complaints(), std::vector<std::string>());
  EXPECT_EQ(driver.operations_queued(), 0u);
}

template <class T>
std::vector<T> numbers(int rank, std::int64_t count) {
  const Philox random(7, Stream::test, static_cast<std::uint64_t>(rank));
  std::vector<T> all;
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(count); ++i)
    all.push_back(std::is_integral_v<T> ? static_cast<T>(1000 * random.normal(i))
                                        : static_cast<T>(static_cast<float>(random.normal(i))));
  return all;
}

template <class T>
Tensor there(Arena& arena, const std::vector<T>& from) {
  const Tensor x(arena, MemoryCategory::other, dtype_of<T>, {std::ssize(from)});
  copy_from_host(std::span<const T>(from), x);
  return x;
}

Counts counts_of(int n, bool even) {
  Counts counts;
  for (int r = 0; r < n; ++r) counts.push_back(even ? 5 : r % 3 == 1 ? 0 : 3 + 2 * r);
  return counts;
}

// What a rank has after each verb in turn, on the host or on a device.
template <class T>
std::vector<std::vector<T>> play(Communicator& group, int rank, bool even,
                                 const std::function<Tensor(const std::vector<T>&)>& put) {
  const int n = group.size();
  std::vector<std::vector<T>> results;
  const auto keep = [&](const Tensor& x) { results.push_back(copy_to_host<T>(x)); };
  const auto empty = [](std::int64_t count) { return std::vector<T>(static_cast<std::size_t>(count)); };
  const Counts counts = counts_of(n, even);
  const std::int64_t own = counts[static_cast<std::size_t>(rank)];
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max}) {
    const Tensor x = put(numbers<T>(rank, 37));
    group.all_reduce(x, op).wait();
    keep(x);
  }
  const Tensor gathered = put(empty(total(counts)));
  group.all_gather(put(numbers<T>(rank, own)), gathered, counts).wait();
  keep(gathered);
  const Tensor part = put(empty(own));
  group.reduce_scatter(put(numbers<T>(rank, total(counts))), part, counts).wait();
  keep(part);
  Counts send, receive;
  const auto between = [&](int from, int to) {
    return even ? 4 : (from * 5 + to) % 4 == 0 ? 0 : from + 2 * to;
  };
  for (int r = 0; r < n; ++r) {
    send.push_back(between(rank, r));
    receive.push_back(between(r, rank));
  }
  const Tensor exchanged = put(empty(total(receive)));
  group.all_to_all(put(numbers<T>(rank, total(send))), send, exchanged, receive).wait();
  keep(exchanged);
  const Tensor said = put(numbers<T>(rank, 9));
  group.broadcast(said, n - 1).wait();
  keep(said);
  const Tensor message = put(numbers<T>(rank, 11)), heard = put(empty(11));
  group.send(message, (rank + 1) % n).wait();
  group.recv(heard, (rank + n - 1) % n).wait();
  keep(heard);
  // In place: its own part of what is gathered and of what is scattered.
  const Tensor whole = put(numbers<T>(rank, total(counts)));
  std::int64_t at = 0;
  for (int r = 0; r < rank; ++r) at += counts[static_cast<std::size_t>(r)];
  group.reduce_scatter(whole, whole.flat_range(at, at + own), counts).wait();
  keep(whole.flat_range(at, at + own));
  group.all_gather(whole.flat_range(at, at + own), whole, counts).wait();
  keep(whole);
  return results;
}

// Within the bound of a sum of n numbers in any order, of magnitude `most` in all: each of n-1 additions
// rounds once.
template <class T>
void expect_verbs(int n, double unit) {
  for (const bool even : {true, false}) {
    SCOPED_TRACE(fmt::format("{} ranks, even {}", n, even));
    std::vector<std::vector<std::vector<T>>> host(static_cast<std::size_t>(n));
    with_ranks(n, [&](Communicator& group) {
      host[static_cast<std::size_t>(group.rank())] =
          play<T>(group, group.rank(), even, [](const std::vector<T>& from) {
            const Tensor x = Tensor::of_host(dtype_of<T>, {std::ssize(from)});
            copy_from_host(std::span<const T>(from), x);
            return x;
          });
    });
    for (std::uint64_t seed = 1; seed <= num_orders; ++seed) {
      FakeDriver driver({.seed = seed, .devices = n});
      on_devices(driver, n, [&](const Here& here) {
        const auto device = play<T>(here.group, here.rank, even,
                                    [&](const std::vector<T>& from) { return there(here.arena, from); });
        const auto& expected = host[static_cast<std::size_t>(here.rank)];
        ASSERT_EQ(device.size(), expected.size());
        for (std::size_t verb = 0; verb < device.size(); ++verb)
          for (std::size_t i = 0; i < device[verb].size(); ++i)
            EXPECT_NEAR(static_cast<double>(device[verb][i]), static_cast<double>(expected[verb][i]),
                        4.0 * n * 2 * (n - 1) * unit)
                << "verb " << verb << " element " << i;
      });
      expect_clean(driver);
      EXPECT_GT(driver.fake_collectives().pieces_queued(), 0);
    }
  }
}

TEST(DeviceGroups, EveryVerbGivesWhatTheHostGives) {  // long
  for (const int n : {2, 3, 4}) {
    expect_verbs<std::int32_t>(n, 0);
    expect_verbs<double>(n, 0x1p-53);
    expect_verbs<float>(n, 0x1p-24);
    expect_verbs<bf16>(n, 0x1p-8);
  }
}

TEST(DeviceGroups, SumsAreInTheLibrarysOrder) {
  std::vector<float> host;
  with_ranks(3, [&](Communicator& group) {
    auto x = numbers<float>(group.rank(), 200);
    group.all_reduce(Tensor::view_of(x.data(), DType::f32, {200})).wait();
    if (group.rank() == 0) host = x;
  });
  FakeDriver driver({.devices = 3});
  on_devices(driver, 3, [&](const Here& here) {
    const Tensor x = there(here.arena, numbers<float>(here.rank, 200));
    here.group.all_reduce(x).wait();
    EXPECT_NE(copy_to_host<float>(x), host);
  });
  expect_clean(driver);
}

// Kernels before it are in it, those between the call and the wait run beside it, and those after the wait
// have it; the host waits for none of them.
TEST(DeviceGroups, RunBesideKernelsAndInTheOrderOfTheStream) {
  for (std::uint64_t seed = 1; seed <= 3 * num_orders; ++seed) {
    FakeDriver driver({.seed = seed, .devices = 2});
    on_devices(driver, 2, [&](const Here& here) {
      const auto kernels = make_kernels(here.arena, DType::f64, 1);
      const Tensor x(here.arena, MemoryCategory::other, DType::f64, {8});
      const Tensor y(here.arena, MemoryCategory::other, DType::f64, {8});
      kernels->fill(x, here.rank + 1);
      Pending sum = here.group.all_reduce(x);
      kernels->fill(y, 10);
      sum.wait();
      kernels->add(x, y);
      {
        // Dropped, and its memory given back: not handed out again before it is done.
        const Tensor z(here.arena, MemoryCategory::other, DType::f64, {8});
        kernels->fill(z, 1);
        const Pending dropped = here.group.all_reduce(z);
      }
      const Tensor next(here.arena, MemoryCategory::other, DType::f64, {8});
      kernels->fill(next, -1);
      EXPECT_EQ(copy_to_host<double>(next), std::vector<double>(8, -1));
      EXPECT_EQ(copy_to_host<double>(y), std::vector<double>(8, 13));
    });
    expect_clean(driver);
  }
}

// Looked at before it is waited for, which is no reason for the kernels to stand still.
TEST(DeviceGroups, AreHiddenBehindKernelsUntilTheyAreWaitedFor) {
  constexpr int kernels_beside = 6;
  for (const double collective : {2.0, 5.0, 9.0})
    for (std::uint64_t seed = 1; seed <= num_orders; ++seed) {
      FakeDriver driver({.seed = seed, .devices = 2, .seconds = [&](const std::string& name, std::size_t) {
                           return name == "a collective" ? collective : name == "transfer" ? 0 : 1;
                         }});
      on_devices(driver, 2, [&](const Here& here) {
        const auto kernels = make_kernels(here.arena, DType::f64, 1);
        const Tensor x = there(here.arena, std::vector<double>(8, here.rank + 1)),
                     y = there(here.arena, std::vector<double>(8, 10));
        Pending sum = here.group.all_reduce(x);
        for (int i = 0; i < kernels_beside; ++i) {
          kernels->scale(y, 1);
          sum.progress();
        }
        sum.wait();
        kernels->add(x, y);
        EXPECT_EQ(copy_to_host<double>(y), std::vector<double>(8, 13));
      });
      expect_clean(driver);
      EXPECT_EQ(driver.last_end(), std::max<double>(kernels_beside, collective) + 1) << "seed " << seed;
    }
}

TEST(DeviceGroups, HostNumbersAndBarriersAreTheWorlds) {
  FakeDriver driver({.devices = 2});
  on_devices(driver, 2, [&](const Here& here) {
    double number = here.rank + 1;
    here.group.all_reduce(Tensor::view_of(&number, DType::f64, {1})).wait();
    EXPECT_EQ(number, 3);
    here.group.barrier().wait();
  });
  EXPECT_EQ(driver.fake_collectives().pieces_queued(), 0);
  expect_clean(driver);
}

// ---- what fails

// What each rank throws; nothing may be left.
std::vector<std::string> failures_of(FakeDriver& driver, int n, const std::function<void(const Here&)>& body,
                                     std::chrono::milliseconds timeout = patience, const Time& time = {}) {
  std::vector<std::string> failures(static_cast<std::size_t>(n));
  EXPECT_THROW(on_devices(
                   driver, n,
                   [&](const Here& here) {
                     try {
                       body(here);
                     } catch (const RunError& error) {
                       failures[static_cast<std::size_t>(here.rank)] = error.what();
                       throw;
                     }
                   },
                   timeout, time),
               RunError);
  EXPECT_EQ(driver.complaints(), std::vector<std::string>());
  return failures;
}

TEST(DeviceGroups, RanksThatDisagreeSaySo) {
  const auto called = [](const std::function<void(const Here&)>& body) {
    FakeDriver driver({.devices = 3});
    const std::vector<std::string> failures = failures_of(driver, 3, body);
    EXPECT_EQ(driver.fake_collectives().pieces_queued(), 0);
    return failures[0];
  };
  EXPECT_EQ(called([](const Here& here) {
              here.group.all_reduce(there(here.arena, numbers<float>(0, here.rank == 1 ? 9 : 8))).wait();
            }),
            "tp collective 1: rank 0 called all_reduce of 8 f32, rank 1 called all_reduce of 9 f32, rank 2 "
            "called all_reduce of 8 f32");
  expect_contains(called([](const Here& here) {
                    const Tensor x = there(here.arena, numbers<float>(0, 8));
                    if (here.rank == 2)
                      here.group.broadcast(x, 0).wait();
                    else
                      here.group.all_reduce(x).wait();
                  }),
                  {"rank 1 called all_reduce of 8 f32", "rank 2 called broadcast from 0 of 8 f32"});
  expect_contains(called([](const Here& here) {
                    Counts send{1, 1, 1}, receive{1, 1, 1};
                    if (here.rank == 0) send[2] = 2;
                    here.group
                        .all_to_all(there(here.arena, numbers<float>(0, total(send))), send,
                                    there(here.arena, numbers<float>(0, 3)), receive)
                        .wait();
                  }),
                  {"rank 0 called all_to_all sending [1, 1, 2]"});
}

TEST(DeviceGroups, ARankThatDoesNotComeIsNamed) {
  FakeDriver driver({.devices = 2});
  const std::vector<std::string> failures = failures_of(driver, 2, [](const Here& here) {
    if (here.rank == 0) here.group.all_reduce(there(here.arena, numbers<float>(0, 8))).wait();
  });
  expect_contains(failures[0], {"rank 1 has finished, but rank 0 called"});
}

// Wherever a call to a device fails: one cause, and no rank is left waiting in work that never begins.
TEST(DeviceGroups, StopWholeWhereverADeviceFails) {
  // What a rank reads while the job fails is not told from what it should: it learns it with its next call.
  const auto body = [](const Here& here) {
    const auto kernels = make_kernels(here.arena, DType::f64, 1);
    const Tensor x(here.arena, MemoryCategory::other, DType::f64, {8});
    for (int i = 0; i < 4; ++i) {
      kernels->fill(x, 1);
      here.group.all_reduce(x).wait();
      (void)copy_to_host<double>(x);
    }
    here.group.barrier().wait();
  };
  for (const FakeCall call : {FakeCall::create_event, FakeCall::launch, FakeCall::run}) {
    int calls = 0;
    {
      FakeDriver driver({.devices = 3});
      on_devices(driver, 3, body);
      calls = driver.calls(call);
    }
    EXPECT_GT(calls, 4);
    for (int others = 0; others < calls; others += 1 + calls / 10) {
      FakeDriver driver({.seed = static_cast<std::uint64_t>(others + 1), .devices = 3});
      driver.fail_after(call, others);
      std::string failure;
      try {
        on_devices(driver, 3, body);
      } catch (const RunError& error) {
        failure = error.what();
      }
      if (failure.empty()) continue;  // it came less often in this order
      EXPECT_TRUE(failure.find("planted") != std::string::npos ||
                  failure.find("was lost") != std::string::npos)
          << failure;
      EXPECT_EQ(driver.complaints(), std::vector<std::string>()) << others;
    }
  }
}

// Turns the clock once so many pieces of work are queued: what is late then waits for nothing else.
class TurnedBeside {
 public:
  TurnedBeside(FakeDriver& driver, int pieces)
      : thread_([this, &driver, pieces] {
          while (!stop_) {
            if (driver.fake_collectives().pieces_queued() >= pieces)
              clock_.turn(std::chrono::milliseconds(100));
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
        }) {}
  ~TurnedBeside() {
    stop_ = true;
    thread_.join();
  }
  TurnedBeside(const TurnedBeside&) = delete;
  TurnedBeside& operator=(const TurnedBeside&) = delete;
  Time time() { return clock_.time(); }

 private:
  TurnedClock clock_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

void sum_four_times(const Here& here) {
  const Tensor x = there(here.arena, numbers<float>(here.rank, 8));
  for (int i = 0; i < 4; ++i) {
    here.group.all_reduce(x).wait();
    (void)copy_to_host<float>(x);
  }
  here.group.barrier().wait();
}

TEST(DeviceGroups, ABrokenNetworkEndsTheJobByTheLibrarysOwnWord) {
  FakeDriver driver({.devices = 2});
  driver.fake_collectives().break_after(4);
  TurnedBeside turned(driver, 6);  // the third of each rank
  const std::vector<std::string> failures = failures_of(driver, 2, sum_four_times, patience, turned.time());
  const std::string why = "tp [0, 1]: fake NCCL 1.2.3 on rank ";
  for (const std::string& failure : failures)
    expect_contains(failure, {why, ": remote process exited or there was a network error"});
}

TEST(DeviceGroups, WorkThatIsNeverDoneIsNamed) {
  FakeDriver driver({.devices = 2});
  driver.fake_collectives().stall_after(5);
  TurnedBeside turned(driver, 6);
  const std::vector<std::string> failures =
      failures_of(driver, 2, sum_four_times, std::chrono::seconds(20), turned.time());
  for (const std::string& failure : failures)
    expect_contains(
        failure,
        {"tp collective 3 (all_reduce of 8 f32): called by ranks 0, 1, and not done on rank", " after 2"});
}

// ---- the library sees what it is there to see

TEST(FakeCollectives, SeesStreamsThatWaitForEachOtherInACircle) {
  FakeDriver driver({.devices = 2});
  FakeCollectives& library = driver.fake_collectives();
  const std::array<DeviceCollectives::Id, 2> ids{library.make_id(), library.make_id()};
  std::array<std::array<DeviceCollectives::Member, 2>, 2> members;  // by rank and group
  const auto never = [] { return false; };
  std::thread other([&] {
    for (std::size_t g = 0; g < 2; ++g) members[1][g] = library.join(ids[g], 1, 1, 2, never);
  });
  for (std::size_t g = 0; g < 2; ++g) members[0][g] = library.join(ids[g], 0, 0, 2, never);
  other.join();
  std::array<StreamHandle, 2> streams{driver.create_stream(0), driver.create_stream(1)};
  std::array<std::byte*, 2> x{driver.allocate(0, 4), driver.allocate(1, 4)};
  for (const std::size_t rank : {0u, 1u})
    for (const std::size_t g : {rank, 1 - rank})  // each begins with another group
      library.all_reduce(x[rank], x[rank], 1, DType::f32, ReduceOp::sum, members[rank][g], streams[rank]);
  std::thread waits([&] { driver.synchronize(streams[0]); });
  wait_until([&] {
    return !driver.complaints().empty() &&
           driver.complaints().front() == "streams wait for each other in a circle";
  });
  for (const auto& of_rank : members)
    for (const DeviceCollectives::Member member : of_rank) library.abort(member);
  waits.join();
  driver.synchronize(streams[1]);
  EXPECT_EQ(driver.operations_queued(), 0u);
}

// ---- whole trainings

// Ranks of a plan with a device each, and the library's collectives.
VerifyReport verified_by_library(const Plan& plan) {
  VerifyRequest request = verify_request(plan, 2);
  const auto driver = std::make_shared<FakeDriver>(FakeDriver::Options{.devices = plan.mesh.num_ranks()});
  request.run.driver = driver;
  request.run.collectives = Collectives::nccl;
  const VerifyReport report = verify(request);
  EXPECT_GT(driver->fake_collectives().pieces_queued(), 0);
  expect_clean(*driver);
  return report;
}

TEST(DeviceGroups, TrainWithinTheBoundsOfOneRank) {  // long
  std::vector<Plan> plans{odd_plan(odd_llama(), 2, 2, true), odd_plan(odd_gpt2(false), 3, 1, false),
                          pipeline_plan(odd_llama(false, 2, 4), "1f1b", 2, 1, 2, 4)};
  plans.push_back(odd_plan(odd_llama(), 3, 1, false));
  plans.back().zero = 3;
  plans.push_back(odd_plan(even_mixtral(2), 2, 2, true));
  plans.back().mesh.ep = 2;
  plans.push_back(odd_plan(odd_gpt2(), 2, 2, true));
  plans.back().precision = recipe("bf16");
  for (const Plan& plan : plans) {
    const VerifyReport report = verified_by_library(plan);
    EXPECT_TRUE(report.pass) << to_json(report, plan);
  }
}

TEST(DeviceGroups, WhatNcclCannotDoIsRefused) {
  const auto refused = [](const FakeDriver::Options& options, const std::function<void(VerifyRequest&)>& ask,
                          const std::string& words) {
    VerifyRequest request = verify_request(odd_plan(odd_llama(), 2, 2, false));
    request.run.driver = std::make_shared<FakeDriver>(options);
    request.run.collectives = Collectives::nccl;
    ask(request);
    expect_contains(message_of<RequestError>([&] { verify(request); }), {"--collectives nccl: ", words});
  };
  const auto as_it_is = [](VerifyRequest&) {};
  refused(
      {.devices = 4}, [](VerifyRequest& r) { r.run.driver = nullptr; }, "legal with --device cpu: direct");
  refused({.devices = 4, .collectives = false}, as_it_is, "this build has no NCCL; legal: direct");
  refused({.devices = 3}, as_it_is, "4 ranks share 3 devices");
  refused(
      {.devices = 4},
      [](VerifyRequest& r) {
        r.plan.numerics = Numerics::invariant;
        r.plan.global_batch = 8;
      },
      "--numerics invariant");
}

}  // namespace
}  // namespace echelon::device_groups_test

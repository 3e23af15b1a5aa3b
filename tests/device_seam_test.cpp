// What is asked of an accelerator's runtime: order, lifetime and failures, on a device that is this machine's
// memory (fake_driver.h).
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/philox.h"
#include "comm/reduce.h"
#include "fake_driver.h"
#include "tensor/device_stream.h"
#include "tensor/host.h"
#include "tensor/kernels.h"
#include "tensor/reduce_element.h"

namespace echelon::device_seam_test {
namespace {

using checks::FakeCall;
using checks::FakeDriver;

constexpr int num_orders = 20;  // seeds

std::vector<float> ascending(std::int64_t count) {
  std::vector<float> numbers(static_cast<std::size_t>(count));
  std::iota(numbers.begin(), numbers.end(), 1.0f);
  return numbers;
}

Tensor of(Arena& arena, std::vector<std::int64_t> shape, DType dtype = DType::f32) {
  return {arena, MemoryCategory::other, dtype, std::move(shape)};
}

std::unique_ptr<Kernels> kernels_of(Arena& arena) { return make_kernels(arena, DType::f64, 1); }

std::string failure_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const RunError& error) {
    return error.what();
  }
  return "";
}

// Runs body(driver) for several orders; nothing may be left, and nothing done that is not allowed.
void in_all_orders(const std::function<void(FakeDriver&)>& body,
                   std::size_t memory_bytes = std::size_t{1} << 30, std::uint64_t orders = num_orders) {
  for (std::uint64_t seed = 1; seed <= orders; ++seed) {
    SCOPED_TRACE(seed);
    FakeDriver driver({.seed = seed, .memory_bytes = memory_bytes});
    body(driver);
    EXPECT_EQ(driver.complaints(), std::vector<std::string>());
  }
}

TEST(DeviceSeam, NumbersCrossAndComeBack) {
  in_all_orders(
      [](FakeDriver& driver) {
        Arena arena(&driver, 0);
        EXPECT_EQ(arena.device(), Device::cuda);
        for (const std::int64_t count :
             {1, 1000, 1 << 20}) {  // the last is larger than what is copied at a time
          const Tensor x = of(arena, {count});
          const std::vector<float> numbers = ascending(count);
          copy_from_host(numbers, x);
          EXPECT_EQ(copy_to_host<float>(x), numbers);
        }
        // A column range of a matrix, one whose rows are longer than what is copied at a time, and other
        // types.
        for (const std::int64_t cols : {7, 300'000}) {
          const Tensor x = of(arena, {3, cols + 5}), part = x.column_range(2, 2 + cols);
          copy_from_host(ascending(x.numel()), x);
          copy_from_host(std::vector<float>(static_cast<std::size_t>(part.numel()), -1.0f), part);
          const std::vector<float> all = copy_to_host<float>(x);
          EXPECT_EQ(all[1], 2.0f);
          EXPECT_EQ(all[2], -1.0f);
          EXPECT_EQ(all[static_cast<std::size_t>(cols + 2)], static_cast<float>(cols + 3));
          EXPECT_EQ(copy_to_host<float>(part), std::vector<float>(static_cast<std::size_t>(3 * cols), -1.0f));
        }
        const Tensor halves = of(arena, {4}, DType::bf16);
        copy_numbers_from_host(std::vector<double>{1, -2, 0.5, 256}, halves);
        EXPECT_EQ(copy_numbers_to_host(halves), (std::vector<double>{1, -2, 0.5, 256}));
        const Tensor nothing = of(arena, {0});
        EXPECT_TRUE(copy_to_host<float>(nothing).empty());
      },
      std::size_t{1} << 30, 2);
}

TEST(DeviceSeam, TheHostDoesNotTouchTheDevicesMemory) {
  FakeDriver driver;
  Arena arena(&driver, 0);
  const Tensor x = of(arena, {8});
  copy_from_host(ascending(8), x);
  EXPECT_THROW((void)x.host<float>(), InvariantError);
  EXPECT_THROW((void)x.host_bytes(), InvariantError);
  EXPECT_THROW((void)x.on_device<double>(), InvariantError);
  EXPECT_THROW((void)Tensor::of_host(DType::f32, {2}).stream(), InvariantError);
  const volatile float* const there = x.on_device<float>();
  EXPECT_DEATH((void)*there, "");
  EXPECT_THROW(Arena(Device::cuda), InvariantError);
}

TEST(DeviceSeam, KernelsRunInTheOrderOfTheStreamAndTheHostWaitsOnlyWhereItReads) {
  in_all_orders([](FakeDriver& driver) {
    Arena arena(&driver, 0);
    const auto kernels = kernels_of(arena);
    const Tensor x = of(arena, {16}, DType::f64), y = of(arena, {16}, DType::f64);
    kernels->fill(x, 3);
    kernels->copy(x, y);
    kernels->scale(x, 2);
    kernels->add(x, y);
    EXPECT_EQ(driver.operations_run(), 0u);
    EXPECT_EQ(copy_to_host<double>(y), std::vector<double>(16, 9));
    EXPECT_TRUE(kernels->all_finite(y));
    EXPECT_EQ(kernels->largest(y), 9);
  });
}

TEST(DeviceSeam, AMuchLargerBlockIsNotSpentOnASmallRequest) {
  FakeDriver driver;
  Arena arena(&driver, 0);
  arena.allocate(1 << 20, MemoryCategory::other).reset();
  const auto small = arena.allocate(64, MemoryCategory::other);
  const auto large = arena.allocate(1 << 20, MemoryCategory::other);
  EXPECT_EQ(arena.system_allocations(), 2);
}

// Between two uses of a large block what is brief is a part of it, and all of it is there again afterwards.
TEST(DeviceSeam, WhatIsBriefIsAPartOfALargerBlock) {
  constexpr std::size_t large = std::size_t{8} << 20, small = std::size_t{1} << 20;
  FakeDriver driver;
  Arena arena(&driver, 0);
  for (int step = 0; step < 3; ++step) {
    const std::byte* const all = arena.allocate(large, MemoryCategory::activations)->data;
    const Arena::BriefUse brief(arena);
    std::vector<std::shared_ptr<Block>> parts;
    for (int i = 0; i < 8; ++i) parts.push_back(arena.allocate(small, MemoryCategory::activations));
    std::set<const std::byte*> begins;
    for (const auto& part : parts) {
      EXPECT_EQ(part->capacity, small);
      EXPECT_EQ((part->data - all) % static_cast<std::ptrdiff_t>(small), 0);
      EXPECT_TRUE(part->data >= all && part->data < all + large);
      begins.insert(part->data);
    }
    EXPECT_EQ(begins.size(), 8u);
    EXPECT_EQ(arena.live().total(), static_cast<std::int64_t>(large));
    // Given back in any order; two neighbours are one again.
    for (int i : {1, 6, 5, 2}) parts[static_cast<std::size_t>(i)].reset();
    parts.push_back(arena.allocate(2 * small, MemoryCategory::activations));
    parts.push_back(arena.allocate(2 * small, MemoryCategory::activations));
    EXPECT_EQ(arena.system_allocations(), 1);
  }
  EXPECT_EQ(arena.held_bytes(), large);
  const auto part = arena.allocate(small, MemoryCategory::activations);
  EXPECT_EQ(arena.system_allocations(), 2);  // not brief: a part would be missed when the whole is needed
  arena.drop_kept();
  EXPECT_EQ(arena.held_bytes(), small);
}

TEST(DeviceSeam, WhatStaysIsNoPartOfALargerBlock) {
  constexpr std::size_t large = std::size_t{8} << 20, small = std::size_t{3} << 20;
  FakeDriver driver;
  for (const MemoryCategory stays :
       {MemoryCategory::parameters, MemoryCategory::gradients, MemoryCategory::optimizer}) {
    Arena arena(&driver, 0);
    arena.allocate(large, MemoryCategory::activations).reset();
    const Arena::BriefUse brief(arena);
    const auto block = arena.allocate(small, stays);
    EXPECT_EQ(arena.system_allocations(), 2);
  }
  // Of at most twice its size is what an activation is cut from that may wait for its backward pass.
  Arena arena(&driver, 0);
  arena.allocate(2 * small, MemoryCategory::activations).reset();
  const auto first = arena.allocate(small, MemoryCategory::activations),
             second = arena.allocate(small, MemoryCategory::activations);
  EXPECT_EQ(arena.system_allocations(), 1);
  // While a part is in use the rest is not given to the system.
  Arena parts(&driver, 0);
  parts.allocate(2 * small, MemoryCategory::activations).reset();
  {
    const auto half = parts.allocate(small, MemoryCategory::activations);
    parts.drop_kept();
    EXPECT_EQ(parts.held_bytes(), 2 * small);
  }
  parts.drop_kept();
  EXPECT_EQ(parts.held_bytes(), 0u);
}

TEST(DeviceSeam, ABlockIsUsedAgainWhileKernelsThatUseItAreQueued) {
  in_all_orders([](FakeDriver& driver) {
    Arena arena(&driver, 0);
    const auto kernels = kernels_of(arena);
    const Tensor sum = of(arena, {64}, DType::f64);
    kernels->fill(sum, 0);
    const std::byte* before = nullptr;
    for (int i = 1; i <= 5; ++i) {
      const Tensor part = of(arena, {64}, DType::f64);
      EXPECT_TRUE(before == nullptr || part.address() == before);
      before = part.address();
      kernels->fill(part, i);
      kernels->add(part, sum);
    }
    EXPECT_EQ(arena.system_allocations(), 2);
    EXPECT_EQ(driver.operations_run(), 0u);
    EXPECT_EQ(copy_to_host<double>(sum), std::vector<double>(64, 15));
  });
}

TEST(DeviceSeam, ABlockThatAnotherStreamUsesIsKeptUntilThatHasCome) {
  int at_once = 0, later = 0;
  in_all_orders([&](FakeDriver& driver) {
    Arena arena(&driver, 0);
    const auto kernels = kernels_of(arena);
    const Tensor kept = of(arena, {32}, DType::f64);
    const std::byte* address = nullptr;
    {
      const Tensor x = of(arena, {32}, DType::f64);
      address = x.address();
      kernels->fill(x, 7);
      const auto filled = arena.stream().record();
      DeviceStream& other = arena.transfers("dp");
      other.wait_for(*filled);
      driver.copy({.to = kept.address(), .from = x.address(), .row_bytes = 256}, other.handle());
      x.in_use_until(other.record());
    }
    const std::size_t queued = driver.operations_queued();
    EXPECT_EQ(queued, 5u);  // the filling and its event; the copy after that, and its event
    const Tensor next = of(arena, {32}, DType::f64);
    // The same memory only when the copy has run.
    if (next.address() == address) {
      EXPECT_EQ(driver.operations_queued(), 0u);
      ++at_once;
    } else {
      ++later;
    }
    kernels->fill(next, -1);
    arena.transfers("dp").synchronize();
    EXPECT_EQ(copy_to_host<double>(kept), std::vector<double>(32, 7));
    const Tensor third = of(arena, {32}, DType::f64);
    EXPECT_LE(arena.system_allocations(), 3);
  });
  EXPECT_GT(at_once, 0);
  EXPECT_GT(later, 0);
}

TEST(DeviceSeam, ADeviceLostWhileBlocksAreTakenBackLeavesEachOnce) {
  int lost = 0;
  in_all_orders([&](FakeDriver& driver) {
    Arena arena(&driver, 0);
    const DeviceStream& other = arena.transfers("dp");
    {
      const Tensor x = of(arena, {32}), y = of(arena, {64});
      y.in_use_until(other.record());
      x.in_use_until(other.record());
      other.synchronize();
      x.in_use_until(other.record());  // of the two, one can be had again
    }
    driver.fail_after(FakeCall::run, 0);
    lost += failure_of([&] { of(arena, {1024}); }).empty() ? 0 : 1;
  });
  EXPECT_GT(lost, 0);
}

TEST(DeviceSeam, OutOfMemorySaysWhatWasAskedAndWhatIsFree) {
  in_all_orders(
      [](FakeDriver& driver) {
        Arena arena(&driver, 0);
        const auto kernels = kernels_of(arena);
        {
          const Tensor x = of(arena, {160 << 10});  // 640 KiB of 1 MiB
          copy_from_host(ascending(x.numel()), x);
        }
        const Tensor y = of(arena, {200 << 10});  // what was kept makes room
        EXPECT_EQ(failure_of([&] { of(arena, {100 << 10}); }),
                  "out of memory on device 0: 400.00 KiB asked, 224.00 KiB free");
        copy_from_host(ascending(y.numel()), y);  // and the rest goes on
        EXPECT_EQ(copy_to_host<float>(y).back(), static_cast<float>(y.numel()));
      },
      1 << 20);
}

TEST(DeviceSeam, EveryCallMayFailAndNothingIsLeft) {
  const auto use_device = [](FakeDriver& driver) {
    Arena arena(&driver, 0);
    const auto kernels = kernels_of(arena);
    const Tensor x = of(arena, {32}, DType::f64), y = of(arena, {32}, DType::f64);
    copy_from_host(std::vector<double>(32, 1), x);
    kernels->fill(y, 2);
    kernels->add(x, y);
    y.in_use_until(arena.transfers("dp").record());
    EXPECT_EQ(copy_to_host<double>(y), std::vector<double>(32, 3));
  };
  struct Case {
    FakeCall call;
    const char* says;
  };
  for (const Case& c : {Case{FakeCall::allocate, "out of memory on device 0: 256 B asked, 4.00 GiB free"},
                        Case{FakeCall::allocate_pinned, "2.00 MiB of pinned memory for copies to device 0"},
                        Case{FakeCall::create_stream, "no stream could be made on device 0: planted"},
                        Case{FakeCall::create_event, "no event could be made on device 0: planted"},
                        Case{FakeCall::launch, "could not be launched on device 0: planted"},
                        Case{FakeCall::run, "device 0 was lost: it fell off the bus"}}) {
    SCOPED_TRACE(c.says);
    int failures = 0;
    for (int others = 0;; ++others) {
      FakeDriver driver;
      driver.fail_after(c.call, others);
      const std::string failure = failure_of([&] { use_device(driver); });
      EXPECT_EQ(driver.complaints(), std::vector<std::string>());
      if (failure.empty()) break;  // the call does not come so often
      EXPECT_NE(failure.find(c.says), std::string::npos) << failure;
      EXPECT_EQ(failure.find('\n'), std::string::npos) << failure;
      ++failures;
    }
    EXPECT_GT(failures, 0);
  }
}

TEST(DeviceSeam, AFailedLaunchNamesItsKernel) {
  FakeDriver driver;
  Arena arena(&driver, 0);
  const auto kernels = kernels_of(arena);
  const Tensor x = of(arena, {4}, DType::f64);
  driver.fail_after(FakeCall::launch, 1);
  kernels->fill(x, 1);
  EXPECT_EQ(failure_of([&] { kernels->scale(x, 2); }),
            "the kernel scale could not be launched on device 0: planted");
}

template <class T, class Stored>
void expect_reduced_as_on_the_host(ReduceOp op, DType dtype) {
  constexpr std::int64_t count = 9;
  for (int ranks = 1; ranks <= ReductionOrder::most_sources; ++ranks) {
    std::vector<std::vector<Stored>> numbers;
    std::vector<const Stored*> typed;
    std::vector<const std::byte*> sources;
    for (int r = 0; r < ranks; ++r) {
      const Philox random(5, Stream::test, static_cast<std::uint64_t>(r));
      std::vector<Stored>& own = numbers.emplace_back();
      for (std::uint64_t i = 0; i < count; ++i)
        own.push_back(static_cast<Stored>(
            static_cast<T>(std::is_integral_v<T> ? 1e9 * random.uniform(i) : random.normal(i))));
      if (!std::is_integral_v<T> && r == ranks / 2)
        own[3] = static_cast<Stored>(static_cast<T>(std::nan("")));
    }
    for (const auto& own : numbers) {
      typed.push_back(own.data());
      sources.push_back(reinterpret_cast<const std::byte*>(own.data()));
    }
    std::vector<Stored> host(count);
    const std::vector<std::byte*> to{reinterpret_cast<std::byte*>(host.data())};
    reduce_elements(op, dtype, sources, 0, to, 0, count);
    const ReductionOrder order = ReductionOrder::of(ranks);
    for (std::int64_t i = 0; i < count; ++i) {
      const T sum = op == ReduceOp::sum ? reduced<ReduceOp::sum, T>(typed.data(), ranks, order, i)
                                        : reduced<ReduceOp::max, T>(typed.data(), ranks, order, i);
      const auto stored = static_cast<Stored>(sum), expected = host[static_cast<std::size_t>(i)];
      if (sum != sum)
        EXPECT_TRUE(expected != expected) << ranks;
      else
        EXPECT_EQ(std::memcmp(&stored, &expected, sizeof stored), 0) << ranks << " " << i;
    }
  }
}

TEST(DeviceSeam, AnElementIsReducedAsOnTheHost) {
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max}) {
    expect_reduced_as_on_the_host<float, float>(op, DType::f32);
    expect_reduced_as_on_the_host<double, double>(op, DType::f64);
    expect_reduced_as_on_the_host<float, bf16>(op, DType::bf16);
    expect_reduced_as_on_the_host<std::int32_t, std::int32_t>(op, DType::i32);
  }
}

// ---- the fake device sees what it is there to see

TEST(FakeDevice, SeesMemoryThatIsUsedAfterItWasGivenBack) {
  FakeDriver driver;
  const StreamHandle stream = driver.create_stream(0);
  std::byte* const x = driver.allocate(0, 64);
  driver.fill_bytes(x, 1, 64, stream);
  driver.free(0, x);
  EXPECT_EQ(driver.complaints().front(), "fill_bytes is queued on memory that is given back");
  EXPECT_THROW(driver.synchronize(stream), InvariantError);
  EXPECT_THROW(driver.fill_bytes(x, 1, 64, stream), InvariantError);
  EXPECT_EQ(driver.complaints().back(), "1 streams left");
}

TEST(FakeDevice, SeesAKernelThatReachesForAnotherDevicesMemory) {
  FakeDriver driver({.devices = 3});
  const StreamHandle zero = driver.create_stream(0), two = driver.create_stream(2);
  std::byte* const x = driver.allocate(0, 64);
  std::byte* const y = driver.allocate(1, 64);
  EXPECT_THROW(driver.fill_bytes(y, 1, 64, zero), InvariantError);
  driver.copy({.to = y, .from = x, .row_bytes = 64}, zero);
  EXPECT_THROW(driver.copy({.to = y, .from = x, .row_bytes = 64}, two), InvariantError);
  EXPECT_TRUE(driver.reach(0, 1));
  driver.fill_bytes(y, 1, 64, zero);
  EXPECT_THROW(driver.fill_bytes(x, 1, 64, driver.create_stream(1)), InvariantError);  // the other way
  EXPECT_THROW(driver.record(driver.create_event(1), zero), InvariantError);
  EXPECT_FALSE(FakeDriver({.devices = 2, .peers = false}).reach(0, 1));
}

TEST(FakeDevice, SeesAnEarlyReadAndALateWriteOfPinnedMemory) {
  FakeDriver driver;
  const StreamHandle stream = driver.create_stream(0);
  std::byte* const x = driver.allocate(0, sizeof(double));
  auto* const pinned = reinterpret_cast<double*>(driver.allocate_pinned(sizeof(double)));
  *pinned = 1;
  driver.copy({.kind = CopyKind::from_host, .to = x, .from = pinned, .row_bytes = sizeof(double)}, stream);
  driver.synchronize(stream);
  driver.copy({.kind = CopyKind::to_host, .to = pinned, .from = x, .row_bytes = sizeof(double)}, stream);
  EXPECT_NE(*pinned, 1);  // too early
  driver.synchronize(stream);
  EXPECT_EQ(*pinned, 1);
  driver.copy({.kind = CopyKind::from_host, .to = x, .from = pinned, .row_bytes = sizeof(double)}, stream);
  *pinned = 2;  // too early
  driver.synchronize(stream);
  EXPECT_EQ(driver.complaints().front(), "pinned memory is changed while a copy is to read it");
}

TEST(FakeDevice, RunsStreamsThatNothingOrdersInAnyOrder) {
  int first_wins = 0;
  for (std::uint64_t seed = 1; seed <= num_orders; ++seed) {
    FakeDriver driver({.seed = seed});
    const StreamHandle a = driver.create_stream(0), b = driver.create_stream(0);
    std::byte* const x = driver.allocate(0, 1);
    std::byte* const pinned = driver.allocate_pinned(1);
    driver.fill_bytes(x, 1, 1, a);
    driver.fill_bytes(x, 2, 1, b);
    for (const StreamHandle stream : {a, b}) driver.synchronize(stream);
    driver.copy({.kind = CopyKind::to_host, .to = pinned, .from = x, .row_bytes = 1}, a);
    driver.synchronize(a);
    if (std::to_integer<int>(*pinned) == 1) ++first_wins;
  }
  EXPECT_GT(first_wins, 0);
  EXPECT_LT(first_wins, num_orders);
}

}  // namespace
}  // namespace echelon::device_seam_test

// The driver of CUDA on a device: what device_seam_test.cpp holds the seam to, where there is one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/philox.h"
#include "spec/tf32.h"
#include "tensor/device_collectives.h"
#include "tensor/device_stream.h"
#include "tensor/host.h"
#include "tensor/kernels.h"
#include "tensor/reduce_element.h"

namespace echelon::cuda_driver_test {
namespace {

class CudaDriver : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = no_cuda(); !why.empty()) GTEST_SKIP() << why;
    driver_ = make_cuda_driver();
  }
  std::shared_ptr<DeviceDriver> driver_;
};

TEST_F(CudaDriver, NamesItsDevices) {
  for (int device = 0; device < driver_->num_devices(); ++device) {
    const DeviceProperties p = driver_->properties(device);
    EXPECT_FALSE(p.name.empty());
    EXPECT_GE(p.major, 8);
    EXPECT_GT(p.multiprocessors, 0);
    EXPECT_LE(driver_->free_bytes(device), p.memory_bytes);
  }
}

TEST_F(CudaDriver, NumbersCrossAndComeBack) {
  Arena arena(driver_.get(), 0);
  for (const std::int64_t count : {1, 1000, 1 << 20}) {
    const Tensor x(arena, MemoryCategory::other, DType::f32, {count});
    std::vector<float> numbers(static_cast<std::size_t>(count));
    std::iota(numbers.begin(), numbers.end(), 1.0f);
    copy_from_host(numbers, x);
    EXPECT_EQ(copy_to_host<float>(x), numbers);
  }
  const Tensor x(arena, MemoryCategory::other, DType::i32, {5, 9}), part = x.column_range(2, 6);
  copy_from_host(std::vector<std::int32_t>(45, 3), x);
  copy_from_host(std::vector<std::int32_t>(20, -1), part);
  EXPECT_EQ(copy_to_host<std::int32_t>(part), std::vector<std::int32_t>(20, -1));
  const std::vector<std::int32_t> all = copy_to_host<std::int32_t>(x);
  EXPECT_EQ(std::accumulate(all.begin(), all.end(), 0), 25 * 3 - 20);
}

TEST_F(CudaDriver, EventsOrderStreams) {
  constexpr std::size_t bytes = 64 << 20;
  Arena arena(driver_.get(), 0);
  const Tensor from(arena, MemoryCategory::other, DType::u8, {bytes});
  const Tensor to(arena, MemoryCategory::other, DType::u8, {bytes});
  for (std::uint8_t value = 1; value <= 3; ++value) {
    const auto before = arena.stream().record();
    driver_->fill_bytes(from.address(), value, bytes, arena.stream().handle());
    const auto filled = arena.stream().record();
    arena.transfers("dp").wait_for(*filled);
    driver_->copy({.to = to.address(), .from = from.address(), .row_bytes = bytes},
                  arena.transfers("dp").handle());
    const auto copied = arena.transfers("dp").record();
    arena.stream().wait_for(*copied);
    const std::vector<std::uint8_t> all = copy_to_host<std::uint8_t>(to);
    EXPECT_EQ(all.front(), value);
    EXPECT_EQ(all.back(), value);
    EXPECT_TRUE(copied->has_happened());
    EXPECT_GT(driver_->seconds_between(before->handle(), copied->handle()), 0);
  }
}

// A product by the library, kernels of our own, a copy and a fill, replayed on other numbers; and what a pass
// may do that is captured: allocate, and upload beside.
TEST_F(CudaDriver, GraphsRunAgainOnWhatIsThere) {
  Arena arena(driver_.get(), 0);
  const auto kernels = make_kernels(arena, DType::f32, 1);
  const std::int64_t n = 64;
  const auto matrix = [&] { return Tensor(arena, MemoryCategory::other, DType::f32, {n, n}); };
  const Tensor a = matrix(), b = matrix(), given = matrix(), sum = matrix();
  kernels->fill(b, 0.5);
  kernels->fill(sum, 0.0);
  kernels->fill(given, 1.0);
  const auto pass = [&] {
    const Arena::PoolUse pool(arena, MemoryPool::passes);
    const Tensor c = matrix(), none = matrix();
    fill_with_zero(none);
    copy_on_device(given, a);
    kernels->matmul(a, Transpose::no, b, Transpose::no, c, false);
    kernels->add(none, c);
    kernels->add(c, sum);
  };
  pass();  // what is chosen once is
  const DeviceGraph graph(arena.stream(), pass);
  float expected = 32;
  EXPECT_EQ(copy_to_host<float>(sum), std::vector<float>(static_cast<std::size_t>(n * n), expected));
  for (const double number : {2.0, 3.0}) {
    kernels->fill(given, number);
    graph.launch();
    expected += static_cast<float>(32 * number);
  }
  EXPECT_EQ(copy_to_host<float>(sum), std::vector<float>(static_cast<std::size_t>(n * n), expected));
  EXPECT_THROW(DeviceGraph(arena.stream(), [&] { copy_to_host<float>(sum); }), RunError);
  kernels->fill(sum, 4.0);
  EXPECT_EQ(copy_to_host<float>(sum).front(), 4);
}

template <class T, class Stored>
void expect_reduced(DeviceDriver& driver, DType dtype, ReduceOp op) {
  Arena arena(&driver, 0);
  constexpr std::int64_t count = 1003;
  for (const int ranks : {1, 2, 3, 5, 8, 64}) {
    const ReductionOrder order = ReductionOrder::of(ranks);
    std::vector<std::vector<Stored>> numbers;
    std::vector<Tensor> tensors;
    std::vector<const std::byte*> from;
    std::vector<std::byte*> to;
    for (int r = 0; r < ranks; ++r) {
      const Philox random(3, Stream::test, static_cast<std::uint64_t>(r));
      std::vector<Stored>& own = numbers.emplace_back();
      for (std::uint64_t i = 0; i < count; ++i)
        own.push_back(static_cast<Stored>(static_cast<T>(9 * random.normal(i))));
      tensors.emplace_back(arena, MemoryCategory::other, dtype, std::vector<std::int64_t>{count});
      copy_from_host(own, tensors.back());
      from.push_back(tensors.back().address());
      to.push_back(tensors.back().address());
    }
    std::vector<const Stored*> sources;
    for (const auto& own : numbers) sources.push_back(own.data());
    driver.reduce({op, dtype, from, to, count}, arena.stream().handle());
    for (const Tensor& tensor : tensors) {
      const std::vector<Stored> sums = copy_to_host<Stored>(tensor);
      for (std::int64_t i = 0; i < count; ++i) {
        const auto sum = static_cast<Stored>(
            op == ReduceOp::sum ? reduced<ReduceOp::sum, T>(sources.data(), ranks, order, i)
                                : reduced<ReduceOp::max, T>(sources.data(), ranks, order, i));
        ASSERT_EQ(std::memcmp(&sums[static_cast<std::size_t>(i)], &sum, sizeof sum), 0) << ranks << " " << i;
      }
    }
  }
}

TEST_F(CudaDriver, ReducesAsTheHostDoes) {
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max}) {
    expect_reduced<float, float>(*driver_, DType::f32, op);
    expect_reduced<double, double>(*driver_, DType::f64, op);
    expect_reduced<float, bf16>(*driver_, DType::bf16, op);
    expect_reduced<std::int32_t, std::int32_t>(*driver_, DType::i32, op);
  }
}

TEST_F(CudaDriver, DevicesReadEachOthersMemory) {
  if (driver_->num_devices() < 2 || !driver_->can_reach(0, 1)) GTEST_SKIP() << "no two devices with access";
  constexpr std::int64_t count = 1 << 20;
  Arena here(driver_.get(), 0), beside(driver_.get(), 1);
  const Tensor x(here, MemoryCategory::other, DType::f32, {count});
  const Tensor y(beside, MemoryCategory::other, DType::f32, {count});
  copy_from_host(std::vector<float>(count, 1), x);
  copy_from_host(std::vector<float>(count, 2), y);
  here.stream().wait_for(*beside.stream().record());
  ASSERT_TRUE(driver_->reach(0, 1));
  ASSERT_TRUE(driver_->reach(0, 1));  // twice is once
  const std::vector<const std::byte*> from{x.address(), y.address()};
  const std::vector<std::byte*> to{x.address(), y.address()};
  driver_->reduce({ReduceOp::sum, DType::f32, from, to, count}, here.stream().handle());
  EXPECT_EQ(copy_to_host<float>(x), std::vector<float>(count, 3));
  EXPECT_EQ(copy_to_host<float>(y), std::vector<float>(count, 3));
  const Tensor z(beside, MemoryCategory::other, DType::f32, {count});
  beside.stream().wait_for(*here.stream().record());
  driver_->copy({.to = z.address(), .from = x.address(), .row_bytes = count * sizeof(float)},
                beside.stream().handle());
  EXPECT_EQ(copy_to_host<float>(z), std::vector<float>(count, 3));
}

// A rank on each device, one thread each; of one device alone, NCCL's calls at least.
TEST_F(CudaDriver, NcclSumsAndGathersOverTheDevices) {
  if (const std::string why = driver_->no_collectives(); !why.empty()) GTEST_SKIP() << why;
  DeviceCollectives& nccl = driver_->collectives();
  EXPECT_EQ(nccl.name().rfind("NCCL ", 0), 0u);
  constexpr std::int64_t count = 1000;
  const int n = std::min(driver_->num_devices(), 8);
  const DeviceCollectives::Id id = nccl.make_id();
  std::vector<std::vector<float>> sums(static_cast<std::size_t>(n)), gathered(sums.size());
  const auto run = [&](int rank) {
    Arena arena(driver_.get(), rank);
    const auto member = nccl.join(id, rank, rank, n, [] { return false; });
    const Tensor x(arena, MemoryCategory::other, DType::f32, {count});
    const Tensor all(arena, MemoryCategory::other, DType::f32, {n});
    copy_from_host(std::vector<float>(count, static_cast<float>(rank + 1)), x);
    const StreamHandle stream = arena.stream().handle();
    nccl.all_gather(x.address(), all.address(), 1, DType::f32, member, stream);
    nccl.all_reduce(x.address(), x.address(), count, DType::f32, ReduceOp::sum, member, stream);
    nccl.begin_together();
    nccl.send(x.address(), 1, DType::f32, (rank + 1) % n, member, stream);
    nccl.receive(x.address() + 4, 1, DType::f32, (rank + n - 1) % n, member, stream);
    nccl.end_together(member);
    sums[static_cast<std::size_t>(rank)] = copy_to_host<float>(x);
    gathered[static_cast<std::size_t>(rank)] = copy_to_host<float>(all);
    EXPECT_EQ(nccl.error(member), "");
    nccl.leave(member);
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
  std::vector<float> ranks(static_cast<std::size_t>(n));
  std::iota(ranks.begin(), ranks.end(), 1.0f);
  for (const auto& sum : sums) EXPECT_EQ(sum, std::vector<float>(count, static_cast<float>(n * (n + 1) / 2)));
  for (const auto& all : gathered) EXPECT_EQ(all, ranks);
}

// Off by more than f32 may be, and by no more than two operands of 10 bits: in products alone and in a group.
TEST_F(CudaDriver, MultipliesInTf32WhereThatIsAskedFor) {
  constexpr std::int64_t n = 64;
  const auto numbers = [](std::uint64_t of) {
    std::vector<double> all(n * n);
    Philox(11, Stream::test, of).fill_normal(0, all.size(), all.data());
    return all;
  };
  const auto product_in = [&](const char* precision, bool group) {
    Arena arena(driver_.get(), 0);
    const auto kernels = make_kernels(arena, recipe(precision), 1, Numerics::ordinary);
    const Tensor a(arena, MemoryCategory::other, DType::f32, {n, n}),
        b(arena, MemoryCategory::other, DType::f32, {n, n}),
        c(arena, MemoryCategory::other, DType::f32, {n, n}),
        d(arena, MemoryCategory::other, DType::f32, {n, n});
    copy_numbers_from_host(numbers(0), a);
    copy_numbers_from_host(numbers(1), b);
    if (group)
      kernels->grouped_matmul(std::vector<MatrixProduct>{{a, Transpose::no, b, Transpose::no, c},
                                                         {b, Transpose::no, a, Transpose::no, d}});
    else
      kernels->matmul(a, Transpose::no, b, Transpose::no, c, false);
    return copy_numbers_to_host(c);
  };
  const std::vector<double> a = numbers(0), b = numbers(1);
  for (const bool group : {false, true}) {
    const std::vector<double> in_f32 = product_in("f32", group), in_tf32 = product_in("tf32", group);
    double most = 0;
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t j = 0; j < n; ++j) {
        double magnitudes = 0;
        for (std::size_t k = 0; k < n; ++k) magnitudes += std::abs(a[i * n + k] * b[k * n + j]);
        const double apart = std::abs(in_tf32[i * n + j] - in_f32[i * n + j]);
        EXPECT_LE(apart, (2 * tf32_epsilon + n * 0x1p-23) * magnitudes);
        most = std::max(most, apart / magnitudes);
      }
    EXPECT_GT(most, n * 0x1p-23) << (group ? "in a group" : "alone");
  }
}

TEST_F(CudaDriver, OutOfMemorySaysWhatWasAskedAndWhatIsFree) {
  Arena arena(driver_.get(), 0);
  const std::size_t most = driver_->properties(0).memory_bytes;
  try {
    const Tensor x(arena, MemoryCategory::other, DType::u8, {static_cast<std::int64_t>(2 * most)});
    FAIL() << "nothing was thrown";
  } catch (const RunError& error) {
    EXPECT_EQ(std::string(error.what()).rfind("out of memory on device 0: ", 0), 0u) << error.what();
  }
  const Tensor x(arena, MemoryCategory::other, DType::u8, {1});  // and the rest goes on
  copy_from_host(std::vector<std::uint8_t>{7}, x);
  EXPECT_EQ(copy_to_host<std::uint8_t>(x), std::vector<std::uint8_t>{7});
}

}  // namespace
}  // namespace echelon::cuda_driver_test

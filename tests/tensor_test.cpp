#include "tensor/tensor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "tensor/host.h"
#include "tensor/host_region.h"

namespace echelon::tensor_test {
namespace {

using Shape = std::vector<std::int64_t>;

// 0, 1, 2, ... as a tensor over memory that lives as long as the test.
struct Counted {
  std::vector<float> values;
  Tensor tensor;
  explicit Counted(const Shape& shape) {
    std::int64_t count = 1;
    for (std::int64_t extent : shape) count *= extent;
    values.resize(static_cast<std::size_t>(count));
    std::iota(values.begin(), values.end(), 0.0f);
    tensor = Tensor::view_of(values.data(), DType::f32, shape);
  }
};

float at(const Tensor& t, std::int64_t i, std::int64_t j) {
  check(i >= 0 && i < t.rows() && j >= 0 && j < t.cols(), "a test reads beyond a tensor");
  return t.host<float>()[i * t.row_stride() + j];
}

TEST(Tensor, ElementSizesAndNames) {
  EXPECT_EQ(element_bytes(DType::f32), 4);
  EXPECT_EQ(element_bytes(DType::f64), 8);
  EXPECT_EQ(element_bytes(DType::i32), 4);
  EXPECT_EQ(element_bytes(DType::u8), 1);
  EXPECT_STREQ(dtype_name(DType::f64), "f64");
  EXPECT_STREQ(dtype_name(DType::u8), "u8");
}

TEST(Tensor, DefaultIsUndefinedAndAllocatedIsNot) {
  EXPECT_FALSE(Tensor().defined());
  Arena arena;
  EXPECT_TRUE(Tensor(arena, MemoryCategory::other, DType::f32, {3}).defined());
  // An empty part (a rank that holds none of a parameter) is a tensor all the same.
  const Tensor empty(arena, MemoryCategory::other, DType::f32, {0, 4});
  EXPECT_TRUE(empty.defined());
  EXPECT_EQ(empty.numel(), 0);
  EXPECT_EQ(empty.rows(), 0);
}

TEST(Tensor, FoldsLeadingDimensionsIntoRows) {
  const Counted t({2, 3, 4});
  EXPECT_EQ(t.tensor.numel(), 24);
  EXPECT_EQ(t.tensor.bytes(), 96);
  EXPECT_EQ(t.tensor.rows(), 6);
  EXPECT_EQ(t.tensor.cols(), 4);
  EXPECT_EQ(t.tensor.dim(1), 3);
  EXPECT_TRUE(t.tensor.contiguous());
  const Counted line({5});
  EXPECT_EQ(line.tensor.rows(), 1);
  EXPECT_EQ(line.tensor.cols(), 5);
}

TEST(Tensor, RowRangeIsAMatrixOverTheSameMemory) {
  const Counted t({2, 3, 4});
  const Tensor rows = t.tensor.row_range(2, 5);
  EXPECT_EQ(rows.shape(), (Shape{3, 4}));
  EXPECT_TRUE(rows.contiguous());
  EXPECT_EQ(at(rows, 0, 0), 8);
  EXPECT_EQ(at(rows, 2, 3), 19);
  rows.host<float>()[0] = -1;
  EXPECT_EQ(t.values[8], -1);
  EXPECT_EQ(t.tensor.row_range(6, 6).numel(), 0);
}

TEST(Tensor, ColumnRangeKeepsTheRowStride) {
  const Counted t({3, 5});
  const Tensor columns = t.tensor.column_range(1, 3);
  EXPECT_EQ(columns.shape(), (Shape{3, 2}));
  EXPECT_EQ(columns.row_stride(), 5);
  EXPECT_FALSE(columns.contiguous());
  EXPECT_EQ(at(columns, 2, 1), 12);
  // Ranges of ranges.
  const Tensor inner = columns.row_range(1, 3).column_range(1, 2);
  EXPECT_EQ(inner.shape(), (Shape{2, 1}));
  EXPECT_EQ(at(inner, 0, 0), 7);
  EXPECT_EQ(at(inner, 1, 0), 12);
  // All columns, or one row, leave no gap.
  EXPECT_TRUE(t.tensor.column_range(0, 5).contiguous());
  EXPECT_TRUE(columns.row_range(1, 2).contiguous());
}

TEST(Tensor, ReshapeAndFlatRangeNeedContiguousMemory) {
  const Counted t({3, 4});
  const Tensor folded = t.tensor.reshape({2, 3, 2});
  EXPECT_EQ(folded.rows(), 6);
  EXPECT_EQ(at(folded, 5, 1), 11);
  EXPECT_EQ(at(t.tensor.flat_range(5, 9), 0, 3), 8);
  EXPECT_EQ(t.tensor.flat().shape(), (Shape{12}));
  // One row of a wider matrix has no gap, and must not inherit the matrix's stride.
  const Tensor row = t.tensor.row_range(1, 2).column_range(1, 3).reshape({2, 1});
  EXPECT_EQ(at(row, 1, 0), 6);

  const Tensor columns = t.tensor.column_range(0, 2);
  EXPECT_THROW(columns.reshape({6}), InvariantError);
  EXPECT_THROW(columns.flat(), InvariantError);
  EXPECT_THROW(t.tensor.reshape({5, 2}), InvariantError);
}

TEST(Tensor, RangesOutsideAreInvariantErrors) {
  const Counted t({3, 4});
  EXPECT_THROW(t.tensor.row_range(0, 4), InvariantError);
  EXPECT_THROW(t.tensor.row_range(-1, 2), InvariantError);
  EXPECT_THROW(t.tensor.row_range(2, 1), InvariantError);
  EXPECT_THROW(t.tensor.column_range(3, 5), InvariantError);
  EXPECT_THROW(t.tensor.flat_range(0, 13), InvariantError);
  EXPECT_THROW(t.tensor.reshape({2, 3, 2}).column_range(0, 1), InvariantError);  // 2-D only
}

TEST(Tensor, DataChecksTheDType) {
  const Counted t({2});
  EXPECT_NO_THROW(t.tensor.host<float>());
  EXPECT_THROW(t.tensor.host<double>(), InvariantError);
  EXPECT_THROW(t.tensor.host<std::int32_t>(), InvariantError);
}

TEST(Tensor, ViewsKeepTheMemoryAlive) {
  Arena arena;
  Tensor view;
  {
    const Tensor t(arena, MemoryCategory::activations, DType::f64, {4, 4});
    view = t.row_range(1, 2).column_range(0, 2);
  }
  EXPECT_EQ(arena.live()[MemoryCategory::activations], 128);
  view = Tensor();
  EXPECT_EQ(arena.live().total(), 0);
}

TEST(Tensor, MemoryComesAndGoesBehindItsViews) {
  Arena arena;
  const Tensor t(arena, MemoryCategory::gradients, DType::f32, {4, 6});
  const Tensor row = t.row_range(2, 3), kept(arena, MemoryCategory::parameters, DType::f32, {10});
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(row.has_memory());
    std::fill_n(t.host<float>(), 24, static_cast<float>(i));
    EXPECT_EQ(at(row, 0, 5), static_cast<float>(i));
    t.release_memory();
    EXPECT_FALSE(t.has_memory() || row.has_memory());
    EXPECT_EQ(arena.live()[MemoryCategory::gradients], 0);
    EXPECT_EQ(arena.live()[MemoryCategory::parameters], 40);
    EXPECT_THROW(row.host<float>(), InvariantError);
    EXPECT_THROW(t.host_bytes(), InvariantError);
    EXPECT_THROW(row.release_memory(), InvariantError);
    // What was given back is anybody's.
    { const Tensor other(arena, MemoryCategory::activations, DType::f32, {24}); }
    row.acquire_memory();  // through any view
    EXPECT_THROW(t.acquire_memory(), InvariantError);
    EXPECT_EQ(arena.live()[MemoryCategory::gradients], 96);
  }
  EXPECT_EQ(arena.system_allocations(), 2);
  t.release_memory();  // and goes for good without memory
}

TEST(Arena, AccountsBytesByCategoryAndRemembersThePeak) {
  Arena arena;
  const Tensor parameters(arena, MemoryCategory::parameters, DType::f32, {10});
  {
    const Tensor activations(arena, MemoryCategory::activations, DType::f32, {25});
    EXPECT_EQ(arena.live()[MemoryCategory::parameters], 40);
    EXPECT_EQ(arena.live()[MemoryCategory::activations], 100);
    EXPECT_EQ(arena.live().total(), 140);
  }
  // More in another category, less in total: the peak is the moment above.
  const Tensor gradients(arena, MemoryCategory::gradients, DType::f32, {20});
  EXPECT_EQ(arena.live().total(), 120);
  EXPECT_EQ(arena.peak().total(), 140);
  EXPECT_EQ(arena.peak()[MemoryCategory::activations], 100);
  EXPECT_EQ(arena.peak()[MemoryCategory::gradients], 0);
  arena.reset_peak();
  EXPECT_EQ(arena.peak(), arena.live());
}

TEST(Arena, BlocksAreAlignedAndApart) {
  Arena arena;
  const auto one = arena.allocate(1, MemoryCategory::other), two = arena.allocate(100, MemoryCategory::other),
             none = arena.allocate(0, MemoryCategory::other);
  for (const auto& block : {one, two, none}) {
    ASSERT_NE(block->data, nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block->data) % 64, 0u);
  }
  EXPECT_EQ(arena.live().total(), 101);
  EXPECT_GE(arena.held_bytes(), 101u);
}

// A training step allocates the same sizes in the same order, several at once.
void one_step(Arena& arena) {
  std::vector<Tensor> stash;
  for (std::int64_t microbatch = 0; microbatch < 4; ++microbatch) {
    const Tensor scratch(arena, MemoryCategory::other, DType::f32, {1000 + 37 * microbatch});
    for (std::int64_t layer = 0; layer < 3; ++layer)
      stash.emplace_back(arena, MemoryCategory::activations, DType::f32, Shape{64, 16 + layer});
    if (microbatch > 1) stash.erase(stash.begin());
  }
}

TEST(Arena, ARepeatedPatternAsksTheSystemForNothing) {
  Arena arena;
  one_step(arena);
  const std::int64_t allocations = arena.system_allocations();
  const std::size_t held = arena.held_bytes();
  EXPECT_GT(allocations, 0);
  EXPECT_EQ(arena.live().total(), 0);
  for (int step = 0; step < 5; ++step) one_step(arena);
  EXPECT_EQ(arena.system_allocations(), allocations);
  EXPECT_EQ(arena.held_bytes(), held);
}

TEST(Arena, ReuseCountsWhatWasAskedNotWhatIsHeld) {
  Arena arena;
  arena.allocate(1024, MemoryCategory::other).reset();
  const auto smaller = arena.allocate(1000, MemoryCategory::other);
  EXPECT_EQ(arena.system_allocations(), 1);
  EXPECT_EQ(arena.live().total(), 1000);
  EXPECT_EQ(arena.held_bytes(), 1024 + guard_bytes());
}

// What is free side by side is one piece: what waited for its use may be part of it, or be larger than each.
TEST(Arena, OnTheHostWhatIsFreeSideBySideIsOnePiece) {
  constexpr std::size_t large = std::size_t{8} << 20, small = std::size_t{1} << 20;
  Arena arena;
  const auto first = arena.allocate(small, MemoryCategory::parameters);
  for (int step = 0; step < 3; ++step) {
    const std::byte* const all = arena.allocate(large, MemoryCategory::activations)->data;
    std::vector<std::shared_ptr<Block>> parts;
    for (const MemoryCategory category : {MemoryCategory::gradients, MemoryCategory::activations})
      for (int i = 0; i < 3; ++i) parts.push_back(arena.allocate(small, category));
    for (const auto& part : parts) EXPECT_TRUE(part->data >= all && part->data + part->bytes <= all + large);
    for (const int i : {1, 5, 3, 2}) parts[static_cast<std::size_t>(i)].reset();
    parts.push_back(arena.allocate(3 * small, MemoryCategory::activations));
    parts.push_back(arena.allocate(small, MemoryCategory::other));
    EXPECT_EQ(arena.system_allocations(), 2);
  }
  EXPECT_EQ(arena.held_bytes(), large + small + 2 * guard_bytes());
}

TEST(Arena, OnTheHostWhatIsFreeAtTheEndGrows) {
  constexpr std::size_t size = 3000 * 64;
  Arena arena;
  const auto kept = arena.allocate(size, MemoryCategory::other);
  arena.allocate(size, MemoryCategory::other).reset();
  const auto twice = arena.allocate(2 * size, MemoryCategory::other);
  EXPECT_EQ(arena.held_bytes(), 3 * size + 2 * guard_bytes());
  EXPECT_EQ(twice->data, kept->data + size + guard_bytes());
}

TEST(Arena, OnTheHostWhatIsFreeAtTheEndGoesBackToTheSystem) {
  constexpr std::size_t size = std::size_t{7} << 20;
  Arena arena;
  auto first = arena.allocate(size, MemoryCategory::other),
       second = arena.allocate(size, MemoryCategory::other);
  std::fill_n(first->data, size, std::byte{1});
  std::fill_n(second->data, size, std::byte{2});
  first.reset();
  arena.drop_kept();  // what lies before another block stays
  EXPECT_EQ(arena.held_bytes(), 2 * (size + guard_bytes()));
  EXPECT_EQ(second->data[size - 1], std::byte{2});
  first = arena.allocate(size, MemoryCategory::other);
  second.reset();
  arena.drop_kept();
  EXPECT_EQ(arena.held_bytes(), size + guard_bytes());
  first.reset();
  arena.drop_kept();
  EXPECT_EQ(arena.held_bytes(), 0u);
  first = arena.allocate(2 * size, MemoryCategory::other);
  std::fill_n(first->data, 2 * size, std::byte{3});
}

TEST(HostRegion, GrowsAsFarAsItHasAddresses) {
  constexpr std::size_t size = std::size_t{9} << 20;
  const std::unique_ptr<HostRegion> region = HostRegion::reserve(size, 0);
  ASSERT_NE(region, nullptr);
  EXPECT_EQ(region->end(), region->begin());
  ASSERT_TRUE(region->grow(100));
  ASSERT_TRUE(region->grow(size - 100));
  std::fill(region->begin(), region->end(), std::byte{1});
  EXPECT_FALSE(region->grow(std::size_t{1} << 60));
  EXPECT_EQ(region->end(), region->begin() + size);
  region->shrink(size - 10);
  EXPECT_EQ(region->begin()[9], std::byte{1});
  ASSERT_TRUE(region->grow(size - 10));
  std::fill(region->begin(), region->end(), std::byte{2});
  EXPECT_EQ(HostRegion::reserve(std::size_t{1} << 60, 0), nullptr);
}

#if defined(__SANITIZE_ADDRESS__)
TEST(Arena, WhatIsFreeIsForbidden) {
  Arena arena;
  auto block = arena.allocate(100, MemoryCategory::other);
  const auto next = arena.allocate(100, MemoryCategory::other);
  volatile std::byte* const data = block->data;
  data[127] = std::byte{1};
  EXPECT_DEATH(data[128] = std::byte{1}, "use-after-poison");
  block.reset();
  EXPECT_DEATH(data[0] = std::byte{1}, "use-after-poison");
}
#endif

TEST(Arena, TheLimitThrowsAndLeavesTheAccountWhole) {
  Arena arena(Device::cpu, 1000);
  const Tensor kept(arena, MemoryCategory::parameters, DType::f32, {150});
  const Memory before = arena.live();
  try {
    const Tensor refused(arena, MemoryCategory::activations, DType::f32, {101});
    FAIL() << "1004 bytes fitted into 1000";
  } catch (const RunError& error) {
    EXPECT_NE(std::string(error.what()).find("activations"), std::string::npos) << error.what();
  }
  EXPECT_EQ(arena.live(), before);
  EXPECT_EQ(arena.peak(), before);
  EXPECT_EQ(arena.system_allocations(), 1);
  // Exactly the limit fits, and so does the same again after it was given back.
  for (int i = 0; i < 2; ++i) {
    const Tensor fits(arena, MemoryCategory::activations, DType::f32, {100});
    EXPECT_EQ(arena.live().total(), 1000);
  }
}

// What a dry run holds: the same account, byte by byte, of memory that is never there.
TEST(Arena, OnNoDeviceEveryByteIsCountedAndNoneIsThere) {
  Arena real, none(Device::none);
  const auto hold = [](Arena& arena) {
    const Tensor kept(arena, MemoryCategory::parameters, DType::f64, {3, 5});
    { const Tensor gone(arena, MemoryCategory::activations, DType::f32, {100}); }
    const Tensor again(arena, MemoryCategory::gradients, DType::i32, {7});
    again.release_memory();
    EXPECT_FALSE(again.has_memory());
    EXPECT_TRUE(kept.has_memory());
    EXPECT_THROW(again.release_memory(), InvariantError);
    again.acquire_memory();
    EXPECT_THROW(again.acquire_memory(), InvariantError);
    EXPECT_EQ(kept.row_range(1, 2).device(), arena.device());
    return arena.live();
  };
  EXPECT_EQ(hold(none), hold(real));
  EXPECT_EQ(none.live(), real.live());
  EXPECT_EQ(none.peak(), real.peak());
  EXPECT_EQ(real.peak()[MemoryCategory::activations], 400);
  EXPECT_EQ(none.system_allocations(), 0);
  EXPECT_EQ(none.held_bytes(), 0u);
  EXPECT_GT(real.held_bytes(), 0u);

  Arena small(Device::none, 1000);
  const Tensor fits(small, MemoryCategory::other, DType::u8, {1000});
  EXPECT_THROW(Tensor(small, MemoryCategory::other, DType::u8, {1}), RunError);
  // More than any machine has.
  const Tensor vast(none, MemoryCategory::parameters, DType::f32, {1'000'000, 1'000'000});
  EXPECT_EQ(none.live().total(), 4'000'000'000'000);
}

TEST(Tensor, TheHostReadsTheCpuAlone) {
  Arena cpu, none(Device::none);
  const Tensor here(cpu, MemoryCategory::other, DType::f32, {2, 4}),
      nowhere(none, MemoryCategory::other, DType::f32, {2, 4});
  const std::vector<float> values{1, 2, 3, 4, 5, 6, 7, 8};
  for (const Tensor& t : {here, nowhere}) copy_from_host(values, t);
  EXPECT_EQ(copy_to_host<float>(here), values);
  EXPECT_EQ(copy_to_host<float>(here.column_range(1, 3)), (std::vector<float>{2, 3, 6, 7}));
  copy_from_host(std::vector<float>{0, 0}, here.column_range(3, 4));
  EXPECT_EQ(copy_numbers_to_host(here), (std::vector<double>{1, 2, 3, 0, 5, 6, 7, 0}));
  EXPECT_EQ(here.host<float>()[3], 0);
  EXPECT_THROW(copy_from_host(std::vector<float>{0, 0, 0}, here), InvariantError);
  EXPECT_THROW(copy_from_host(std::vector<float>{0, 0, 0}, nowhere), InvariantError);
  EXPECT_THROW(copy_to_host<double>(here), InvariantError);

  EXPECT_THROW(nowhere.host<float>(), InvariantError);
  EXPECT_THROW(nowhere.host_bytes(), InvariantError);
  EXPECT_THROW(copy_to_host<float>(nowhere), InvariantError);
  EXPECT_THROW(copy_numbers_to_host(nowhere), InvariantError);
  std::vector<std::byte> bytes(32);
  EXPECT_THROW(copy_bytes_to_host(nowhere, bytes), InvariantError);
  copy_bytes_from_host(bytes, nowhere);
  copy_bytes_from_host(bytes, here);
  EXPECT_EQ(copy_to_host<float>(here), std::vector<float>(8));
}

TEST(Tensor, BeginsWithAnotherWhereTheirFirstByteIsOne) {
  Arena cpu, none(Device::none);
  for (Arena* arena : {&cpu, &none}) {
    const Tensor x(*arena, MemoryCategory::other, DType::f32, {4, 2}),
        y(*arena, MemoryCategory::other, DType::f32, {4, 2});
    EXPECT_TRUE(x.begins_with(x.flat_range(0, 3)));
    EXPECT_TRUE(x.row_range(1, 2).begins_with(x.flat_range(2, 3)));
    EXPECT_FALSE(x.begins_with(x.row_range(1, 2)));
    EXPECT_FALSE(x.begins_with(y));
    EXPECT_FALSE(x.begins_with({}));
  }
  std::vector<float> memory(4);
  EXPECT_TRUE(Tensor::view_of(memory.data(), DType::f32, {4})
                  .begins_with(Tensor::view_of(memory.data(), DType::f32, {2})));
}

}  // namespace
}  // namespace echelon::tensor_test

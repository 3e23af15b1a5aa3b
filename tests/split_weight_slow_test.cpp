// Every f32 there is, by the function that the host and devices share and by the passes for this processor.
#include <gtest/gtest.h>

#include <vector>

#include "split_weight_checks.h"
#include "tensor/kernels.h"

namespace echelon::split_weight_slow_test {
namespace {

TEST(SplitWeightSlow, EveryF32ComesBack) {
  std::uint32_t bits = 0;
  do ASSERT_EQ(wrong_split(bits), nullptr) << std::hex << bits;
  while (++bits != 0);
}

// Which the passes take for 0 (tensor/flush_subnormals.h). Told by bits, as this thread takes them for 0 too.
bool is_flushed([[maybe_unused]] std::uint32_t bits) {
#if defined(__x86_64__)
  return (bits & 0x7f800000u) == 0 && (bits & 0x007fffffu) != 0;
#else
  return false;
#endif
}

// An update by nothing reads each weight and stores it.
TEST(SplitWeightSlow, EveryF32StaysInTheFastPasses) {
  if (!has_cpu_kernels()) GTEST_SKIP() << "built without them";
  constexpr std::int64_t block = 1 << 20;
  Arena arena;
  const auto kernels = make_cpu_kernels(arena, DType::bf16, 2);
  const auto make = [&](DType dtype) { return Tensor(arena, MemoryCategory::other, dtype, {block}); };
  const Tensor values = make(DType::bf16), remainders = make(DType::i16), g = make(DType::f32),
               m = make(DType::f32), v = make(DType::f32);
  for (const Tensor& t : {g, m, v}) kernels->fill(t, 0.0);
  bf16* const value = values.host<bf16>();
  std::int16_t* const remainder = remainders.host<std::int16_t>();
  for (std::uint64_t begin = 0; begin < std::uint64_t{1} << 32; begin += block) {
    const auto weight = [&](std::int64_t i) {
      return SplitWeight(
          std::bit_cast<float>(static_cast<std::uint32_t>(begin) + static_cast<std::uint32_t>(i)));
    };
    for (std::int64_t i = 0; i < block; ++i) {
      const SplitWeight split = weight(i);
      value[i] = split.value;
      remainder[i] = split.remainder;
    }
    kernels->adamw(values, g, m, v, {.lr = 0}, remainders);
    for (std::int64_t i = 0; i < block; ++i) {
      const SplitWeight split = weight(i);
      const auto bits = static_cast<std::uint32_t>(begin) + static_cast<std::uint32_t>(i);
      if (is_flushed(bits))
        ASSERT_TRUE((value[i].bits & 0x7fffu) == 0 && remainder[i] == 0) << std::hex << bits;
      else
        ASSERT_TRUE(value[i].bits == split.value.bits && remainder[i] == split.remainder) << std::hex << bits;
    }
  }
}

}  // namespace
}  // namespace echelon::split_weight_slow_test

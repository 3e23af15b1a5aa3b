// The warp instructions that tensor/rows/fragments.h needs, as PTX for compute capability 8.0 and later; and
// those of a warpgroup for 9.0, in code that is compiled only for it (sm_90a).
#pragma once

#include <cstdint>

#include "tensor/rows/fragments.h"

namespace echelon {

class CudaWarp {
 public:
  __device__ static int lane() { return static_cast<int>(threadIdx.x % rows::warp_lanes); }
  __device__ static int number() { return static_cast<int>(threadIdx.x / rows::warp_lanes); }
  __device__ static int count() { return static_cast<int>(blockDim.x / rows::warp_lanes); }

  __device__ static void multiply(rows::SumFragment& c, const rows::LeftFragment& a,
                                  const rows::RightFragment& b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c.sums[0]), "+f"(c.sums[1]), "+f"(c.sums[2]), "+f"(c.sums[3])
        : "r"(a.words[0]), "r"(a.words[1]), "r"(a.words[2]), "r"(a.words[3]), "r"(b.words[0]),
          "r"(b.words[1]));
  }
  __device__ static void load(const bf16* row, std::uint32_t (&to)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
  }
  __device__ static void load_turned(const bf16* row, std::uint32_t (&to)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
  }
  __device__ static float across(float x, int apart) { return __shfl_xor_sync(0xffffffffu, x, apart); }
  __device__ static std::uint32_t pair(float low, float high) {
    std::uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
  __device__ static float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  __device__ static float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  // Bypasses the first-level cache: a block reads a tile once.
  __device__ static void copy_later(void* to, const void* from, bool is) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(is ? 16 : 0)
                 : "memory");
  }
  __device__ static void meet() { __syncwarp(); }
  __device__ static void arrive() {
    asm volatile("cp.async.wait_all;" ::: "memory");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // warpgroups' products read through another proxy than lanes write
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  static constexpr bool has_warpgroups = true;
  template <class... Registers>
  __device__ static void begin_products(Registers&... registers) {
    (settle(registers), ...);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  }
  template <class... Sums>
  __device__ static void end_products(Sums&... sums) {
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
    (settle(sums), ...);
  }
  template <int wide>
  __device__ static void multiply_turned(bool first, rows::SumFragment* sums, const rows::SharedRows& left,
                                         int row, const rows::SharedRows& right, int column, int depth) {
    multiply_together<wide, false>(first, sums, descriptor(left.at(row / 64 * 64, depth)),
                                   descriptor(right.at(column, depth)));
  }
  template <int wide>
  __device__ static void multiply_rows(bool first, rows::SumFragment* sums, const rows::LeftFragment& left,
                                       const rows::SharedRows& right, int depth, int column) {
    multiply_together<wide, true>(first, sums, left, descriptor(right.at(depth, column)));
  }
#else
  static constexpr bool has_warpgroups = false;
#endif

 private:
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  // Keeps the compiler from moving code that writes or reads these registers across.
  __device__ static void settle(rows::SumFragment& f) {
    asm volatile("" : "+f"(f.sums[0]), "+f"(f.sums[1]), "+f"(f.sums[2]), "+f"(f.sums[3])::"memory");
  }
  __device__ static void settle(rows::LeftFragment& f) {
    asm volatile("" : "+r"(f.words[0]), "+r"(f.words[1]), "+r"(f.words[2]), "+r"(f.words[3])::"memory");
  }
  template <class Registers, int count>
  __device__ static void settle(Registers (&all)[count]) {
    ECHELON_UNROLL
    for (int i = 0; i < count; ++i) settle(all[i]);
  }

  // For rows in SharedRows' layout: 128-byte swizzling, groups of eight rows 1,024 bytes apart.
  __device__ static std::uint64_t descriptor(const bf16* from) {
    return std::uint64_t{1} << 62 | std::uint64_t{1024 / 16} << 32 | std::uint64_t{1} << 16 |
           (shared_address(from) & 0x3ffff) / 16;
  }
// A lane's sums as operands, from fragment i on.
#define ECHELON_SUMS(i) "+f"(c[i].sums[0]), "+f"(c[i].sums[1]), "+f"(c[i].sums[2]), "+f"(c[i].sums[3])
#define ECHELON_SUMS_4(i) ECHELON_SUMS(i), ECHELON_SUMS(i + 1), ECHELON_SUMS(i + 2), ECHELON_SUMS(i + 3)
#define ECHELON_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define ECHELON_NAMES_32 \
  ECHELON_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
  // `by_rows`: the right operand's rows are rows of it, else its columns are.
  template <int wide, bool by_rows>
  __device__ static void multiply_together(bool first, rows::SumFragment* c, const rows::LeftFragment& a,
                                           std::uint64_t b) {
    static_assert(wide == 32 || wide == 64);
    if constexpr (wide == 64)
      asm volatile(
          "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
          "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" ECHELON_NAMES_32
          "}, {%32, %33, %34, %35}, %36, add, 1, 1, %38;\n}"
          : ECHELON_SUMS_4(0), ECHELON_SUMS_4(4)
          : "r"(a.words[0]), "r"(a.words[1]), "r"(a.words[2]), "r"(a.words[3]), "l"(b), "r"(int{!first}),
            "n"(int{by_rows}));
    else
      asm volatile(
          "{\n.reg .pred add;\nsetp.ne.b32 add, %21, 0;\n"
          "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" ECHELON_NAMES_16
          "}, {%16, %17, %18, %19}, %20, add, 1, 1, %22;\n}"
          : ECHELON_SUMS_4(0)
          : "r"(a.words[0]), "r"(a.words[1]), "r"(a.words[2]), "r"(a.words[3]), "l"(b), "r"(int{!first}),
            "n"(int{by_rows}));
  }
  template <int wide, bool by_rows>
  __device__ static void multiply_together(bool first, rows::SumFragment* c, std::uint64_t a,
                                           std::uint64_t b) {
    static_assert(wide == 32 || wide == 64);
    if constexpr (wide == 64)
      asm volatile(
          "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
          "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" ECHELON_NAMES_32
          "}, %32, %33, add, 1, 1, 0, %35;\n}"
          : ECHELON_SUMS_4(0), ECHELON_SUMS_4(4)
          : "l"(a), "l"(b), "r"(int{!first}), "n"(int{by_rows}));
    else
      asm volatile(
          "{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"
          "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" ECHELON_NAMES_16
          "}, %16, %17, add, 1, 1, 0, %19;\n}"
          : ECHELON_SUMS_4(0)
          : "l"(a), "l"(b), "r"(int{!first}), "n"(int{by_rows}));
  }
#undef ECHELON_SUMS
#undef ECHELON_SUMS_4
#undef ECHELON_NAMES_16
#undef ECHELON_NAMES_32
#endif

  __device__ static unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
  }
};

}  // namespace echelon

// The instructions of a warp that tensor/rows/fragments.h asks for, as PTX for compute capability 8.0 and
// later.
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
  // Past the first-level cache: a tile is read once by its block.
  __device__ static void copy_later(bf16* to, const bf16* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
  }
  __device__ static void arrive() { asm volatile("cp.async.wait_all;" ::: "memory"); }

 private:
  __device__ static unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
  }
};

}  // namespace echelon

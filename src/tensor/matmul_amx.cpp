#include "tensor/matmul_amx.h"

#if defined(__AMX_BF16__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace echelon {

#if defined(__AMX_BF16__)
namespace {

struct AmxUnit {
  static void clear() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  static void load(const std::uint32_t* a0, const std::uint32_t* a1, std::int64_t a_stride,
                   const std::uint32_t* b0, const std::uint32_t* b1, std::int64_t b_stride) {
    _tile_loadd(4, a0, a_stride);
    _tile_loadd(6, b0, b_stride);
    _tile_loadd(7, b1, b_stride);
    _tile_loadd(5, a1, a_stride);
  }
  static void multiply() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  static void store(float* c00, float* c01, float* c10, float* c11, std::int64_t stride) {
    _tile_stored(0, c00, stride);
    _tile_stored(1, c01, stride);
    _tile_stored(2, c10, stride);
    _tile_stored(3, c11, stride);
  }
};

void amx_tile(std::int64_t words, const std::uint32_t* a, const std::uint32_t* b, float* to,
              TileTarget target) {
  amx_tile_by<AmxUnit>(words, a, b, to, target);
}

// Tiles that stay in use make every switch of threads save 8 KiB.
void amx_begin() {
  static constexpr AmxTiles tiles;
  _tile_loadconfig(&tiles);
}
void amx_end() { _tile_release(); }

bool processor_has_amx() {
  constexpr unsigned leaf = 7, amx_bf16 = 1u << 22, amx_tile_bit = 1u << 24;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(leaf, 0, &a, &b, &c, &d) != 0 && (d & amx_bf16) != 0 && (d & amx_tile_bit) != 0;
}

// Linux keeps the tiles' memory from a process until it asks
// (https://docs.kernel.org/arch/x86/xstate.html).
bool system_gives_tiles() {
  constexpr long arch_req_xcomp_perm = 0x1023, tile_data = 18;
  return ::syscall(SYS_arch_prctl, arch_req_xcomp_perm, tile_data) == 0;
}

constexpr MicroKernel amx_kernel{.name = "AMX in bf16",
                                 .rows = amx_rows,
                                 .cols = amx_cols,
                                 .pairs = true,
                                 .group = amx_group,
                                 .a_words = MicroKernel::most_a_words,
                                 .tile = amx_tile,
                                 .begin = amx_begin,
                                 .end = amx_end};

}  // namespace

const MicroKernel* amx_micro_kernel() {
  static const bool has_it = processor_has_amx() && system_gives_tiles();
  return has_it ? &amx_kernel : nullptr;
}
#else
const MicroKernel* amx_micro_kernel() { return nullptr; }
#endif

}  // namespace echelon

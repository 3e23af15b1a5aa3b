#include "tensor/matmul_amx.h"

#if defined(__AMX_BF16__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>

#include "base/on_off.h"
#endif

namespace echelon {

#if defined(__AMX_BF16__)
namespace {

// A register's number is part of the instruction.
template <int i>
struct AmxSum;
#define ECHELON_AMX_SUM(sum, a, b)                                                               \
  template <>                                                                                    \
  struct AmxSum<sum> {                                                                           \
    static void clear() { _tile_zero(sum); }                                                     \
    static void load(const float* from, std::int64_t stride) { _tile_loadd(sum, from, stride); } \
    static void multiply() { _tile_dpbf16ps(sum, a, b); }                                        \
    static void store(float* to, std::int64_t stride) { _tile_stored(sum, to, stride); }         \
  };
ECHELON_AMX_SUM(0, 4, 6)
ECHELON_AMX_SUM(1, 4, 7)
ECHELON_AMX_SUM(2, 5, 6)
ECHELON_AMX_SUM(3, 5, 7)
#undef ECHELON_AMX_SUM

// MatmulPasses::store() with half the instructions: all of them would take longer than the AMX unit leaves
// time for.
__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"))) void amx_store_rows(const float* tile,
                                                                                    std::int64_t row,
                                                                                    std::int64_t count,
                                                                                    const TileTarget& c) {
  std::byte* to = c.data + row * c.stride;
  const auto cols = static_cast<std::uint32_t>(c.cols);
  const std::uint32_t all = cols >= amx_cols ? ~0u : (1u << cols) - 1;
  const auto low_mask = static_cast<__mmask16>(all), high_mask = static_cast<__mmask16>(all >> 16);
  const __m512 alpha = _mm512_set1_ps(c.alpha);
  for (; count > 0; --count, tile += amx_cols, to += c.stride) {
    __m512 low = _mm512_load_ps(tile), high = _mm512_load_ps(tile + 16);
    if (c.alpha != 1) low = _mm512_mul_ps(low, alpha), high = _mm512_mul_ps(high, alpha);
    if (!c.narrow) {
      auto* const floats = reinterpret_cast<float*>(to);
      if (c.beta != 0) {
        low = _mm512_add_ps(_mm512_maskz_loadu_ps(low_mask, floats), low);
        high = _mm512_add_ps(_mm512_maskz_loadu_ps(high_mask, floats + 16), high);
      }
      if (c.past_caches && all == ~0u) {
        _mm512_stream_ps(floats, low);
        _mm512_stream_ps(floats + 16, high);
      } else {
        _mm512_mask_storeu_ps(floats, low_mask, low);
        _mm512_mask_storeu_ps(floats + 16, high_mask, high);
      }
      continue;
    }
    if (c.beta != 0) {
      constexpr __mmask16 whole = 0xffff;  // GCC warns about intrinsics without a mask
      const __m512i old[] = {
          _mm512_maskz_cvtepu16_epi32(whole, _mm256_maskz_loadu_epi16(low_mask, to)),
          _mm512_maskz_cvtepu16_epi32(whole, _mm256_maskz_loadu_epi16(high_mask, to + 32))};
      low = _mm512_add_ps(_mm512_castsi512_ps(_mm512_maskz_slli_epi32(whole, old[0], 16)), low);
      high = _mm512_add_ps(_mm512_castsi512_ps(_mm512_maskz_slli_epi32(whole, old[1], 16)), high);
    }
    const auto rounded = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
    if (c.past_caches && all == ~0u)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to), rounded);
    else
      _mm512_mask_storeu_epi16(to, all, rounded);
  }
}

struct AmxUnit {
  template <int i>
  using Sum = AmxSum<i>;

  static void store_rows(const float* tile, std::int64_t row, std::int64_t count, const TileTarget& c) {
    amx_store_rows(tile, row, count, c);
  }
  // Loads of a bypass the L1 cache, where the panel of b is.
  static void load(const std::uint32_t* a0, const std::uint32_t* a1, std::int64_t a_stride,
                   const std::uint32_t* b0, const std::uint32_t* b1, std::int64_t b_stride) {
    _tile_stream_loadd(4, a0, a_stride);
    _tile_loadd(6, b0, b_stride);
    _tile_loadd(7, b1, b_stride);
    _tile_stream_loadd(5, a1, a_stride);
  }
  static void load_a(const std::uint32_t* a0, const std::uint32_t* a1, std::int64_t stride) {
    _tile_stream_loadd(4, a0, stride);
    _tile_stream_loadd(5, a1, stride);
  }
  static void load_b(const std::uint32_t* b0, const std::uint32_t* b1, std::int64_t stride) {
    _tile_loadd(6, b0, stride);
    _tile_loadd(7, b1, stride);
  }
};

// While tiles are configured, each thread switch must save 8 KiB.
void amx_begin() {
  static constexpr AmxTiles tiles;
  _tile_loadconfig(&tiles);
}
void amx_end() {
  _tile_release();
  _mm_sfence();  // completes the stores that bypassed the caches
}

bool processor_has_amx() {
  constexpr unsigned leaf = 7, amx_bf16 = 1u << 22, amx_tile_bit = 1u << 24;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(leaf, 0, &a, &b, &c, &d) != 0 && (d & amx_bf16) != 0 && (d & amx_tile_bit) != 0;
}

// Linux gives a process the tile registers' state only on request
// (https://docs.kernel.org/arch/x86/xstate.html).
bool system_gives_tiles() {
  constexpr long arch_req_xcomp_perm = 0x1023, tile_data = 18;
  return ::syscall(SYS_arch_prctl, arch_req_xcomp_perm, tile_data) == 0;
}

bool is_wanted() {
  constexpr const char* variable = "ECHELON_AMX";
  const char* const text = std::getenv(variable);
  return text == nullptr || parse_on_or_off(variable, text);
}

constexpr MicroKernel amx_kernel = amx_kernel_by<AmxUnit>("AMX in bf16", amx_begin, amx_end),
                      parts_kernel = amx_parts_kernel_by<AmxUnit>("AMX in three bf16", amx_begin, amx_end);

}  // namespace

const MicroKernel* amx_micro_kernel() {
  static const bool has_it = is_wanted() && processor_has_amx() && system_gives_tiles();
  return has_it ? &amx_kernel : nullptr;
}
const MicroKernel* parts_micro_kernel() {
  return amx_micro_kernel() != nullptr && avx512_part_passes() != nullptr ? &parts_kernel : nullptr;
}
#else
const MicroKernel* amx_micro_kernel() { return nullptr; }
const MicroKernel* parts_micro_kernel() { return nullptr; }
#endif

}  // namespace echelon

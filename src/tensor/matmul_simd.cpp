#include "tensor/matmul_simd.h"

#include <algorithm>
#include <bit>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/matmul_simd.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "tensor/simd_bf16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace echelon {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using Size = std::int64_t;
using Word = std::uint32_t;
using Floats = hn::CappedTag<float, 16>;
using Four = hn::CappedTag<Word, 4>;
using Words = hn::RebindToUnsigned<Floats>;

// The sums, two vectors of b and one of a fill 31 of 32 registers, or 15 of 16.
constexpr int lanes = static_cast<int>(hn::MaxLanes(Floats())), tile_rows = lanes == 16 ? 14 : 6,
              tile_cols = 2 * lanes;

void store(const float* tile, Size tile_stride, Size row, Size count, const TileTarget& c);

// A tile whose rows are stored while the next one is computed: all at once, they would fill the buffers of
// the processor, and the next tile's loads would wait.
struct WaitingTile {
  float* sums = nullptr;
  TileTarget target = {};
  Size row = 0;

  bool has_row() const { return row < target.rows; }

  HWY_INLINE void store_row() {
    const float* const from = sums + row * tile_cols;
    if (target.narrow || !target.is_plain(target.rows, tile_cols)) {
      store(from, tile_cols, row, 1, target);
    } else {
      const Floats d;
      auto* const to = reinterpret_cast<float*>(target.data + row * target.stride);
      auto v0 = hn::LoadU(d, from), v1 = hn::LoadU(d, from + lanes);
      if (target.beta != 0) v0 = hn::Add(hn::LoadU(d, to), v0), v1 = hn::Add(hn::LoadU(d, to + lanes), v1);
      hn::StoreU(v0, d, to);
      hn::StoreU(v1, d, to + lanes);
    }
    ++row;
  }
};

void make_column(const TileColumn& column) {
  constexpr Size tile_size = tile_rows * tile_cols;
  const Floats d;
  // The words of a tile after which one row of the tile before is stored.
  const Size run = std::max<Size>(column.words / tile_rows, 1);
  const Size runs = column.tiles * (column.words / run);
  const Size fetched = column.next == nullptr ? 0 : (column.next_lines + runs - 1) / runs;
  WaitingTile waiting;
  for (Size t = 0; t < column.tiles; ++t) {
    const auto *a = reinterpret_cast<const float*>(column.a + t * column.a_tile),
               *b = reinterpret_cast<const float*>(column.b);
    WaitingTile made;
    if (column.target == nullptr) {
      made.sums = column.sums + t * tile_size;
    } else {
      made.sums = column.sums + t % 2 * tile_size;
      made.target = *column.target;
      made.target.data += t * tile_rows * made.target.stride;
      made.target.rows = std::min<Size>(tile_rows, made.target.rows - t * tile_rows);
    }
    hn::Vec<Floats> sums[tile_rows][2];
#pragma GCC unroll 14
    for (int i = 0; i < tile_rows; ++i) sums[i][0] = sums[i][1] = hn::Zero(d);
    Size w = 0;
    for (Size r = 0; w < column.words; ++r) {
      if (waiting.has_row()) waiting.store_row();
      if (r < made.target.rows) made.target.fetch(r);
      if (fetched > 0) column.next->fetch(fetched);
      for (const Size end = std::min(w + run, column.words); w < end; ++w, a += tile_rows, b += tile_cols) {
        const auto b0 = hn::LoadU(d, b), b1 = hn::LoadU(d, b + lanes);
#pragma GCC unroll 14
        for (int i = 0; i < tile_rows; ++i) {
          const auto x = hn::Set(d, a[i]);
          sums[i][0] = hn::MulAdd(x, b0, sums[i][0]);
          sums[i][1] = hn::MulAdd(x, b1, sums[i][1]);
        }
      }
    }
    while (waiting.has_row()) waiting.store_row();
    float* to = made.sums;
#pragma GCC unroll 14
    for (int i = 0; i < tile_rows; ++i, to += tile_cols) {
      hn::StoreU(sums[i][0], d, to);
      hn::StoreU(sums[i][1], d, to + lanes);
    }
    waiting = made;
  }
  while (waiting.has_row()) waiting.store_row();
}

// How words are loaded: neighbouring words of a line (along); and, for words of two elements, from a row and
// the next (across), which is missing for the last element of an odd k.
struct FromFloats {
  using Stored = float;
  static constexpr Size elements = 1;  // in a word
  template <class D>
  static HWY_INLINE hn::Vec<D> along(D d, const float* x) {
    return hn::LoadU(d, reinterpret_cast<const Word*>(x));
  }
};
struct Widened {
  using Stored = bf16;
  static constexpr Size elements = 1;
  template <class D>
  static HWY_INLINE hn::Vec<D> along(D d, const bf16* x) {
    return hn::ShiftLeft<16>(hn::PromoteTo(d, hn::LoadU(hn::Rebind<std::uint16_t, D>(), &x->bits)));
  }
};
struct Pairs {
  using Stored = bf16;
  static constexpr Size elements = 2;
  template <class D>
  static HWY_INLINE hn::Vec<D> along(D d, const bf16* x) {
    return hn::LoadU(d, reinterpret_cast<const Word*>(x));
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> across(D d, const bf16* x, Size stride, bool alone) {
    const hn::Rebind<std::uint16_t, D> half;
    const auto first = hn::PromoteTo(d, hn::LoadU(half, &x->bits));
    if (alone) return first;
    return hn::Or(first, hn::ShiftLeft<16>(hn::PromoteTo(d, hn::LoadU(half, &(x + stride)->bits))));
  }
};

// One word of a line whose elements are `step` apart, with `left` elements from here on.
template <class From>
HWY_INLINE Word word(const typename From::Stored* x, Size step, Size left) {
  if constexpr (std::is_same_v<From, FromFloats>)
    return std::bit_cast<Word>(*x);
  else if constexpr (std::is_same_v<From, Widened>)
    return Word{x->bits} << 16;
  else
    return Word{x->bits} | (left > 1 ? Word{x[step].bits} << 16 : 0);
}

#if HWY_TARGET != HWY_SCALAR
// Four consecutive words, from element `at` on, of every fourth line of x, for as many lines as d has blocks
// of four.
template <class From, class D>
HWY_INLINE hn::Vec<D> fours(D d, const typename From::Stored* const* x, Size at) {
  constexpr std::size_t size = hn::MaxLanes(D());
  if constexpr (size == 4) {
    return From::along(d, *x + at);
  } else {
    const hn::Half<D> half;
    return hn::Combine(d, fours<From>(half, x + size / 2, at), fours<From>(half, x, at));
  }
}

// Transposes 4 words, from element `at` on, of as many lines as d has lanes: x is where each line begins. In
// the result, one word of all lines is contiguous, and the next word's are `width` further.
template <class From, class D>
HWY_INLINE void turn(D d, const typename From::Stored* const* x, Size at, Size width, Word* to) {
  const hn::Repartition<std::uint64_t, D> two;
  const auto a = fours<From>(d, x, at), b = fours<From>(d, x + 1, at), c = fours<From>(d, x + 2, at),
             e = fours<From>(d, x + 3, at);
  const auto ab = hn::BitCast(two, hn::InterleaveLower(d, a, b)),
             ab2 = hn::BitCast(two, hn::InterleaveUpper(d, a, b));
  const auto ce = hn::BitCast(two, hn::InterleaveLower(d, c, e)),
             ce2 = hn::BitCast(two, hn::InterleaveUpper(d, c, e));
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(two, ab, ce)), d, to);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(two, ab, ce)), d, to + width);
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(two, ab2, ce2)), d, to + 2 * width);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(two, ab2, ce2)), d, to + 3 * width);
}
#endif

template <class From>
void pack_along(const typename From::Stored* x, Size stride, Size there, Size k, Size width, Word* to) {
  const Size lines = std::min(there, width), words = (k + From::elements - 1) / From::elements;
  // One cache line of each line at a time.
  constexpr Size at_once = 16;
  for (Size begin = 0; begin < words; begin += at_once) {
    const Size end = std::min(begin + at_once, words);
    // Hardware does not prefetch this many streams.
    for (Size line = 0; line < lines; ++line)
      __builtin_prefetch(x + line * stride + (begin + 2 * at_once) * From::elements);
    Size r = 0;
#if HWY_TARGET != HWY_SCALAR
    // If a vector is longer than the panel is wide, the next word overwrites its end.
    if (end * From::elements <= k && (end - begin) % 4 == 0) {
      for (; r < lines; r += lanes) {
        const Size first = std::min(r, std::max<Size>(width - lanes, 0));
        const typename From::Stored* from[lanes];
        for (Size i = 0; i < lanes; ++i) from[i] = x + std::min(first + i, lines - 1) * stride;
        for (Size w = begin; w < end; w += 4)
          turn<From>(Words(), from, w * From::elements, width, to + w * width + first);
      }
      r = lines;
    }
#endif
    for (; r < lines; ++r)
      for (Size w = begin; w < end; ++w)
        to[w * width + r] = word<From>(x + r * stride + w * From::elements, 1, k - w * From::elements);
    for (; r < width; ++r)
      for (Size w = begin; w < end; ++w) to[w * width + r] = 0;
  }
}

template <class From>
void pack_across(const typename From::Stored* x, Size stride, Size there, Size k, Size width, Word* to) {
  const Words d;
  const Four four;
  const Size lines = std::min(there, width);
  constexpr Size most_ahead = 32;
  for (Size at = 0; at < k; at += From::elements) {
    const auto* row = x + at * stride;
    const bool alone = k - at < From::elements;
    // The processor does not prefetch rows of which only a part is read; nor those that the next call packs.
    for (Size i = 0; i < From::elements; ++i)
      __builtin_prefetch(row + (std::min(k, most_ahead) + i) * stride);
    Size r = 0;
    const auto words = [&](auto tag, const auto* from) HWY_ATTR {
      if constexpr (From::elements == 1)
        return From::along(tag, from);
      else
        return From::across(tag, from, stride, alone);
    };
    // The next word overwrites what is written beyond the panel's width.
    const Size readable = at + From::elements < k ? there : lines;
    for (; r < lines && r + lanes <= readable; r += lanes) hn::StoreU(words(d, row + r), d, to + r);
    for (; r + 4 <= lines && lanes > 4; r += 4) hn::StoreU(words(four, row + r), four, to + r);
    for (; r < lines; ++r) to[r] = word<From>(row + r, stride, k - at);
    for (; r < width; ++r) to[r] = 0;
    to += width;
  }
}

constexpr Size group = 16;  // contiguous words of a line

template <class From>
void groups_along(const typename From::Stored* x, Size stride, Size there, Size k, Size width, Word* to) {
  using Stored = typename From::Stored;
  const Words d;
  constexpr Size elements = From::elements * group;  // of a line in a group
  const Size lines = std::min(there, width), whole = k / elements * elements;
  // Few lines at a time, since hardware does not prefetch many streams.
  constexpr Size at_once = 4;
  for (Size begin = 0; begin < lines; begin += at_once) {
    const Size end = std::min(begin + at_once, lines);
    for (Size at = 0; at < whole; at += elements)
      for (Size r = begin; r < end; ++r) {
        const Stored* const from = x + r * stride + at;
        Word* const line = to + at / From::elements * width + r * group;
        __builtin_prefetch(from + 8 * elements);
        for (Size w = 0; w < group; w += lanes)
          hn::StoreU(From::along(d, from + w * From::elements), d, line + w);
      }
  }
  if (whole < k)
    for (Size r = 0; r < lines; ++r) {
      Word* const line = to + whole / From::elements * width + r * group;
      std::memset(line, 0, 4 * group);
      std::memcpy(line, x + r * stride + whole, sizeof(Stored) * static_cast<std::size_t>(k - whole));
    }
  for (Size at = 0; at < k; at += elements) {
    Word* const panel = to + at / From::elements * width;
    std::fill(panel + lines * group, panel + width * group, 0u);
  }
}

template <class From>
void groups_across(const typename From::Stored* x, Size stride, Size lines, Size k, Size width, Word* to) {
  constexpr Size most_width = MicroKernel::most_rows, elements = From::elements * group;
  alignas(64) Word words[group * most_width + lanes];
  for (Size at = 0; at < k; at += elements, to += width * group) {
    const Size here = std::min(elements, k - at);
    pack_across<From>(x + at * stride, stride, lines, here, width, words);
    std::fill(words + (here + From::elements - 1) / From::elements * width, words + group * width, 0);
    for (Size r = 0; r < width; r += 4)
#if HWY_TARGET != HWY_SCALAR
      for (Size w = 0; w < group; w += lanes) {
        const float* from[lanes];
        for (Size i = 0; i < lanes; ++i)
          from[i] = reinterpret_cast<const float*>(words + (w + i) * width + r);
        turn<FromFloats>(Words(), from, 0, group, to + r * group + w);
      }
#else
      for (Size w = 0; w < group; ++w)
        for (Size i = r; i < r + 4; ++i) to[i * group + w] = words[w * width + i];
#endif
  }
}

template <class T>
void store_tile(const float* from, Size from_stride, Size row, Size count, const TileTarget& target) {
  const Floats d;
  const hn::CappedTag<float, 1> one;
  const float alpha = target.alpha, beta = target.beta;
  const auto each = [=](auto tag, const float* x, T* y) HWY_ATTR {
    auto v = hn::LoadU(tag, x);
    if (alpha != 1.0f) v = hn::Mul(v, hn::Set(tag, alpha));
    if (beta != 0.0f) v = hn::Add(load(tag, y), v);
    store(v, tag, y);
  };
  for (Size i = 0; i < count; ++i, from += from_stride) {
    T* const c = reinterpret_cast<T*>(target.data + (row + i) * target.stride);
    Size j = 0;
    for (; j + lanes <= target.cols; j += lanes) each(d, from + j, c + j);
    for (; j < target.cols; ++j) each(one, from + j, c + j);
  }
}

void store(const float* tile, Size tile_stride, Size row, Size count, const TileTarget& c) {
  if (c.narrow) return store_tile<bf16>(tile, tile_stride, row, count, c);
  store_tile<float>(tile, tile_stride, row, count, c);
}

constexpr MicroKernel kernel{.name = "our FMA kernel",
                             .rows = tile_rows,
                             .cols = tile_cols,
                             .pairs = false,
                             .depth = lanes == 16 ? 384 : 512,
                             .whole_depth = lanes == 16 ? 384 : 512,
                             .a_words = (lanes == 16 ? 96 : 64) * 1024,  // the L2 cache is larger, too
                             .column = make_column};
static_assert(tile_rows <= MicroKernel::most_rows && tile_cols <= MicroKernel::most_cols);

constexpr MatmulPasses passes{.floats_along = pack_along<FromFloats>,
                              .floats_across = pack_across<FromFloats>,
                              .widened_along = pack_along<Widened>,
                              .widened_across = pack_across<Widened>,
                              .pairs_along = pack_along<Pairs>,
                              .pairs_across = pack_across<Pairs>,
                              .groups_along = groups_along<Pairs>,
                              .groups_across = groups_across<Pairs>,
                              .float_groups_along = groups_along<FromFloats>,
                              .float_groups_across = groups_across<FromFloats>,
                              .store = store};

}  // namespace

const MicroKernel* micro_kernel_here() { return &kernel; }
const MatmulPasses* matmul_passes_here() { return &passes; }

}  // namespace HWY_NAMESPACE
}  // namespace echelon
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace echelon {

HWY_EXPORT(micro_kernel_here);
HWY_EXPORT(matmul_passes_here);

const MicroKernel& f32_micro_kernel() { return *HWY_DYNAMIC_DISPATCH(micro_kernel_here)(); }
const MatmulPasses& matmul_passes() { return *HWY_DYNAMIC_DISPATCH(matmul_passes_here)(); }

}  // namespace echelon
#endif

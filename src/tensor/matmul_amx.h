// bf16 products by AMX: eight tile registers of 16 rows of 64 bytes, and one instruction that adds to a tile
// of f32 the product of two tiles of bf16 pairs (Intel 64 and IA-32 Architectures Software Developer's
// Manual, volume 1, chapter 18). The instructions are functions of a type, so that the code around them can
// be tested on machines without AMX.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>

#include "tensor/matmul_simd.h"
#include "tensor/three_parts.h"

namespace echelon {

inline constexpr int amx_rows = 32, amx_cols = 32, amx_group = 16;

// The operand of LDTILECFG: all eight tiles, with full size.
struct alignas(64) AmxTiles {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(AmxTiles) == 64);

// The work beside a column's products, a part of it with each product, since the unit leaves the core half of
// its instructions: stores the rows of the tile before, and prefetches the rows to which a tile will be
// added.
template <class Unit>
class BesideAmx {
 public:
  // steps: products in a tile.
  BesideAmx(const TileColumn& column, std::int64_t steps) : column_(column) {
    lines_each_ = (column.next_lines + steps * column.tiles - 1) / (steps * column.tiles);
    rows_each_ = (amx_rows + steps - 1) / steps;
  }

  // Where a tile's sums go.
  float* sums(std::int64_t tile) const {
    return column_.sums + (column_.target == nullptr ? tile : tile % 2) * amx_rows * amx_cols;
  }

  void begin(std::int64_t tile) {
    tile_ = tile;
    stored_ = fetched_ = 0;
  }
  void step() {
    if (lines_each_ > 0) column_.next->fetch(lines_each_);
    store_some(rows_each_);
  }
  void end() { store_some(amx_rows); }

  void store_last() {
    begin(column_.tiles);
    end();
  }

 private:
  std::int64_t rows_of(std::int64_t tile) const {
    return std::clamp<std::int64_t>(column_.target->rows - tile * amx_rows, 0, amx_rows);
  }
  void store_some(std::int64_t count) {
    if (column_.target == nullptr) return;
    const TileTarget& target = *column_.target;
    if (target.beta != 0)
      for (const std::int64_t end = std::min(fetched_ + count, rows_of(tile_)); fetched_ < end; ++fetched_)
        target.fetch(tile_ * amx_rows + fetched_);
    if (tile_ == 0) return;
    const std::int64_t here = std::min(count, rows_of(tile_ - 1) - stored_);
    if (here <= 0) return;
    Unit::store_rows(sums(tile_ - 1) + stored_ * amx_cols, (tile_ - 1) * amx_rows + stored_, here, target);
    stored_ += here;
  }

  const TileColumn& column_;
  std::int64_t rows_each_, lines_each_;
  std::int64_t tile_ = 0, stored_ = 0, fetched_ = 0;
};

// MicroKernel::column by `Unit`, which has two tiles of a and two of b, loaded by load(), or by load_a() and
// load_b(), and four tiles of sums: Sum<2 i + j>::multiply() adds tile i of a times tile j of b. Strides are
// in bytes. store_rows() is MatmulPasses::store(). Sums are stored between the first products of the next
// tile, so that the unit does not wait at the end of each tile.
template <class Unit, int parts, bool a_is_packed>
void amx_column_of(const TileColumn& column) {
  constexpr std::int64_t row = 4 * amx_cols, b_part = amx_cols * amx_group;
  const GroupedRows a_rows = a_is_packed ? GroupedRows() : column.a_rows;
  const std::int64_t a_row = a_rows.row_bytes, lower = 16 * a_row / 4, a_part = a_rows.group_words;
  const std::int64_t groups = column.words / (amx_group * parts);
  constexpr int products = parts == 1 ? 1 : std::size(part_products);  // in a group
  BesideAmx<Unit> beside(column, groups * products);
  // What the p-th product of a group needs and the one before it did not.
  const auto load = [&]<int p>(const std::uint32_t* a, const std::uint32_t* b)
      __attribute__((always_inline)) {
    if constexpr (parts == 1) {
      Unit::load(a, a + lower, a_row, b, b + 16, row);
    } else {
      constexpr PartProduct made = part_products[p],
                            before = p == 0 ? PartProduct{-1, -1} : part_products[p - 1];
      if constexpr (made.a != before.a) Unit::load_a(a + made.a * a_part, a + made.a * a_part + lower, a_row);
      if constexpr (made.b != before.b) Unit::load_b(b + made.b * b_part, b + made.b * b_part + 16, row);
    }
  };
  const auto quarter = [](auto* tile, int i) { return tile + i / 2 * 16 * amx_cols + i % 2 * 16; };
  const auto begin_sum = [&]<int i>(std::int64_t tile) __attribute__((always_inline)) {
    if (column.before == nullptr)
      Unit::template Sum<i>::clear();
    else
      Unit::template Sum<i>::load(quarter(column.before + tile * amx_rows * amx_cols, i), row);
  };
  const auto store_sum = [&]<int i>(std::int64_t tile) __attribute__((always_inline)) {
    Unit::template Sum<i>::store(quarter(beside.sums(tile), i), row);
  };
  const auto each = [](auto f) __attribute__((always_inline)) {
    f.template operator()<0>();
    f.template operator()<1>();
    f.template operator()<2>();
    f.template operator()<3>();
  };

  // The products of a group, from the first-th on.
  const auto multiply = [&]<int first>(const std::uint32_t* a, const std::uint32_t* b)
      __attribute__((always_inline)) {
    const auto one = [&]<int p>() __attribute__((always_inline)) {
      load.template operator()<p>(a, b);
      each([&]<int i>() __attribute__((always_inline)) { Unit::template Sum<i>::multiply(); });
      beside.step();
    };
    [&]<int... p>(std::integer_sequence<int, p...>) __attribute__((always_inline)) {
      (one.template operator()<first + p>(), ...);
    }
    (std::make_integer_sequence<int, products - first>());
  };

  load.template operator()<0>(column.a, column.b);
  each([&]<int i>() __attribute__((always_inline)) {
    begin_sum.template operator()<i>(0);
    Unit::template Sum<i>::multiply();
  });
  for (std::int64_t t = 0;; ++t) {
    const std::uint32_t *a = column.a + t * column.a_tile, *b = column.b;
    beside.begin(t);
    beside.step();
    multiply.template operator()<1>(a, b);
    for (std::int64_t g = 1; g < groups; ++g) {
      a += parts * a_part, b += parts * b_part;
      multiply.template operator()<0>(a, b);
    }
    beside.end();
    if (t + 1 == column.tiles) break;
    load.template operator()<0>(column.a + (t + 1) * column.a_tile, column.b);
    each([&]<int i>() __attribute__((always_inline)) {
      store_sum.template operator()<i>(t);
      begin_sum.template operator()<i>(t + 1);
      Unit::template Sum<i>::multiply();
    });
  }
  each([&]<int i>() __attribute__((always_inline)) { store_sum.template operator()<i>(column.tiles - 1); });
  beside.store_last();
}

// With constants for a packed a, since attention's columns are short.
template <class Unit>
void amx_column_by(const TileColumn& column) {
  column.a_rows == GroupedRows() ? amx_column_of<Unit, 1, true>(column)
                                 : amx_column_of<Unit, 1, false>(column);
}

// begin and end: see MicroKernel.
template <class Unit>
constexpr MicroKernel amx_kernel_by(const char* name, void (*begin)(), void (*end)()) {
  return {.name = name,
          .rows = amx_rows,
          .cols = amx_cols,
          .pairs = true,
          .group = amx_group,
          .whole_depth = 2048,
          .column_words = 256,
          .a_words = MicroKernel::most_a_words,
          .pack_rows = 8,
          .past_caches = std::int64_t{1} << 20,
          .column = amx_column_by<Unit>,
          .begin = begin,
          .end = end};
}

// For f32 as three bf16 each.
template <class Unit>
constexpr MicroKernel amx_parts_kernel_by(const char* name, void (*begin)(), void (*end)()) {
  MicroKernel kernel = amx_kernel_by<Unit>(name, begin, end);
  kernel.parts = parts_of_f32;
  kernel.column_words = 4 * kernel.unit();
  kernel.pack_rows = 2 * amx_group;
  kernel.column = amx_column_of<Unit, parts_of_f32, true>;
  return kernel;
}

}  // namespace echelon

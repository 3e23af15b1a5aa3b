// Products of tiles in a block's shared memory, and of whole matrices that are cut into such tiles.
#pragma once

#include "base/bf16.h"
#include "base/halving_tree.h"
#include "tensor/rows/activations.h"
#include "tensor/rows/team.h"

namespace echelon::rows {

// An operand of a product: element (i, k) is at data[i * of_row + k * of_depth].
template <class F>
struct TileOperand {
  const F* data;
  int of_row, of_depth;
};

// out (rows, cols), with rows `stride` apart, += a (rows, depth) b (cols, depth)^T. Each lane sums patches of
// 4 x 4 elements, whose rows and columns are as far apart as there are patches, so that neighbouring lanes
// read neighbouring columns. Each element is one sum in the order of depth, starting from its old value.
template <class Team, class F>
ECHELON_HOST_DEVICE void add_tile_product(const Team& team, const TileOperand<F>& a, const TileOperand<F>& b,
                                          int rows, int cols, int depth, F* out, int stride) {
  constexpr int edge = 4;
  const int high = (rows + edge - 1) / edge, wide = (cols + edge - 1) / edge;
  for (int patch = static_cast<int>(team.lane()); patch < high * wide;
       patch += static_cast<int>(team.lanes())) {
    const int first_row = patch / wide, first_col = patch % wide;
    F sums[edge][edge];
    int row_of[edge], col_of[edge];  // beyond the tile: the last, whose sum another lane stores
    for (int r = 0; r < edge; ++r) row_of[r] = first_row + r * high < rows ? first_row + r * high : rows - 1;
    for (int c = 0; c < edge; ++c) col_of[c] = first_col + c * wide < cols ? first_col + c * wide : cols - 1;
    const auto is = [&](int r, int c) { return first_row + r * high < rows && first_col + c * wide < cols; };
    for (int r = 0; r < edge; ++r)
      for (int c = 0; c < edge; ++c) sums[r][c] = is(r, c) ? out[row_of[r] * stride + col_of[c]] : F(0);
    for (int k = 0; k < depth; ++k) {
      F left[edge], right[edge];
      for (int r = 0; r < edge; ++r) left[r] = a.data[row_of[r] * a.of_row + k * a.of_depth];
      for (int c = 0; c < edge; ++c) right[c] = b.data[col_of[c] * b.of_row + k * b.of_depth];
      for (int r = 0; r < edge; ++r)
        for (int c = 0; c < edge; ++c) sums[r][c] += left[r] * right[c];
    }
    for (int r = 0; r < edge; ++r)
      for (int c = 0; c < edge; ++c)
        if (is(r, c)) out[row_of[r] * stride + col_of[c]] = sums[r][c];
  }
}

// Loads rows [row, row + rows) and columns [col, col + cols) of m, or of its transpose, into a tile whose
// rows are `stride` apart.
template <class Team, class T, class F>
ECHELON_HOST_DEVICE void load_tile(const Team& team, const Matrix<T>& m, bool transposed, std::int64_t row,
                                   std::int64_t col, int rows, int cols, F* tile, int stride) {
  for (int e = static_cast<int>(team.lane()); e < rows * cols; e += static_cast<int>(team.lanes())) {
    // Neighbouring lanes read neighbouring elements of memory.
    const int i = transposed ? e % rows : e / cols, j = transposed ? e / rows : e % cols;
    tile[i * stride + j] = F(transposed ? m[col + j][row + i] : m[row + i][col + j]);
  }
}

// A range of the summed index.
struct DepthRange {
  std::int64_t begin, end;
};

// Stores a sum in c, or adds it.
template <class C>
struct StoreSum {
  bool accumulate;
  ECHELON_HOST_DEVICE void operator()(C& c, std::int64_t, std::int64_t, Wide<C> sum) const {
    c = C(accumulate ? c + sum : sum);
  }
};
// The same, with an Epilogue, each element of which is rounded once: computed from c as stored. Null
// pointers: none.
template <class C>
struct StoreFollowed {
  const C* bias;
  Matrix<C> added;
  Activation activation;
  Matrix<C> activated, hidden;
  ECHELON_HOST_DEVICE void operator()(C& c, std::int64_t i, std::int64_t j, Wide<C> sum) const {
    using F = Wide<C>;
    if (added.data != nullptr) sum = F(added[i][j]) + sum;
    if (bias != nullptr) sum += F(bias[j]);
    if (hidden.data != nullptr) {
      C& h = hidden[i][j];
      const F given = h;
      sum *= activation_at<F>(activation, given).slope;
      h = C(activation_of<F>(activation, given));
    }
    c = C(sum);
    if (activated.data != nullptr) activated[i][j] = C(activation_of<F>(activation, c));
  }
};

// c (M, N) = or += op(a) (M, K) op(b) (K, N), a tile of c for each block. The sums of an element are in the
// order of k, grouped by SumBlocks: its bits depend on nothing else, and so not on shapes.
template <class A, class B, class C, class Store = StoreSum<C>>
struct TiledProduct {
  static constexpr int tile = 32;
  Matrix<A> a;
  bool a_transposed;
  Matrix<B> b;
  bool b_transposed;
  Matrix<C> c;
  Store store;
  const DepthRange* ranges;        // those of one sum block after those of another
  const std::int64_t* block_ends;  // indices into `ranges`
  std::int64_t num_blocks;

  // Tiles of op(a) and op(b), waiting sums and the current one.
  static std::size_t shared_bytes(std::int64_t blocks) {
    return sizeof(Wide<C>) *
           static_cast<std::size_t>((2 * (tile + 1) + tile * (most_waiting(blocks) + 1)) * tile);
  }
  static std::int64_t tiles_of(std::int64_t n) { return (n + tile - 1) / tile; }
  std::int64_t num_tiles() const { return tiles_of(c.rows) * tiles_of(c.cols); }

  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    one_tile(team, team.block());
  }

  template <class Team>
  ECHELON_HOST_DEVICE void one_tile(const Team& team, std::int64_t which) const {
    using F = Wide<C>;
    const std::int64_t wide = (c.cols + tile - 1) / tile;
    const std::int64_t row = which / wide * tile, col = which % wide * tile;
    const int rows = static_cast<int>(c.rows - row < tile ? c.rows - row : tile);
    const int cols = static_cast<int>(c.cols - col < tile ? c.cols - col : tile);
    constexpr int stride = tile + 1;
    F* const left = reinterpret_cast<F*>(team.shared());
    F* const right = left + tile * stride;
    F* const sums = right + tile * stride;
    const int first = static_cast<int>(team.lane()), step = static_cast<int>(team.lanes());

    std::int64_t range = 0;
    for (std::int64_t block = 0; block < num_blocks; ++block) {
      const TreePlace place = tree_place(num_blocks, block);
      F* at = sums + place.waiting * tile * tile;
      for (int e = first; e < tile * tile; e += step) at[e] = 0;
      for (; range < block_ends[block]; ++range)
        for (std::int64_t k = ranges[range].begin; k < ranges[range].end; k += tile) {
          const std::int64_t left_over = ranges[range].end - k;
          const int depth = static_cast<int>(left_over < tile ? left_over : tile);
          load_tile(team, a, a_transposed, row, k, rows, depth, left, stride);
          load_tile(team, b, !b_transposed, col, k, cols, depth, right, stride);
          team.sync();
          add_tile_product(team, TileOperand<F>{left, stride, 1}, TileOperand<F>{right, stride, 1}, rows,
                           cols, depth, at, tile);
          team.sync();
        }
      team.sync();
      for (int merge = 0; merge < place.merges; ++merge, at -= tile * tile)
        for (int e = first; e < tile * tile; e += step) at[e - tile * tile] += at[e];
    }
    team.sync();
    for (int e = first; e < rows * cols; e += step) {
      const int i = e / cols, j = e % cols;
      store(c[row + i][col + j], row + i, col + j, sums[i * tile + j]);
    }
  }
};

// Several products of the same types: the tiles of one after those of another, each a block's.
template <class A, class B, class C>
struct TiledProducts {
  const TiledProduct<A, B, C>* products;
  const std::int64_t* first_tiles;  // of each product; the first is 0
  std::int64_t count;

  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const std::int64_t i =
        last_reached(team.block(), count, [this](std::int64_t k) { return first_tiles[k]; });
    const TiledProduct<A, B, C> product = products[i];
    product.one_tile(team, team.block() - first_tiles[i]);
  }
};

}  // namespace echelon::rows

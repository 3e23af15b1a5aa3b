#include "tensor/matmul_onednn.h"

#include <oneapi/dnnl/dnnl.h>
#include <sys/mman.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "base/split.h"

namespace echelon {
namespace {

// Rows [m.begin, m.end) and columns [n.begin, n.end) of the product.
Product part(const Product& p, Range m, Range n) {
  Product q = p;
  q.m = m.size();
  q.n = n.size();
  q.a += p.ta == Transpose::no ? m.begin * p.a_stride : m.begin;
  q.b += p.tb == Transpose::no ? n.begin : n.begin * p.b_stride;
  q.c += m.begin * p.c_stride + n.begin;
  return q;
}

// `length` cut into `parts` whose borders are multiples of 16, so that no vector of the result is shared.
Range aligned_range(std::int64_t length, std::int64_t parts, std::int64_t index) {
  const Range r = split_range((length + 15) / 16, parts, index);
  return {std::min(r.begin * 16, length), std::min(r.end * 16, length)};
}

struct Grid {
  std::int64_t rows = 1, cols = 1;
};

// How to cut the result for `threads`. oneDNN's own cut may split k, and then the bits depend on the number
// of threads. Cutting rows and columns keeps every element's sum in one thread, in an order that depends on k
// alone as long as both sides stay large. A narrow result is therefore cut by its shape only.
Grid grid(std::int64_t m, std::int64_t n, int threads) {
  constexpr std::int64_t narrow = 64, piece = 128;
  if (std::min(m, n) < narrow) return m < n ? Grid{1, (n + 511) / 512} : Grid{(m + 511) / 512, 1};
  const std::int64_t most_rows = std::max<std::int64_t>(1, m / piece),
                     most_cols = std::max<std::int64_t>(1, n / piece);
  Grid best;
  std::int64_t best_pieces = 1;
  double best_border = 0;
  for (std::int64_t rows = 1; rows <= threads; ++rows) {
    const Grid g{std::min(rows, most_rows), std::min(threads / rows, most_cols)};
    const std::int64_t pieces = g.rows * g.cols;
    // What the threads read in all, a multiple of k: each row of pieces reads b, each column of pieces reads
    // a.
    const double border = static_cast<double>(g.rows * n + g.cols * m);
    if (pieces > best_pieces || (pieces == best_pieces && border < best_border)) {
      best = g;
      best_pieces = pieces;
      best_border = border;
    }
  }
  return best;
}

// oneDNN cuts a deeper k in places that differ between its methods, and it chooses the method by m and n. Up
// to this depth all of them add in one order (found by trying); cutting here costs no time that could be
// measured.
constexpr std::int64_t depth = 768;

bool multiply_once(const Product& p) {
  const auto letter = [](Transpose t) { return t == Transpose::yes ? 'T' : 'N'; };
  return dnnl_sgemm(letter(p.ta), letter(p.tb), p.m, p.n, p.k, p.alpha, p.a, p.a_stride, p.b, p.b_stride,
                    p.beta, p.c, p.c_stride) == dnnl_success;
}

}  // namespace

void prepare_products() {
  static const bool prepared = [] {
    constexpr std::size_t enough = std::size_t{40}
                                   << 20;  // it took 18 MiB on the machine where that was looked at
    void* const room = ::mmap(nullptr, enough, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED)
      fail("out of memory: the system has no {} MiB left for matrix products", enough >> 20);
    ::munmap(room, enough);
    // A number, a vector and a matrix: what each of its methods is written by. Any later call uses these.
    const float one[4] = {1, 1, 1, 1};
    float result[4];
    bool ok = true;
    for (const auto& [m, n, turn] :
         {std::tuple{1, 1, Transpose::no}, {2, 1, Transpose::yes}, {2, 2, Transpose::no}})
      ok = multiply_once({.tb = turn,
                          .m = m,
                          .n = n,
                          .k = 1,
                          .a = one,
                          .a_stride = 1,
                          .b = one,
                          .b_stride = 2,
                          .c = result,
                          .c_stride = 2}) &&
           ok;
    if (!ok) fail("out of memory: oneDNN could not be prepared");
    return true;
  }();
  (void)prepared;
}

bool multiply(const Product& p) {
  if (p.m == 0 || p.n == 0) return true;
  if (p.k == 0) {
    if (p.beta == 0)
      for (std::int64_t i = 0; i < p.m; ++i) std::fill_n(p.c + i * p.c_stride, p.n, 0.0f);
    return true;
  }
  for (std::int64_t begin = 0; begin < p.k; begin += depth) {
    Product q = p;
    q.k = std::min(depth, p.k - begin);
    q.a += p.ta == Transpose::no ? begin : begin * p.a_stride;
    q.b += p.tb == Transpose::no ? begin * p.b_stride : begin;
    if (begin > 0) q.beta = 1;
    if (!multiply_once(q)) return false;
  }
  return true;
}

void multiply(const Product& p, int threads) { multiply(std::span(&p, 1), threads); }

void multiply(std::span<const Product> products, int threads) {
  std::vector<Product> pieces;
  for (const Product& p : products) {
    const Grid g = grid(p.m, p.n, threads);
    for (std::int64_t i = 0; i < g.rows * g.cols; ++i)
      pieces.push_back(
          part(p, aligned_range(p.m, g.rows, i / g.cols), aligned_range(p.n, g.cols, i % g.cols)));
  }
  const auto count = static_cast<std::int64_t>(pieces.size());
  bool ok = true;
  if (threads == 1 || count == 1) {
    for (const Product& piece : pieces) ok = multiply(piece) && ok;
  } else {
    // Pieces of one product are alike; those of several may not be.
#pragma omp parallel for num_threads(threads) schedule(dynamic) reduction(&& : ok)
    for (std::int64_t i = 0; i < count; ++i) ok = multiply(pieces[static_cast<std::size_t>(i)]) && ok;
  }
  if (ok) return;
  const Product& p = products.front();
  fail("out of memory: oneDNN has none left for the product ({}, {}) x ({}, {})", p.m, p.k, p.k, p.n);
}

}  // namespace echelon

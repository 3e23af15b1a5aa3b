#include "tensor/matmul_onednn.h"

#include <omp.h>
#include <sys/mman.h>
#include <oneapi/dnnl/dnnl.hpp>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/split.h"
#include "tensor/simd.h"

namespace echelon {
namespace {

ConstPanel at(const ConstPanel& x, std::int64_t row, std::int64_t col) {
  return {static_cast<const std::byte*>(x.data) + (row * x.stride + col) * element_bytes(x.type), x.stride,
          x.type};
}
Panel at(const Panel& x, std::int64_t row, std::int64_t col) {
  return {static_cast<std::byte*>(x.data) + (row * x.stride + col) * element_bytes(x.type), x.stride, x.type};
}
// Where op(x) begins at (row, col).
ConstPanel at(const ConstPanel& x, Transpose turn, std::int64_t row, std::int64_t col) {
  return turn == Transpose::no ? at(x, row, col) : at(x, col, row);
}

// Rows [m.begin, m.end) and columns [n.begin, n.end) of the product.
Product part(const Product& p, Range m, Range n) {
  Product q = p;
  q.m = m.size();
  q.n = n.size();
  q.a = at(p.a, p.ta, m.begin, 0);
  q.b = at(p.b, p.tb, 0, n.begin);
  q.c = at(p.c, m.begin, n.begin);
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

// oneDNN cuts a deeper k of f32 in places that differ between its methods, and it chooses the method by m and
// n. Up to this depth all of them add in one order (found by trying); cutting here costs no time that could
// be measured.
constexpr std::int64_t depth = 768;

// A product in f32.
bool multiply_once(const Product& p) {
  const auto letter = [](Transpose t) { return t == Transpose::yes ? 'T' : 'N'; };
  return dnnl_sgemm(letter(p.ta), letter(p.tb), p.m, p.n, p.k, p.alpha, static_cast<const float*>(p.a.data),
                    p.a.stride, static_cast<const float*>(p.b.data), p.b.stride, p.beta,
                    static_cast<float*>(p.c.data), p.c.stride) == dnnl_success;
}

// piece(range of k, beta) in order; false as soon as one is.
template <class Piece>
bool each_depth(const Product& p, const Piece& piece) {
  for (std::int64_t begin = 0; begin < p.k; begin += depth)
    if (!piece(Range{begin, std::min(begin + depth, p.k)}, begin > 0 ? 1.0f : p.beta)) return false;
  return true;
}

bool multiply_f32(const Product& p) {
  return each_depth(p, [&](Range k, float beta) {
    Product q = p;
    q.k = k.size();
    q.a = at(p.a, p.ta, 0, k.begin);
    q.b = at(p.b, p.tb, k.begin, 0);
    q.beta = beta;
    return multiply_once(q);
  });
}

// A processor's own products of bf16: written once for each shape, and kept.
class Bf16Products {
 public:
  static Bf16Products& instance() {
    static Bf16Products products;
    return products;
  }

  // Whatever its room for scratch, the bits are the same: k is never cut, and added in order.
  bool multiply(const Product& p, std::byte* scratch) {
    const Written written = find(p);
    if (static_cast<std::int64_t>(written.scratch.get_size()) > product_scratch_bytes()) {
      const bool cut_rows = p.m > p.n;
      const std::int64_t length = cut_rows ? p.m : p.n;
      check(length > 1, "a product of one element fits in the scratch of a thread");
      for (std::int64_t half : {0, 1}) {
        const Range range = split_range(length, 2, half);
        if (!multiply(cut_rows ? part(p, range, {0, p.n}) : part(p, {0, p.m}, range), scratch)) return false;
      }
      return true;
    }
    thread_local dnnl::stream stream(engine_);
    const auto memory = [&](const dnnl::memory::desc& shape, const void* data) {
      return dnnl::memory(shape, engine_, const_cast<void*>(data));
    };
    written.product.execute(stream, {{DNNL_ARG_SRC, memory(written.a, p.a.data)},
                                     {DNNL_ARG_WEIGHTS, memory(written.b, p.b.data)},
                                     {DNNL_ARG_DST, memory(written.c, p.c.data)},
                                     {DNNL_ARG_SCRATCHPAD, memory(written.scratch, scratch)}});
    stream.wait();
    return true;
  }

 private:
  struct Shape {
    Transpose ta, tb;
    std::int64_t m, n, k, a_stride, b_stride, c_stride;
    float alpha, beta;
    DType c_type;
    auto operator<=>(const Shape&) const = default;
  };
  struct Written {
    dnnl::matmul product;
    dnnl::memory::desc a, b, c, scratch;
  };

  Written find(const Product& p) {
    const std::lock_guard lock(mutex_);
    const Shape shape{p.ta,       p.tb,       p.m,     p.n,    p.k,     p.a.stride,
                      p.b.stride, p.c.stride, p.alpha, p.beta, p.c.type};
    const auto found = written_.find(shape);
    if (found != written_.end()) return found->second;
    // Generation meets a new shape with every token.
    constexpr std::size_t most = 2048;
    if (written_.size() >= most) written_.clear();
    return written_.emplace(shape, write(p)).first->second;
  }

  Written write(const Product& p) const {
    using Desc = dnnl::memory::desc;
    constexpr auto bf16 = dnnl::memory::data_type::bf16;
    const auto shape = [](std::int64_t rows, std::int64_t cols, std::int64_t stride, Transpose turn,
                          auto type) {
      return turn == Transpose::no ? Desc({rows, cols}, type, {stride, 1})
                                   : Desc({rows, cols}, type, {1, stride});
    };
    const Desc a = shape(p.m, p.k, p.a.stride, p.ta, bf16), b = shape(p.k, p.n, p.b.stride, p.tb, bf16);
    const Desc c = shape(p.m, p.n, p.c.stride, Transpose::no,
                         p.c.type == DType::bf16 ? bf16 : dnnl::memory::data_type::f32);
    dnnl::primitive_attr how;
    how.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (p.alpha != 1) how.set_output_scales(0, {p.alpha});
    if (p.beta != 0) {
      dnnl::post_ops added;
      added.append_sum(p.beta);
      how.set_post_ops(added);
    }
    const dnnl::matmul::primitive_desc described(dnnl::matmul::desc(a, b, c), how, engine_);
    return {dnnl::matmul(described), a, b, c, described.scratchpad_desc()};
  }

  const dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  std::mutex mutex_;
  std::map<Shape, Written> written_;
};

// Where bf16 meets f32, or a processor that does not multiply it: pieces of this many rows and columns at
// most are widened, and multiplied in f32.
constexpr std::int64_t piece_side = 256;
constexpr std::int64_t widened_floats = piece_side * (2 * depth + piece_side);

void widen(const bf16* x, std::int64_t stride, std::int64_t rows, std::int64_t cols, float* y) {
  for (std::int64_t i = 0; i < rows; ++i) simd<bf16>().widen(x + i * stride, y + i * cols, cols);
}

// The upper left (rows, cols) of op(x) in f32: itself, or a copy in `room`.
ConstPanel widened(const ConstPanel& x, Transpose turn, std::int64_t rows, std::int64_t cols, float* room) {
  if (x.type == DType::f32) return x;
  if (turn == Transpose::yes) std::swap(rows, cols);
  widen(static_cast<const bf16*>(x.data), x.stride, rows, cols, room);
  return {room, cols};
}

bool multiply_widened_piece(const Product& p, float* room) {
  float *const a = room, *const b = a + piece_side * depth, *const c = b + piece_side * depth;
  const bool rounds = p.c.type == DType::bf16;
  bf16* const narrow = static_cast<bf16*>(p.c.data);
  if (rounds && p.beta != 0) widen(narrow, p.c.stride, p.m, p.n, c);
  const bool ok = each_depth(p, [&](Range k, float beta) {
    Product q = p;
    q.k = k.size();
    q.a = widened(at(p.a, p.ta, 0, k.begin), p.ta, p.m, q.k, a);
    q.b = widened(at(p.b, p.tb, k.begin, 0), p.tb, q.k, p.n, b);
    q.beta = beta;
    if (rounds) q.c = {c, p.n};
    return multiply_once(q);
  });
  if (ok && rounds)
    for (std::int64_t i = 0; i < p.m; ++i) simd<bf16>().narrow(c + i * p.n, narrow + i * p.c.stride, p.n);
  return ok;
}

bool multiply_widened(const Product& p, float* room) {
  const auto pieces = [](std::int64_t length) { return (length + piece_side - 1) / piece_side; };
  bool ok = true;
  for (std::int64_t j = 0; j < pieces(p.n); ++j)
    for (std::int64_t i = 0; i < pieces(p.m) && ok; ++i)
      ok = multiply_widened_piece(part(p, split_range(p.m, pieces(p.m), i), split_range(p.n, pieces(p.n), j)),
                                  room);
  return ok;
}

void clear(const Panel& c, std::int64_t rows, std::int64_t cols) {
  for (std::int64_t i = 0; i < rows; ++i)
    std::memset(at(c, i, 0).data, 0, static_cast<std::size_t>(cols * element_bytes(c.type)));
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
      ok = multiply_once(
               {.tb = turn, .m = m, .n = n, .k = 1, .a = {one, 1}, .b = {one, 2}, .c = {result, 2}}) &&
           ok;
    if (!ok) fail("out of memory: oneDNN could not be prepared");
    return true;
  }();
  (void)prepared;
}

bool multiplies_bf16() {
  static const bool does = [] {
    const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
    constexpr auto needed = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
    return (isa & needed) == needed;
  }();
  return does;
}

// Enough for most shapes of oneDNN's own, which are cut where it is not.
std::int64_t product_scratch_bytes() {
  constexpr std::int64_t enough = std::int64_t{2} << 20;
  static_assert(widened_floats * 4 <= enough);
  return enough;
}

bool multiply(const Product& p, std::byte* scratch) {
  if (p.m == 0 || p.n == 0) return true;
  if (p.k == 0) {
    if (p.beta == 0) clear(p.c, p.m, p.n);
    return true;
  }
  const auto is = [](const auto& x, DType type) { return x.type == type; };
  if (is(p.a, DType::f32) && is(p.b, DType::f32) && is(p.c, DType::f32)) return multiply_f32(p);
  if (!multiplies_bf16() || !is(p.a, DType::bf16) || !is(p.b, DType::bf16))
    return multiply_widened(p, reinterpret_cast<float*>(scratch));
  try {
    return Bf16Products::instance().multiply(p, scratch);
  } catch (const dnnl::error&) {
    return false;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void multiply(std::span<const Product> products, std::byte* scratch, int threads) {
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
    for (const Product& piece : pieces) ok = multiply(piece, scratch) && ok;
  } else {
    // Pieces of one product are alike; those of several may not be.
#pragma omp parallel for num_threads(threads) schedule(dynamic) reduction(&& : ok)
    for (std::int64_t i = 0; i < count; ++i)
      ok = multiply(pieces[static_cast<std::size_t>(i)],
                    scratch + omp_get_thread_num() * product_scratch_bytes()) &&
           ok;
  }
  if (ok) return;
  const Product& p = products.front();
  fail("out of memory: oneDNN has none left for the product ({}, {}) x ({}, {})", p.m, p.k, p.k, p.n);
}

}  // namespace echelon

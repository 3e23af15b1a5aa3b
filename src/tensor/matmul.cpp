#include "tensor/matmul.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "base/error.h"
#include "base/split.h"
#include "tensor/matmul_onednn.h"
#include "tensor/matmul_packed.h"
#include "tensor/matmul_scratch.h"
#include "tensor/matmul_simd.h"
#include "tensor/matmul_sum_blocks.h"
#include "tensor/matmul_team.h"

namespace echelon {
namespace {

// Cuts `length` into `parts` at multiples of 16, so that no two parts share a vector of the result.
Range aligned_range(std::int64_t length, std::int64_t parts, std::int64_t index) {
  const Range r = split_range((length + 15) / 16, parts, index);
  return {std::min(r.begin * 16, length), std::min(r.end * 16, length)};
}

// Whether our kernel is faster than oneDNN, by up to a third. oneDNN multiplies without packing where packing
// would cost much beside the work. We always pack, which is worth it if b has to be turned anyway, or if many
// rows meet it. And we store results beside the next products, which counts where k is short. Elsewhere
// oneDNN is faster, by up to a sixth.
bool ours_is_faster(const Product& p) {
  constexpr double packs_below = 0.00196;  // of oneDNN
  constexpr std::int64_t fewest_rows = 64, many_rows = 1024, fewest_cols = 384, deep = 512;
  const bool onednn_packs = 1 / static_cast<double>(p.m) + 1 / static_cast<double>(p.n) < packs_below;
  const bool turns_b = p.tb == Transpose::yes && p.m >= fewest_rows && p.k >= deep;
  const bool meets_many_rows = p.m >= many_rows && (!onednn_packs || p.k <= deep);
  // With another alpha the bits differ: oneDNN multiplies it into a, and we multiply the sums.
  return p.alpha == 1 && p.n >= fewest_cols && (meets_many_rows || (turns_b && !onednn_packs));
}

// Whether our kernel gives the same bits as oneDNN: then a product may be made by either, whichever is faster
// for the part of it that a thread has.
bool ours_gives_the_same_bits() {
  static const bool does = [] {
    constexpr std::int64_t wide = 64, deep = 1300;  // two whole runs, then two halves
    std::vector<float> x(static_cast<std::size_t>(wide * deep)),
        c(static_cast<std::size_t>(wide * wide), 1.0f);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = 1 / static_cast<float>(i % 997 + 3);
    std::vector<float> other = c;
    std::vector<std::byte> room(static_cast<std::size_t>(product_scratch_bytes()) + 64);
    auto* const aligned = room.data() + (64 - reinterpret_cast<std::uintptr_t>(room.data()) % 64) % 64;
    Product p{.ta = Transpose::yes,
              .m = wide,
              .n = wide,
              .k = deep,
              .a = {x.data(), wide},
              .b = {x.data(), wide},
              .beta = 1,
              .c = {c.data(), wide}};
    if (!multiply_by_onednn(p)) return false;
    p.c.data = other.data();
    multiply_by(f32_micro_kernel(), p, aligned);
    return c == other;
  }();
  return does;
}

bool is_f32(const Product& p) {
  return p.a.type == DType::f32 && p.b.type == DType::f32 && p.c.type == DType::f32;
}

// Whether f32 products in three parts are faster, although operands are packed in more words.
bool is_worth_parts(const Product& p) {
  constexpr std::int64_t fewest = 64, fewest_rows = 96;
  return p.m >= fewest_rows && std::min(p.n, p.k) >= fewest;
}

// Of a whole product, since another kernel may give other bits. With blocks it depends on types alone: how a
// mesh cuts a product must not change its bits.
const MicroKernel& kernel_for(const Product& p) {
  const MicroKernel *const pairs = bf16_micro_kernel(), *const parts = parts_micro_kernel();
  if (pairs != nullptr && p.a.type == DType::bf16 && p.b.type == DType::bf16) return *pairs;
  if (!is_f32(p)) return f32_micro_kernel();
  if (p.blocks != nullptr) return invariant_micro_kernel();
  return parts != nullptr && is_worth_parts(p) ? *parts : f32_micro_kernel();
}

// Whether oneDNN makes a product, or a part of one, for which `kernel` was chosen.
bool by_onednn(const MicroKernel& kernel, const Product& p) {
  return &kernel == &f32_micro_kernel() && is_f32(p) && p.blocks == nullptr && onednn_adds_in_one_order() &&
         p.m > 0 && p.n > 0 && p.k > 0 && !(ours_is_faster(p) && ours_gives_the_same_bits());
}

struct Grid {
  std::int64_t rows = 1, cols = 1;
};

// How to cut the result for `threads`. A narrow oneDNN product is cut by its shape only, since oneDNN has
// separate methods for vectors.
Grid grid(const MicroKernel& kernel, const Product& p, int threads) {
  constexpr std::int64_t narrow = 64, piece = 128;
  const std::int64_t m = p.m, n = p.n;
  if (by_onednn(kernel, p) && std::min(m, n) < narrow)
    return m < n ? Grid{1, (n + 511) / 512} : Grid{(m + 511) / 512, 1};
  const std::int64_t most_rows = std::max<std::int64_t>(1, m / piece),
                     most_cols = std::max<std::int64_t>(1, n / piece);
  Grid best;
  std::int64_t best_pieces = 1;
  double best_border = 0;
  for (std::int64_t rows = 1; rows <= threads; ++rows) {
    const Grid g{std::min(rows, most_rows), std::min(threads / rows, most_cols)};
    const std::int64_t pieces = g.rows * g.cols;
    // How much the threads read in total, divided by k: each row of pieces reads b, each column of pieces
    // reads a.
    const double border = static_cast<double>(g.rows * n + g.cols * m);
    if (pieces > best_pieces || (pieces == best_pieces && border < best_border)) {
      best = g;
      best_pieces = pieces;
      best_border = border;
    }
  }
  return best;
}

// A product, or a part of one, for which `kernel` was chosen. False if memory is exhausted.
bool multiply_part(const MicroKernel& kernel, const Product& p, std::byte* room) {
  if (by_onednn(kernel, p)) return multiply_by_onednn(p);
  if (p.blocks != nullptr)
    multiply_by_blocks(kernel, p, room);
  else
    multiply_by(kernel, p, room);
  return true;
}

// Whether a team computes a product for which `kernel` was chosen together, rather than in parts.
bool is_by_a_team(const MicroKernel& kernel, const Product& p, int threads) {
  return is_worth_a_team(kernel, p, threads) && !by_onednn(kernel, p);
}

}  // namespace

const MicroKernel* bf16_micro_kernel() {
  return amx_micro_kernel() != nullptr ? amx_micro_kernel() : avx512_micro_kernel();
}

const MicroKernel& invariant_micro_kernel() {
  return parts_micro_kernel() != nullptr ? *parts_micro_kernel() : f32_micro_kernel();
}

const MicroKernel* bf16_column_kernel() {
  return amx_micro_kernel() != nullptr ? amx_micro_kernel() : avx512_column_kernel();
}

const char* products_in(DType dtype) {
  if (dtype == DType::f32 && parts_micro_kernel() != nullptr) return parts_micro_kernel()->name;
  if (dtype == DType::f32) return onednn_adds_in_one_order() ? "oneDNN" : f32_micro_kernel().name;
  return bf16_micro_kernel() != nullptr ? bf16_micro_kernel()->name : "our FMA kernel, bf16 widened";
}

const char* multiplied_by(const Product& p, int threads) {
  const MicroKernel& kernel = kernel_for(p);
  if (is_by_a_team(kernel, p, threads)) return kernel.name;
  const Grid g = grid(kernel, p, threads);
  const Product first = part(p, aligned_range(p.m, g.rows, 0), aligned_range(p.n, g.cols, 0));
  return by_onednn(kernel, first) ? "oneDNN" : kernel.name;
}

void keep_products_to_their_thread() {
  if (onednn_adds_in_one_order()) keep_onednn_to_its_thread();
}

void prepare_products() {
  if (!onednn_adds_in_one_order()) return;
  prepare_onednn();
  ours_gives_the_same_bits();
}

std::int64_t product_scratch_bytes() { return ProductScratch::bytes; }

bool multiply(const Product& p, std::byte* room) { return multiply_part(kernel_for(p), p, room); }

void multiply(std::span<const Product> products, std::byte* scratch, std::int64_t scratch_per_thread,
              const ThreadTeam& team) {
  struct Part {
    const MicroKernel* kernel;
    Product product;
  };
  std::vector<Part> parts;
  for (const Product& p : products) {
    const MicroKernel& kernel = kernel_for(p);
    if (is_by_a_team(kernel, p, team.threads())) {
      multiply_together(kernel, p, scratch, scratch_per_thread, team);
      continue;
    }
    Grid g = grid(kernel, p, team.threads());
    // Here too, small parts for load balance, if b is packed for each.
    constexpr std::int64_t parts_of_thread = 8, fewest_cols = 2048;
    if (kernel.column != nullptr && g.rows == 1 && g.cols > 1)
      g.cols = std::clamp<std::int64_t>(p.n / fewest_cols, g.cols, parts_of_thread * team.threads());
    for (std::int64_t i = 0; i < g.rows * g.cols; ++i)
      parts.push_back(
          {&kernel, part(p, aligned_range(p.m, g.rows, i / g.cols), aligned_range(p.n, g.cols, i % g.cols))});
  }
  std::atomic<bool> ok = true;
  team.each_task(std::ssize(parts), [&](std::int64_t i, int thread) {
    const Part& here = parts[static_cast<std::size_t>(i)];
    if (!multiply_part(*here.kernel, here.product, scratch + thread * scratch_per_thread)) ok = false;
  });
  if (ok) return;
  const Product& p = products.front();
  fail("out of memory: oneDNN has none left for the product ({}, {}) x ({}, {})", p.m, p.k, p.k, p.n);
}

}  // namespace echelon

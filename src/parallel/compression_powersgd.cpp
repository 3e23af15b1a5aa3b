// PowerSGD: Vogels, Karimireddy & Jaggi 2019, Practical Low-Rank Gradient Compression for Distributed
// Optimization, https://arxiv.org/abs/1905.13727.
//
// The sum M of the ranks' matrices M_i (rows, cols), each including its residual, is approximated by one step
// of subspace iteration from the last step's Q (cols, R):
//   P = sum of M_i Q (all_reduce);  orthonormalize P;  Q = sum of M_i^T P (all_reduce);  M ~ P Q^T
//   rank i keeps M_i - P (M_i^T P)^T, the part of its own that lies outside P
// This is exact if M has at most rank R (and Q is not orthogonal to it). Both factors are sums, so a ring can
// add them on the way. Bytes sent per rank: 2(n-1)/n (rows + cols) R. Whatever would gain nothing (vectors,
// small matrices) is sent together, uncompressed.
//
// Factors are stored transposed, with R rows. Q is orthonormalized too before its next use: it has the same
// span, so gives the same P but for rounding, and avoids products of small gradients that underflow or become
// dependent.
#include <fmt/format.h>

#include "base/error.h"
#include "base/philox.h"
#include "parallel/compression_methods.h"

namespace echelon {

LowRankReduction::LowRankReduction(const ReductionContext& context, const GradientBucket& bucket)
    : context_(context), bucket_(bucket), warmup_(context, bucket) {
  const std::int64_t r = context.compression.rank;
  std::int64_t elements = 0, p = 0, q = 0, rest = 0;
  for (const GradientSection& s : bucket.sections) {
    const bool factored = is_factored(context.compression, s);
    (factored ? elements : rest) += s.range.size();
    if (!factored) continue;
    matrices_.push_back({.section = &s, .residual = {}, .p = {}, .q = {}});
    p += r * s.rows;
    q += r * s.cols;
  }
  if (matrices_.empty()) return;
  const Tensor residuals = context.carried_over(elements);
  p_ = context.payload(context.dtype, p);
  q_ = context.carried_over(q);
  rest_ = context.payload(context.dtype, rest);
  elements = p = q = 0;
  for (Factored& m : matrices_) {
    const std::int64_t rows = m.section->rows, cols = m.section->cols;
    m.residual = residuals.flat_range(elements, elements + rows * cols).reshape({rows, cols});
    m.p = p_.flat_range(p, p + r * rows).reshape({r, rows});
    m.q = q_.flat_range(q, q + r * cols).reshape({r, cols});
    elements += rows * cols;
    p += r * rows;
    q += r * cols;
    orthonormalize(m, m.q, "start");  // of zeros: random directions, the same on every rank
  }
}

void LowRankReduction::orthonormalize(const Factored& matrix, const Tensor& factor,
                                      const std::string& when) const {
  const GradientSection& s = *matrix.section;
  const Philox fresh(context_.seed, Stream::low_rank,
                     name_hash(fmt::format("{} slice {} {}", s.name, s.slice, when).c_str()));
  context_.kernels.orthonormalize_rows(factor, fresh);
}

void LowRankReduction::copy_rest(const Tensor& gradient, bool pack) const {
  std::int64_t begin = 0;
  for (const GradientSection& s : bucket_.sections) {
    if (is_factored(context_.compression, s)) continue;
    const Tensor there = gradient.flat_range(s.range.begin, s.range.end),
                 here = rest_.flat_range(begin, begin + s.range.size());
    context_.kernels.copy(pack ? there : here, pack ? here : there);
    begin += s.range.size();
  }
}

void LowRankReduction::start(const BucketReduction& of) {
  compressed_ = of.step >= context_.compression.warmup_steps && !matrices_.empty();
  if (!compressed_) return warmup_.start(of);
  if (rest_.numel() > 0) {
    copy_rest(of.gradient, true);
    rest_pending_ = context_.group.all_reduce(rest_);
  }
  for (const Factored& m : matrices_) {
    context_.kernels.add(matrix_of(of.gradient, *m.section), m.residual);
    context_.kernels.matmul(m.q, Transpose::no, m.residual, Transpose::yes, m.p, false);
  }
  factor_pending_ = context_.group.all_reduce(p_);
}

void LowRankReduction::progress() {
  warmup_.progress();
  rest_pending_.progress();
  factor_pending_.progress();
}

void LowRankReduction::advance(const BucketReduction& of) {
  if (!compressed_) return;
  factor_pending_.wait();
  for (const Factored& m : matrices_) {
    orthonormalize(m, m.p, fmt::format("p {}", of.step));
    context_.kernels.matmul(m.p, Transpose::no, m.residual, Transpose::no, m.q, false);
    context_.kernels.scale(m.p, -1);  // exact, and so is its undoing
    context_.kernels.matmul(m.p, Transpose::yes, m.q, Transpose::no, m.residual, true);
    context_.kernels.scale(m.p, -1);
  }
  factor_pending_ = context_.group.all_reduce(q_);
}

void LowRankReduction::finish(const BucketReduction& of) {
  if (!compressed_) return warmup_.finish(of);
  factor_pending_.wait();
  for (const Factored& m : matrices_) {
    context_.kernels.matmul(m.p, Transpose::yes, m.q, Transpose::no, matrix_of(of.gradient, *m.section),
                            false);
    orthonormalize(m, m.q, fmt::format("q {}", of.step));
  }
  rest_pending_.wait();
  copy_rest(of.gradient, false);
  context_.keep_shard(bucket_, of);
}

void LowRankReduction::list_carried(std::vector<CarriedTensor>& list) const {
  for (const Factored& m : matrices_) {
    list.push_back({m.section->name, m.section->slice, "residual", m.residual});
    list.push_back({m.section->name, m.section->slice, "factor", m.q});
  }
}

}  // namespace echelon

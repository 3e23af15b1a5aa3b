#include "tensor/attention_reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "base/error.h"
#include "tensor/kernels.h"
#include "tensor_checks.h"

namespace echelon::attention_reference_test {
namespace {

using namespace checks;

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

struct Problem {
  Arena arena;
  std::unique_ptr<Kernels> kernels = make_reference_kernels();
  AttentionShape shape;
  std::int64_t stride, kv_rows;
  Tensor q, k, v, out, lse, delta, dout, dq, dk, dv;
  Tensor sinks;  // undefined: none

  explicit Problem(const AttentionShape& s) : shape(s) {
    stride = s.kv_batch_stride > 0 ? s.kv_batch_stride : s.kv_len;
    kv_rows = (s.batch - 1) * stride + s.kv_len;
    const std::int64_t q_rows = s.batch * s.q_len, width = s.num_heads * s.head_dim,
                       kv_width = s.num_kv_heads * s.head_dim;
    q = random_strided(arena, q_rows, width, 1);
    k = random_strided(arena, kv_rows, kv_width, 2);
    v = random_strided(arena, kv_rows, kv_width, 3);
    dout = random_strided(arena, q_rows, width, 4);
    // Rows between two sequences are not keys: whoever reads them gets nan.
    for_each_gap([&](std::int64_t row) {
      for (std::int64_t j = 0; j < kv_width; ++j) at(k, row, j) = at(v, row, j) = nan;
    });
    out = constant(arena, {q_rows, width}, nan);
    lse = constant(arena, {s.batch * s.num_heads * s.q_len}, nan);
    delta = constant(arena, lse.shape(), nan);
    dq = constant(arena, {q_rows, width}, nan);
    dk = constant(arena, {kv_rows, kv_width}, nan);
    dv = constant(arena, {kv_rows, kv_width}, nan);
  }

  template <class Body>
  void for_each_gap(const Body& body) const {
    for (std::int64_t row = 0; row < kv_rows; ++row)
      if (row % stride >= shape.kv_len) body(row);
  }

  void forward() {
    kernels->attention(q, k, v, shape, out, lse);
    if (sinks.defined()) kernels->attention_sink(sinks, shape, out, lse);
  }
  void backward() {
    kernels->attention_delta(out, dout, shape, delta);
    kernels->attention_backward(q, k, v, dout, lse, delta, shape, dq, dk, dv);
  }
  // Keys [first, end) of a sequence that query t sees.
  std::int64_t first_key(std::int64_t row) const {
    return shape.first_keys.defined() ? shape.first_keys.host<std::int32_t>()[row] : 0;
  }
};

// softmax(scale Q K^T + mask) V of one head of one sequence with the whole matrix at hand; the mask is
// -infinity.
void expect_matches_full_matrix(const Problem& problem) {
  const AttentionShape& s = problem.shape;
  const double tolerance = 16 * epsilon * std::sqrt(static_cast<double>(s.kv_len * s.head_dim));
  for (std::int64_t b = 0; b < s.batch; ++b)
    for (std::int64_t h = 0; h < s.num_heads; ++h) {
      const std::int64_t kv_head = h * s.num_kv_heads / s.num_heads;
      std::vector<std::vector<double>> matrix(static_cast<std::size_t>(s.q_len));
      for (std::int64_t t = 0; t < s.q_len; ++t) {
        auto& line = matrix[static_cast<std::size_t>(t)];
        long double sum = problem.sinks.defined() ? std::exp(problem.sinks.host<double>()[h]) : 0;
        for (std::int64_t j = 0; j < s.kv_len; ++j) {
          const bool seen =
              j * s.k_step <= s.q_offset + t * s.q_step && j >= problem.first_key(b * s.q_len + t);
          double score = seen ? 0 : -std::numeric_limits<double>::infinity();
          for (std::int64_t d = 0; d < s.head_dim; ++d)
            score += s.scale * at(problem.q, b * s.q_len + t, h * s.head_dim + d) *
                     at(problem.k, b * problem.stride + j, kv_head * s.head_dim + d);
          if (s.cap > 0 && seen) score = s.cap * std::tanh(score / s.cap);
          // For five heads 2^-2, 2^-4, 2^-6, 2^-8, and the first of eight heads, 2^-1.
          const double slopes[] = {0x1p-2, 0x1p-4, 0x1p-6, 0x1p-8, 0x1p-1};
          if (s.alibi.is_used())
            score -= slopes[s.alibi.first_head + h] *
                     static_cast<double>(s.q_offset + t * s.q_step - j * s.k_step);
          line.push_back(std::exp(score));
          sum += line.back();
        }
        EXPECT_NEAR(problem.lse.host<double>()[(b * s.num_heads + h) * s.q_len + t],
                    std::log(static_cast<double>(sum)), tolerance);
        for (std::int64_t d = 0; d < s.head_dim; ++d) {
          long double mean = 0;
          for (std::int64_t j = 0; j < s.kv_len; ++j)
            if (line[static_cast<std::size_t>(j)] > 0)
              mean += line[static_cast<std::size_t>(j)] / sum *
                      at(problem.v, b * problem.stride + j, kv_head * s.head_dim + d);
          EXPECT_NEAR(at(problem.out, b * s.q_len + t, h * s.head_dim + d), static_cast<double>(mean),
                      tolerance)
              << "sequence " << b << " head " << h << " query " << t << " element " << d;
        }
      }
    }
}

std::vector<AttentionShape> shapes() {
  return {
      {.batch = 1, .q_len = 1, .kv_len = 1, .num_heads = 1, .num_kv_heads = 1, .head_dim = 1},
      {.batch = 2, .q_len = 5, .kv_len = 5, .num_heads = 2, .num_kv_heads = 2, .head_dim = 3, .scale = 0.6},
      // capped
      {.batch = 1,
       .q_len = 5,
       .kv_len = 5,
       .num_heads = 2,
       .num_kv_heads = 1,
       .head_dim = 3,
       .scale = 0.6,
       .cap = 0.5},
      // ALiBi, on the last three of five heads
      {.batch = 2,
       .q_len = 5,
       .kv_len = 3,
       .num_heads = 3,
       .num_kv_heads = 1,
       .head_dim = 3,
       .q_offset = 2,
       .q_step = 2,
       .k_step = 3,
       .scale = 0.6,
       .alibi = {.heads = 5, .first_head = 2}},
      // grouped queries
      {.batch = 2, .q_len = 4, .kv_len = 4, .num_heads = 6, .num_kv_heads = 2, .head_dim = 2, .scale = 0.7},
      // later queries over a cache with room left
      {.batch = 2,
       .q_len = 2,
       .kv_len = 5,
       .num_heads = 2,
       .num_kv_heads = 1,
       .head_dim = 4,
       .q_offset = 3,
       .kv_batch_stride = 8,
       .scale = 0.5},
      // all keys stand before all queries
      {.batch = 1, .q_len = 3, .kv_len = 4, .num_heads = 1, .num_kv_heads = 1, .head_dim = 2, .q_offset = 9},
      // every third query, and every third key from the first one on
      {.batch = 1,
       .q_len = 4,
       .kv_len = 12,
       .num_heads = 2,
       .num_kv_heads = 1,
       .head_dim = 2,
       .q_offset = 2,
       .q_step = 3},
      {.batch = 2, .q_len = 12, .kv_len = 4, .num_heads = 1, .num_kv_heads = 1, .head_dim = 2, .k_step = 3},
  };
}

class AttentionReference : public ::testing::TestWithParam<AttentionShape> {};
INSTANTIATE_TEST_SUITE_P(Shapes, AttentionReference, ::testing::ValuesIn(shapes()));

TEST_P(AttentionReference, MatchesTheFullMatrix) {
  Problem problem(GetParam());
  problem.forward();
  expect_matches_full_matrix(problem);
}

// As a column more of the matrix, whose value is zero; and against differences, keys' and sinks' gradients.
TEST_P(AttentionReference, SinksAreKeysWithoutValues) {
  Problem problem(GetParam());
  problem.sinks = random(problem.arena, {GetParam().num_heads}, 5);
  problem.forward();
  expect_matches_full_matrix(problem);
  problem.backward();
  const Tensor dsinks = random(problem.arena, {GetParam().num_heads}, 6),
               before = clone(problem.arena, dsinks);
  problem.kernels->attention_sink_backward(problem.sinks, problem.lse, problem.delta, problem.shape, dsinks);
  const auto loss = [&] {
    problem.forward();
    return inner(problem.out, problem.dout);
  };
  expect_gradient(problem.sinks, added(problem.arena, dsinks, before), loss, "dsinks");
  expect_gradient(problem.q, problem.dq, loss, "dq");
  for (std::int64_t b = 0; b < problem.shape.batch; ++b) {
    const std::int64_t first = b * problem.stride, last = first + problem.shape.kv_len;
    expect_gradient(problem.k.row_range(first, last), problem.dk.row_range(first, last), loss, "dk");
    expect_gradient(problem.v.row_range(first, last), problem.dv.row_range(first, last), loss, "dv");
  }
}

TEST_P(AttentionReference, GradientsMatchDifferences) {
  Problem problem(GetParam());
  problem.forward();
  problem.backward();
  const auto loss = [&] {
    problem.forward();
    return inner(problem.out, problem.dout);
  };
  expect_gradient(problem.q, problem.dq, loss, "dq");
  // Rows between two sequences stay as they were, and no difference is taken there.
  problem.for_each_gap([&](std::int64_t row) {
    EXPECT_TRUE(std::isnan(at(problem.dk, row)) && std::isnan(at(problem.dv, row)));
  });
  for (std::int64_t b = 0; b < problem.shape.batch; ++b) {
    const std::int64_t first = b * problem.stride, last = first + problem.shape.kv_len;
    expect_gradient(problem.k.row_range(first, last), problem.dk.row_range(first, last), loss, "dk");
    expect_gradient(problem.v.row_range(first, last), problem.dv.row_range(first, last), loss, "dv");
  }
}

// Documents one behind the other: every query sees the keys of its own from its first one on.
TEST(AttentionReference, KeepsDocumentsApart) {
  Arena arena;  // before what views its memory
  for (bool two_sequences : {false, true}) {
    AttentionShape shape{.batch = two_sequences ? 2 : 1,
                         .q_len = 6,
                         .kv_len = 6,
                         .num_heads = 2,
                         .num_kv_heads = 1,
                         .head_dim = 3,
                         .scale = 0.6};
    std::vector<std::int32_t> first{0, 0, 2, 2, 2, 5};
    if (two_sequences) first.insert(first.end(), {0, 1, 1, 1, 4, 4});
    shape.first_keys = integers(arena, first);
    Problem problem(shape);
    problem.forward();
    expect_matches_full_matrix(problem);
    problem.backward();
    const auto loss = [&] {
      problem.forward();
      return inner(problem.out, problem.dout);
    };
    expect_gradient(problem.q, problem.dq, loss, "dq");
    expect_gradient(problem.k, problem.dk, loss, "dk");
    expect_gradient(problem.v, problem.dv, loss, "dv");
  }
}

// What ring attention rests on: keys in two blocks, the second call adding to the first, are the whole, in
// any order; and each block's backward pass with the joined lse and delta gives its part of the gradients.
// The block of late keys is not seen at all by the first queries.
TEST(AttentionReference, BlocksOfKeysAddUp) {
  const std::int64_t cut = 2, length = 6;
  Problem whole(
      {.batch = 1, .q_len = length, .kv_len = length, .num_heads = 2, .num_kv_heads = 1, .head_dim = 3});
  whole.forward();
  whole.backward();
  Arena& arena = whole.arena;
  for (bool late_first : {false, true}) {
    const Tensor out = constant(arena, whole.out.shape(), nan), lse = constant(arena, whole.lse.shape(), nan),
                 dq = constant(arena, whole.dq.shape(), nan), dk = constant(arena, whole.dk.shape(), nan),
                 dv = constant(arena, whole.dv.shape(), nan);
    for (bool second : {false, true}) {
      const bool late = late_first != second;
      const std::int64_t begin = late ? cut : 0, end = late ? length : cut;
      AttentionShape shape = whole.shape;
      shape.kv_len = end - begin;
      shape.q_offset = -begin;
      shape.accumulate = second;
      const Tensor k = whole.k.row_range(begin, end), v = whole.v.row_range(begin, end);
      reference_attention<double>(whole.q, k, v, shape, out, lse);
      if (!second) {
        EXPECT_EQ(std::isinf(lse.host<double>()[0]), late);
      }
      const Tensor dk_part = dk.row_range(begin, end), dv_part = dv.row_range(begin, end);
      for_each(dk_part, [&](std::int64_t i, std::int64_t j) { at(dk_part, i, j) = at(dv_part, i, j) = 0; });
      if (!second) for_each(dq, [&](std::int64_t i, std::int64_t j) { at(dq, i, j) = 0; });
      shape.accumulate = true;
      reference_attention_backward<double>(whole.q, k, v, whole.dout, whole.lse, whole.delta, shape, dq,
                                           dk_part, dv_part);
    }
    expect_near(out, whole.out, 32 * epsilon);
    expect_near(dq, whole.dq, 32 * epsilon);
    expect_near(dk, whole.dk, 32 * epsilon);
    expect_near(dv, whole.dv, 32 * epsilon);
  }
}

TEST(AttentionReference, SurvivesScoresThatOverflowExp) {
  Problem problem({.batch = 1, .q_len = 3, .kv_len = 3, .head_dim = 2, .scale = 1e4});
  problem.forward();
  for_each(problem.out,
           [&](std::int64_t i, std::int64_t j) { EXPECT_TRUE(std::isfinite(at(problem.out, i, j))); });
}

TEST(AttentionReference, RefusesBrokenShapes) {
  Problem problem({.batch = 1, .q_len = 2, .kv_len = 2, .num_heads = 2, .num_kv_heads = 2, .head_dim = 2});
  problem.shape.num_heads = 3;
  EXPECT_THROW(problem.forward(), InvariantError);  // 3 heads over 2 key/value heads
  problem.shape.num_heads = 2;
  problem.shape.kv_len = 3;
  EXPECT_THROW(problem.forward(), InvariantError);  // more keys than rows
  problem.shape.kv_len = 2;
  problem.shape.kv_batch_stride = 1;
  EXPECT_THROW(problem.forward(), InvariantError);
  problem.shape.kv_batch_stride = 0;
  EXPECT_NO_THROW(problem.forward());
}

}  // namespace
}  // namespace echelon::attention_reference_test

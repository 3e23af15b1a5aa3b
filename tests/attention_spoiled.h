// Attention of what is not a number, or of scores that no float holds: every query that sees it has NaN, and
// no other.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tensor/host.h"
#include "tensor/kernels.h"

namespace echelon::checks {

using Attend = std::function<void(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape&,
                                  const Tensor& out, const Tensor& lse)>;

// Of a head of 40 queries and as many keys in `arena`. `accumulates`: keys may come in two blocks too;
// `tells_lowest`: a query all of whose scores are -infinity is told from one that sees no key.
inline void expect_spoiled_attention(Arena& arena, DType dtype, const Attend& attend, bool accumulates,
                                     bool tells_lowest = true) {
  constexpr std::int64_t length = 40, depth = 16, hidden = 25;  // a query that sees no key
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  const double huge = dtype == DType::f64 ? 1e200 : 1e25;
  const auto make = [&](DType t, std::vector<std::int64_t> shape) {
    return Tensor(arena, MemoryCategory::other, t, std::move(shape));
  };
  const auto numbers = [&](double first) {
    std::vector<double> x(length * depth);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(first + static_cast<double>(i));
    return x;
  };
  const auto at = [](std::int64_t row, std::int64_t col) {
    return static_cast<std::size_t>(row * depth + col);
  };
  const auto fill_row = [&](std::vector<double>& x, std::int64_t row, double value) {
    std::fill_n(x.begin() + row * depth, depth, value);
  };
  const auto first_keys = [&](std::int64_t keys, std::int32_t of_the_last) {
    std::vector<std::int32_t> first(length, 0);
    first[hidden] = static_cast<std::int32_t>(keys);
    std::fill(first.begin() + 30, first.end(), of_the_last);
    const Tensor t = make(DType::i32, {length});
    copy_from_host(first, t);
    return t;
  };
  enum Kind { nan_in_query, nan_in_key, infinite, lowest };
  for (const Kind kind : {nan_in_query, nan_in_key, infinite, lowest})
    for (const bool documents : {false, true}) {
      if (kind == lowest && !tells_lowest) continue;
      for (const std::int64_t cut : {length, std::int64_t{10}}) {  // of the keys, between two blocks
        if (cut < length && (!accumulates || kind == lowest)) continue;
        const std::int64_t query = kind == lowest ? 35 : 20, key = 5;
        std::vector<double> q = numbers(0), k = numbers(0.3), v = numbers(0.7);
        if (kind == nan_in_query) q[at(query, 3)] = nan;
        if (kind == nan_in_key) k[at(key, 3)] = nan;
        if (kind == infinite) fill_row(q, query, huge), fill_row(k, key, huge);
        if (kind == lowest) {
          fill_row(q, query, -huge);
          for (std::int64_t i = 0; i < length; ++i) fill_row(k, i, huge);
        }
        const Tensor tq = make(dtype, {length, depth}), tk = make(dtype, {length, depth}),
                     tv = make(dtype, {length, depth}), out = make(dtype, {length, depth}),
                     lse = make(dtype == DType::f64 ? DType::f64 : DType::f32, {length});
        copy_numbers_from_host(q, tq), copy_numbers_from_host(k, tk), copy_numbers_from_host(v, tv);
        AttentionShape shape{.q_len = length, .kv_len = cut, .head_dim = depth, .scale = 0.25};
        if (documents) shape.first_keys = first_keys(cut, 3);
        attend(tq, tk.row_range(0, cut), tv.row_range(0, cut), shape, out, lse);
        if (cut < length) {
          shape.accumulate = true, shape.kv_len = length - cut, shape.q_offset = -cut;
          if (documents) shape.first_keys = first_keys(length - cut, 0);
          attend(tq, tk.row_range(cut, length), tv.row_range(cut, length), shape, out, lse);
        }
        const std::vector<double> outs = copy_numbers_to_host(out), sums = copy_numbers_to_host(lse);
        for (std::int64_t t = 0; t < length; ++t) {
          const bool sees_none = documents && t == hidden;
          const bool spoiled = !sees_none && (kind == nan_in_key ? t >= key : t == query);
          const std::string where = "case " + std::to_string(kind) + ", query " + std::to_string(t) +
                                    (documents ? ", documents" : "") + (cut < length ? ", two blocks" : "");
          const double sum = sums[static_cast<std::size_t>(t)];
          EXPECT_EQ(std::isnan(sum), spoiled) << where;
          if (sees_none) {
            EXPECT_EQ(sum, -std::numeric_limits<double>::infinity()) << where;
          }
          for (std::int64_t d = 0; d < depth; ++d) {
            EXPECT_EQ(std::isnan(outs[at(t, d)]), spoiled) << where << ", column " << d;
            if (sees_none) {
              EXPECT_EQ(outs[at(t, d)], 0) << where << ", column " << d;
            }
          }
        }
      }
    }
}

}  // namespace echelon::checks

// Attention by columns of tiles, played in C++ and, where the processor has them, by AMX and by AVX-512,
// beside the same sums in f64 of the same numbers.
#include "tensor/attention_columns.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "attention_shapes.h"
#include "attention_spoiled.h"
#include "base/philox.h"
#include "case_choice.h"
#include "played_scores.h"
#include "played_tiles.h"
#include "tensor/arena.h"
#include "tensor/matmul.h"
#include "tensor/normals.h"
#include "tensor/score_columns.h"
#include "tensor/tensor.h"

namespace echelon::attention_columns_test {
namespace {

class AttentionColumns : public ::testing::Test {
 protected:
  Tensor make(DType type, std::int64_t rows, std::int64_t cols) {
    return {arena_, MemoryCategory::activations, type, {rows, cols}};
  }
  // Of a matrix that has more columns.
  template <class T>
  Tensor random(std::int64_t rows, std::int64_t cols) {
    const Tensor x = make(dtype_of<T>, rows, cols + 5);
    std::vector<float> values(static_cast<std::size_t>(x.numel()));
    fill_normals(Philox(23, Stream::test, draws_++), 1, 0, values);
    std::transform(values.begin(), values.end(), x.host<T>(), [](float value) { return T(value); });
    return x.column_range(3, 3 + cols);
  }
  static double at(const Tensor& x, std::int64_t row, std::int64_t col) {
    const std::int64_t i = row * x.row_stride() + col;
    return x.dtype() == DType::f32 ? double{x.host<float>()[i]} : double{float{x.host<bf16>()[i]}};
  }

  using Matrix = std::vector<double>;
  static Matrix values(const Tensor& x) {
    Matrix all;
    for (std::int64_t i = 0; i < x.rows(); ++i)
      for (std::int64_t j = 0; j < x.cols(); ++j) all.push_back(at(x, i, j));
    return all;
  }
  // A sum of so many terms; in bf16 of weights that were rounded, and what is stored is, too.
  static void expect_close(const Tensor& x, const Matrix& exact, std::int64_t terms,
                           const std::string& what) {
    double largest = 0;
    for (const double value : exact)
      if (std::isfinite(value)) largest = std::max(largest, std::abs(value));
    const double eps = std::numeric_limits<float>::epsilon(), rounded = x.dtype() == DType::bf16 ? 0x1p-8 : 0;
    const double sums = (8 * eps * std::sqrt(static_cast<double>(terms)) + rounded) * largest;
    for (std::int64_t i = 0; i < x.rows(); ++i)
      for (std::int64_t j = 0; j < x.cols(); ++j) {
        const double expected = exact[static_cast<std::size_t>(i * x.cols() + j)], got = at(x, i, j);
        ASSERT_TRUE(got == expected || std::abs(got - expected) <= rounded * std::abs(expected) + sums)
            << what << " at " << i << ", " << j << ": " << expected << " expected, not " << got;
      }
  }

  template <class T>
  void check(const ColumnKernels<T>& kernels, AttentionShape s, const ThreadTeam& team) {
    s.scale = 1 / std::sqrt(static_cast<double>(s.head_dim));
    const std::int64_t d = s.head_dim, queries = s.batch * s.q_len,
                       stride = s.kv_batch_stride > 0 ? s.kv_batch_stride : s.kv_len, keys = s.batch * stride,
                       group = s.num_heads / s.num_kv_heads;
    const Tensor q = random<ElementOf<T>>(queries, s.num_heads * d),
                 k = random<ElementOf<T>>(keys, s.num_kv_heads * d),
                 v = random<ElementOf<T>>(keys, s.num_kv_heads * d),
                 dout = random<ElementOf<T>>(queries, s.num_heads * d);
    const Tensor out = random<ElementOf<T>>(queries, s.num_heads * d),
                 dq = random<ElementOf<T>>(queries, s.num_heads * d),
                 dk = random<ElementOf<T>>(keys, s.num_kv_heads * d),
                 dv = random<ElementOf<T>>(keys, s.num_kv_heads * d);
    const Tensor lse = make(DType::f32, 1, s.num_heads * queries),
                 delta = make(DType::f32, 1, s.num_heads * queries);
    Matrix exact_out, exact_lse(static_cast<std::size_t>(lse.numel())), exact_dq, exact_dk, exact_dv;
    exact_out.resize(static_cast<std::size_t>(out.numel())), exact_dq = exact_out;
    for (std::int64_t i = 0; i < keys; ++i)  // what belongs to no key stays
      for (std::int64_t j = 0; j < s.num_kv_heads * d; ++j) {
        const bool is_key = i % stride < s.kv_len;
        exact_dk.push_back(is_key ? 0 : at(dk, i, j)), exact_dv.push_back(is_key ? 0 : at(dv, i, j));
      }
    const std::int64_t q_cols = s.num_heads * d, k_cols = s.num_kv_heads * d;
    const Matrix of_q = values(q), of_k = values(k), of_v = values(v), of_dout = values(dout);
    const auto part = [](auto& x, std::int64_t cols, std::int64_t row, std::int64_t col) {
      return x.data() + row * cols + col;
    };
    const auto dot = [&](const double* x, const double* y) { return std::inner_product(x, x + d, y, 0.0); };
    const auto add = [&](double* to, double weight, const double* x) {
      for (std::int64_t j = 0; j < d; ++j) to[j] += weight * x[j];
    };
    for (std::int64_t b = 0; b < s.batch; ++b)
      for (std::int64_t h = 0; h < s.num_heads; ++h)
        for (std::int64_t t = 0; t < s.q_len; ++t) {
          const std::int64_t row = b * s.q_len + t, q_at = h * d, k_at = h / group * d, end = s.end_key(t),
                             first = s.first_keys.defined() ? s.first_keys.host<std::int32_t>()[row] : 0;
          const double *const query = part(of_q, q_cols, row, q_at), *const slope =
                                                                         part(of_dout, q_cols, row, q_at);
          double* const result = part(exact_out, q_cols, row, q_at);
          Matrix scores;
          for (std::int64_t i = first; i < end; ++i)
            scores.push_back(dot(query, part(of_k, k_cols, b * stride + i, k_at)) * s.scale -
                             s.alibi.slope(h) * static_cast<double>(s.distance(t, i)));
          double max = -std::numeric_limits<double>::infinity(), sum = 0;
          for (const double x : scores) max = std::max(max, x);
          for (const double x : scores) sum += std::exp(x - max);
          const auto of = static_cast<std::size_t>((b * s.num_heads + h) * s.q_len + t);
          exact_lse[of] = scores.empty() ? max : max + std::log(sum);
          Matrix weights;
          for (const double x : scores) weights.push_back(std::exp(x - exact_lse[of]));
          for (std::size_t i = 0; i < scores.size(); ++i)
            add(result, weights[i],
                part(of_v, k_cols, b * stride + first + static_cast<std::int64_t>(i), k_at));
          const double level = dot(result, slope);
          delta.host<float>()[of] = static_cast<float>(level);
          for (std::size_t i = 0; i < scores.size(); ++i) {
            const std::int64_t key = b * stride + first + static_cast<std::int64_t>(i);
            const double dp = dot(slope, part(of_v, k_cols, key, k_at)),
                         ds = weights[i] * (dp - level) * s.scale;
            add(part(exact_dq, q_cols, row, q_at), ds, part(of_k, k_cols, key, k_at));
            add(part(exact_dk, k_cols, key, k_at), ds, query);
            add(part(exact_dv, k_cols, key, k_at), weights[i], slope);
          }
        }
    const std::int64_t room_step = product_scratch_bytes() / 64 * 64;
    ASSERT_TRUE(is_made_by_columns<T>(s, false, room_step) && is_made_by_columns<T>(s, true, room_step));
    const Tensor rooms = make(DType::u8, 1, team.threads() * room_step);
    std::fill_n(rooms.host<std::uint8_t>(), rooms.numel(), 0xff);  // not a number
    attention_forward_by_columns(kernels, q, k, v, s, out, lse,
                                 reinterpret_cast<std::byte*>(rooms.host<std::uint8_t>()), room_step, team);
    expect_close(out, exact_out, s.kv_len + d, "out");
    expect_close(lse, exact_lse, s.kv_len + d, "lse");
    const auto back = [&](const Tensor& to_q, const Tensor& to_k, const Tensor& to_v) {
      attention_backward_by_columns(kernels, q, k, v, dout, lse, delta, s, to_q, to_k, to_v,
                                    reinterpret_cast<std::byte*>(rooms.host<std::uint8_t>()), room_step,
                                    team);
    };
    back(dq, {}, {});
    expect_close(dq, exact_dq, s.kv_len + d, "dq alone");
    back({}, dk, dv);
    expect_close(dk, exact_dk, group * s.q_len + d, "dk alone");
    expect_close(dv, exact_dv, group * s.q_len + d, "dv alone");
    back(dq, dk, dv);
    expect_close(dq, exact_dq, s.kv_len + d, "dq");
    expect_close(dk, exact_dk, group * s.q_len + d, "dk");
    expect_close(dv, exact_dv, group * s.q_len + d, "dv");

    s.accumulate = true;
    back(dq, dk, dv);
    std::ranges::for_each(exact_dq, [](double& x) { x *= 2; });
    for (std::int64_t i = 0; i < keys; ++i)
      for (std::int64_t j = 0; j < k_cols && i % stride < s.kv_len; ++j)
        for (Matrix* const x : {&exact_dk, &exact_dv}) (*x)[static_cast<std::size_t>(i * k_cols + j)] *= 2;
    expect_close(dq, exact_dq, s.kv_len + d, "dq added to");
    expect_close(dk, exact_dk, group * s.q_len + d, "dk added to");
    expect_close(dv, exact_dv, group * s.q_len + d, "dv added to");

    // The keys in two blocks.
    const std::int64_t cut = s.kv_len / 3, later = s.kv_len - cut;
    AttentionShape block = s;
    block.accumulate = false, block.kv_len = cut, block.kv_batch_stride = stride;
    const auto forward = [&](std::int64_t first) {
      attention_forward_by_columns(kernels, q, k.row_range(first, keys), v.row_range(first, keys), block, out,
                                   lse, reinterpret_cast<std::byte*>(rooms.host<std::uint8_t>()), room_step,
                                   team);
    };
    if (cut > 0) forward(0);
    block.accumulate = cut > 0, block.kv_len = later, block.q_offset -= cut * s.k_step;
    if (s.first_keys.defined()) {
      block.first_keys = {arena_, MemoryCategory::activations, DType::i32, {queries}};
      std::transform(s.first_keys.host<std::int32_t>(), s.first_keys.host<std::int32_t>() + queries,
                     block.first_keys.host<std::int32_t>(),
                     [&](std::int32_t key) { return std::max(key - static_cast<std::int32_t>(cut), 0); });
    }
    forward(cut);
    expect_close(out, exact_out, s.kv_len + d, "out of two blocks");
    expect_close(lse, exact_lse, s.kv_len + d, "lse of two blocks");
  }

  template <class T>
  void check_spoiled(const ColumnKernels<T>& kernels) {
    const std::int64_t room_step = product_scratch_bytes() / 64 * 64;
    const Tensor rooms = make(DType::u8, 1, room_step);
    checks::expect_spoiled_attention(
        arena_, dtype_of<ElementOf<T>>,
        [&](const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& s, const Tensor& out,
            const Tensor& lse) {
          attention_forward_by_columns(kernels, q, k, v, s, out, lse,
                                       reinterpret_cast<std::byte*>(rooms.host<std::uint8_t>()), room_step,
                                       ThreadTeam(1));
        },
        true);
  }

  // One in `share` of them, as a kernel that is played takes its time.
  template <class T>
  void check_all(const ColumnKernels<T>& kernels, std::uint64_t share) {
    std::vector<AttentionShape> shapes = attention_shapes();
    std::erase_if(shapes, [](const AttentionShape& s) { return s.q_len < 32; });
    shapes.push_back({.q_len = 33, .kv_len = 33, .head_dim = 7});
    shapes.push_back({.q_len = 40, .kv_len = 40, .head_dim = 256});
    const std::size_t plain = shapes.size();
    for (std::size_t i = 0; i < plain; ++i) {  // the same with documents: some queries then see no key
      AttentionShape s = shapes[i];
      s.first_keys = {arena_, MemoryCategory::activations, DType::i32, {s.batch * s.q_len}};
      std::ranges::copy(first_keys_of_documents(s), s.first_keys.host<std::int32_t>());
      shapes.push_back(s);
    }
    for (const int threads : {1, 3}) {
      const ThreadTeam team(threads);
      for (std::size_t i = 0; i < shapes.size(); ++i) {
        if (!checks::is_taken(share)) continue;
        SCOPED_TRACE(std::string(kernels.products->name) + ", shape " + std::to_string(i));
        AttentionShape s = shapes[i];
        if ((i + static_cast<std::size_t>(threads / 2)) % 2 ==
            0)  // the others by the other number of threads
          s.alibi = {.heads = s.num_heads + 3, .first_head = 1};
        check(kernels, s, team);
      }
    }
  }

  // One head's gradients by one thread; and as separate tasks, since there are several threads, or since the
  // sums of all keys have no room.
  template <class T>
  void check_tasks(const ColumnKernels<T>& kernels, std::int64_t length) {
    AttentionShape s{.q_len = length, .kv_len = length, .num_heads = 2, .num_kv_heads = 1, .head_dim = 40};
    s.scale = 1 / std::sqrt(static_cast<double>(s.head_dim));
    s.first_keys = {arena_, MemoryCategory::activations, DType::i32, {s.q_len}};
    for (const bool has_documents : {false, true}) {
      for (std::int64_t i = 0; i < s.q_len; ++i)
        s.first_keys.host<std::int32_t>()[i] = has_documents && i >= 270 ? 270 : 0;
      s.alibi.heads = has_documents ? 2 : 0;
      const std::int64_t d = s.head_dim;
      const Tensor q = random<ElementOf<T>>(s.q_len, 2 * d), k = random<ElementOf<T>>(s.kv_len, d),
                   v = random<ElementOf<T>>(s.kv_len, d), dout = random<ElementOf<T>>(s.q_len, 2 * d),
                   out = random<ElementOf<T>>(s.q_len, 2 * d);
      const Tensor lse = make(DType::f32, 1, 2 * s.q_len), delta = make(DType::f32, 1, 2 * s.q_len);
      std::fill_n(delta.host<float>(), delta.numel(), 0.25f);
      const auto gradients = [&](int threads, std::int64_t room_step) {
        const Tensor rooms = make(DType::u8, 1, threads * room_step);
        auto* const begin = reinterpret_cast<std::byte*>(rooms.host<std::uint8_t>());
        const ThreadTeam team(threads);
        if (threads == 1) attention_forward_by_columns(kernels, q, k, v, s, out, lse, begin, room_step, team);
        std::vector<Tensor> made{make(dtype_of<ElementOf<T>>, s.q_len, 2 * d),
                                 make(dtype_of<ElementOf<T>>, s.kv_len, d),
                                 make(dtype_of<ElementOf<T>>, s.kv_len, d)};
        attention_backward_by_columns(kernels, q, k, v, dout, lse, delta, s, made[0], made[1], made[2], begin,
                                      room_step, team);
        return made;
      };
      const std::int64_t whole = product_scratch_bytes() / 64 * 64;
      std::int64_t least = 64;
      while (!is_made_by_columns<T>(s, true, least)) least += 64;
      const std::vector<Tensor> one = gradients(1, whole);
      for (const auto& [threads, room] : {std::pair{3, whole}, {1, least}, {2, least}}) {
        const std::vector<Tensor> other = gradients(threads, room);
        for (std::size_t i = 0; i < one.size(); ++i)
          EXPECT_EQ(std::memcmp(one[i].host_bytes(), other[i].host_bytes(),
                                static_cast<std::size_t>(one[i].bytes())),
                    0)
              << threads << " threads, gradient " << i;
      }
    }
  }

 private:
  std::uint64_t draws_ = 0;
  Arena arena_{Device::cpu, std::size_t{0}};
};

constexpr ColumnKernels<bf16> played{&played_kernel, &played_scores<bf16>};
constexpr ColumnKernels<float> played_in_f32{&played_f32_columns, &played_scores<float>};
constexpr ColumnKernels<ThreeParts> played_by_parts{&played_parts_kernel, &played_scores<ThreeParts>};

TEST_F(AttentionColumns, AreTheSumsPlayed) {  // long
  check_all(played, 18);
  check_all(played_in_f32, 18);
  if (avx512_part_passes() != nullptr) check_all(played_by_parts, 18);
}

TEST_F(AttentionColumns, HaveTheSameBitsAsSeparateTasksPlayed) {  // long
  check_tasks(played, 300);
  check_tasks(played_in_f32, 300);
  if (avx512_part_passes() != nullptr) check_tasks(played_by_parts, 300);
}

TEST_F(AttentionColumns, KeepWhatIsNotANumberPlayed) {
  check_spoiled(played);
  check_spoiled(played_in_f32);
  if (avx512_part_passes() != nullptr) check_spoiled(played_by_parts);
}

TEST_F(AttentionColumns, AreTheSumsByTheProcessor) {
  const auto check_by = [&]<class T>(const ColumnKernels<T>& kernels) {
    if (kernels.products == nullptr) return;
    check_all(kernels, 6);
    check_spoiled(kernels);
    check_tasks(kernels, 1100);
  };
  if (f32_column_kernel() == nullptr) GTEST_SKIP() << "this processor has no AVX-512";
  check_by(ColumnKernels<float>{f32_column_kernel(), avx512_score_passes<float>()});
  check_by(ColumnKernels<ThreeParts>{parts_micro_kernel(), avx512_score_passes<ThreeParts>()});
  for (const MicroKernel* kernel : {amx_micro_kernel(), avx512_column_kernel()})
    check_by(ColumnKernels<bf16>{kernel, avx512_score_passes<bf16>()});
}

}  // namespace
}  // namespace echelon::attention_columns_test

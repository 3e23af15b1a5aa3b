// Attention that keeps its scores in registers, of bf16 on tensor cores and of f32 on ordinary ones: with the
// instructions of warps played on the host (emulated_launch.h), and on a CUDA device where there is one. Each
// element is held to plain loops in f64 on the same numbers, within what the roundings on its way can make:
// of f32 sums, of weights that go into a product as bf16, and of what is stored.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <set>
#include <string>
#include <vector>

#include "base/philox.h"
#include "case_choice.h"
#include "devices_under_test.h"
#include "tensor/host.h"
#include "tensor/rows/warp_attention.h"

namespace echelon::warp_attention_test {
namespace {

constexpr double eps = std::numeric_limits<float>::epsilon();
// How far off a number is that is kept so, as part of it.
double unit_of(DType t) { return t == DType::bf16 ? 0x1p-8 : 0x1p-24; }

// A value, and how far off it may be.
struct Bounded {
  double value = 0, bound = 0;
};

struct Case {
  std::int64_t batch = 1, q_len = 1, kv_len = 1, heads = 1, kv_heads = 1, head_dim = 64, q_offset = 0,
               kv_stride = 0;
  double cap = 0;
  bool accumulate = false;
  std::vector<std::int32_t> first_keys = {};  // of each query of the batch, or none
  DType dtype = DType::bf16;

  std::int64_t key_rows() const { return batch * std::max(kv_len, kv_stride); }
  AttentionShape shape() const {
    return {.batch = batch,
            .q_len = q_len,
            .kv_len = kv_len,
            .num_heads = heads,
            .num_kv_heads = kv_heads,
            .head_dim = head_dim,
            .q_offset = q_offset,
            .kv_batch_stride = kv_stride,
            .scale = 1.5 / std::sqrt(static_cast<double>(head_dim)),
            .cap = cap,
            .accumulate = accumulate};
  }
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  out << dtype_name(c.dtype) << ", batch " << c.batch << ", " << c.q_len << " queries at " << c.q_offset
      << ", " << c.kv_len << " keys (stride " << c.kv_stride << "), heads " << c.heads << " over "
      << c.kv_heads << " of " << c.head_dim << ", cap " << c.cap << (c.accumulate ? ", accumulate" : "")
      << ", first keys";
  for (const std::int32_t first : c.first_keys) out << ' ' << first;
  return out;
}

// A matrix of numbers on the host.
struct Numbers {
  std::int64_t cols = 1;
  std::vector<double> all;
  double* operator[](std::int64_t row) { return all.data() + row * cols; }
  const double* operator[](std::int64_t row) const { return all.data() + row * cols; }
};
Numbers normal(std::int64_t rows, std::int64_t cols, std::uint64_t draw, DType as) {
  Numbers n{cols, std::vector<double>(static_cast<std::size_t>(rows * cols))};
  Philox(41, Stream::test, draw).fill_normal(0, n.all.size(), n.all.data());
  for (double& x : n.all) x = as == DType::bf16 ? double{float{bf16(x)}} : double{static_cast<float>(x)};
  return n;
}

struct Problem {
  Case c;
  Numbers q, k, v, dout, out, lse, delta, dq, dk, dv;  // the last seven as they are before the call
  Problem(const Case& of, std::uint64_t draw) : c(of) {
    std::uint64_t next = 16 * draw;
    const std::int64_t queries = c.batch * c.q_len, wide = c.heads * c.head_dim,
                       narrow = c.kv_heads * c.head_dim;
    for (Numbers* x : {&q, &dout, &out, &dq}) *x = normal(queries, wide, next++, c.dtype);
    for (Numbers* x : {&k, &v, &dk, &dv}) *x = normal(c.key_rows(), narrow, next++, c.dtype);
    for (Numbers* x : {&lse, &delta}) *x = normal(queries * c.heads, 1, next++, DType::f32);
  }
};

// What a call gives.
struct Results {
  Numbers out, lse, dq, dk, dv, delta;
};

class WarpAttention : public ::testing::TestWithParam<checks::TensorCoresUnderTest> {
 protected:
  void SetUp() override {
    if (const std::string why = GetParam().why_not(); !why.empty()) GTEST_SKIP() << why;
    device = GetParam().use(Numerics::ordinary);
  }
  checks::DeviceInUse device;

  // Columns [8, 8 + cols) of a matrix of which nothing else is a number; or as it is asked for.
  struct Layout {
    std::int64_t before = 8, after = 16;
  };
  struct Held {
    Tensor whole, part;
  };
  static Held hold(Arena& arena, const Numbers& n, DType dtype, const Layout& layout) {
    const std::int64_t rows = std::ssize(n.all) / n.cols;
    Held held;
    held.whole = Tensor(arena, MemoryCategory::other, dtype, {rows, layout.before + n.cols + layout.after});
    copy_numbers_from_host(std::vector<double>(static_cast<std::size_t>(held.whole.numel()), NAN),
                           held.whole);
    held.part = held.whole.column_range(layout.before, layout.before + n.cols);
    copy_numbers_from_host(n.all, held.part);
    return held;
  }
  static Tensor vector(Arena& arena, const Numbers& n) {
    Tensor t(arena, MemoryCategory::other, DType::f32, {std::ssize(n.all)});
    copy_numbers_from_host(n.all, t);
    return t;
  }
  // Numbers of the part; beside it nothing has been written.
  static Numbers back(const Held& held) {
    const std::vector<double> all = copy_numbers_to_host(held.whole);
    std::int64_t numbers = 0;
    for (const double x : all) numbers += std::isnan(x) ? 0 : 1;
    EXPECT_EQ(numbers, held.part.numel());
    return {held.part.cols(), copy_numbers_to_host(held.part)};
  }

  static Results run(const checks::DeviceInUse& on, const Problem& p, const Layout& layout) {
    Arena& arena = *on.arena;
    AttentionShape shape = p.c.shape();
    if (!p.c.first_keys.empty()) {
      shape.first_keys = Tensor(arena, MemoryCategory::other, DType::i32, {std::ssize(p.c.first_keys)});
      copy_from_host(p.c.first_keys, shape.first_keys);
    }
    const auto held = [&](const Numbers& n) { return hold(arena, n, p.c.dtype, layout); };
    const Held q = held(p.q), k = held(p.k), v = held(p.v), out = held(p.out), dout = held(p.dout),
               dq = held(p.dq), dk = held(p.dk), dv = held(p.dv);
    const Tensor lse = vector(arena, p.lse), given_lse = vector(arena, p.lse), delta = vector(arena, p.delta);
    const Tensor made_delta = vector(arena, p.delta);
    on.kernels->attention_delta(out.part, dout.part, shape, made_delta);
    on.kernels->attention(q.part, k.part, v.part, shape, out.part, lse);
    // Of an lse that is not that of these keys alone: there may be others.
    on.kernels->attention_backward(q.part, k.part, v.part, dout.part, given_lse, delta, shape, dq.part,
                                   dk.part, dv.part);
    return {back(out), {1, copy_numbers_to_host(lse)},       back(dq), back(dk),
            back(dv),  {1, copy_numbers_to_host(made_delta)}};
  }
};

void expect_within(const std::vector<Bounded>& expected, const Numbers& found, const char* what) {
  ASSERT_EQ(expected.size(), found.all.size()) << what;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto& [value, bound] = expected[i];
    ASSERT_TRUE(found.all[i] == value || std::abs(found.all[i] - value) <= bound)
        << what << ", element " << i << ": " << value << " within " << bound << " expected, not "
        << found.all[i];
  }
}
// Stored: rounded once more. What multiplies two errors is below a fiftieth.
Bounded stored(double unit, double value, double bound) {
  return {value, 1.02 * bound + unit * std::abs(value) + 1e-30};
}

// The plain loops.
void expect_attention(const Problem& p, const Results& found) {
  const Case& c = p.c;
  const AttentionShape s = c.shape();
  const double unit = unit_of(c.dtype);
  const std::int64_t D = c.head_dim, key_stride = c.kv_stride > 0 ? c.kv_stride : c.kv_len;
  const auto terms = static_cast<double>(c.kv_len + 8), width = static_cast<double>(D + 4);
  std::vector<Bounded> out(p.out.all.size()), lse(p.lse.all.size()), dq(p.dq.all.size()), dk(p.dk.all.size()),
      dv(p.dv.all.size()), made_delta(p.delta.all.size());
  struct Sum {
    double value = 0, weights = 0, sums = 0;  // with the errors of its terms' weights, and of its additions
    void add(double weight, double error, double x) {
      value += weight * x;
      weights += error * std::abs(x);
      sums += std::abs(weight * x);
    }
  };
  std::vector<Sum> key_sums(dk.size()), value_sums(dv.size());

  for (std::int64_t b = 0; b < c.batch; ++b)
    for (std::int64_t h = 0; h < c.heads; ++h)
      for (std::int64_t t = 0; t < c.q_len; ++t) {
        const std::int64_t row = b * c.q_len + t, kv_head = h / (c.heads / c.kv_heads),
                           at = (b * c.heads + h) * c.q_len + t;
        const double *const query = p.q[row] + h * D, *const gradient = p.dout[row] + h * D;
        const std::int64_t first = c.first_keys.empty() ? 0 : c.first_keys[static_cast<std::size_t>(row)];
        const std::int64_t end = std::clamp<std::int64_t>(c.q_offset + t + 1, 0, c.kv_len);
        struct Seen {
          const double *key, *value;
          std::int64_t row;
          double score, slope, error;  // the score's own
        };
        std::vector<Seen> keys;
        double most = -INFINITY;
        for (std::int64_t j = first; j < end; ++j) {
          Seen one{p.k[b * key_stride + j] + kv_head * D,
                   p.v[b * key_stride + j] + kv_head * D,
                   b * key_stride + j,
                   0,
                   1,
                   0};
          double sizes = 0;
          for (std::int64_t d = 0; d < D; ++d) {
            one.score += s.scale * query[d] * one.key[d];
            sizes += s.scale * std::abs(query[d] * one.key[d]);
          }
          one.error = eps * width * sizes;
          if (c.cap > 0) {
            one.score = c.cap * std::tanh(one.score / c.cap);
            one.slope = 1 - one.score / c.cap * (one.score / c.cap);
            one.error += 8 * eps * c.cap;
          }
          most = std::max(most, one.score);
          keys.push_back(one);
        }
        // Forwards.
        const double earlier = c.accumulate ? p.lse.all[static_cast<std::size_t>(at)] : -INFINITY;
        const double top = std::max(most, earlier);
        double total = std::isfinite(earlier) ? std::exp(earlier - top) : 0, off = 0;
        for (const Seen& one : keys) {
          total += std::exp(one.score - top);
          off = std::max(off, one.error + 8 * eps * (1 + std::abs(one.score) + std::abs(top)));
        }
        off += 8 * eps * (1 + (std::isfinite(top) ? std::abs(top) : 0)) + terms * eps;
        const double all = top + std::log(total);
        lse[static_cast<std::size_t>(at)] = {all, 2 * off + 8 * eps * std::abs(all)};
        for (std::int64_t d = 0; d < D; ++d) {
          Sum sum;
          if (std::isfinite(earlier)) sum.add(std::exp(earlier - top) / total, 0, p.out[row][h * D + d]);
          for (const Seen& one : keys) {
            const double weight = std::exp(one.score - top) / total;
            sum.add(weight, unit * weight, one.value[d]);
          }
          out[static_cast<std::size_t>(row * p.out.cols + h * D + d)] =
              stored(unit, total == 0 ? 0 : sum.value, sum.weights + (2 * off + terms * eps) * sum.sums);
        }
        Sum of_output;  // as it is given
        for (std::int64_t d = 0; d < D; ++d) of_output.add(gradient[d], 0, p.out[row][h * D + d]);
        made_delta[static_cast<std::size_t>(at)] = {of_output.value, width * eps * of_output.sums};
        // And backwards, with the lse and the delta that are given.
        std::vector<Sum> query_sums(static_cast<std::size_t>(D));
        const double given = p.lse.all[static_cast<std::size_t>(at)],
                     delta = p.delta.all[static_cast<std::size_t>(at)];
        for (const Seen& one : keys) {
          const double weight = std::exp(one.score - given);
          const double weight_off = one.error + 8 * eps * (1 + std::abs(one.score) + std::abs(given));
          double change = -delta, sizes = std::abs(delta);
          for (std::int64_t d = 0; d < D; ++d) {
            change += gradient[d] * one.value[d];
            sizes += std::abs(gradient[d] * one.value[d]);
          }
          const double ds = weight * change * one.slope;
          double error = std::abs(ds) * (unit + weight_off + 4 * eps) + weight * width * eps * sizes;
          if (c.cap > 0) error += std::abs(weight * change) * 2 * (one.error / c.cap + 4 * eps);
          for (std::int64_t d = 0; d < D; ++d) {
            const auto of_key = static_cast<std::size_t>(one.row * p.dk.cols + kv_head * D + d);
            query_sums[static_cast<std::size_t>(d)].add(s.scale * ds, s.scale * error, one.key[d]);
            key_sums[of_key].add(s.scale * ds, s.scale * error, query[d]);
            value_sums[of_key].add(weight, weight * (unit + weight_off), gradient[d]);
          }
        }
        for (std::int64_t d = 0; d < D; ++d) {
          const Sum& sum = query_sums[static_cast<std::size_t>(d)];
          const auto i = static_cast<std::size_t>(row * p.dq.cols + h * D + d);
          dq[i] = stored(unit, sum.value + (c.accumulate ? p.dq.all[i] : 0),
                         sum.weights + terms * eps * sum.sums);
        }
      }
  // Rows of a cache beyond a sequence's keys stay as they are.
  const double queries = static_cast<double>(c.q_len * c.heads / c.kv_heads + 8);
  for (std::size_t i = 0; i < dk.size(); ++i) {
    const bool is_key = static_cast<std::int64_t>(i) / p.dk.cols % key_stride < c.kv_len;
    for (auto [to, sums, before] : {std::tuple{&dk, &key_sums, &p.dk}, std::tuple{&dv, &value_sums, &p.dv}}) {
      const Sum& sum = (*sums)[i];
      (*to)[i] = is_key ? stored(unit, sum.value + (c.accumulate ? before->all[i] : 0),
                                 sum.weights + queries * eps * sum.sums)
                        : Bounded{before->all[i], 0};
    }
  }
  expect_within(out, found.out, "out");
  expect_within(lse, found.lse, "lse");
  expect_within(dq, found.dq, "dq");
  expect_within(dk, found.dk, "dk");
  expect_within(dv, found.dv, "dv");
  expect_within(made_delta, found.delta, "delta");
}

bool same(const Results& x, const Results& y) {
  const auto bits = [](const Results& r) {
    std::vector<double> all;
    for (const Numbers* n : {&r.out, &r.lse, &r.dq, &r.dk, &r.dv, &r.delta})
      all.insert(all.end(), n->all.begin(), n->all.end());
    return all;
  };
  const std::vector<double> a = bits(x), b = bits(y);
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

TEST_P(WarpAttention, OfEachKind) {
  std::vector<std::int32_t> documents, window;
  for (int i = 0; i < 100; ++i) documents.push_back(i < 37 ? 0 : i < 90 ? 37 : 90);
  for (int i = 0; i < 100; ++i) window.push_back(std::max(0, i - 20));
  std::uint64_t draw = 0;
  for (const Case& c :
       {Case{.q_len = 40, .kv_len = 70, .heads = 2, .kv_heads = 1, .q_offset = 30},
        Case{.batch = 2, .q_len = 20, .kv_len = 90, .head_dim = 128, .q_offset = 70, .kv_stride = 95},
        Case{.q_len = 100, .kv_len = 100, .head_dim = 16, .cap = 2, .first_keys = documents},
        Case{.q_len = 100, .kv_len = 100, .head_dim = 40, .first_keys = window},
        Case{.q_len = 80, .kv_len = 70, .head_dim = 72, .q_offset = -30, .accumulate = true},
        Case{.q_len = 33, .kv_len = 33, .head_dim = 256}, Case{.q_len = 3, .kv_len = 0}, Case{.batch = 0},
        Case{.q_len = 5, .kv_len = 9, .q_offset = -9},
        Case{.batch = 2,
        .q_len = 100,
        .kv_len = 130,
        .heads = 2,
        .kv_heads = 1,
        .q_offset = 30,
        .dtype = DType::f32},
        Case{.q_len = 100,
        .kv_len = 100,
        .head_dim = 20,
        .cap = 2,
        .first_keys = documents,
        .dtype = DType::f32},
        Case{.q_len = 100, .kv_len = 100, .head_dim = 128, .first_keys = window, .dtype = DType::f32},
        Case{.q_len = 80,
        .kv_len = 70,
        .head_dim = 72,
        .q_offset = -30,
        .accumulate = true,
        .dtype = DType::f32},
        Case{.q_len = 3, .kv_len = 0, .dtype = DType::f32},
        Case{.q_len = 5, .kv_len = 9, .q_offset = -9, .dtype = DType::f32}}) {
    if (!checks::is_taken(18)) continue;
    SCOPED_TRACE(c);
    const Problem p(c, 900 + draw++);
    const Results found = run(device, p, {});
    expect_attention(p, found);
    EXPECT_TRUE(same(found, run(device, p, {})));
  }
}

TEST_P(WarpAttention, OfAnyShape) {
  const Philox random(43, Stream::test, 0);
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(checks::so_many(1, 100)); ++i) {
    auto upto = [&, at = 1024 * i](std::int64_t most) mutable {
      return static_cast<std::int64_t>(random.below(at++, static_cast<std::uint64_t>(most) + 1));
    };
    Case c;
    c.dtype = upto(2) == 0 ? DType::f32 : DType::bf16;
    const std::vector<std::int64_t> widths =
        c.dtype == DType::f32
            ? std::vector<std::int64_t>{4, 12, 16, 40, 64, 64, 72, 100, 128}
            : std::vector<std::int64_t>{8, 16, 24, 48, 64, 64, 64, 80, 96, 128, 128, 136, 192, 256};
    c.head_dim = widths[static_cast<std::size_t>(upto(std::ssize(widths) - 1))];
    c.batch = 1 + upto(1);
    c.q_len = 1 + upto(c.head_dim > 64 ? 90 : 150);
    c.kv_len = upto(c.head_dim > 64 ? 90 : 150);
    c.kv_heads = 1 + upto(1);
    c.heads = c.kv_heads * (1 + upto(2));
    c.q_offset = upto(2) == 0 ? 0 : upto(120) - 60;
    c.kv_stride = upto(1) == 0 || c.kv_len == 0 ? 0 : c.kv_len + upto(3);
    c.cap = upto(2) == 0 ? 1.5 : 0;
    c.accumulate = upto(2) == 0;
    switch (upto(4)) {
      case 0:  // any
        for (std::int64_t n = 0; n < c.batch * c.q_len; ++n)
          c.first_keys.push_back(static_cast<std::int32_t>(upto(c.kv_len)));
        break;
      case 1: {  // documents
        for (std::int64_t b = 0; b < c.batch; ++b)
          for (std::int64_t t = 0, first = 0; t < c.q_len; ++t) {
            if (upto(19) == 0) first = std::max<std::int64_t>(0, t + c.q_offset);
            c.first_keys.push_back(static_cast<std::int32_t>(std::min(first, c.kv_len)));
          }
        break;
      }
      case 2: {  // a window
        const std::int64_t wide = 1 + upto(80);
        for (std::int64_t n = 0; n < c.batch * c.q_len; ++n)
          c.first_keys.push_back(
              static_cast<std::int32_t>(std::max<std::int64_t>(0, n % c.q_len + c.q_offset + 1 - wide)));
        break;
      }
      default:
        break;
    }
    SCOPED_TRACE(::testing::Message() << "case " << i << ": " << c);
    const Problem p(c, i);
    const Results found = run(device, p, {});
    expect_attention(p, found);
    EXPECT_TRUE(i % 16 != 0 || same(found, run(device, p, {})));
    if (HasFatalFailure()) return;
  }
}

// What is not for them is computed in tiles: by the same bits as where there are none.
TEST_P(WarpAttention, OfWhatIsNotForIt) {
  const checks::DeviceInUse without = GetParam().use(Numerics::invariant);
  const auto by_both = [&](const Case& c, const Layout& layout) {
    const Problem p(c, 1000);
    return same(run(device, p, layout), run(without, p, layout));
  };
  for (const DType dtype : {DType::bf16, DType::f32}) {
    SCOPED_TRACE(dtype_name(dtype));
    const std::int64_t at_once = 16 / element_bytes(dtype);
    const Case c{.q_len = 9, .kv_len = 9, .head_dim = 16, .dtype = dtype};
    EXPECT_FALSE(by_both(c, {}));
    for (const std::int64_t head_dim : {64, 128, 192, 256}) {  // forward and backward are
      if (dtype == DType::f32 && head_dim > 128) continue;
      const Problem p({.q_len = 9, .kv_len = 9, .head_dim = head_dim, .dtype = dtype}, 1001);
      const Results on = run(device, p, {}), off = run(without, p, {});
      EXPECT_NE(on.out.all, off.out.all) << head_dim;
      EXPECT_NE(on.dq.all, off.dq.all) << head_dim;
      EXPECT_NE(on.dk.all, off.dk.all) << head_dim;
    }
    // Begins between 16 bytes; so do rows.
    EXPECT_TRUE(by_both(c, {.before = at_once / 2, .after = at_once / 2}));
    EXPECT_TRUE(by_both(c, {.after = 3}));
    EXPECT_TRUE(by_both({.q_len = 9, .kv_len = 9, .head_dim = at_once + at_once / 2, .dtype = dtype}, {}));
  }
  EXPECT_TRUE(by_both({.q_len = 9, .kv_len = 9, .head_dim = 132, .dtype = DType::f32}, {}));
}

// Blocks go over the tiles of all heads once, group after group, and in a group over all first tiles first.
TEST(HeadsTogether, AreOfEvenGroups) {
  for (const std::int64_t batch : {1, 3})
    for (const std::int64_t heads : {1, 4, 7})
      for (const std::int64_t rows : {1, 500, 4096, 1 << 20}) {
        const int together = rows::heads_together(batch * heads, rows, 256);
        const std::int64_t groups = (batch * heads + together - 1) / together;
        EXPECT_GE(together, 1);
        EXPECT_TRUE(together == 1 || std::int64_t{together} * rows * 128 * 4 <= 32 << 20);
        EXPECT_EQ(together, (batch * heads + groups - 1) / groups);  // no fewer would do for as many groups
      }
  for (const int together : {1, 3, 4, 6, 12}) {
    constexpr std::int64_t batch = 2, heads = 6, tiles = 5;
    std::set<std::array<int, 3>> seen;
    int last_group = 0, last_tile = 0;
    for (std::int64_t block = 0; block < batch * heads * tiles; ++block) {
      const rows::TileOfHead at(block, batch, heads, tiles, together);
      EXPECT_TRUE(at.sequence < batch && at.head < heads && at.tile < tiles);
      EXPECT_TRUE(seen.insert({at.sequence, at.head, at.tile}).second);
      const int group = (at.sequence * static_cast<int>(heads) + at.head) / together;
      EXPECT_TRUE(group > last_group || (group == last_group && at.tile >= last_tile));
      last_group = group, last_tile = at.tile;
    }
    EXPECT_EQ(std::ssize(seen), batch * heads * tiles);
  }
}

INSTANTIATE_TEST_SUITE_P(On, WarpAttention, ::testing::ValuesIn(checks::devices_with_tensor_cores()),
                         [](const auto& of) { return of.param.name; });

}  // namespace
}  // namespace echelon::warp_attention_test

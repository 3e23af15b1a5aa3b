// Attention by the kernels of a device, as device_kernels_test.cpp tests the others.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention_spoiled.h"
#include "base/error.h"
#include "base/philox.h"
#include "case_choice.h"
#include "device_kernel_runs.h"

namespace echelon::device_attention_test {
namespace {

struct AttentionCase {
  std::int64_t batch, q_len, kv_len, heads, kv_heads, head_dim, q_offset, kv_stride;
  double cap;
  bool accumulate;
  std::vector<std::int32_t> first_keys = {};  // in turn
  std::int64_t q_step = 1, k_step = 1;
  Alibi alibi = {};
};

class DeviceAttention : public checks::OfDeviceKernels {
 protected:
  void check(const AttentionCase& one, DType t) {
    const std::int64_t queries = one.batch * one.q_len, softmaxes = queries * one.heads;
    const std::int64_t keys = one.batch * std::max(one.kv_stride, one.kv_len);
    const std::int64_t wide_q = one.heads * one.head_dim, wide_k = one.kv_heads * one.head_dim;
    std::vector<std::int32_t> firsts;
    for (std::int64_t i = 0; i < queries && !one.first_keys.empty(); ++i)
      firsts.push_back(one.first_keys[static_cast<std::size_t>(i) % one.first_keys.size()]);
    const Operand first = ids(firsts);
    AttentionShape shape{.batch = one.batch,
                         .q_len = one.q_len,
                         .kv_len = one.kv_len,
                         .num_heads = one.heads,
                         .num_kv_heads = one.kv_heads,
                         .head_dim = one.head_dim,
                         .q_offset = one.q_offset,
                         .q_step = one.q_step,
                         .k_step = one.k_step,
                         .kv_batch_stride = one.kv_stride,
                         .scale = 0.6,
                         .cap = one.cap,
                         .alibi = one.alibi,
                         .accumulate = one.accumulate};
    const Operand q = random(t, queries, wide_q), k = random(t, keys, wide_k), v = random(t, keys, wide_k),
                  out = random(t, queries, wide_q), dout = random(t, queries, wide_q),
                  dq = random(t, queries, wide_q), dk = random(t, keys, wide_k), dv = random(t, keys, wide_k);
    const Operand lse = vector(wide(t), softmaxes), delta = vector(wide(t), softmaxes);
    // Each side's kernels read only what lies in their own memory, first keys too.
    const auto run_shaped = [&](const auto& call) {
      run([&](Kernels& on, auto of) {
        if (!firsts.empty()) shape.first_keys = of(first);
        call(on, of);
      });
    };
    run_shaped([&](Kernels& on, auto of) { on.attention(of(q), of(k), of(v), shape, of(out), of(lse)); });
    const std::int64_t length = one.kv_len + one.head_dim;
    expect_close(out, length, "attention");
    expect_close(lse, length, "attention's log-sum-exp");
    run_shaped([&](Kernels& on, auto of) { on.attention_delta(of(out), of(dout), shape, of(delta)); });
    expect_close(delta, one.head_dim, "attention_delta");
    run_shaped([&](Kernels& on, auto of) {
      on.attention_backward(of(q), of(k), of(v), of(dout), of(lse), of(delta), shape, of(dq), of(dk), of(dv));
    });
    // What a score's gradient is a difference of, a delta and a product as large, may cancel in all of them.
    const double score = shape.scale * largest_of(delta), of_dq = score * largest_of(k),
                 of_dk = score * largest_of(q);
    expect_close(dq, 4 * length, "attention_backward's dq", 4, of_dq);
    expect_close(dk, 4 * (queries * one.heads + one.head_dim), "attention_backward's dk", 4, of_dk);
    expect_close(dv, 4 * (queries * one.heads + one.head_dim), "attention_backward's dv");
    run_shaped([&](Kernels& on, auto of) {  // of queries, and of keys and values, alone
      const Tensor none;
      on.attention_backward(of(q), of(k), of(v), of(dout), of(lse), of(delta), shape, of(dq), none, none);
      on.attention_backward(of(q), of(k), of(v), of(dout), of(lse), of(delta), shape, none, of(dk), of(dv));
    });
    expect_close(dq, 8 * length, "attention_backward's dq alone", 4, of_dq);
    expect_close(dk, 8 * (queries * one.heads + one.head_dim), "attention_backward's dk alone", 4, of_dk);
    expect_close(dv, 8 * (queries * one.heads + one.head_dim), "attention_backward's dv alone");
    const Operand sinks = vector(t, one.heads), dsinks = vector(wide(t), one.heads);
    run_shaped([&](Kernels& on, auto of) { on.attention_sink(of(sinks), shape, of(out), of(lse)); });
    expect_close(out, 1, "attention_sink");
    expect_close(lse, 1, "attention_sink's log-sum-exp");
    // It adds a part of each delta, the sink's probability, to what is there.
    const double summand = std::max(largest_of(dsinks), largest_of(delta));
    run_shaped([&](Kernels& on, auto of) {
      on.attention_sink_backward(of(sinks), of(lse), of(delta), shape, of(dsinks));
    });
    expect_close(dsinks, queries, "attention_sink_backward", 4, summand);
  }
};

TEST_P(DeviceAttention, OfEachKind) {
  for (const AttentionCase& one :
       {AttentionCase{2, 9, 9, 4, 2, 5, 0, 0, 0, false},    // query heads that share keys, tiles not full
        AttentionCase{1, 6, 11, 2, 1, 4, 5, 13, 0, false},  // a cache with room behind
        AttentionCase{2, 7, 7, 2, 2, 3, 0, 0, 4.0, false, {0, 0, 0, 3, 3, 3, 6}},  // documents, capped scores
        AttentionCase{1, 10, 6, 2, 2, 8, -3, 0, 0, true},                          // a later block of keys
        AttentionCase{1, 1, 1, 1, 1, 1, 0, 0, 0, false}, AttentionCase{1, 3, 0, 2, 2, 4, 0, 0, 0, false},
        AttentionCase{0, 3, 3, 2, 2, 4, 0, 0, 0, false}})
    for (DType t : stored) {
      SCOPED_TRACE(::testing::Message() << "q_len " << one.q_len << " kv_len " << one.kv_len);
      check(one, t);
    }
}

TEST_P(DeviceAttention, KeepsWhatIsNotANumber) {
  for (const DType t : stored)
    checks::expect_spoiled_attention(
        *device.arena, t,
        [this](const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& s, const Tensor& out,
               const Tensor& lse) { tested->attention(q, k, v, s, out, lse); },
        true, false);
}

TEST_P(DeviceAttention, OfAnyShape) {
  const Philox draw(23, Stream::test, 2);
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(checks::so_many(10, 300)); ++i) {
    SCOPED_TRACE(::testing::Message() << "case " << i);
    auto upto = [&, at = 64 * i](std::int64_t most) mutable {
      return static_cast<std::int64_t>(draw.below(at++, static_cast<std::uint64_t>(most) + 1));
    };
    AttentionCase one;
    one.batch = 1 + upto(1);
    one.q_len = upto(13);
    one.kv_len = upto(20);
    one.kv_heads = 1 + upto(1);
    one.heads = one.kv_heads * (1 + upto(2));
    one.head_dim = 1 + upto(11);
    one.q_offset = upto(20) - 6;
    (upto(1) == 0 ? one.q_step : one.k_step) = 1 + upto(2);
    one.kv_stride = upto(1) == 0 || one.kv_len == 0 ? 0 : one.kv_len + upto(3);
    one.cap = upto(1) == 0 ? 0 : 3;
    if (one.cap == 0 && upto(1) == 0) one.alibi = {.heads = one.heads + upto(3), .first_head = upto(3)};
    one.accumulate = upto(1) == 1;
    for (std::int64_t n = upto(1) * 7; n > 0; --n)
      one.first_keys.push_back(static_cast<std::int32_t>(upto(one.kv_len)));
    check(one, stored[i % stored.size()]);
  }
}

// Tiles are as large as a block's memory allows, and where none is small enough it is said.
TEST_P(DeviceAttention, OfWideHeads) {
  const std::int64_t widest = GetParam().widest_head;
  check({1, 5, 5, 1, 1, widest, 0, 0, 0, false}, DType::f64);
  if (device.arena->device() == Device::cuda) check({1, 70, 70, 2, 1, widest, 0, 0, 0, false}, DType::bf16);
  EXPECT_THROW(check({1, 5, 5, 1, 1, 16 * widest, 0, 0, 0, false}, DType::f64), RequestError);
}

INSTANTIATE_TEST_SUITE_P(On, DeviceAttention, ::testing::ValuesIn(checks::devices_under_test()),
                         [](const auto& of) { return of.param.name; });

}  // namespace
}  // namespace echelon::device_attention_test

// Speed of the CPU kernels on the shapes of GPT-2 124M (4 sequences of 1024 tokens). Products and attention
// report FLOP/s (causal attention counts the scores that a query sees), passes report the bytes that they
// must read and write; the first argument is the number of threads. Compare a pass with Memcpy, attention
// with the best product.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/philox.h"
#include "tensor/kernels.h"
#include "tensor/split_weights.h"

namespace echelon {
namespace {

constexpr std::int64_t tokens = 4096, width = 768, vocabulary = 50257, logit_rows = 512;

struct Bench {
  explicit Bench(benchmark::State& state) : threads(static_cast<int>(state.range(0))) {}

  // Normal numbers, a short row of them over and over.
  Tensor random(std::vector<std::int64_t> shape) {
    Tensor t(arena, MemoryCategory::other, DType::f32, std::move(shape));
    std::vector<double> values(4099);
    Philox(5, Stream::test, draws++).fill_normal(0, values.size(), values.data());
    float* x = t.host<float>();
    for (std::int64_t i = 0; i < t.numel(); ++i)
      x[i] = static_cast<float>(values[static_cast<std::size_t>(i) % values.size()]);
    return t;
  }
  Tensor targets(std::int64_t n) {
    Tensor t(arena, MemoryCategory::other, DType::i32, {n});
    for (std::int64_t i = 0; i < n; ++i)
      t.host<std::int32_t>()[i] = static_cast<std::int32_t>(i * 7919 % vocabulary);
    return t;
  }

  int threads;
  Arena arena;
  std::uint64_t draws = 0;
  std::unique_ptr<Kernels> kernels = make_cpu_kernels(arena, DType::f32, threads);
};

void rate(benchmark::State& state, const char* unit, double amount) {
  state.counters[unit] = benchmark::Counter(amount, benchmark::Counter::kIsIterationInvariantRate);
}

double bytes(std::initializer_list<Tensor> tensors) {
  double total = 0;
  for (const Tensor& t : tensors) total += static_cast<double>(t.bytes());
  return total;
}

// c (m, n) = op(a) op(b); turn 0: both as stored, 1: b transposed (a linear layer), 2: a transposed (a weight
// gradient).
void Matmul(benchmark::State& state) {
  Bench bench(state);
  const std::int64_t m = state.range(1), n = state.range(2), k = state.range(3), turn = state.range(4);
  const Tensor a = turn == 2 ? bench.random({k, m}) : bench.random({m, k});
  const Tensor b = turn == 1 ? bench.random({n, k}) : bench.random({k, n}), c = bench.random({m, n});
  for (auto _ : state)
    bench.kernels->matmul(a, turn == 2 ? Transpose::yes : Transpose::no, b,
                          turn == 1 ? Transpose::yes : Transpose::no, c, false);
  rate(state, "FLOP/s", 2.0 * static_cast<double>(m * n * k));
}

void matmul_shapes(benchmark::internal::Benchmark* b) {
  const std::vector<std::vector<std::int64_t>> shapes{
      {tokens, 3 * width, width, 0},      {tokens, width, width, 0},          {tokens, 4 * width, width, 0},
      {tokens, width, 4 * width, 0},      {logit_rows, vocabulary, width, 1}, {tokens, width, 3 * width, 1},
      {tokens, 4 * width, width, 1},      {width, 3 * width, tokens, 2},      {4 * width, width, tokens, 2},
      {vocabulary, width, logit_rows, 2}, {logit_rows, width, vocabulary, 0}};
  for (std::int64_t threads : {1, 2})
    for (const auto& s : shapes) b->Args({threads, s[0], s[1], s[2], s[3]});
}
BENCHMARK(Matmul)->Apply(matmul_shapes)->ArgNames({"threads", "m", "n", "k", "turn"})->UseRealTime();

struct AttentionBench : Bench {
  explicit AttentionBench(benchmark::State& state) : Bench(state) {
    shape.q_len = shape.kv_len = state.range(1);
    shape.batch = tokens / shape.q_len;
    shape.num_heads = shape.num_kv_heads = 12;
    shape.head_dim = 64;
    shape.scale = 1.0 / 8;
    q = qkv.column_range(0, width), k = qkv.column_range(width, 2 * width),
    v = qkv.column_range(2 * width, 3 * width);
    dq = dqkv.column_range(0, width), dk = dqkv.column_range(width, 2 * width);
    dv = dqkv.column_range(2 * width, 3 * width);
    kernels->scale(q, static_cast<double>(state.range(2)));
    lse = random({shape.num_heads * tokens}), delta = random({shape.num_heads * tokens});
    kernels->attention(q, k, v, shape, out, lse);
  }
  double forward_flops() const {
    return 2.0 * static_cast<double>(shape.q_len) * static_cast<double>(shape.q_len * shape.head_dim) *
           static_cast<double>(shape.batch * shape.num_heads);
  }

  AttentionShape shape;
  Tensor qkv = random({tokens, 3 * width}), dqkv = random({tokens, 3 * width});
  Tensor out = random({tokens, width}), dout = random({tokens, width});
  Tensor q, k, v, dq, dk, dv, lse, delta;
};

void AttentionForward(benchmark::State& state) {
  AttentionBench b(state);
  for (auto _ : state) b.kernels->attention(b.q, b.k, b.v, b.shape, b.out, b.lse);
  rate(state, "FLOP/s", b.forward_flops());
}
void AttentionBackward(benchmark::State& state) {
  AttentionBench b(state);
  for (auto _ : state) {
    b.kernels->attention_delta(b.out, b.dout, b.shape, b.delta);
    b.kernels->attention_backward(b.q, b.k, b.v, b.dout, b.lse, b.delta, b.shape, b.dq, b.dk, b.dv);
  }
  rate(state, "FLOP/s", 2.5 * b.forward_flops());
}
// With queries 30 times as large most scores lie so far below the largest that no float holds their weights.
BENCHMARK(AttentionForward)
    ->ArgsProduct({{1, 2}, {1024, 4096}, {1, 30}})
    ->ArgNames({"threads", "T", "queries"})
    ->UseRealTime();
BENCHMARK(AttentionBackward)
    ->ArgsProduct({{1, 2}, {1024, 4096}, {1, 30}})
    ->ArgNames({"threads", "T", "queries"})
    ->UseRealTime();

// pass(bench) returns a function to time and the bytes that it reads and writes.
template <class Pass>
void measure(benchmark::State& state, const Pass& pass) {
  Bench bench(state);
  const auto [run, moved] = pass(bench);
  for (auto _ : state) run();
  rate(state, "bytes/s", moved);
}

struct Measured {
  std::function<void()> run;
  double bytes;
};

void Memcpy(benchmark::State& state) {
  measure(state, [](Bench& b) {
    const Tensor x = b.random({tokens, 4 * width}), y = b.random({tokens, 4 * width});
    return Measured{[&b, x, y] { b.kernels->copy(x, y); }, bytes({x, y})};
  });
}
void Residual(benchmark::State& state) {
  measure(state, [](Bench& b) {
    const Tensor x = b.random({4 * tokens, width}), y = b.random({4 * tokens, width}),
                 bias = b.random({width});
    return Measured{[&b, x, y, bias] { b.kernels->residual(x, y, bias, x); }, bytes({x, x, y})};
  });
}
void Gelu(benchmark::State& state) {
  measure(state, [](Bench& b) {
    const Tensor h = b.random({tokens, 4 * width}), y = b.random({tokens, 4 * width}),
                 bias = b.random({4 * width});
    return Measured{[&b, h, y, bias] { b.kernels->activate(Activation::gelu, h, bias, y); },
                    bytes({h, h, y})};
  });
}
void GeluBackward(benchmark::State& state) {
  measure(state, [](Bench& b) {
    const Tensor h = b.random({tokens, 4 * width}), dy = b.random({tokens, 4 * width});
    return Measured{[&b, h, dy] { b.kernels->activate_backward(Activation::gelu, h, dy); },
                    bytes({h, h, dy, dy})};
  });
}
void LayerNorm(benchmark::State& state) {
  measure(state, [](Bench& b) {
    const Tensor x = b.random({4 * tokens, width}), y = b.random({4 * tokens, width}), w = b.random({width});
    const Tensor stats = b.random({4 * tokens, 2});
    return Measured{[&b, x, y, w, stats] { b.kernels->layer_norm(x, w, w, 1e-5, y, stats); }, bytes({x, y})};
  });
}
void LayerNormBackward(benchmark::State& state) {
  measure(state, [](Bench& b) {
    const Tensor x = b.random({4 * tokens, width}), dy = b.random({4 * tokens, width}), w = b.random({width});
    const Tensor dx = b.random({4 * tokens, width}), stats = b.random({4 * tokens, 2});
    const Tensor dw = b.random({width}), db = b.random({width});
    return Measured{[=, &b] {
                      b.kernels->layer_norm_backward_input(dy, x, w, stats, dx);
                      b.kernels->layer_norm_backward_weight(dy, x, stats, dw, db);
                    },
                    bytes({x, x, dy, dy, dx, dx})};
  });
}
void BiasGradient(benchmark::State& state) {
  measure(state, [](Bench& b) {
    const Tensor dy = b.random({tokens, 4 * width}), db = b.random({4 * width});
    return Measured{[=, &b] { b.kernels->bias_gradient(dy, db); }, bytes({dy})};
  });
}
void CrossEntropy(benchmark::State& state) {
  measure(state, [](Bench& b) {
    const Tensor logits = b.random({logit_rows, vocabulary}), max = b.random({logit_rows});
    const Tensor sum = b.random({logit_rows}), target = b.random({logit_rows}), ids = b.targets(logit_rows);
    return Measured{[=, &b] {
                      b.kernels->row_max(logits, max);
                      b.kernels->exp_sum(logits, max, ids, 0, sum, target);
                      b.kernels->cross_entropy_backward(logits, sum, ids, 0, 1.0, logits);
                    },
                    5 * bytes({logits})};
  });
}
void AdamW(benchmark::State& state) {
  measure(state, [](Bench& b) {
    const Tensor p = b.random({10'000'000}), g = b.random({10'000'000}), m = b.random({10'000'000});
    const Tensor v = b.random({10'000'000});
    b.kernels->fill(v, 1.0);
    return Measured{[=, &b] { b.kernels->adamw(p, g, m, v, {.lr = 1e-4}); }, bytes({p, p, g, m, m, v, v})};
  });
}
// Of --precision bf16: weights as values and what they are rounded off by.
void AdamWSplit(benchmark::State& state) {
  measure(state, [](Bench& b) {
    const Tensor p = b.random({10'000'000}), g = b.random({10'000'000}), m = b.random({10'000'000});
    const Tensor v = b.random({10'000'000});
    b.kernels->fill(v, 1.0);
    const Tensor values(b.arena, MemoryCategory::other, DType::bf16, p.shape()),
        remainders(b.arena, MemoryCategory::other, DType::i16, p.shape());
    const std::span<const float> weights(p.host<float>(), static_cast<std::size_t>(p.numel()));
    split_values(weights, values);
    split_remainders(weights, remainders);
    return Measured{[=, &b] { b.kernels->adamw(values, g, m, v, {.lr = 1e-4}, remainders); },
                    bytes({values, values, remainders, remainders, g, m, m, v, v})};
  });
}
void SumSquares(benchmark::State& state) {
  measure(state, [](Bench& b) {
    const Tensor x = b.random({20'000'000});
    const Tensor sums(b.arena, MemoryCategory::other, DType::f64, {(x.numel() + 1023) / 1024});
    return Measured{[=, &b] { b.kernels->sum_squares(x, 1024, sums); }, bytes({x})};
  });
}

#define ECHELON_PASS(name) BENCHMARK(name)->Arg(1)->Arg(2)->ArgName("threads")->UseRealTime()
ECHELON_PASS(Memcpy);
ECHELON_PASS(Residual);
ECHELON_PASS(Gelu);
ECHELON_PASS(GeluBackward);
ECHELON_PASS(LayerNorm);
ECHELON_PASS(LayerNormBackward);
ECHELON_PASS(BiasGradient);
ECHELON_PASS(CrossEntropy);
ECHELON_PASS(AdamW);
ECHELON_PASS(AdamWSplit);
ECHELON_PASS(SumSquares);

}  // namespace
}  // namespace echelon

BENCHMARK_MAIN();

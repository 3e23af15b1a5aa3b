// A mixture's expert MLPs beside one dense MLP of the same FLOPs: 4096 tokens of C = 512, each to 2 of 8
// experts. The widths of the experts are half of the dense one's, which so takes every token once.
// docs/experts.md has the ratios.
#include <benchmark/benchmark.h>

#include <memory>

#include "base/philox.h"
#include "tensor/expert_products.h"
#include "tensor/host.h"

namespace echelon {
namespace {

constexpr std::int64_t tokens = 4096, width = 512, expert_hidden = 768, num_experts = 8, k = 2;

struct Bench {
  explicit Bench(benchmark::State& state) : threads(static_cast<int>(state.range(0))) {}
  Tensor random(std::vector<std::int64_t> shape) {
    Tensor t(arena, MemoryCategory::other, DType::f32, std::move(shape));
    const Philox numbers(5, Stream::test, draws++);
    for (std::int64_t i = 0; i < t.numel(); ++i)
      t.host<float>()[i] = static_cast<float>(numbers.normal(static_cast<std::uint64_t>(i % 4099)));
    return t;
  }
  Tensor ids(std::int64_t n) { return {arena, MemoryCategory::other, DType::i32, {n / k, k}}; }
  Weight weight(std::int64_t rows, std::int64_t cols) { return {random({rows, cols}), random({rows, cols})}; }

  int threads;
  Arena arena;
  std::uint64_t draws = 0;
  std::unique_ptr<Kernels> kernels = make_cpu_kernels(arena, DType::f32, threads);
};

void rate(benchmark::State& state) {
  const double flops = 6.0 * 3 * static_cast<double>(tokens * k * width * expert_hidden);
  state.counters["FLOP/s"] = benchmark::Counter(flops, benchmark::Counter::kIsIterationInvariantRate);
}

// Forward and backward.
void DenseMlp(benchmark::State& state) {
  Bench b(state);
  constexpr std::int64_t hidden = k * expert_hidden;
  const Weight in = b.weight(2 * hidden, width), out = b.weight(width, hidden);
  const Tensor x = b.random({tokens, width}), dy = b.random({tokens, width}), dx = b.random({tokens, width}),
               y = b.random({tokens, width}), h = b.random({tokens, 2 * hidden}),
               a = b.random({tokens, hidden});
  for (auto _ : state) {
    b.kernels->matmul(x, Transpose::no, in.value, Transpose::yes, h, false);
    b.kernels->gated(Activation::swiglu, h, a);
    b.kernels->matmul(a, Transpose::no, out.value, Transpose::yes, y, false);
    b.kernels->matmul(dy, Transpose::no, out.value, Transpose::no, a, false);
    b.kernels->gated_backward(Activation::swiglu, h, a);
    b.kernels->matmul(dy, Transpose::yes, a, Transpose::no, out.gradient, true);
    b.kernels->matmul(h, Transpose::no, in.value, Transpose::no, dx, false);
    b.kernels->matmul(h, Transpose::yes, x, Transpose::no, in.gradient, true);
  }
  rate(state);
}

// The same with copies of tokens taken, weighted and summed again. The second argument is the share of all
// choices, in percent, that the first expert has beyond its even part.
void GroupedExperts(benchmark::State& state) {
  Bench b(state);
  std::vector<Weight> in, out;
  for (int e = 0; e < num_experts; ++e) {
    in.push_back(b.weight(2 * expert_hidden, width));
    out.push_back(b.weight(width, expert_hidden));
  }
  constexpr std::int64_t copies = tokens * k;
  const Tensor ids = b.ids(copies), places = b.ids(copies), token_of = b.ids(copies).flat();
  const Philox numbers(6, Stream::test, 0);
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto at = static_cast<std::uint64_t>(2 * t);
    const bool popular = numbers.below(at, 100) < static_cast<std::uint64_t>(2 * state.range(1));
    const auto first = popular ? 0 : numbers.below(at + 1, num_experts);
    ids.host<std::int32_t>()[k * t] = static_cast<std::int32_t>(first);
    ids.host<std::int32_t>()[k * t + 1] = static_cast<std::int32_t>(
        (first + 1 + numbers.below(at + 2 * tokens, num_experts - 1)) % num_experts);
  }
  const Tensor x = b.random({tokens, width}), dy = b.random({tokens, width}), y = b.random({tokens, width}),
               dx = b.random({tokens, width}), taken = b.random({copies, width}),
               rows = b.random({copies, width}), h = b.random({copies, 2 * expert_hidden}),
               a = b.random({copies, expert_hidden}), weights = b.random({tokens, k}),
               row_weights = b.random({copies, 1}), d_weights = b.random({copies, 1});
  const Tensor counts(b.arena, MemoryCategory::other, DType::i32, {num_experts});
  for (auto _ : state) {
    b.kernels->sort_by_expert(ids, places, token_of, counts);
    ExpertBounds bounds{0};
    for (const std::int32_t of_expert : copy_to_host<std::int32_t>(counts))
      bounds.push_back(bounds.back() + of_expert);
    b.kernels->embedding(token_of, x, 0, taken);
    multiply(*b.kernels, in, Transpose::yes, bounds, taken, h);
    b.kernels->gated(Activation::swiglu, h, a);
    multiply(*b.kernels, out, Transpose::yes, bounds, a, rows);
    b.kernels->combine_rows(rows, places, weights, y);
    b.kernels->embedding(token_of, dy, 0, rows);
    multiply(*b.kernels, out, Transpose::no, bounds, rows, a);
    b.kernels->weighted_activation_backward(Activation::swiglu, h, a, row_weights, d_weights);
    add_gradients(*b.kernels, out, bounds, a, rows);
    multiply(*b.kernels, in, Transpose::no, bounds, h, rows);
    b.kernels->combine_rows(rows, places, {}, dx);
    add_gradients(*b.kernels, in, bounds, taken, h);
  }
  rate(state);
}

BENCHMARK(DenseMlp)->Arg(1)->Arg(2)->ArgName("threads")->UseRealTime();
BENCHMARK(GroupedExperts)->ArgsProduct({{1, 2}, {0, 40}})->ArgNames({"threads", "skew"})->UseRealTime();

}  // namespace
}  // namespace echelon

BENCHMARK_MAIN();

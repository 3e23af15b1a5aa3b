#include "tensor/updates_cpu.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tensor/reference_view.h"
#include "tensor/simd.h"

namespace echelon {
namespace {

AdamWFactors factors_of(const AdamWStep& step) {
  const double t = static_cast<double>(step.step);
  const auto f32 = [](double x) { return static_cast<float>(x); };
  return {.beta1 = f32(step.beta1),
          .one_minus_beta1 = f32(1 - step.beta1),
          .beta2 = f32(step.beta2),
          .one_minus_beta2 = f32(1 - step.beta2),
          .gradient_scale = f32(step.gradient_scale),
          .decay = f32(1 - step.lr * step.weight_decay),
          .rate = f32(step.lr / (1 - std::pow(step.beta1, t))),
          .root_scale = f32(1 / std::sqrt(1 - std::pow(step.beta2, t))),
          .eps = f32(step.eps)};
}

// Calls pass(first, words, n) for pieces of `count` weights, with a random word for each, which decides how
// it is rounded: of its logical element.
template <class Pass>
void each_at_random(std::int64_t count, const StochasticRounding& rounding, const ThreadTeam& team,
                    const Pass& pass) {
  // Contiguous pieces; for each, finds the place of its first element among the runs.
  constexpr std::int64_t piece = 4096;
  std::vector<std::int64_t> begins;  // of each run among the elements
  std::int64_t begin = 0;
  for (const LogicalRun& run : rounding.runs) {
    begins.push_back(begin);
    begin += run.count;
  }
  team.each_row((count + piece - 1) / piece, piece, [&](std::int64_t i) {
    std::array<std::uint32_t, piece> words;
    const std::int64_t first = i * piece, end = std::min(count, first + piece);
    auto run =
        static_cast<std::size_t>(std::upper_bound(begins.begin(), begins.end(), first) - begins.begin() - 1);
    for (std::int64_t at = first; at < end; ++run) {
      const std::int64_t skipped = at - begins[run];
      const std::int64_t n = std::min(end - at, rounding.runs[run].count - skipped);
      rounding.random.fill_words(static_cast<std::uint64_t>(rounding.runs[run].begin + skipped),
                                 static_cast<std::uint64_t>(n), words.data() + (at - first));
      at += n;
    }
    pass(first, words.data(), end - first);
  });
}

}  // namespace

void adamw_by_team(const Tensor& tp, const Tensor& tg, const Tensor& tm, const Tensor& tv,
                   const AdamWStep& step, const Tensor& tremainder, const ThreadTeam& team) {
  const AdamWFactors factors = factors_of(step);
  const float* g = tg.host<float>();
  if (step.rounding != nullptr) {
    bf16 *p = tp.host<bf16>(), *m = tm.host<bf16>(), *v = tv.host<bf16>();
    return each_at_random(tp.numel(), *step.rounding, team,
                          [&](std::int64_t first, const std::uint32_t* words, std::int64_t n) {
                            wide_simd().adamw_at_random(p + first, g + first, m + first, v + first, words,
                                                        factors, n);
                          });
  }
  float *m = tm.host<float>(), *v = tv.host<float>();
  if (tremainder.defined()) {
    std::int16_t* const remainder = tremainder.host<std::int16_t>();
    return team.each_span(
        Matrix<bf16>(tp), true, [&](bf16* at, std::int64_t, std::int64_t first, std::int64_t n) {
          wide_simd().adamw_split(at, remainder + first, g + first, m + first, v + first, factors, n);
        });
  }
  team.each_span(Matrix<float>(tp), true, [&](float* at, std::int64_t, std::int64_t first, std::int64_t n) {
    wide_simd().adamw(at, g + first, m + first, v + first, factors, n);
  });
}

void momentum_by_team(const Tensor& tg, const Tensor& tm, const Tensor& tupdate, const MomentumStep& step,
                      const ThreadTeam& team) {
  const float* g = tg.host<float>();
  const auto momentum = static_cast<float>(step.momentum), scale = static_cast<float>(step.gradient_scale);
  const auto run = [&]<class M, class T>(const auto& pass, M*, T* update) {
    team.each_span(Matrix<M>(tm), true, [&](M* at, std::int64_t, std::int64_t first, std::int64_t n) {
      pass(g + first, at, update + first, momentum, scale, n);
    });
  };
  if (tupdate.dtype() == DType::f32)
    return run(wide_simd().momentum, tm.host<float>(), tupdate.host<float>());
  bf16* const update = tupdate.host<bf16>();
  if (tm.dtype() == DType::f32) return run(wide_simd().momentum_to_bf16, tm.host<float>(), update);
  run(wide_simd().momentum_in_bf16, tm.host<bf16>(), update);
}

void step_weights_by_team(const Tensor& tp, const Tensor& tupdate, const WeightStep& step,
                          const Tensor& tremainder, const ThreadTeam& team) {
  const auto keep = static_cast<float>(1 - step.lr * step.weight_decay),
             rate = static_cast<float>(step.lr * step.scale);
  if (tp.dtype() == DType::f32) {
    const float* const update = tupdate.host<float>();
    return team.each_span(Matrix<float>(tp), true,
                          [&](float* at, std::int64_t, std::int64_t first, std::int64_t n) {
                            wide_simd().step_weights(at, update + first, keep, rate, n);
                          });
  }
  const bf16* const update = tupdate.host<bf16>();
  if (step.rounding != nullptr) {
    bf16* const p = tp.host<bf16>();
    return each_at_random(tp.numel(), *step.rounding, team,
                          [&](std::int64_t first, const std::uint32_t* words, std::int64_t n) {
                            wide_simd().step_weights_at_random(p + first, update + first, words, keep, rate,
                                                               n);
                          });
  }
  std::int16_t* const remainder = tremainder.host<std::int16_t>();
  team.each_span(Matrix<bf16>(tp), true, [&](bf16* at, std::int64_t, std::int64_t first, std::int64_t n) {
    wide_simd().step_weights_split(at, remainder + first, update + first, keep, rate, n);
  });
}

}  // namespace echelon

#include "tensor/adamw_cpu.h"

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

// In the order of the runs of logical elements, whose random words decide how each element is rounded.
void adamw_at_random(bf16* p, const float* g, bf16* m, bf16* v, std::int64_t count,
                     const StochasticRounding& rounding, const AdamWFactors& factors,
                     const ThreadTeam& team) {
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
    wide_simd().adamw_at_random(p + first, g + first, m + first, v + first, words.data(), factors,
                                end - first);
  });
}

}  // namespace

void adamw_by_team(const Tensor& tp, const Tensor& tg, const Tensor& tm, const Tensor& tv,
                   const AdamWStep& step, const Tensor& tremainder, const ThreadTeam& team) {
  const AdamWFactors factors = factors_of(step);
  const float* g = tg.host<float>();
  if (step.rounding != nullptr)
    return adamw_at_random(tp.host<bf16>(), g, tm.host<bf16>(), tv.host<bf16>(), tp.numel(), *step.rounding,
                           factors, team);
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

}  // namespace echelon

#include "tensor/simd.h"

#include <cmath>

// The build chooses the instruction sets (CMakeLists.txt).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tensor/simd_norms.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "tensor/simd_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace echelon {
namespace HWY_NAMESPACE {
namespace {

// LayerNorm and RMSNorm share this code: RMSNorm has mean 0 and no b.
template <bool centered, bool weighted, bool biased, class T>
HWY_INLINE void normalise(const T* x, const T* w, const T* b, float mean, float rstd, T* y, Size n) {
  each(n, fetching(x), [=](auto d, Size i) HWY_ATTR {
    auto v = load(d, x + i);
    if constexpr (centered) v = Sub(v, Set(d, mean));
    v = Mul(v, Set(d, rstd));
    if constexpr (weighted) v = Mul(v, load(d, w + i));
    if constexpr (biased) v = Add(v, load(d, b + i));
    store(v, d, y + i);
  });
}

// dx += rstd (dxhat - level - xhat along), xhat = (x - mean) rstd, dxhat = dy w.
template <bool centered, bool weighted, class T>
HWY_INLINE void add_norm_dx(const T* dy, const T* x, const T* w, float mean, float rstd, float level,
                            float along, T* dx, Size n) {
  each(n, [=](auto tag, Size i) HWY_ATTR {
    auto dxhat = load(tag, dy + i);
    if constexpr (weighted) dxhat = Mul(dxhat, load(tag, w + i));
    const auto xhat = Mul(Sub(load(tag, x + i), Set(tag, mean)), Set(tag, rstd));
    auto g = NegMulAdd(xhat, Set(tag, along), dxhat);
    if constexpr (centered) g = Sub(g, Set(tag, level));
    store(MulAdd(g, Set(tag, rstd), load(tag, dx + i)), tag, dx + i);
  });
}

template <bool centered, bool weighted, class T>
HWY_INLINE void norm_dx(const T* dy, const T* x, const T* w, float mean, float rstd, T* dx, Size n) {
  // Sums over the row: of dxhat = dy w, and of dxhat xhat with xhat = (x - mean) rstd.
  float level = 0, along = 0;
  const Full d;
  auto levels = Zero(d), alongs = levels, levels2 = levels, alongs2 = levels;
  const auto both = [=](auto tag, Size i, auto& sum, auto& product) HWY_ATTR {
    auto dxhat = load(tag, dy + i);
    if constexpr (weighted) dxhat = Mul(dxhat, load(tag, w + i));
    sum = Add(sum, dxhat);
    product = MulAdd(dxhat, Sub(load(tag, x + i), Set(tag, mean)), product);
  };
  const Size step = lanes(d);
  Size done = 0;
  for (; done + 2 * step <= n; done += 2 * step) {
    for (const T* const from : {dy, x, static_cast<const T*>(dx)})
      __builtin_prefetch(reinterpret_cast<const char*>(from + done) + ahead);
    both(d, done, levels, alongs);
    both(d, done + step, levels2, alongs2);
  }
  for (; done < n; ++done) {
    float dxhat = float{dy[done]};
    if constexpr (weighted) dxhat *= float{w[done]};
    level += dxhat;
    along += dxhat * (x[done] - mean);
  }
  const float count = static_cast<float>(n);
  level = centered ? (level + hn::GetLane(hn::SumOfLanes(d, Add(levels, levels2)))) / count : 0.0f;
  along = (along + hn::GetLane(hn::SumOfLanes(d, Add(alongs, alongs2)))) * rstd / count;
  add_norm_dx<centered, weighted>(dy, x, w, mean, rstd, level, along, dx, n);
}

// count rows at once; if centered, stats are (mean, rstd) of each row, otherwise rstd.
template <bool centered, Size count, class T>
HWY_INLINE void norm_dw_rows(const T* dy, Size dy_stride, const T* x, Size x_stride, const float* stats,
                             float* dw, float* db, Size n) {
  each(n, [=](auto d, Size i) HWY_ATTR {
    auto weight = load(d, dw + i);
    auto level = Zero(d);
    for (Size r = 0; r < count; ++r) {
      if constexpr (count > 1) {  // the next rows'
        __builtin_prefetch(dy + (count + r) * dy_stride + i);
        __builtin_prefetch(x + (count + r) * x_stride + i);
      }
      const auto g = load(d, dy + r * dy_stride + i);
      auto xhat = load(d, x + r * x_stride + i);
      if constexpr (centered) {
        xhat = Mul(Sub(xhat, Set(d, stats[2 * r])), Set(d, stats[2 * r + 1]));
        level = Add(level, g);
      } else {
        xhat = Mul(xhat, Set(d, stats[r]));
      }
      weight = MulAdd(g, xhat, weight);
    }
    store(weight, d, dw + i);
    if constexpr (centered) store(Add(level, load(d, db + i)), d, db + i);
  });
}

template <bool centered, class T>
HWY_INLINE void norm_dw(const T* dy, Size dy_stride, const T* x, Size x_stride, const float* stats, Size rows,
                        float* dw, float* db, Size n) {
  constexpr Size each_stats = centered ? 2 : 1;
  Size r = 0;
  for (; r + streams <= rows; r += streams)
    norm_dw_rows<centered, streams>(dy + r * dy_stride, dy_stride, x + r * x_stride, x_stride,
                                    stats + r * each_stats, dw, db, n);
  for (; r < rows; ++r)
    norm_dw_rows<centered, 1>(dy + r * dy_stride, dy_stride, x + r * x_stride, x_stride,
                              stats + r * each_stats, dw, db, n);
}

template <class T>
HWY_INLINE void normalise_centered(const T* x, const T* w, const T* b, const float* stats, T* y, Size n) {
  if (b != nullptr)
    normalise<true, true, true>(x, w, b, stats[0], stats[1], y, n);
  else if (w != nullptr)
    normalise<true, true, false>(x, w, b, stats[0], stats[1], y, n);
  else
    normalise<true, false, false>(x, w, b, stats[0], stats[1], y, n);
}

template <class T>
void layer_norm(const T* x, const T* w, const T* b, float eps, T* y, float* stats, Size n) {
  const float count = static_cast<float>(n);
  const float mean = sum_of(n, [=](auto d, Size i) HWY_ATTR { return load(d, x + i); }) / count;
  const float variance = sum_of(n,
                                [=](auto d, Size i) HWY_ATTR {
                                  const auto v = Sub(load(d, x + i), Set(d, mean));
                                  return Mul(v, v);
                                }) /
                         count;
  stats[0] = mean;
  stats[1] = 1.0f / std::sqrt(variance + eps);
  normalise_centered(x, w, b, stats, y, n);
}

template <class T>
void layer_norm_again(const T* x, const T* w, const T* b, const float* stats, T* y, Size n) {
  normalise_centered(x, w, b, stats, y, n);
}

template <class T>
void layer_norm_dx(const T* dy, const T* x, const T* w, const float* stats, T* dx, Size n) {
  if (w != nullptr)
    norm_dx<true, true>(dy, x, w, stats[0], stats[1], dx, n);
  else
    norm_dx<true, false>(dy, x, w, stats[0], stats[1], dx, n);
}

template <class T>
void layer_norm_dw(const T* dy, Size dy_stride, const T* x, Size x_stride, const float* stats, Size rows,
                   float* dw, float* db, Size n) {
  norm_dw<true>(dy, dy_stride, x, x_stride, stats, rows, dw, db, n);
}

template <class T>
void rms_norm_again(const T* x, const T* w, const float* stats, T* y, Size n) {
  if (w != nullptr)
    normalise<false, true, false, T>(x, w, nullptr, 0.0f, stats[0], y, n);
  else
    normalise<false, false, false, T>(x, w, nullptr, 0.0f, stats[0], y, n);
}

template <class T>
void rms_norm(const T* x, const T* w, float eps, T* y, float* stats, Size n) {
  stats[0] = 1.0f / std::sqrt(dot(x, x, n) / static_cast<float>(n) + eps);
  rms_norm_again(x, w, stats, y, n);
}

template <class T>
void rms_norm_dx(const T* dy, const T* x, const T* w, const float* stats, T* dx, Size n) {
  if (w != nullptr)
    norm_dx<false, true>(dy, x, w, 0.0f, stats[0], dx, n);
  else
    norm_dx<false, false>(dy, x, w, 0.0f, stats[0], dx, n);
}

template <class T>
float rms_norm_dx_sum(const T* dy, const T* x, const T* w, float rstd, Size n) {
  return rstd * sum_of(n, [=](auto d, Size i)
                              HWY_ATTR { return Mul(Mul(load(d, dy + i), load(d, w + i)), load(d, x + i)); });
}

template <class T>
void rms_norm_dx_of(const T* dy, const T* x, const T* w, float rstd, float mean, T* dx, Size n) {
  add_norm_dx<false, true>(dy, x, w, 0.0f, rstd, 0.0f, mean, dx, n);
}

template <class T>
void rms_norm_dw(const T* dy, Size dy_stride, const T* x, Size x_stride, const float* stats, Size rows,
                 float* dw, Size n) {
  norm_dw<false>(dy, dy_stride, x, x_stride, stats, rows, dw, nullptr, n);
}

}  // namespace

template <class T>
const NormSimd<T>& norm_simd() {
  static constexpr NormSimd<T> passes{.layer_norm = layer_norm<T>,
                                      .layer_norm_again = layer_norm_again<T>,
                                      .layer_norm_dx = layer_norm_dx<T>,
                                      .layer_norm_dw = layer_norm_dw<T>,
                                      .rms_norm = rms_norm<T>,
                                      .rms_norm_again = rms_norm_again<T>,
                                      .rms_norm_dx = rms_norm_dx<T>,
                                      .rms_norm_dx_sum = rms_norm_dx_sum<T>,
                                      .rms_norm_dx_of = rms_norm_dx_of<T>,
                                      .rms_norm_dw = rms_norm_dw<T>};
  return passes;
}
template const NormSimd<float>& norm_simd();
template const NormSimd<bf16>& norm_simd();

}  // namespace HWY_NAMESPACE
}  // namespace echelon
HWY_AFTER_NAMESPACE();

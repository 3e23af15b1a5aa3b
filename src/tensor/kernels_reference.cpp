// Plain loops in f32, f64 and bf16, one thread, no vendor library: the yardstick that every faster kernel and
// every mesh is measured against. T is what numbers are stored as, F = Wide<T> what they are computed in:
// sums run in index order in F, so a rerun agrees to the last bit, and T(...) is where an output is rounded.
// What kernels.h says is accumulated ("+=") is first summed on its own and then added once: the sum of one
// microbatch does not depend on what the output held before.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "base/halving_tree.h"
#include "tensor/attention_reference.h"
#include "tensor/kernels_host.h"
#include "tensor/local_column.h"
#include "tensor/reference_view.h"

namespace echelon {
namespace {

template <class F>
F gelu_tanh_argument(F x) {
  constexpr F c = F(0.797884560802865355879892119868763737);  // sqrt(2 / pi)
  return c * (x + F(0.044715) * x * x * x);
}

template <class F>
F gelu_of(F x) {
  return F(0.5) * x * (1 + std::tanh(gelu_tanh_argument(x)));
}

template <class F>
F gelu_slope(F x) {
  constexpr F c = F(0.797884560802865355879892119868763737);
  const F tanh = std::tanh(gelu_tanh_argument(x));
  return F(0.5) * (1 + tanh) + F(0.5) * x * (1 - tanh * tanh) * c * (1 + 3 * F(0.044715) * x * x);
}

template <class F>
F normal_distribution(F x) {
  return F(0.5) * (1 + std::erf(x * F(0.707106781186547524400844362104849039)));
}

template <class F>
F gelu_erf_slope(F x) {
  constexpr F density = F(0.398942280401432677939946059934381868);  // 1 / sqrt(2 pi)
  return normal_distribution(x) + x * density * std::exp(F(-0.5) * x * x);
}

template <class F>
F activation_of(Activation a, F x) {
  check(!is_gated(a), "an activation without a gate");
  const F positive = std::max(x, F(0));
  if (a == Activation::gelu_erf) return x * normal_distribution(x);
  return a == Activation::relu2 ? positive * positive : gelu_of(x);
}

template <class F>
F activation_slope(Activation a, F x) {
  check(!is_gated(a), "an activation without a gate");
  if (a == Activation::gelu_erf) return gelu_erf_slope(x);
  return a == Activation::relu2 ? 2 * std::max(x, F(0)) : gelu_slope(x);
}

template <class F>
F sigmoid(F x) {
  return 1 / (1 + std::exp(-x));
}

// What an activation with a gate makes of it.
template <class F>
F gate_of(Activation a, F gate) {
  return a == Activation::geglu ? gelu_of(gate) : gate * sigmoid(gate);
}

// op(b) is copied in panels of a few columns, so that the inner loop is contiguous whatever the transposes,
// and one order of summation (k ascending) serves all four cases.
template <class F, class A, class B, class C>
void matmul_of(const Matrix<A>& a, bool a_transposed, const Matrix<B>& b, bool b_transposed,
               const Matrix<C>& c, bool accumulate, const SumBlocks& blocks) {
  constexpr std::int64_t width = 16;  // as many running sums as fit in registers
  const std::int64_t m = c.rows, n = c.cols, depth = a_transposed ? a.rows : a.cols;
  const SumBlocks whole{{{0, depth}}}, &all = blocks.empty() ? whole : blocks;
  std::vector<std::array<F, width>> sums(static_cast<std::size_t>(most_waiting(std::ssize(all)) + 1));
  std::vector<F> panel(static_cast<std::size_t>(depth * width));
  for (std::int64_t begin = 0; begin < n; begin += width) {
    const std::int64_t used = std::min(width, n - begin);
    for (std::int64_t k = 0; k < depth; ++k)
      for (std::int64_t j = 0; j < used; ++j)
        panel[static_cast<std::size_t>(k * width + j)] = b_transposed ? b[begin + j][k] : b[k][begin + j];
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t block = 0; block < std::ssize(all); ++block) {
        const TreePlace place = tree_place(std::ssize(all), block);
        auto at = static_cast<std::size_t>(place.waiting);
        std::array<F, width> sum{};
        for (const Range& range : all[static_cast<std::size_t>(block)])
          for (std::int64_t k = range.begin; k < range.end; ++k) {
            const F factor = a_transposed ? a[k][i] : a[i][k];
            const F* line = panel.data() + k * width;
            for (std::size_t j = 0; j < width; ++j) sum[j] += factor * line[j];
          }
        sums[at] = sum;
        for (int merge = 0; merge < place.merges; ++merge, --at)
          for (std::size_t j = 0; j < width; ++j) sums[at - 1][j] += sums[at][j];
      }
      const std::array<F, width>& sum = sums.front();
      for (std::int64_t j = 0; j < used; ++j) {
        C& out = c[i][begin + j];
        const F product = sum[static_cast<std::size_t>(j)];
        out = C(accumulate ? out + product : product);
      }
    }
  }
}

// body(matrix of x, matrix of y) where both are of one type, or one is bf16 and the other f32.
template <class Body>
void with_pair(const Tensor& x, const Tensor& y, const Body& body) {
  with_stored_type(x, [&]<class X>(X) {
    with_stored_type(y, [&]<class Y>(Y) {
      if constexpr (std::is_same_v<Wide<X>, Wide<Y>>) body(Matrix<X>(x), Matrix<Y>(y));
    });
  });
}

// total (C) += sum over rows of term(row, column).
template <class F, class Term>
void add_column_sums(std::int64_t rows, std::int64_t cols, F* total, const Term& term) {
  for (std::int64_t j = 0; j < cols; ++j) {
    F sum = 0;
    for (std::int64_t i = 0; i < rows; ++i) sum += term(i, j);
    total[j] += sum;
  }
}

// On entry gate, up and d, the gradient of y = silu(gate) up; on exit gate and up are their gradients.
// Returns y. (T is what they are stored as.)
template <class T, class F>
F gated_gradient(Activation a, T& gate_at, T& up_at, F d) {
  const F gate = gate_at, up = up_at;
  if (a == Activation::geglu) {
    gate_at = T(d * up * gelu_slope(gate));
    up_at = T(d * gelu_of(gate));
    return gelu_of(gate) * up;
  }
  const F open = sigmoid(gate);
  gate_at = T(d * up * open * (1 + gate * (1 - open)));
  up_at = T(d * gate * open);
  return gate * open * up;
}

// Updated weights as they are stored, one after the other: f32 and f64 as they are, bf16 rounded at random.
template <class T>
class WeightRounding {
 public:
  explicit WeightRounding(const StochasticRounding*) {}
  T next(T weight) const { return weight; }
};

template <>
class WeightRounding<bf16> {
 public:
  explicit WeightRounding(const StochasticRounding* rounding) : rounding_(*rounding) {}

  bf16 next(float weight) {
    if (at_ == words_.size()) draw();
    return bf16::stochastic(weight, static_cast<std::uint16_t>(words_[at_++] >> 16));
  }

 private:
  // The words of the next elements of a run, as many as are drawn at once.
  void draw() {
    while (done_ == rounding_.runs[run_].count) {
      ++run_;
      done_ = 0;
    }
    const LogicalRun& run = rounding_.runs[run_];
    words_.resize(static_cast<std::size_t>(std::min<std::int64_t>(run.count - done_, 1024)));
    rounding_.random.fill_words(static_cast<std::uint64_t>(run.begin + done_), words_.size(), words_.data());
    done_ += std::ssize(words_);
    at_ = 0;
  }

  const StochasticRounding& rounding_;
  std::size_t run_ = 0;
  std::int64_t done_ = 0;  // elements of the run that are drawn
  std::vector<std::uint32_t> words_;
  std::size_t at_ = 0;
};

class ReferenceKernels final : public HostBackend {
 public:
  void matmul(const Tensor& a, Transpose ta, const Tensor& b, Transpose tb, Out c, bool accumulate) override {
    multiply({a, ta, b, tb, c, accumulate});
  }

  void grouped_matmul(std::span<const MatrixProduct> products) override {
    for (const MatrixProduct& p : products) multiply(p);
  }

  void fill(Out tx, double value) override {
    with_stored_type(tx, [&]<class T>(T) {
      const Matrix<T> x(tx);
      for (std::int64_t i = 0; i < x.rows; ++i) std::fill_n(x[i], x.cols, T(value));
    });
  }

  void copy(const Tensor& from, Out to) override {
    with_pair(from, to, []<class X, class Y>(const Matrix<X>& x, const Matrix<Y>& y) {
      for (std::int64_t i = 0; i < x.rows; ++i)
        std::transform(x[i], x[i] + x.cols, y[i], [](X value) { return Y(value); });
    });
  }

  void add(const Tensor& tx, InOut ty) override {
    with_pair(tx, ty, []<class X, class Y>(const Matrix<X>& x, const Matrix<Y>& y) {
      for (std::int64_t i = 0; i < x.rows; ++i)
        for (std::int64_t j = 0; j < x.cols; ++j) y[i][j] = Y(y[i][j] + x[i][j]);
    });
  }

  void scale(InOut tx, double factor) override {
    with_stored_type(tx, [&]<class T>(T) {
      const Matrix<T> x(tx);
      for (std::int64_t i = 0; i < x.rows; ++i)
        for (std::int64_t j = 0; j < x.cols; ++j) x[i][j] = T(x[i][j] * Wide<T>(factor));
    });
  }

  void sum_squares(const Tensor& tx, std::int64_t block, Out tsums) override {
    with_stored_type(tx, [&]<class T>(T) {
      const std::int64_t count = tx.numel();
      const T* x = tx.host<T>();
      double* sums = tsums.host<double>();
      std::fill_n(sums, tsums->numel(), 0.0);
      for (std::int64_t i = 0; i < count; ++i) sums[i / block] += double{x[i]} * double{x[i]};
    });
  }

  bool all_finite(const Tensor& tx) override {
    bool finite = true;
    with_stored_type(tx, [&]<class T>(T) {
      const Matrix<T> x(tx);
      for (std::int64_t i = 0; i < x.rows && finite; ++i)
        finite = std::all_of(x[i], x[i] + x.cols, [](Wide<T> value) { return std::isfinite(value); });
    });
    return finite;
  }

  void add_bias(const Tensor& tbias, InOut ty) override {
    with_stored_type(ty, [&]<class T>(T) {
      const Matrix<T> y(ty);
      const T* bias = tbias.host<T>();
      for (std::int64_t i = 0; i < y.rows; ++i)
        for (std::int64_t j = 0; j < y.cols; ++j) y[i][j] = T(y[i][j] + bias[j]);
    });
  }

  void residual(const Tensor& tx, const Tensor& ty, const Tensor& tbias, Out tout) override {
    with_stored_type(tout, [&]<class T>(T) {
      const Matrix<T> x(tx), y(ty), out(tout);
      const T* bias = tbias.defined() ? tbias.host<T>() : nullptr;
      for (std::int64_t i = 0; i < out.rows; ++i)
        for (std::int64_t j = 0; j < out.cols; ++j) {
          const Wide<T> sum = x[i][j] + y[i][j];
          out[i][j] = T(bias == nullptr ? sum : sum + bias[j]);
        }
    });
  }

  void bias_gradient(const Tensor& tdy, InOut tdbias) override {
    with_stored_type(tdy, [&]<class T>(T) {
      const Matrix<T> dy(tdy);
      add_column_sums(dy.rows, dy.cols, tdbias.host<Wide<T>>(),
                      [&](std::int64_t i, std::int64_t j) { return dy[i][j]; });
    });
  }

  void layer_norm(const Tensor& tx, const Tensor& w, const Tensor& b, double eps, Out y,
                  Out tstats) override {
    with_stored_type(tx, [&]<class T>(T) {
      using F = Wide<T>;
      const Matrix<T> x(tx);
      F* stats = tstats.host<F>();
      const F columns = static_cast<F>(x.cols);
      for (std::int64_t i = 0; i < x.rows; ++i) {
        F mean = 0, variance = 0;
        for (std::int64_t j = 0; j < x.cols; ++j) mean += x[i][j];
        mean /= columns;
        for (std::int64_t j = 0; j < x.cols; ++j) variance += (x[i][j] - mean) * (x[i][j] - mean);
        stats[2 * i] = mean;
        stats[2 * i + 1] = 1 / std::sqrt(variance / columns + F(eps));
      }
    });
    layer_norm_again(tx, w, b, tstats, y);
  }

  void layer_norm_again(const Tensor& tx, const Tensor& tw, const Tensor& tb, const Tensor& tstats,
                        Out ty) override {
    with_stored_type(tx, [&]<class T>(T) {
      using F = Wide<T>;
      const Matrix<T> x(tx), y(ty);
      const T *w = tw.host<T>(), *b = tb.host<T>();
      const F* stats = tstats.host<F>();
      for (std::int64_t i = 0; i < x.rows; ++i)
        for (std::int64_t j = 0; j < x.cols; ++j)
          y[i][j] = T((x[i][j] - stats[2 * i]) * stats[2 * i + 1] * w[j] + b[j]);
    });
  }

  // With n = (x - mean) rstd and g = dy w: dx = rstd (g - mean(g) - n mean(g n)).
  void layer_norm_backward_input(const Tensor& tdy, const Tensor& tx, const Tensor& tw, const Tensor& tstats,
                                 InOut tdx) override {
    with_stored_type(tx, [&]<class T>(T) {
      using F = Wide<T>;
      const Matrix<T> dy(tdy), x(tx), dx(tdx);
      const T* w = tw.host<T>();
      const F* stats = tstats.host<F>();
      const F columns = static_cast<F>(x.cols);
      for (std::int64_t i = 0; i < x.rows; ++i) {
        const F mean = stats[2 * i], rstd = stats[2 * i + 1];
        F mean_g = 0, mean_gn = 0;
        for (std::int64_t j = 0; j < x.cols; ++j) {
          mean_g += dy[i][j] * w[j];
          mean_gn += dy[i][j] * w[j] * (x[i][j] - mean) * rstd;
        }
        mean_g /= columns;
        mean_gn /= columns;
        for (std::int64_t j = 0; j < x.cols; ++j)
          dx[i][j] = T(dx[i][j] + rstd * (dy[i][j] * w[j] - mean_g - (x[i][j] - mean) * rstd * mean_gn));
      }
    });
  }

  void layer_norm_backward_weight(const Tensor& tdy, const Tensor& tx, const Tensor& tstats, InOut dw,
                                  InOut db) override {
    with_stored_type(tx, [&]<class T>(T) {
      using F = Wide<T>;
      const Matrix<T> dy(tdy), x(tx);
      const F* stats = tstats.host<F>();
      add_column_sums(x.rows, x.cols, dw.host<F>(), [&](std::int64_t i, std::int64_t j) {
        return dy[i][j] * (x[i][j] - stats[2 * i]) * stats[2 * i + 1];
      });
    });
    bias_gradient(tdy, db);
  }

  void rms_norm(const Tensor& tx, const Tensor& w, double eps, Out y, Out tstats) override {
    with_stored_type(tx, [&]<class T>(T) {
      using F = Wide<T>;
      const Matrix<T> x(tx);
      F* rstd = tstats.host<F>();
      for (std::int64_t i = 0; i < x.rows; ++i) {
        F squares = 0;
        for (std::int64_t j = 0; j < x.cols; ++j) squares += x[i][j] * x[i][j];
        rstd[i] = 1 / std::sqrt(squares / static_cast<F>(x.cols) + F(eps));
      }
    });
    rms_norm_again(tx, w, tstats, y);
  }

  void rms_norm_again(const Tensor& tx, const Tensor& tw, const Tensor& tstats, Out ty) override {
    with_stored_type(tx, [&]<class T>(T) {
      using F = Wide<T>;
      const Matrix<T> x(tx), y(ty);
      const T* w = tw.host<T>();
      const F* rstd = tstats.host<F>();
      for (std::int64_t i = 0; i < x.rows; ++i)
        for (std::int64_t j = 0; j < x.cols; ++j) y[i][j] = T(x[i][j] * rstd[i] * w[j]);
    });
  }

  // With n = x rstd and g = dy w: dx = rstd (g - n mean(g n)).
  void rms_norm_backward_input(const Tensor& tdy, const Tensor& tx, const Tensor& tw, const Tensor& tstats,
                               InOut tdx) override {
    with_stored_type(tx, [&]<class T>(T) {
      using F = Wide<T>;
      const Matrix<T> dy(tdy), x(tx), dx(tdx);
      const T* w = tw.host<T>();
      const F* rstd = tstats.host<F>();
      for (std::int64_t i = 0; i < x.rows; ++i) {
        F mean_gn = 0;
        for (std::int64_t j = 0; j < x.cols; ++j) mean_gn += dy[i][j] * w[j] * x[i][j] * rstd[i];
        mean_gn /= static_cast<F>(x.cols);
        for (std::int64_t j = 0; j < x.cols; ++j)
          dx[i][j] = T(dx[i][j] + rstd[i] * (dy[i][j] * w[j] - x[i][j] * rstd[i] * mean_gn));
      }
    });
  }

  void rms_norm_backward_weight(const Tensor& tdy, const Tensor& tx, const Tensor& tstats,
                                InOut dw) override {
    with_stored_type(tx, [&]<class T>(T) {
      using F = Wide<T>;
      const Matrix<T> dy(tdy), x(tx);
      const F* rstd = tstats.host<F>();
      add_column_sums(x.rows, x.cols, dw.host<F>(),
                      [&](std::int64_t i, std::int64_t j) { return dy[i][j] * x[i][j] * rstd[i]; });
    });
  }

  void activate(Activation a, InOut th, const Tensor& bias, Out ty) override {
    if (bias.defined()) add_bias(bias, th);
    with_stored_type(th, [&]<class T>(T) {
      using F = Wide<T>;
      const Matrix<T> h(th), y(ty);
      for (std::int64_t i = 0; i < h.rows; ++i)
        for (std::int64_t j = 0; j < h.cols; ++j) y[i][j] = T(activation_of<F>(a, h[i][j]));
    });
  }

  void activate_backward(Activation a, InOut th, InOut tdy) override {
    with_stored_type(th, [&]<class T>(T) {
      using F = Wide<T>;
      const Matrix<T> h(th), dy(tdy);
      for (std::int64_t i = 0; i < h.rows; ++i)
        for (std::int64_t j = 0; j < h.cols; ++j) {
          dy[i][j] = T(dy[i][j] * activation_slope<F>(a, h[i][j]));
          h[i][j] = T(activation_of<F>(a, h[i][j]));
        }
    });
  }

  void gated(Activation a, const Tensor& gate_up, Out ty) override {
    with_stored_type(ty, [&]<class T>(T) {
      using F = Wide<T>;
      const Matrix<T> x(gate_up), y(ty);
      for (std::int64_t i = 0; i < y.rows; ++i)
        for (std::int64_t j = 0; j < y.cols; ++j) y[i][j] = T(gate_of<F>(a, x[i][j]) * x[i][y.cols + j]);
    });
  }

  void gated_backward(Activation a, InOut gate_up, InOut tdy) override {
    with_stored_type(tdy, [&]<class T>(T) {
      using F = Wide<T>;
      const Matrix<T> x(gate_up), dy(tdy);
      for (std::int64_t i = 0; i < dy.rows; ++i)
        for (std::int64_t j = 0; j < dy.cols; ++j) {
          const F y = gated_gradient(a, x[i][j], x[i][dy.cols + j], F(dy[i][j]));
          dy[i][j] = T(y);
        }
    });
  }

  void weighted_swiglu_backward(InOut gate_up, InOut tdy, const Tensor& tweights, Out tdweights) override {
    with_stored_type(tdy, [&]<class T>(T) {
      using F = Wide<T>;
      const Matrix<T> x(gate_up), dy(tdy);
      const F* weights = tweights.host<F>();
      F* dweights = tdweights.host<F>();
      for (std::int64_t i = 0; i < dy.rows; ++i) {
        dweights[i] = 0;
        for (std::int64_t j = 0; j < dy.cols; ++j) {
          const F d = dy[i][j],
                  y = gated_gradient(Activation::swiglu, x[i][j], x[i][dy.cols + j], d * weights[i]);
          dweights[i] += d * y;
          dy[i][j] = T(y * weights[i]);
        }
      }
    });
  }

  void combine_rows(const Tensor& tx, const Tensor& tplaces, const Tensor& tweights, Out ty) override {
    with_stored_type(ty, [&]<class T>(T) {
      using F = Wide<T>;
      const Matrix<T> x(tx), y(ty);
      const std::int64_t k = y.rows == 0 ? 0 : tplaces.numel() / y.rows;
      const std::int32_t* places = tplaces.host<std::int32_t>();
      const F* weights = tweights.defined() ? tweights.host<F>() : nullptr;
      std::vector<F> sum(static_cast<std::size_t>(y.cols));
      for (std::int64_t i = 0; i < y.rows; ++i) {
        std::fill(sum.begin(), sum.end(), F(0));
        for (std::int64_t j = i * k; j < (i + 1) * k; ++j) {
          if (places[j] < 0) continue;
          check(places[j] < x.rows, "combine_rows: a place lies after the last row");
          const F weight = weights == nullptr ? F(1) : weights[j];
          for (std::int64_t c = 0; c < y.cols; ++c)
            sum[static_cast<std::size_t>(c)] += weight * x[places[j]][c];
        }
        std::transform(sum.begin(), sum.end(), y[i], [](F value) { return T(value); });
      }
    });
  }

  // Angles are made in double: in f32 the angle of a late position is off by more than the arithmetic that
  // follows.
  void rope(InOut tx, std::int64_t head_dim, const Tensor& tpositions, const RopeTurns& turns,
            bool inverse) override {
    with_stored_type(tx, [&]<class T>(T) {
      using F = Wide<T>;
      const Matrix<T> x(tx);
      const std::int32_t* positions = tpositions.host<std::int32_t>();
      const std::int64_t half = std::ssize(turns.frequencies);
      for (std::int64_t pair = 0; pair < half; ++pair) {
        const double frequency = turns.frequencies[static_cast<std::size_t>(pair)];
        for (std::int64_t r = 0; r < x.rows; ++r) {
          const double angle = static_cast<double>(positions[r]) * frequency;
          const F c = F(turns.factor * std::cos(angle)),
                  s = F(turns.factor * (inverse ? -std::sin(angle) : std::sin(angle)));
          for (std::int64_t j = pair; j < x.cols; j += head_dim) {
            const F low = x[r][j], high = x[r][j + half];
            x[r][j] = T(low * c - high * s);
            x[r][j + half] = T(high * c + low * s);
          }
        }
      }
    });
  }

  void attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape, Out out,
                 Out lse) override {
    with_stored_type(out, [&]<class T>(T) { reference_attention<T>(q, k, v, shape, out, lse); });
  }

  void attention_delta(const Tensor& out, const Tensor& dout, const AttentionShape& shape,
                       Out delta) override {
    with_stored_type(out, [&]<class T>(T) { reference_attention_delta<T>(out, dout, shape, delta); });
  }

  void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout,
                          const Tensor& lse, const Tensor& delta, const AttentionShape& shape, Out dq, Out dk,
                          Out dv) override {
    with_stored_type(dout, [&]<class T>(T) {
      reference_attention_backward<T>(q, k, v, dout, lse, delta, shape, dq, dk, dv);
    });
  }

  void embedding(const Tensor& tids, const Tensor& ttable, std::int64_t first_id, Out ty) override {
    with_stored_type(ty, [&]<class T>(T) {
      const Matrix<T> table(ttable), y(ty);
      const std::int32_t* ids = tids.host<std::int32_t>();
      for (std::int64_t i = 0; i < y.rows; ++i) {
        const std::int64_t row = local_column(ids[i], first_id, table.rows);
        if (row >= 0)
          std::copy_n(table[row], y.cols, y[i]);
        else
          std::fill_n(y[i], y.cols, T{});
      }
    });
  }

  void embedding_backward(const Tensor& tids, const Tensor& tdy, std::int64_t first_id,
                          InOut tdtable) override {
    with_stored_type(tdy, [&]<class T>(T) {
      using F = Wide<T>;
      const Matrix<T> dy(tdy);
      const Matrix<F> dtable(tdtable);
      const std::int32_t* ids = tids.host<std::int32_t>();
      for (std::int64_t i = 0; i < dy.rows; ++i) {
        const std::int64_t row = local_column(ids[i], first_id, dtable.rows);
        if (row < 0) continue;
        for (std::int64_t j = 0; j < dy.cols; ++j) dtable[row][j] += dy[i][j];
      }
    });
  }

  void soft_cap(InOut tx, double cap) override {
    with_float_type(tx, [&]<class F>(F) {
      const Matrix<F> x(tx);
      for (std::int64_t i = 0; i < x.rows; ++i)
        for (std::int64_t j = 0; j < x.cols; ++j) x[i][j] = F(cap) * std::tanh(x[i][j] / F(cap));
    });
  }

  void row_max(const Tensor& tlogits, Out tmax) override {
    with_float_type(tlogits, [&]<class F>(F) {
      const Matrix<F> logits(tlogits);
      F* max = tmax.host<F>();
      for (std::int64_t i = 0; i < logits.rows; ++i) {
        max[i] = -std::numeric_limits<F>::infinity();
        for (std::int64_t j = 0; j < logits.cols; ++j) max[i] = std::max(max[i], logits[i][j]);
      }
    });
  }

  void exp_sum(InOut tlogits, const Tensor& tmax, const Tensor& ttargets, std::int64_t first_id, Out tsum,
               Out ttarget) override {
    with_float_type(tlogits, [&]<class F>(F) {
      const Matrix<F> logits(tlogits);
      const F* max = tmax.host<F>();
      const std::int32_t* targets = ttargets.host<std::int32_t>();
      F *sum = tsum.host<F>(), *target = ttarget.host<F>();
      for (std::int64_t i = 0; i < logits.rows; ++i) {
        const std::int64_t column = local_column(targets[i], first_id, logits.cols);
        target[i] = column >= 0 ? logits[i][column] - max[i] : F(0);
        sum[i] = 0;
        for (std::int64_t j = 0; j < logits.cols; ++j)
          sum[i] += logits[i][j] = std::exp(logits[i][j] - max[i]);
      }
    });
  }

  void cross_entropy_backward(const Tensor& tp, const Tensor& tsum, const Tensor& ttargets,
                              std::int64_t first_id, double loss_scale, Out tdlogits,
                              const LogitsCap& cap) override {
    with_pair(tp, tdlogits, [&]<class F, class T>(const Matrix<F>& p, const Matrix<T>& dlogits) {
      if constexpr (std::is_same_v<F, Wide<F>>) {
        const F* sum = tsum.host<F>();
        const std::int32_t* targets = ttargets.host<std::int32_t>();
        for (std::int64_t i = 0; i < p.rows; ++i) {
          if (targets[i] < 0) {
            std::fill_n(dlogits[i], p.cols, T{});
            continue;
          }
          const std::int64_t column = local_column(targets[i], first_id, p.cols);
          for (std::int64_t j = 0; j < p.cols; ++j) {
            F slope = 1;  // of the cap at the logit that p is made of
            if (cap.cap > 0) {
              const F bent = (cap.max.host<F>()[i] + std::log(p[i][j])) / F(cap.cap);
              slope -= bent * bent;
            }
            dlogits[i][j] = T(F(loss_scale) * (p[i][j] / sum[i] - (j == column ? F(1) : F(0))) * slope);
          }
        }
      }
    });
  }

  void adamw(InOut tp, const Tensor& tg, InOut tm, InOut tv, const AdamWStep& step, Out trounded) override {
    with_stored_type(tp, [&]<class T>(T) {
      using F = Wide<T>;
      const std::int64_t count = tp->numel();
      T *p = tp.host<T>(), *m = tm.host<T>(), *v = tv.host<T>();
      const F* gradient = tg.host<F>();
      bf16* const rounded = trounded->defined() ? trounded.host<bf16>() : nullptr;
      const double t = static_cast<double>(step.step);
      const F beta1 = F(step.beta1), rest1 = F(1 - step.beta1), correction1 = F(1 - std::pow(step.beta1, t));
      const F beta2 = F(step.beta2), rest2 = F(1 - step.beta2), correction2 = F(1 - std::pow(step.beta2, t));
      const F scale = F(step.gradient_scale), lr = F(step.lr), eps = F(step.eps),
              keep = F(1 - step.lr * step.weight_decay);
      WeightRounding<T> stored(step.rounding);
      for (std::int64_t i = 0; i < count; ++i) {
        const F g = scale * gradient[i];
        const F first = beta1 * m[i] + rest1 * g, second = beta2 * v[i] + rest2 * g * g;
        m[i] = T(first);
        v[i] = T(second);
        p[i] =
            stored.next(keep * p[i] - lr * (first / correction1) / (std::sqrt(second / correction2) + eps));
        if (rounded != nullptr) rounded[i] = bf16(p[i]);
      }
    });
  }

 private:
  void multiply(const MatrixProduct& p) {
    with_pair(p.a, p.b, [&]<class A, class B>(const Matrix<A>& left, const Matrix<B>& right) {
      with_stored_type(p.c, [&]<class C>(C) {
        using F = Wide<C>;
        if constexpr (std::is_same_v<Wide<A>, F>)
          matmul_of<F>(left, p.ta == Transpose::yes, right, p.tb == Transpose::yes, Matrix<C>(p.c),
                       p.accumulate, p.blocks);
      });
    });
  }
};

}  // namespace

std::unique_ptr<Kernels> make_reference_kernels() {
  return std::make_unique<Kernels>(std::make_shared<ReferenceKernels>());
}

}  // namespace echelon

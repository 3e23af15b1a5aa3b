// The fast kernels of one rank: oneDNN products, SIMD passes, OpenMP threads; f32 only. What each element of
// a result is made of, and in which order it is added, depends on the shapes alone and never on the number of
// threads.
#include <omp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <exception>
#include <latch>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/split.h"
#include "base/start_thread.h"
#include "tensor/attention_cpu.h"
#include "tensor/kernels_host.h"
#include "tensor/local_column.h"
#include "tensor/matmul_onednn.h"
#include "tensor/reference_view.h"
#include "tensor/rope_angles.h"
#include "tensor/simd.h"
#include "tensor/thread_team.h"

namespace echelon {
namespace {

using Rows = Matrix<float>;

// Column sums: groups of rows summed side by side, and columns of one strip.
constexpr std::int64_t most_groups = 32, strip = 2048;
constexpr std::int64_t column_sums_size = most_groups * 2 * strip;

bool contiguous(const Rows& x) { return x.stride == x.cols || x.rows <= 1; }

// OpenMP ends the process where it gets no thread. So as many are started and ended first, and then its own,
// which stay: one rank at a time, or two would find the same last ones free.
void start_team(int threads) {
  static std::mutex one_at_a_time;
  if (threads == 1) return;
  const std::lock_guard lock(one_at_a_time);
  std::latch all_there(1);
  std::vector<std::thread> tried;
  tried.reserve(static_cast<std::size_t>(threads - 1));
  std::exception_ptr error;
  try {
    for (int i = 1; i < threads; ++i)
      tried.push_back(start_thread(fmt::format("{} compute threads a rank (--threads)", threads),
                                   [&all_there] { all_there.wait(); }));
  } catch (const RunError&) {
    error = std::current_exception();
  }
  all_there.count_down();
  for (std::thread& thread : tried) thread.join();
  if (error) std::rethrow_exception(error);
  std::atomic<int> started{0};
#pragma omp parallel num_threads(threads)
  ++started;
  check(started == threads, "OpenMP started another number of threads");
}

Product product_of(const MatrixProduct& p) {
  const Rows a(p.a), b(p.b), c(p.c);
  const bool across_a = p.ta == Transpose::yes;
  const std::int64_t k = across_a ? a.rows : a.cols;
  return {.ta = p.ta,
          .tb = p.tb,
          .m = c.rows,
          .n = c.cols,
          .k = k,
          .a = a.data,
          .a_stride = a.stride,
          .b = b.data,
          .b_stride = b.stride,
          .beta = p.accumulate ? 1.0f : 0.0f,
          .c = c.data,
          .c_stride = c.stride};
}

class CpuKernels final : public HostBackend {
 public:
  CpuKernels(Arena& arena, int threads)
      : team_(threads),
        tiles_(arena, MemoryCategory::other, DType::f32, {threads * attention_scratch_per_thread()}),
        column_sums_(arena, MemoryCategory::other, DType::f32, {column_sums_size}) {
    check(threads >= 1, "CPU kernels need at least one thread");
    // Every region names its number of threads; oneDNN called outside of one must not open its own.
    omp_set_num_threads(1);
    prepare_products();
    start_team(threads);
  }

  void matmul(const Tensor& ta, Transpose turn_a, const Tensor& tb, Transpose turn_b, Out tc,
              bool accumulate) override {
    multiply(product_of({ta, turn_a, tb, turn_b, tc, accumulate}), team_.threads());
  }

  void grouped_matmul(std::span<const MatrixProduct> products) override {
    std::vector<Product> list;
    for (const MatrixProduct& p : products) list.push_back(product_of(p));
    multiply(list, team_.threads());
  }

  void fill(Out tx, double value) override {
    const Rows x(tx);
    team_.each_span(x, contiguous(x), [&](float* at, std::int64_t, std::int64_t, std::int64_t n) {
      std::fill_n(at, n, static_cast<float>(value));
    });
  }

  void copy(const Tensor& from, Out to) override {
    const Rows x(from), y(to);
    team_.each_span(x, contiguous(x) && contiguous(y),
                    [&](float* at, std::int64_t row, std::int64_t col, std::int64_t n) {
                      std::copy_n(at, n, y[row] + col);
                    });
  }

  void add(const Tensor& tx, InOut ty) override {
    const Rows x(tx), y(ty);
    team_.each_span(x, contiguous(x) && contiguous(y),
                    [&](float* at, std::int64_t row, std::int64_t col, std::int64_t n) {
                      pass_.add(at, y[row] + col, n);
                    });
  }

  void scale(InOut tx, double factor) override {
    const Rows x(tx);
    team_.each_span(x, contiguous(x), [&](float* at, std::int64_t, std::int64_t, std::int64_t n) {
      pass_.scale(at, static_cast<float>(factor), n);
    });
  }

  void sum_squares(const Tensor& tx, std::int64_t block, Out tsums) override {
    const std::int64_t count = tx.numel(), blocks = (count + block - 1) / block;
    const float* x = tx.host<float>();
    double* sums = tsums.host<double>();
    team_.each_row(blocks, block, [&](std::int64_t i) {
      sums[i] = pass_.sum_squares(x + i * block, std::min(block, count - i * block));
    });
  }

  bool all_finite(const Tensor& tx) override {
    const Rows x(tx);
    std::atomic<bool> finite = true;
    team_.each_span(x, contiguous(x), [&](float* at, std::int64_t, std::int64_t, std::int64_t n) {
      if (!pass_.all_finite(at, n)) finite.store(false, std::memory_order_relaxed);
    });
    return finite;
  }

  void add_bias(const Tensor& tbias, InOut ty) override {
    const Rows y(ty);
    const float* bias = tbias.host<float>();
    team_.each_row(y.rows, y.cols, [&](std::int64_t i) { pass_.add(bias, y[i], y.cols); });
  }

  void residual(const Tensor& tx, const Tensor& ty, const Tensor& tbias, Out tout) override {
    const Rows x(tx), y(ty), out(tout);
    const float* bias = tbias.defined() ? tbias.host<float>() : nullptr;
    team_.each_row(out.rows, out.cols,
                   [&](std::int64_t i) { pass_.residual(x[i], y[i], bias, out[i], out.cols); });
  }

  void bias_gradient(const Tensor& tdy, InOut tdbias) override {
    const Rows dy(tdy);
    float* total = tdbias.host<float>();
    add_column_sums(dy.rows, dy.cols, total, nullptr,
                    [&](Range part, std::int64_t at, std::int64_t n, float* sum, float*) {
                      pass_.column_sums(dy[part.begin] + at, dy.stride, part.size(), sum, n);
                    });
  }

  void layer_norm(const Tensor& tx, const Tensor& tw, const Tensor& tb, double eps, Out ty,
                  Out tstats) override {
    const Rows x(tx), y(ty);
    const float *w = tw.host<float>(), *b = tb.host<float>();
    float* stats = tstats.host<float>();
    team_.each_row(x.rows, x.cols, [&](std::int64_t i) {
      pass_.layer_norm(x[i], w, b, static_cast<float>(eps), y[i], stats + 2 * i, x.cols);
    });
  }

  void layer_norm_again(const Tensor& tx, const Tensor& tw, const Tensor& tb, const Tensor& tstats,
                        Out ty) override {
    const Rows x(tx), y(ty);
    const float *w = tw.host<float>(), *b = tb.host<float>(), *stats = tstats.host<float>();
    team_.each_row(x.rows, x.cols,
                   [&](std::int64_t i) { pass_.layer_norm_again(x[i], w, b, stats + 2 * i, y[i], x.cols); });
  }

  void layer_norm_backward_input(const Tensor& tdy, const Tensor& tx, const Tensor& tw, const Tensor& tstats,
                                 InOut tdx) override {
    const Rows dy(tdy), x(tx), dx(tdx);
    const float *w = tw.host<float>(), *stats = tstats.host<float>();
    team_.each_row(x.rows, x.cols, [&](std::int64_t i) {
      pass_.layer_norm_dx(dy[i], x[i], w, stats + 2 * i, dx[i], x.cols);
    });
  }

  void layer_norm_backward_weight(const Tensor& tdy, const Tensor& tx, const Tensor& tstats, InOut tdw,
                                  InOut tdb) override {
    const Rows dy(tdy), x(tx);
    const float* stats = tstats.host<float>();
    add_column_sums(x.rows, x.cols, tdw.host<float>(), tdb.host<float>(),
                    [&](Range part, std::int64_t at, std::int64_t n, float* dw, float* db) {
                      pass_.layer_norm_dw(dy[part.begin] + at, dy.stride, x[part.begin] + at, x.stride,
                                          stats + 2 * part.begin, part.size(), dw, db, n);
                    });
  }

  void rms_norm(const Tensor& tx, const Tensor& tw, double eps, Out ty, Out tstats) override {
    const Rows x(tx), y(ty);
    const float* w = tw.host<float>();
    float* stats = tstats.host<float>();
    team_.each_row(x.rows, x.cols, [&](std::int64_t i) {
      pass_.rms_norm(x[i], w, static_cast<float>(eps), y[i], stats + i, x.cols);
    });
  }

  void rms_norm_again(const Tensor& tx, const Tensor& tw, const Tensor& tstats, Out ty) override {
    const Rows x(tx), y(ty);
    const float *w = tw.host<float>(), *stats = tstats.host<float>();
    team_.each_row(x.rows, x.cols,
                   [&](std::int64_t i) { pass_.rms_norm_again(x[i], w, stats + i, y[i], x.cols); });
  }

  void rms_norm_backward_input(const Tensor& tdy, const Tensor& tx, const Tensor& tw, const Tensor& tstats,
                               InOut tdx) override {
    const Rows dy(tdy), x(tx), dx(tdx);
    const float *w = tw.host<float>(), *stats = tstats.host<float>();
    team_.each_row(x.rows, x.cols,
                   [&](std::int64_t i) { pass_.rms_norm_dx(dy[i], x[i], w, stats + i, dx[i], x.cols); });
  }

  void rms_norm_backward_weight(const Tensor& tdy, const Tensor& tx, const Tensor& tstats,
                                InOut tdw) override {
    const Rows dy(tdy), x(tx);
    const float* stats = tstats.host<float>();
    add_column_sums(x.rows, x.cols, tdw.host<float>(), nullptr,
                    [&](Range part, std::int64_t at, std::int64_t n, float* dw, float*) {
                      pass_.rms_norm_dw(dy[part.begin] + at, dy.stride, x[part.begin] + at, x.stride,
                                        stats + part.begin, part.size(), dw, n);
                    });
  }

  void activate(Activation a, InOut th, const Tensor& tbias, Out ty) override {
    const Rows h(th), y(ty);
    const float* bias = tbias.defined() ? tbias.host<float>() : nullptr;
    const auto pass = pass_.activation(a).forward;
    team_.each_row(h.rows, h.cols, [&](std::int64_t i) { pass(h[i], bias, y[i], h.cols); });
  }

  void activate_backward(Activation a, InOut th, InOut tdy) override {
    const Rows h(th), dy(tdy);
    const auto pass = pass_.activation(a).backward;
    team_.each_row(h.rows, h.cols, [&](std::int64_t i) { pass(h[i], dy[i], h.cols); });
  }

  void swiglu(const Tensor& gate_up, Out ty) override {
    const Rows x(gate_up), y(ty);
    team_.each_row(x.rows, x.cols, [&](std::int64_t i) { pass_.swiglu(x[i], x[i] + y.cols, y[i], y.cols); });
  }

  void swiglu_backward(InOut gate_up, InOut tdy) override {
    const Rows x(gate_up), dy(tdy);
    team_.each_row(x.rows, x.cols,
                   [&](std::int64_t i) { pass_.swiglu_backward(x[i], x[i] + dy.cols, dy[i], dy.cols); });
  }

  void weighted_swiglu_backward(InOut gate_up, InOut tdy, const Tensor& tweights, Out tdweights) override {
    const Rows x(gate_up), dy(tdy);
    const float* weights = tweights.host<float>();
    float* dweights = tdweights.host<float>();
    team_.each_row(x.rows, x.cols, [&](std::int64_t i) {
      constexpr std::int64_t piece = 256;  // of the incoming gradient, which is overwritten
      std::array<float, piece> incoming;
      float *gate = x[i], *up = x[i] + dy.cols;
      dweights[i] = 0;
      for (std::int64_t at = 0; at < dy.cols; at += piece) {
        const std::int64_t n = std::min(piece, dy.cols - at);
        std::copy_n(dy[i] + at, n, incoming.data());
        pass_.scale(dy[i] + at, weights[i], n);
        pass_.swiglu_backward(gate + at, up + at, dy[i] + at, n);
        dweights[i] += pass_.dot(incoming.data(), dy[i] + at, n);
        pass_.scale(dy[i] + at, weights[i], n);
      }
    });
  }

  void combine_rows(const Tensor& tx, const Tensor& tplaces, const Tensor& tweights, Out ty) override {
    const Rows x(tx), y(ty);
    const std::int64_t k = y.rows == 0 ? 0 : tplaces.numel() / y.rows;
    const std::int32_t* places = tplaces.host<std::int32_t>();
    const float* weights = tweights.defined() ? tweights.host<float>() : nullptr;
    check(std::all_of(places, places + y.rows * k, [&](std::int32_t p) { return p < x.rows; }),
          "combine_rows: a place lies after the last row");
    team_.each_row(y.rows, (k + 1) * y.cols, [&](std::int64_t i) {
      std::fill_n(y[i], y.cols, 0.0f);
      for (std::int64_t j = i * k; j < (i + 1) * k; ++j)
        if (places[j] >= 0)
          pass_.add_scaled(x[places[j]], weights == nullptr ? 1.0f : weights[j], y[i], y.cols);
    });
  }

  void rope(InOut tx, std::int64_t head_dim, const Tensor& tpositions, double theta, bool inverse) override {
    const Rows x(tx);
    const std::int32_t* positions = tpositions.host<std::int32_t>();
    const std::int64_t half = head_dim / 2;
    constexpr std::int64_t block = 64, width = RopeAngles::most_pairs;
    const std::int64_t blocks = (x.rows + block - 1) / block;
    team_.each_row(blocks * ((half + width - 1) / width), block * x.cols, [&](std::int64_t part) {
      const std::int64_t first_pair = part / blocks * width, pairs = std::min(width, half - first_pair);
      const std::int64_t begin = part % blocks * block, end = std::min(begin + block, x.rows);
      RopeAngles angles(theta, head_dim, first_pair, pairs);
      for (std::int64_t i = begin; i < end; ++i) {
        angles.move_to(positions[i]);
        for (float* head = x[i] + first_pair; head < x[i] + x.cols; head += head_dim)
          pass_.rotate(head, head + half, angles.cosine(), angles.sine(), inverse ? -1.0f : 1.0f, pairs);
      }
    });
  }

  void attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape, Out out,
                 Out lse) override {
    attention_forward(q, k, v, shape, out, lse, tiles_, team_.threads());
  }

  void attention_delta(const Tensor& tout, const Tensor& tdout, const AttentionShape& s,
                       Out tdelta) override {
    const Rows out(tout), dout(tdout);
    float* delta = tdelta.host<float>();
    team_.each_row(out.rows, out.cols, [&](std::int64_t row) {
      float* first = delta + row / s.q_len * s.num_heads * s.q_len + row % s.q_len;
      for (std::int64_t head = 0; head < s.num_heads; ++head)
        first[head * s.q_len] =
            pass_.dot(out[row] + head * s.head_dim, dout[row] + head * s.head_dim, s.head_dim);
    });
  }

  void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout,
                          const Tensor& lse, const Tensor& delta, const AttentionShape& shape, Out dq, Out dk,
                          Out dv) override {
    echelon::attention_backward(q, k, v, dout, lse, delta, shape, dq, dk, dv, tiles_, team_.threads());
  }

  void embedding(const Tensor& tids, const Tensor& ttable, std::int64_t first_id, Out ty) override {
    const Rows table(ttable), y(ty);
    const std::int32_t* ids = tids.host<std::int32_t>();
    team_.each_row(y.rows, y.cols, [&](std::int64_t i) {
      const std::int64_t row = local_column(ids[i], first_id, table.rows);
      if (row >= 0)
        std::copy_n(table[row], y.cols, y[i]);
      else
        std::fill_n(y[i], y.cols, 0.0f);
    });
  }

  void embedding_backward(const Tensor& tids, const Tensor& tdy, std::int64_t first_id,
                          InOut tdtable) override {
    const Rows dy(tdy), dtable(tdtable);
    const std::int32_t* ids = tids.host<std::int32_t>();
    // Each thread takes a range of columns, so that the rows of an id are added in order.
    constexpr std::int64_t width = 64;
    team_.each_row((dy.cols + width - 1) / width, dy.rows * width, [&](std::int64_t block) {
      const std::int64_t begin = block * width, count = std::min(width, dy.cols - begin);
      for (std::int64_t i = 0; i < dy.rows; ++i) {
        const std::int64_t row = local_column(ids[i], first_id, dtable.rows);
        if (row >= 0) pass_.add(dy[i] + begin, dtable[row] + begin, count);
      }
    });
  }

  void row_max(const Tensor& tlogits, Out tmax) override {
    const Rows logits(tlogits);
    float* max = tmax.host<float>();
    team_.each_row(logits.rows, logits.cols,
                   [&](std::int64_t i) { max[i] = pass_.max(logits[i], logits.cols); });
  }

  void exp_sum(InOut tlogits, const Tensor& tmax, const Tensor& ttargets, std::int64_t first_id, Out tsum,
               Out ttarget) override {
    const Rows logits(tlogits);
    const float* max = tmax.host<float>();
    const std::int32_t* targets = ttargets.host<std::int32_t>();
    float *sum = tsum.host<float>(), *target = ttarget.host<float>();
    team_.each_row(logits.rows, logits.cols, [&](std::int64_t i) {
      const std::int64_t column = local_column(targets[i], first_id, logits.cols);
      target[i] = column >= 0 ? logits[i][column] - max[i] : 0.0f;
      sum[i] = pass_.exp_sum(logits[i], max[i], logits.cols);
    });
  }

  void cross_entropy_backward(const Tensor& tp, const Tensor& tsum, const Tensor& ttargets,
                              std::int64_t first_id, double loss_scale, Out tdlogits) override {
    const Rows p(tp), dlogits(tdlogits);
    const float* sum = tsum.host<float>();
    const std::int32_t* targets = ttargets.host<std::int32_t>();
    const float weight = static_cast<float>(loss_scale);
    team_.each_row(p.rows, p.cols, [&](std::int64_t i) {
      if (targets[i] < 0) {
        std::fill_n(dlogits[i], p.cols, 0.0f);
        return;
      }
      const std::int64_t column = local_column(targets[i], first_id, p.cols);
      const float at_target = column >= 0 ? weight * (p[i][column] / sum[i] - 1.0f) : 0.0f;
      if (dlogits[i] != p[i]) std::copy_n(p[i], p.cols, dlogits[i]);
      pass_.scale(dlogits[i], weight / sum[i], p.cols);
      if (column >= 0) dlogits[i][column] = at_target;
    });
  }

  void adamw(InOut tp, const Tensor& tg, InOut tm, InOut tv, const AdamWStep& step, Out rounded) override {
    check(!rounded->defined(), "the CPU kernels make no bf16 weights");
    const Rows p(tp);
    const float* g = tg.host<float>();
    float *m = tm.host<float>(), *v = tv.host<float>();
    const double t = static_cast<double>(step.step);
    const auto f32 = [](double x) { return static_cast<float>(x); };
    const AdamWFactors factors{.beta1 = f32(step.beta1),
                               .one_minus_beta1 = f32(1 - step.beta1),
                               .beta2 = f32(step.beta2),
                               .one_minus_beta2 = f32(1 - step.beta2),
                               .gradient_scale = f32(step.gradient_scale),
                               .decay = f32(1 - step.lr * step.weight_decay),
                               .rate = f32(step.lr / (1 - std::pow(step.beta1, t))),
                               .root_scale = f32(1 / std::sqrt(1 - std::pow(step.beta2, t))),
                               .eps = f32(step.eps)};
    team_.each_span(p, true, [&](float* at, std::int64_t, std::int64_t first, std::int64_t n) {
      pass_.adamw(at, g + first, m + first, v + first, factors, n);
    });
  }

 private:
  // first (cols) += column sums made by add_rows, second likewise when not null. Groups of rows are summed
  // side by side and then added in order; there are as many groups as the rows ask for, whatever the number
  // of threads.
  template <class AddRows>  // add_rows(rows, first column, columns, sum_first, sum_second)
  void add_column_sums(std::int64_t rows, std::int64_t cols, float* first, float* second,
                       const AddRows& add_rows) {
    const std::int64_t groups = std::clamp<std::int64_t>(rows / 64, 1, most_groups);
    float* sums = column_sums_.host<float>();
    for (std::int64_t begin = 0; begin < cols; begin += strip) {
      const std::int64_t count = std::min(strip, cols - begin), width = second == nullptr ? count : 2 * count;
      team_.each_row(groups, rows / groups * count, [&](std::int64_t g) {
        float* sum = sums + g * width;
        std::fill_n(sum, width, 0.0f);
        add_rows(split_range(rows, groups, g), begin, count, sum, sum + width - count);
      });
      for (std::int64_t g = 1; g < groups; ++g) pass_.add(sums + g * width, sums, width);
      pass_.add(sums, first + begin, count);
      if (second != nullptr) pass_.add(sums + count, second + begin, count);
    }
  }

  const Simd& pass_ = simd();
  const ThreadTeam team_;
  // Scratch: there from the start, so that no step holds less than another.
  const Tensor tiles_, column_sums_;
};

}  // namespace

std::unique_ptr<Kernels> make_cpu_kernels(Arena& arena, int threads) {
  return std::make_unique<Kernels>(std::make_shared<CpuKernels>(arena, threads));
}

bool has_cpu_kernels() { return true; }

std::int64_t cpu_kernels_scratch_bytes(int threads) {
  return 4 * (threads * attention_scratch_per_thread() + column_sums_size);
}

}  // namespace echelon

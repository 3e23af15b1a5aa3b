// The kernels of a device against the reference kernels on the same numbers: all but attention and products.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/philox.h"
#include "base/split_weight.h"
#include "device_kernel_runs.h"
#include "spec/token_router.h"
#include "tensor/host.h"
#include "tensor/kernels.h"
#include "tensor/rows/columns.h"
#include "tensor/split_weights.h"

namespace echelon::device_kernels_test {
namespace {

class DeviceKernels : public checks::OfDeviceKernels {};

TEST_P(DeviceKernels, Elements) {
  for (bool aligned : {false, true}) {
    is_aligned = aligned;
    for (const auto& [rows, cols] : with_long_rows)
      for (DType tx : stored)
        for (DType ty : stored) {
          if (wide(tx) != wide(ty)) continue;
          const Operand x = random(tx, rows, cols), y = random(ty, rows, cols);
          run([&](Kernels& on, auto of) { on.add(of(x), of(y)); });
          expect_close(y, 1, "add");
          run([&](Kernels& on, auto of) { on.copy(of(x), of(y)); });
          expect_close(y, 1, "copy", 0);
          run([&](Kernels& on, auto of) { on.scale(of(y), 1.0 / 3); });
          expect_close(y, 1, "scale");
          run([&](Kernels& on, auto of) { on.fill(of(y), 1.0 / 3); });
          expect_close(y, 1, "fill", 0);
        }
    for (const auto& [rows, cols] : with_long_rows)
      for (DType t : stored) {
        const Operand x = random(t, rows, cols), y = random(t, rows, cols), out = random(t, rows, cols);
        const Operand bias = vector(t, cols), dbias = vector(wide(t), cols);
        run([&](Kernels& on, auto of) { on.add_bias(of(bias), of(y)); });
        expect_close(y, 1, "add_bias");
        run([&](Kernels& on, auto of) { on.residual(of(x), of(y), of(bias), of(out)); });
        expect_close(out, 2, "residual");
        run([&](Kernels& on, auto of) { on.residual(of(x), of(y), Tensor(), of(out)); });
        expect_close(out, 1, "residual");
        run([&](Kernels& on, auto of) { on.bias_gradient(of(x), of(dbias)); });
        expect_close(dbias, rows + 1, "bias_gradient");
      }
  }
}

TEST_P(DeviceKernels, Norms) {
  for (bool aligned : {false, true}) {
    is_aligned = aligned;
    for (const auto& [rows, cols] : with_long_rows)
      for (DType t : stored) {
        const Operand x = random(t, rows, cols), y = random(t, rows, cols), dx = random(t, rows, cols);
        const Operand w = vector(t, cols), b = vector(t, cols), stats = vector(wide(t), 2 * rows),
                      rstd = vector(wide(t), rows), dw = vector(wide(t), cols), db = vector(wide(t), cols);
        run([&](Kernels& on, auto of) { on.layer_norm(of(x), of(w), of(b), 1e-5, of(y), of(stats)); });
        expect_close(stats, cols, "layer_norm's statistics");
        expect_close(y, cols, "layer_norm");
        run([&](Kernels& on, auto of) { on.layer_norm_again(of(x), of(w), of(b), of(stats), of(y)); });
        expect_close(y, 4, "layer_norm_again");
        const double of_layer_norm = backward_summand(y, w, stats, 2, dx);
        run([&](Kernels& on, auto of) {
          on.layer_norm_backward_input(of(y), of(x), of(w), of(stats), of(dx));
          on.layer_norm_backward_weight(of(y), of(x), of(stats), of(dw), of(db));
        });
        expect_close(dx, 4 * cols, "layer_norm_backward_input", 4, of_layer_norm);
        expect_close(dw, 4 * (rows + 1), "layer_norm_backward_weight");
        expect_close(db, rows + 1, "layer_norm_backward_weight's bias");
        for (bool weighted : {true, false}) {
          const Operand weight = weighted ? w : Operand();
          run([&](Kernels& on, auto of) {
            on.layer_norm(of(x), of(weight), Tensor(), 1e-5, of(y), of(stats));
          });
          expect_close(stats, cols, "layer_norm's statistics without");
          expect_close(y, cols, "layer_norm without");
          const double summand = backward_summand(y, weight, stats, 2, dx);
          run([&](Kernels& on, auto of) {
            on.layer_norm_backward_input(of(y), of(x), of(weight), of(stats), of(dx));
          });
          expect_close(dx, 4 * cols, "layer_norm_backward_input without", 4, summand);
        }
        run([&](Kernels& on, auto of) { on.rms_norm(of(x), of(w), 1e-5, of(y), of(rstd)); });
        expect_close(rstd, cols, "rms_norm's statistics");
        expect_close(y, cols, "rms_norm");
        run([&](Kernels& on, auto of) { on.rms_norm_again(of(x), of(w), of(rstd), of(y)); });
        expect_close(y, 4, "rms_norm_again");
        const double of_rms_norm = backward_summand(y, w, rstd, 1, dx);
        run([&](Kernels& on, auto of) {
          on.rms_norm_backward_input(of(y), of(x), of(w), of(rstd), of(dx));
          on.rms_norm_backward_weight(of(y), of(x), of(rstd), of(dw));
        });
        expect_close(dx, 4 * cols, "rms_norm_backward_input", 4, of_rms_norm);
        expect_close(dw, 4 * (rows + 1), "rms_norm_backward_weight");
        const Operand none;
        run([&](Kernels& on, auto of) { on.rms_norm(of(x), of(none), 1e-5, of(y), of(rstd)); });
        expect_close(y, cols, "rms_norm without");
        run([&](Kernels& on, auto of) { on.rms_norm_again(of(x), of(none), of(rstd), of(y)); });
        expect_close(y, 4, "rms_norm_again without");
        const double without = backward_summand(y, none, rstd, 1, dx);
        run([&](Kernels& on, auto of) {
          on.rms_norm_backward_input(of(y), of(x), of(none), of(rstd), of(dx));
        });
        expect_close(dx, 4 * cols, "rms_norm_backward_input without", 4, without);
        const double columns = 2.0 * static_cast<double>(cols);
        const Operand sums = vector(wide(t), rows);
        run([&](Kernels& on, auto of) { on.row_squares(of(x), of(rstd)); });
        expect_close(rstd, cols, "row_squares");
        run([&](Kernels& on, auto of) {
          on.rms_norm_of_squares(of(x), of(w), 1e-5, columns, of(y), of(rstd));
        });
        expect_close(rstd, 4, "rms_norm_of_squares' statistics");
        expect_close(y, cols, "rms_norm_of_squares");
        run([&](Kernels& on, auto of) {
          on.rms_norm_backward_sums(of(y), of(x), of(w), of(rstd), of(sums));
        });
        expect_close(sums, 4 * cols, "rms_norm_backward_sums");
        const double of_sums = backward_summand(y, w, rstd, 1, dx);
        run([&](Kernels& on, auto of) {
          on.rms_norm_backward_input_of_sums(of(y), of(x), of(w), of(rstd), of(sums), columns, of(dx));
        });
        expect_close(dx, 8, "rms_norm_backward_input_of_sums", 4, of_sums);
      }
  }
}

// Where rows lie says how they are read, not what is made of them.
TEST_P(DeviceKernels, SameBitsWhereverRowsLie) {
  for (const auto& [rows, cols] : with_long_rows)
    for (DType t : stored) {
      SCOPED_TRACE(::testing::Message() << rows << " x " << cols << " in " << dtype_name(t));
      const std::vector<double> of_x = normal(rows * cols), of_dy = normal(rows * cols), of_w = normal(cols);
      const auto all_of = [&](bool aligned) {
        is_aligned = aligned;
        const Operand x = of(of_x, range_of_wider(t, rows, cols)),
                      dy = of(of_dy, range_of_wider(t, rows, cols)),
                      dx = of(of_dy, range_of_wider(t, rows, cols)), y = random(t, rows, cols),
                      w = of(of_w, make(t, {cols})), stats = vector(wide(t), 2 * rows),
                      rstd = vector(wide(t), rows), dw = of(of_w, make(wide(t), {cols})),
                      db = of(of_w, make(wide(t), {cols}));
        std::vector<std::vector<double>> made;
        const auto keep = [&](std::initializer_list<Tensor> results) {
          for (const Tensor& one : results) made.push_back(copy_numbers_to_host(one));
        };
        tested->layer_norm(x.tested, w.tested, w.tested, 1e-5, y.tested, stats.tested);
        tested->layer_norm_backward_input(dy.tested, x.tested, w.tested, stats.tested, dx.tested);
        tested->layer_norm_backward_weight(dy.tested, x.tested, stats.tested, dw.tested, db.tested);
        keep({y.tested, stats.tested, dx.tested, dw.tested, db.tested});
        tested->rms_norm(x.tested, w.tested, 1e-5, y.tested, rstd.tested);
        tested->rms_norm_backward_input(dy.tested, x.tested, w.tested, rstd.tested, dx.tested);
        tested->rms_norm_backward_weight(dy.tested, x.tested, rstd.tested, dw.tested);
        keep({y.tested, rstd.tested, dx.tested, dw.tested});
        tested->residual(x.tested, y.tested, w.tested, y.tested);
        tested->activate(Activation::gelu, x.tested, w.tested, y.tested);
        tested->activate_backward(Activation::gelu, x.tested, dy.tested);
        keep({x.tested, y.tested, dy.tested});
        return made;
      };
      EXPECT_EQ(all_of(true), all_of(false));
    }
}

TEST_P(DeviceKernels, Activations) {
  for (bool aligned : {false, true}) {
    is_aligned = aligned;
    for (const auto& [rows, cols] : with_long_rows)
      for (DType t : stored) {
        for (Activation a : {Activation::gelu, Activation::gelu_erf, Activation::relu, Activation::relu2}) {
          const Operand h = random(t, rows, cols), y = random(t, rows, cols), bias = vector(t, cols);
          run([&](Kernels& on, auto of) { on.activate(a, of(h), of(bias), of(y)); });
          expect_close(h, 1, "activate's input");
          expect_close(y, 4, "activate");
          run([&](Kernels& on, auto of) { on.activate(a, of(h), Tensor(), of(y)); });
          expect_close(y, 4, "activate");
          run([&](Kernels& on, auto of) { on.activate_backward(a, of(h), of(y)); });
          expect_close(h, 4, "activate_backward's output");
          expect_close(y, 16, "activate_backward");
        }
        {
          const Operand x = random(t, rows, cols), gate = random(t, rows, cols), y = random(t, rows, cols),
                        dy = random(t, rows, cols);
          run([&](Kernels& on, auto of) { on.sigmoid_gate(of(x), of(gate), of(y)); });
          expect_close(y, 4, "sigmoid_gate");
          run([&](Kernels& on, auto of) { on.sigmoid_gate_backward(of(x), of(gate), of(dy), of(y)); });
          expect_close(gate, 16, "sigmoid_gate_backward's gate");
          expect_close(dy, 4, "sigmoid_gate_backward");
          expect_close(y, 4, "sigmoid_gate_backward's output");
        }
        {
          const Operand h = random(t, rows, cols), y = random(t, rows, cols), alphas = vector(t, 2),
                        dalphas = vector(wide(t), 2 * rows);
          run([&](Kernels& on, auto of) { on.xielu(of(h), of(alphas), of(y)); });
          expect_close(y, 4, "xielu");
          run([&](Kernels& on, auto of) { on.xielu_backward(of(h), of(alphas), of(y), of(dalphas)); });
          expect_close(h, 4, "xielu_backward's output");
          expect_close(y, 16, "xielu_backward");
          expect_close(dalphas, static_cast<int>(16 * std::sqrt(static_cast<double>(cols))),
                       "xielu_backward's alphas");
        }
        const SwigluClamp clamp{.alpha = 1.7, .limit = 0.8};
        for (Activation a : {Activation::swiglu, Activation::geglu, Activation::clamped_swiglu}) {
          const Operand x = random(t, rows, 2 * cols), y = random(t, rows, cols);
          run([&](Kernels& on, auto of) { on.gated(a, of(x), of(y), clamp); });
          expect_close(y, 4, "gated");
          run([&](Kernels& on, auto of) { on.gated_backward(a, of(x), of(y), clamp); });
          expect_close(x, 16, "gated_backward");
          expect_close(y, 4, "gated_backward's output");
        }
        for (Activation a : {Activation::clamped_swiglu, Activation::relu2}) {
          const Operand x = random(t, rows, is_gated(a) ? 2 * cols : cols), y = random(t, rows, cols),
                        weights = vector(wide(t), rows), dweights = vector(wide(t), rows);
          run([&](Kernels& on, auto of) {
            on.weighted_activation_backward(a, of(x), of(y), of(weights), of(dweights), clamp);
          });
          expect_close(x, 16, "weighted_activation_backward");
          expect_close(y, 4, "weighted_activation_backward's output");
          expect_close(dweights, 4 * cols, "weighted_activation_backward's weights");
        }
      }
  }
}

TEST_P(DeviceKernels, RowsOfTablesAndPositions) {
  for (bool aligned : {false, true}) {
    is_aligned = aligned;
    for (const auto& [rows, cols] : sizes)
      for (DType t : stored) {
        std::vector<std::int32_t> some, places;
        for (std::int64_t i = 0; i < rows; ++i) some.push_back(static_cast<std::int32_t>(i * 7 % 11 - 1));
        for (std::int64_t i = 0; i < 3 * rows; ++i)
          places.push_back(static_cast<std::int32_t>(i * 5 % (rows + 1) - 1));
        const Operand id = ids(some), table = random(t, 6, cols), y = random(t, rows, cols);
        const Operand dtable = random(wide(t), 6, cols);
        run([&](Kernels& on, auto of) { on.embedding(of(id), of(table), 2, of(y)); });
        expect_close(y, 1, "embedding", 0);
        run([&](Kernels& on, auto of) { on.embedding_backward(of(id), of(y), 2, of(dtable)); });
        expect_close(dtable, 1, "embedding_backward", 0);  // in the order of the rows

        const Operand x = random(t, rows, cols), place = ids(places), weights = vector(wide(t), 3 * rows);
        run([&](Kernels& on, auto of) { on.combine_rows(of(x), of(place), of(weights), of(y)); });
        expect_close(y, 4, "combine_rows");
        run([&](Kernels& on, auto of) { on.combine_rows(of(x), of(place), Tensor(), of(y)); });
        expect_close(y, 4, "combine_rows without weights");

        RopeTurns turns = RopeTurns::plain(1e4, 6);
        turns.factor = 1.25, turns.growth = 0.5, turns.growth_length = 3;
        const Operand q = random(t, rows, 24);
        for (bool inverse : {false, true}) {
          run([&](Kernels& on, auto of) { on.rope(of(q), 8, of(id), turns, inverse); });
          expect_close(q, 4, "rope");
        }
        const Operand first = ids(some);
        run([&](Kernels& on, auto of) { on.first_keys(of(id), 3, 2, 3, of(first)); });
        expect_same_ids(first, "first_keys");
      }
  }
}

TEST_P(DeviceKernels, CrossEntropy) {
  for (const auto& [rows, cols] : sizes)
    for (DType t : stored) {
      const DType f = wide(t);
      std::vector<std::int32_t> some;
      for (std::int64_t i = 0; i < rows; ++i) some.push_back(static_cast<std::int32_t>(i * 7 % 11 - 1));
      const Operand targets = ids(some), logits = random(f, rows, cols, 3), d = random(t, rows, cols);
      const Operand max = vector(f, rows), sum = vector(f, rows), target = vector(f, rows),
                    loss = number(0.5);
      run([&](Kernels& on, auto of) { on.soft_cap(of(logits), 5); });
      expect_close(logits, 4, "soft_cap");
      run([&](Kernels& on, auto of) { on.row_max(of(logits), of(max)); });
      expect_close(max, 1, "row_max", 0);
      run([&](Kernels& on, auto of) {
        on.exp_sum(of(logits), of(max), of(targets), 2, of(sum), of(target));
      });
      expect_close(logits, 4, "exp_sum's exponentials");
      expect_close(sum, cols, "exp_sum");
      expect_close(target, 1, "exp_sum's target");
      run([&](Kernels& on, auto of) { on.add_losses(of(sum), of(target), of(targets), of(loss)); });
      expect_close(loss, rows + 1, "add_losses");
      run([&](Kernels& on, auto of) {
        on.cross_entropy_backward(of(logits), of(sum), of(targets), 2, 0.3, of(d), {5, of(max)});
      });
      expect_close(d, 64, "cross_entropy_backward of capped logits");
      run([&](Kernels& on, auto of) {
        on.cross_entropy_backward(of(logits), of(sum), of(targets), 2, 0.3, of(d));
      });
      expect_close(d, 4, "cross_entropy_backward");

      for (const double cap : {0.0, 5.0}) {
        const Operand whole = random(f, rows, cols, 3);
        run([&, cap = cap](Kernels& on, auto of) {
          if (cap > 0) on.soft_cap(of(whole), cap);
          on.cross_entropy(of(whole), of(targets), 0.3, cap, of(max), of(sum), of(target), of(d));
        });
        expect_close(max, 1, "cross_entropy's max", cap > 0 ? 4 : 0);  // soft_cap's are off by so much
        expect_close(sum, cols, "cross_entropy's sum");
        expect_close(target, 1, "cross_entropy's target");
        expect_close(d, cap > 0 ? 64 : 4 + cols, "cross_entropy");
      }

      std::vector<double> of_parts = normal(2 * 3 * rows);
      for (double& x : of_parts) x = x * x + 0.1;
      const Operand parts = this->of(of_parts, make(f, {2, 3, rows})), scales = vector(f, 2 * rows),
                    shares = vector(f, 2 * rows);
      run([&](Kernels& on, auto of) {
        on.merge_softmax(of(parts), of(targets), std::array<std::int64_t, 3>{0, 4, 12}, of(sum), of(target),
                         of(scales), of(shares));
      });
      expect_close(sum, 8, "merge_softmax's sum");
      expect_close(target, 4, "merge_softmax's target");
      expect_close(scales, 16, "merge_softmax's scales");
      expect_close(shares, 16, "merge_softmax's shares");
      const std::array<Operand, 2> means{of_flat(t, rows, cols), of_flat(t, rows, cols)},
          of_targets{of_flat(t, rows, cols), of_flat(t, rows, cols)},
          of_ranks{vector(f, rows), vector(f, rows)};
      const Operand y = of_flat(t, rows, cols);
      run([&](Kernels& on, auto of) {
        const std::array<Tensor, 2> m{of(means[0]), of(means[1])}, s{of(of_ranks[0]), of(of_ranks[1])},
            o{of(of_targets[0]), of(of_targets[1])};
        on.merge_gradients(m, s, o, of(targets), 0.7, of(y));
      });
      expect_close(y, 8, "merge_gradients");
      const Operand more = number(0.25);
      run([&](Kernels& on, auto of) { on.add_number(of(more), of(loss)); });
      expect_close(loss, 1, "add_number", 0);
    }
}

TEST_P(DeviceKernels, AdamW) {
  for (std::int64_t count : {0, 1, 40})
    for (DType t : stored) {
      const Operand p = vector(t, count), m = vector(t, count), g = vector(wide(t), count);
      std::vector<double> squares = normal(count);
      for (double& x : squares) x *= x;
      const Operand v = of(squares, make(t, {count}));
      const std::vector<LogicalRun> runs{{5, count / 3}, {77, 0}, {1000, count - count / 3}};
      const StochasticRounding rounding{weight_rounding(3, "w", 2), runs};
      AdamWStep step{.lr = 1e-2, .beta2 = 0.95, .weight_decay = 0.1, .step = 3, .gradient_scale = 0.5};
      if (t == DType::bf16) step.rounding = &rounding;
      run([&](Kernels& on, auto of) { on.adamw(of(p), of(g), of(m), of(v), step); });
      expect_close(p, 4, "adamw");
      expect_close(m, 4, "adamw's m");
      expect_close(v, 4, "adamw's v");
    }
}

TEST_P(DeviceKernels, MomentumAndStepOfWeights) {
  for (std::int64_t count : {0, 1, 40})
    for (DType t : stored) {
      const Operand g = vector(wide(t), count), m = vector(t, count), update = vector(t, count),
                    p = vector(t, count);
      run([&](Kernels& on, auto of) { on.momentum(of(g), of(m), of(update), {0.9, 0.5}); });
      expect_close(m, 4, "m of momentum");
      expect_close(update, 4, "update of momentum");
      const std::vector<LogicalRun> runs{{5, count / 3}, {77, 0}, {1000, count - count / 3}};
      const StochasticRounding rounding{weight_rounding(3, "w", 2), runs};
      WeightStep step{.lr = 1e-2, .weight_decay = 0.1, .scale = 3};
      if (t == DType::bf16) step.rounding = &rounding;
      run([&](Kernels& on, auto of) { on.step_weights(of(p), of(update), step); });
      expect_close(p, 4, "step_weights");
      if (t != DType::bf16) continue;
      // With an f32 momentum, and split weights.
      const Operand wide_m = vector(DType::f32, count), values = make(DType::bf16, {count}),
                    remainders = make(DType::i16, {count}), whole = vector(DType::f32, count);
      run([&](Kernels& on, auto of) { on.momentum(of(g), of(wide_m), of(update), {0.9, 0.5}); });
      expect_close(update, 4, "update of momentum in f32");
      const std::vector<float> weights = copy_to_host<float>(whole.expected);
      for (const auto side : {&Operand::expected, &Operand::tested}) {
        split_values(weights, values.*side);
        split_remainders(weights, remainders.*side);
      }
      step.rounding = nullptr;
      run([&](Kernels& on, auto of) { on.step_weights(of(values), of(update), step, of(remainders)); });
      for (const auto side : {&Operand::expected, &Operand::tested}) {
        std::vector<float> joined(weights.size());
        join_weights(values.*side, remainders.*side, joined);
        copy_from_host(joined, whole.*side);
      }
      expect_close(whole, 4, "step_weights of split weights");
    }
}

TEST_P(DeviceKernels, AdamWHasTheSameBitsWhereverNumbersLie) {
  constexpr std::int64_t count = 1001;
  const std::vector<LogicalRun> runs{{5, 300}, {1000, count - 300}};
  const StochasticRounding rounding{weight_rounding(3, "w", 2), runs};
  const std::vector<double> of_p = normal(count), of_g = normal(count), of_m = normal(count);
  const std::vector<std::int16_t> zeros(static_cast<std::size_t>(count));
  std::vector<double> of_v = normal(count);
  for (double& x : of_v) x *= x;
  for (const DType t : stored)
    for (const bool is_split : {false, true}) {
      if (is_split && t != DType::bf16) continue;
      SCOPED_TRACE(::testing::Message() << dtype_name(t) << (is_split ? " with remainders" : ""));
      const DType moments = is_split ? wide(t) : t;
      // `before`: how many elements before each its memory begins.
      const auto all_from = [&](std::int64_t before) {
        const auto place = [&](DType dtype) {
          const Operand longer = make(dtype, {before + count});
          return Operand{longer.expected.flat_range(before, before + count),
                         longer.tested.flat_range(before, before + count)};
        };
        const Operand p = of(of_p, place(t)), g = of(of_g, place(wide(t))), m = of(of_m, place(moments)),
                      v = of(of_v, place(moments));
        Operand remainder;
        if (is_split) copy_from_host(zeros, (remainder = place(DType::i16)).tested);
        AdamWStep step{.lr = 1e-2, .beta2 = 0.95, .weight_decay = 0.1, .step = 3, .gradient_scale = 0.5};
        if (t == DType::bf16 && !is_split) step.rounding = &rounding;
        tested->adamw(p.tested, g.tested, m.tested, v.tested, step, remainder.tested);
        std::vector<std::vector<double>> made;
        for (const Operand& one : {p, m, v}) made.push_back(copy_numbers_to_host(one.tested));
        return made;
      };
      const auto aligned = all_from(0);
      for (const std::int64_t before : {1, 3, 4}) EXPECT_EQ(all_from(before), aligned) << before;
    }
}

TEST_P(DeviceKernels, AdamWOfSplitWeights) {
  for (std::int64_t count : {0, 1, 40}) {
    const Operand values = make(DType::bf16, {count}), remainders = make(DType::i16, {count}),
                  copied = make(DType::i16, {count}), whole = vector(DType::f32, count);
    const std::vector<float> weights = copy_to_host<float>(whole.expected);
    for (const auto side : {&Operand::expected, &Operand::tested}) {
      split_values(weights, values.*side);
      split_remainders(weights, remainders.*side);
    }
    const Operand m = vector(DType::f32, count), g = vector(DType::f32, count);
    std::vector<double> squares = normal(count);
    for (double& x : squares) x *= x;
    const Operand v = of(squares, make(DType::f32, {count}));
    const AdamWStep step{.lr = 1e-2, .beta2 = 0.95, .weight_decay = 0.1, .step = 3, .gradient_scale = 0.5};
    run([&](Kernels& on, auto of) { on.copy(of(remainders), of(copied)); });
    expect_same_bytes(copied, "copy of remainders");
    run([&](Kernels& on, auto of) { on.adamw(of(values), of(g), of(m), of(v), step, of(remainders)); });
    for (const auto side : {&Operand::expected, &Operand::tested}) {
      std::vector<float> joined(weights.size());
      join_weights(values.*side, remainders.*side, joined);
      for (std::size_t i = 0; i < joined.size(); ++i)
        EXPECT_EQ(SplitWeight(joined[i]).value.bits, copy_to_host<bf16>(values.*side)[i].bits);
      copy_from_host(joined, whole.*side);
    }
    expect_close(whole, 4, "adamw of split weights");
    expect_close(m, 4, "adamw's m of split weights");
    expect_close(v, 4, "adamw's v of split weights");
  }
}

// More than one launch has room for, of several kinds, with steps of their own.
TEST_P(DeviceKernels, ManyTensorsTogether) {
  struct One {
    Operand p, g, m, v, remainder, sums;
  };
  std::vector<One> all;
  for (std::int64_t i = 0; i < 90; ++i) {
    const bool split = i % 3 == 1;
    const std::int64_t count = i % 7 == 0 ? 0 : i * 5 % 23 + 1;
    One one{vector(split ? DType::bf16 : DType::f32, count),
            vector(DType::f32, count),
            vector(DType::f32, count),
            of(std::vector<double>(static_cast<std::size_t>(count), 0.25), make(DType::f32, {count})),
            {},
            vector(DType::f64, (count + 3) / 4)};
    if (split) {
      one.remainder = make(DType::i16, {count});
      const std::vector<float> numbers(static_cast<std::size_t>(count), 0.3F);
      for (const auto side : {&Operand::expected, &Operand::tested}) {
        split_values(numbers, one.p.*side);
        split_remainders(numbers, one.remainder.*side);
      }
    }
    all.push_back(one);
  }
  run([&](Kernels& on, auto of) {
    std::vector<AdamWUpdate> updates;
    std::vector<SumsOf> squares;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const One& one = all[i];
      const AdamWStep step{.lr = 1e-2, .weight_decay = i % 2 == 0 ? 0.1 : 0, .step = 1 + std::int64_t(i % 4)};
      updates.push_back({of(one.p), of(one.g), of(one.m), of(one.v),
                         one.remainder.expected.defined() ? of(one.remainder) : Tensor(), step});
      squares.push_back({of(one.g), of(one.sums)});
    }
    on.adamw_of_all(updates);
    on.sum_squares_of_all(squares, 4);
  });
  for (const One& one : all) {
    // A value of 8 bits and what it lacks: of weights that differ by a rounding the pairs may differ more.
    if (!one.remainder.expected.defined()) expect_close(one.p, 4, "adamw of many");
    expect_close(one.m, 4, "adamw's m of many");
    expect_close(one.v, 4, "adamw's v of many");
    expect_close(one.sums, 4, "sum_squares of many");
    if (!one.remainder.expected.defined()) continue;
    std::vector<float> joined(static_cast<std::size_t>(one.p.expected.numel())), of_many = joined;
    join_weights(one.p.expected, one.remainder.expected, joined);
    join_weights(one.p.tested, one.remainder.tested, of_many);
    for (std::size_t i = 0; i < joined.size(); ++i) EXPECT_NEAR(of_many[i], joined[i], 1e-6);
  }
}

// Of text: one id is most of all, others come once, and some are another rank's.
TEST_P(DeviceKernels, RowsOfTablesWithOneIdManyTimes) {
  for (bool aligned : {false, true}) {
    is_aligned = aligned;
    for (DType t : stored) {
      constexpr std::int64_t rows = 300, cols = 40, vocab = 50;
      std::vector<std::int32_t> some;
      for (std::int64_t i = 0; i < rows; ++i)
        some.push_back(static_cast<std::int32_t>(i % 7 == 3 ? i * 13 % (vocab + 9) : 5));
      const Operand id = ids(some), y = random(t, rows, cols), dtable = random(wide(t), vocab, cols);
      run([&](Kernels& on, auto of) { on.embedding_backward(of(id), of(y), 2, of(dtable)); });
      expect_close(dtable, 1, "embedding_backward", 0);
    }
  }
}

TEST_P(DeviceKernels, NumbersThatTheHostReads) {
  for (const auto& [rows, cols] : sizes)
    for (DType t : stored) {
      const Operand x = random(t, rows, cols), flat = vector(t, rows * cols);
      EXPECT_EQ(tested->largest(x.tested), reference->largest(x.expected));
      EXPECT_EQ(tested->largest(flat.tested), reference->largest(flat.expected));
      EXPECT_TRUE(tested->all_finite(x.tested));
      const ExactSum sum = tested->sum_squares_exactly(flat.tested, 0x1p-10),
                     expected = reference->sum_squares_exactly(flat.expected, 0x1p-10);
      EXPECT_EQ(sum.high, expected.high);
      EXPECT_EQ(sum.low, expected.low);
      const Operand sums = vector(DType::f64, (rows * cols + 9) / 10);
      run([&](Kernels& on, auto of) { on.sum_squares(of(flat), 10, of(sums)); });
      expect_close(sums, 10, "sum_squares");
      if (t == DType::f64) {  // the reference's bits, as the order is said
        run([&](Kernels& on, auto of) { on.sum_in_order(of(flat), 10, of(sums)); });
        EXPECT_EQ(copy_numbers_to_host(sums.tested), copy_numbers_to_host(sums.expected));
      }
      if (rows == 0) continue;
      for (const double bad :
           {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
        std::vector<double> numbers = copy_numbers_to_host(x.tested);
        numbers[numbers.size() / 2] = bad;
        copy_numbers_from_host(numbers, x.tested);
        EXPECT_FALSE(tested->all_finite(x.tested));
        const double largest = tested->largest(x.tested);
        EXPECT_TRUE(std::isnan(bad) ? std::isnan(largest) : largest == bad);
      }
    }
}

// Documents and chunks that end where the sequence does not.
TEST_P(DeviceKernels, OfStateSpaces) {
  for (const bool delta : {false, true})
    for (const DType t : stored) {
      const std::int64_t rows = 2 * 10;
      const Operand first = ids({0, 0, 0, 3, 4, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 7, 7, 7});
      StateSpaceShape shape{{2, 10, {}}, 4, 3, 2, 5, 4, delta, 1e-2};
      const std::int64_t heads = shape.heads, mixed = shape.mixed_width();
      const Operand x = random(t, rows, mixed), taps = of_flat(t, mixed, 3), bias = vector(t, mixed),
                    z = random(t, rows, shape.width()), dt = random(t, rows, heads),
                    dt_bias = vector(t, heads), a_log = vector(t, heads),
                    d = vector(t, delta ? shape.head_dim : heads), xbc = random(wide(t), rows, mixed),
                    y = random(t, rows, shape.width()), dy = random(t, rows, shape.width()),
                    dz = random(t, rows, shape.width()), dxbc = random(wide(t), rows, mixed),
                    ddt = random(t, rows, heads), terms = random(wide(t), rows, shape.terms()),
                    beta = random(t, rows, heads), dbeta = random(t, rows, heads),
                    dx = random(t, rows, mixed), dtaps = of_flat(wide(t), mixed, 3),
                    room = vector(wide(t), shape.workspace(true));
      const auto tensors = [&](auto of) {
        StateSpaceTensors in{of(z), of(xbc), of(dt), of(dt_bias), of(a_log), of(d)};
        if (delta) in.beta = of(beta);
        return in;
      };
      run([&](Kernels& on, auto of) {
        shape.rows.first_positions = of(first);
        on.convolve(of(x), of(taps), of(bias), shape.rows, of(xbc));
      });
      expect_close(xbc, 3, "convolve", 16);
      run([&](Kernels& on, auto of) {
        shape.rows.first_positions = of(first);
        on.state_space(tensors(of), shape, of(room).flat_range(0, shape.workspace(false)), Tensor(), of(y));
      });
      expect_close(y, 4 * shape.state, "state_space", 16);
      run([&](Kernels& on, auto of) {
        shape.rows.first_positions = of(first);
        on.state_space_backward(tensors(of), shape, of(dy), of(room),
                                {of(dz), of(dxbc), of(ddt), of(terms), delta ? of(dbeta) : Tensor()});
      });
      if (delta) expect_close(dbeta, 4 * shape.width(), "state_space_backward's dbeta", 16);
      expect_close(dz, 4 * shape.state, "state_space_backward's dz", 16);
      expect_close(dxbc, 4 * shape.width(), "state_space_backward's dxbc", 16);
      expect_close(ddt, 4 * shape.width(), "state_space_backward's ddt", 16);
      expect_close(terms, 4 * shape.width(), "state_space_backward's terms", 16);
      run([&](Kernels& on, auto of) {
        shape.rows.first_positions = of(first);
        on.convolve_backward(of(x), of(taps), of(bias), shape.rows, of(dxbc), of(dx));
      });
      expect_close(dxbc, 3, "convolve_backward's gradient before SiLU", 16);
      expect_close(dx, 3, "convolve_backward", 16);
      run([&](Kernels& on, auto of) {
        shape.rows.first_positions = of(first);
        on.convolve_backward_weight(of(x), of(dxbc), shape.rows, of(dtaps));
      });
      expect_close(dtaps, rows, "convolve_backward_weight", 16);
    }
}

TEST_P(DeviceKernels, OfShortConvolutions) {
  for (const std::int64_t kernel : {2, 3, 5})
    for (const DType t : stored) {
      const std::int64_t rows = 2 * 10, width = 7;
      const Operand first = ids({0, 0, 0, 3, 4, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 7, 7, 7}),
                    given = random(t, rows, 3 * width), taps = of_flat(t, width, kernel),
                    y = random(t, rows, width), dy = random(t, rows, width),
                    d_given = random(t, rows, 3 * width), d_taps = of_flat(wide(t), width, kernel);
      run([&](Kernels& on, auto of) {
        on.short_convolution(of(given), of(taps), {2, 10, of(first)}, of(y));
      });
      expect_close(y, 3 * kernel, "short_convolution", 16);
      run([&](Kernels& on, auto of) {
        on.short_convolution_backward(of(given), of(taps), of(dy), {2, 10, of(first)}, of(d_given), of(y));
      });
      expect_close(y, 3 * kernel, "short_convolution_backward's output", 16);
      expect_close(d_given, 3 * kernel, "short_convolution_backward", 16);
      run([&](Kernels& on, auto of) {
        on.short_convolution_backward_weight(of(given), of(dy), {2, 10, of(first)}, of(d_taps));
      });
      expect_close(d_taps, 3 * rows, "short_convolution_backward_weight", 16);
    }
}

TEST_P(DeviceKernels, Routing) {
  for (std::int64_t rows : {0, 1, 12})
    for (DType t : {DType::f64, DType::f32})
      for (RouterScores scores : {RouterScores::softmax, RouterScores::sigmoid})
        for (bool grouped : {false, true}) {
          RouterSpec spec{.scores = scores, .normalise = grouped, .scale = 1.5};
          if (grouped) spec.groups = 4, spec.most_groups = 2;
          const TokenRouter router(spec, 8, 2);
          std::vector<double> bias(8);
          for (std::size_t e = 0; e < bias.size(); ++e) bias[e] = 0.01 * static_cast<double>(e);
          const std::vector<std::int32_t> unset(static_cast<std::size_t>(2 * rows), -7);
          const Operand logits = random(t, rows, 8), id = shaped(ids(unset), {rows, 2}),
                        weights = vector(t, 2 * rows), d_weights = vector(t, 2 * rows),
                        d_logits = random(t, rows, 8), loss = number(0.5);
          run([&](Kernels& on, auto of) { on.route(router, of(logits), bias, of(id), of(weights)); });
          expect_same_ids(id, "route");
          expect_close(weights, 8, "route's weights");
          run([&](Kernels& on, auto of) { on.weigh_routes(router, of(logits), of(id), of(weights)); });
          expect_close(weights, 8, "weigh_routes");
          RouterLosses losses{.rows_per_scope = 4, .first_row = 4, .z_loss = 0.01};
          losses.factors.resize(8 * 4);
          for (std::size_t i = 0; i < losses.factors.size(); ++i)
            losses.factors[i] = 0.1 * static_cast<double>(i % 7);
          run([&](Kernels& on, auto of) {
            on.route_backward(router, of(logits), of(id), of(d_weights), losses, 0.7, of(d_logits));
            on.add_router_losses(router, of(logits), losses, of(loss));
          });
          expect_close(d_logits, 32, "route_backward");
          expect_close(loss, 8 * rows + 1, "add_router_losses");
        }
}

// What is whole numbers is the same to the last one.
TEST_P(DeviceKernels, ChoicesAndTheirPlaces) {
  for (std::int64_t rows : {0, 1, 24}) {
    const RouterSpec spec{.groups = 3, .most_groups = 3};
    const TokenRouter router(spec, 6, 2);
    std::vector<std::int32_t> chosen, unset(static_cast<std::size_t>(2 * rows), -7);
    for (std::int64_t i = 0; i < rows; ++i) {  // two experts of each token, some far oftener than others
      const auto one = static_cast<std::int32_t>(i * i % 5);
      chosen.push_back(one);
      chosen.push_back(i % 3 == 0 ? 5 : (one + 1) % 5);
    }
    const Operand id = shaped(ids(chosen), {rows, 2});
    const std::int64_t scopes = rows == 24 ? 2 : 1;
    const Operand counts = ids(std::vector<std::int32_t>(static_cast<std::size_t>(scopes * 9), -7));
    run([&](Kernels& on, auto of) { on.count_routed(router, of(id), scopes, of(counts)); });
    expect_same_ids(counts, "count_routed");

    for (DropPolicy policy : {DropPolicy::probability, DropPolicy::position}) {
      // Equal weights, weights that differ by rounding, and one that is no number.
      std::vector<double> values(static_cast<std::size_t>(2 * rows));
      for (std::size_t i = 0; i < values.size(); ++i)
        values[i] = 0.5 + 0.125 * static_cast<double>(i % 3) + 1e-7 * static_cast<double>(i % 2);
      if (rows > 1) values[7] = std::numeric_limits<double>::quiet_NaN();
      const Operand weights = of(values, make(DType::f32, {rows, 2})), kept = shaped(ids(unset), {rows, 2});
      run([&](Kernels& on, auto of) {
        on.drop_over_capacity(of(id), of(weights), {scopes, 6, 3, policy}, of(kept));
      });
      expect_same_ids(kept, "drop_over_capacity");
      const Operand places = shaped(ids(unset), {rows, 2}),
                    tokens = ids(std::vector<std::int32_t>(static_cast<std::size_t>(2 * rows + 3), -7)),
                    copies = ids(std::vector<std::int32_t>(6, -7));
      run([&](Kernels& on, auto of) { on.sort_by_expert(of(kept), of(places), of(tokens), of(copies)); });
      expect_same_ids(places, "sort_by_expert's places");
      expect_same_ids(tokens, "sort_by_expert's tokens");
      expect_same_ids(copies, "sort_by_expert's counts");
    }

    const Operand weights = of(normal(2 * rows), make(DType::f32, {rows, 2})),
                  packed = of(normal(4 * rows), make(DType::f32, {rows, 4})),
                  back = shaped(ids(unset), {rows, 2}), two = ids(std::vector<std::int32_t>(4, -7));
    run([&](Kernels& on, auto of) { on.pack_choices(of(id), of(weights), of(packed)); });
    expect_close(packed, 1, "pack_choices", 0);
    std::vector<std::int64_t> turned;
    for (std::int64_t i = rows; i-- > 0;) turned.push_back(i);
    for (const std::vector<std::int64_t>& to : {std::vector<std::int64_t>(), turned}) {
      run([&](Kernels& on, auto of) { on.unpack_choices(of(packed), to, of(back), of(weights)); });
      expect_same_ids(back, "unpack_choices");
      expect_close(weights, 1, "unpack_choices", 0);
    }
    if (rows == 0) continue;
    const std::vector<std::int64_t> taken{rows - 1, 0};
    run([&](Kernels& on, auto of) { on.take_ids(of(id), taken, of(two)); });
    expect_same_ids(two, "take_ids");
    const Operand places = ids(std::vector<std::int32_t>(chosen.size(), -1)), placed = vector(DType::f32, 5);
    run([&](Kernels& on, auto of) { on.place_weights(of(weights), of(places), of(placed)); });
    expect_close(placed, 1, "place_weights of none", 0);
  }
}

// Bytes travel: they are the same.
TEST_P(DeviceKernels, PackedGradients) {
  GradientBucket bucket;
  bucket.sections = {{.name = "a", .range = {0, 300}},
                     {.name = "b", .range = {300, 307}},
                     {.name = "c", .range = {307, 820}}};
  const std::vector<Philox> rounding{
      {1, Stream::rounding, 0}, {1, Stream::rounding, 1}, {1, Stream::rounding, 2}};
  for (DType t : {DType::f64, DType::f32})
    for (CompressionKind kind : {CompressionKind::bf16, CompressionKind::fp16, CompressionKind::int8})
      for (const Range part : {Range{0, 820}, Range{100, 310}, Range{307, 307}, Range{600, 820}}) {
        std::vector<double> numbers = normal(820);
        for (std::size_t i = 0; i < numbers.size(); ++i)
          numbers[i] *= std::ldexp(1, static_cast<int>(i % 60) - 30);
        numbers[301] = 0;
        numbers[700] = std::numeric_limits<double>::quiet_NaN();  // its block is bad
        const Operand gradient = of(numbers, make(t, {820}));
        const Operand packed = make(DType::u8, {quantized_bytes(kind, bucket, part)}),
                      back = vector(t, part.size());
        run([&](Kernels& on, auto of) {
          on.pack_gradient(kind, bucket, part, rounding, of(gradient), of(packed));
        });
        const auto bytes_of = [](const Tensor& x) {
          std::vector<std::byte> bytes(static_cast<std::size_t>(x.numel()));
          copy_bytes_to_host(x, bytes);
          return bytes;
        };
        EXPECT_EQ(bytes_of(packed.tested), bytes_of(packed.expected)) << dtype_name(t);
        for (bool accumulate : {false, true}) {
          run([&](Kernels& on, auto of) {
            on.unpack_gradient(kind, bucket, part, of(packed), accumulate, of(back));
          });
          const std::vector<double> expected = copy_numbers_to_host(back.expected),
                                    unpacked = copy_numbers_to_host(back.tested);
          for (std::size_t i = 0; i < expected.size(); ++i)
            EXPECT_TRUE(unpacked[i] == expected[i] || (std::isnan(unpacked[i]) && std::isnan(expected[i])))
                << "element " << i;
        }
      }
}

// Elements and places are the same: they are moved, not added up.
TEST_P(DeviceKernels, LargestElementsAndWhereTheyWere) {
  for (DType t : {DType::f64, DType::f32})
    for (const std::int64_t n : {1, 6, 300, 9001}) {  // the last in several runs
      std::vector<double> numbers = normal(n);
      for (std::size_t i = 0; i < numbers.size(); i += 7) numbers[i] = i % 2 == 0 ? 0.5 : -0.5;  // ties
      for (std::size_t i = 3; i < numbers.size(); i += 11) numbers[i] = i % 2 == 0 ? 0.0 : -0.0;
      if (n >= 300) {
        numbers[17] = std::numeric_limits<double>::infinity();
        numbers[250] = std::numeric_limits<double>::quiet_NaN();
      }
      for (const std::int64_t take : std::set<std::int64_t>{1, n / 3 + 1, n}) {
        SCOPED_TRACE(::testing::Message() << take << " of " << n << " in " << dtype_name(t));
        const Operand x = of(numbers, make(t, {n})), values = vector(t, take);
        const Operand indices = ids(std::vector<std::int32_t>(static_cast<std::size_t>(take), -1));
        run([&](Kernels& on, auto of) { on.take_largest(of(x), 100, of(values), of(indices)); });
        expect_same_bytes(values, "values");
        expect_same_bytes(x, "what is left");
        expect_same_ids(indices, "indices");
        const Operand sum = vector(t, 100 + n);
        run([&](Kernels& on, auto of) { on.add_at(of(values), of(indices), of(sum)); });
        expect_same_numbers(sum, "add_at");
      }
    }
}

TEST_P(DeviceKernels, OrthonormalRows) {
  const Philox fresh(3, Stream::low_rank, 5);
  for (DType t : {DType::f64, DType::f32})
    for (const auto& [rows, cols] : {std::pair{1, 1}, {3, 3}, {4, 37}, {2, 8}}) {
      SCOPED_TRACE(::testing::Message() << rows << " x " << cols << " in " << dtype_name(t));
      const auto one = static_cast<std::size_t>(cols);
      std::vector<double> numbers = normal(rows * cols);
      // The last has no direction of its own; the first is so small that its square is none.
      for (std::size_t c = 0; c < one; ++c) {
        if (rows > 1) numbers[numbers.size() - one + c] = -3 * numbers[c];
        numbers[c] *= t == DType::f64 ? 1e-200 : 1e-30;
      }
      const Operand x = of(numbers, make(t, {rows, cols})), zeros = of({0, 0, 0, 0}, make(t, {2, 2}));
      for (const Operand& each : {x, zeros}) {
        run([&](Kernels& on, auto of) { on.orthonormalize_rows(of(each), fresh); });
        expect_close(each, cols, "orthonormalize_rows", 16);
      }
      if (rows == 1) continue;
      numbers[one] = std::numeric_limits<double>::quiet_NaN();  // of the second row
      const Operand bad = of(numbers, make(t, {rows, cols}));
      run([&](Kernels& on, auto of) { on.orthonormalize_rows(of(bad), fresh); });
      const std::vector<double> expected = copy_numbers_to_host(bad.expected),
                                found = copy_numbers_to_host(bad.tested);
      for (std::size_t i = 0; i < found.size(); ++i)
        EXPECT_EQ(std::isnan(found[i]), std::isnan(expected[i])) << "element " << i;
    }
}

TEST(QuickDivision, IsDivision) {
  constexpr auto most = static_cast<std::uint32_t>(rows::QuickDivision::limit - 1);
  const Philox draw(29, Stream::test, 0);
  for (std::uint64_t i = 0; i < 2000; ++i) {
    const auto divisor = static_cast<std::uint32_t>(
        1 + (i < 200 ? i : draw.below(2 * i, i % 2 == 0 ? most : std::uint64_t{1} << i % 31)));
    const rows::QuickDivision by(divisor);
    for (const std::uint32_t n :
         {0u, divisor - 1, divisor, most / divisor * divisor, most / divisor * divisor - 1, most - 1, most,
          static_cast<std::uint32_t>(draw.below(2 * i + 1, most))})
      ASSERT_EQ(by(n), n / divisor) << n << " / " << divisor;
  }
}

INSTANTIATE_TEST_SUITE_P(On, DeviceKernels, ::testing::ValuesIn(checks::devices_under_test()),
                         [](const auto& of) { return of.param.name; });

}  // namespace
}  // namespace echelon::device_kernels_test

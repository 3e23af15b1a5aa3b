// Activations by the kernels of CPUs, against the reference in f64.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpu_kernel_runs.h"
#include "tensor/kernels.h"
#include "tensor/simd.h"

namespace echelon::activations_cpu_test {
namespace {

class ActivationsCpu : public checks::OfCpuKernels {};

TEST_F(ActivationsCpu, GeluOfTheErrorFunction) {
  for (const auto& [rows, cols] : sizes)
    for (bool strided : {false, true}) {
      const Operand h = random(rows, cols, strided, 3.0), dy = random(rows, cols, strided),
                    bias = vector(cols);
      const Operand y = random(rows, cols, strided);
      run([&](Kernels& k, auto of) {
        k.activate(Activation::gelu_erf, of(h), of(bias), of(y));
        k.activate_backward(Activation::gelu_erf, of(h), of(dy));
      });
      expect_close(y, 1, 8, "gelu_erf"), expect_close(h, 1, 8, "gelu_erf_backward y");
      expect_close(dy, 1, 8, "gelu_erf_backward dh");
    }
}

TEST_F(ActivationsCpu, Relus) {
  for (const Activation relu : {Activation::relu, Activation::relu2})
    for (const auto& [rows, cols] : sizes)
      for (bool strided : {false, true}) {
        const Operand h = random(rows, cols, strided), dy = random(rows, cols, strided), bias = vector(cols);
        const Operand y = random(rows, cols, strided), in_place = random(rows, cols, strided);
        run([&](Kernels& k, auto of) {
          k.activate(relu, of(h), of(bias), of(y));
          k.activate_backward(relu, of(h), of(dy));
          k.activate(relu, of(in_place), Tensor(), of(in_place));
        });
        expect_close(y, 1, 8, name_of(relu)), expect_close(in_place, 1, 8, "in place");
        expect_close(h, 1, 8, "backward y"), expect_close(dy, 1, 8, "backward dh");
      }
}

TEST_F(ActivationsCpu, Gates) {
  for (const auto& [rows, cols] : sizes)
    for (double scale : {1.0, 30.0})  // 30: both tails of the sigmoid
      for (bool strided : {false, true}) {
        const Operand h = random(rows, cols, strided, scale), dy = random(rows, cols, strided),
                      bias = vector(cols);
        const Operand y = random(rows, cols, strided), in_place = random(rows, cols, strided, scale);
        run([&](Kernels& k, auto of) {
          k.activate(Activation::gelu, of(h), of(bias), of(y));
          k.activate_backward(Activation::gelu, of(h), of(dy));
          k.activate(Activation::gelu, of(in_place), Tensor(), of(in_place));
        });
        expect_close(y, 1, 8, "gelu"), expect_close(in_place, 1, 8, "gelu in place");
        expect_close(h, 1, 8, "gelu_backward y"), expect_close(dy, 1, 16 * scale, "gelu_backward dh");
        const Operand gate_up = random(rows, 2 * cols, strided, scale), z = random(rows, cols, strided);
        const Operand dz = random(rows, cols, strided);
        run([&](Kernels& k, auto of) {
          k.gated(Activation::swiglu, of(gate_up), of(z));
          k.gated_backward(Activation::swiglu, of(gate_up), of(dz));
        });
        expect_close(z, 1, 8, "swiglu"), expect_close(dz, 1, 8, "swiglu_backward y");
        expect_close(gate_up, 1, 8 * scale, "swiglu_backward");
        const Operand other = random(rows, 2 * cols, strided, scale), dw = random(rows, cols, strided);
        run([&](Kernels& k, auto of) {
          k.gated(Activation::geglu, of(other), of(z));
          k.gated_backward(Activation::geglu, of(other), of(dw));
        });
        expect_close(z, 1, 8, "geglu"), expect_close(dw, 1, 8, "geglu_backward y");
        expect_close(other, 1, 16 * scale, "geglu_backward");
        const Operand clamped = random(rows, 2 * cols, strided, scale), du = random(rows, cols, strided);
        const SwigluClamp clamp{.alpha = 1.7, .limit = 0.8};
        run([&](Kernels& k, auto of) {
          k.gated(Activation::clamped_swiglu, of(clamped), of(z), clamp);
          k.gated_backward(Activation::clamped_swiglu, of(clamped), of(du), clamp);
        });
        expect_close(z, 1, 8, "clamped swiglu"), expect_close(du, 1, 8, "clamped swiglu_backward y");
        expect_close(clamped, 1, 16, "clamped swiglu_backward");
      }
}

TEST_F(ActivationsCpu, XieluAndSigmoidGates) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  for (const auto& [rows, cols] : sizes)
    for (const double scale : {1.0, 30.0})
      for (const bool strided : {false, true})
        for (const bool spoiled : {false, true}) {
          const Operand h = random(rows, cols, strided, scale), alphas = vector(2),
                        y = random(rows, cols, strided), dy = random(rows, cols, strided),
                        dalphas = random(rows, 2), gate = random(rows, cols, strided, scale),
                        x = random(rows, cols, strided), gated = random(rows, cols, strided),
                        dgated = random(rows, cols, strided);
          const std::int64_t row = rows / 2, col = cols - 1;
          for (const Operand& of : {h, gate}) {
            if (!spoiled) continue;
            of.exact.host<double>()[row * of.exact.row_stride() + col] = nan;
            for (const Tensor& t : {of.one, of.several})
              t.host<float>()[row * t.row_stride() + col] = static_cast<float>(nan);
          }
          const auto expect = [&](const Operand& of, std::int64_t length, double c, const char* what) {
            for (std::int64_t j = 0; j < of.one.cols(); ++j) {
              double& exact = of.exact.host<double>()[row * of.exact.row_stride() + j];
              float &a = of.one.host<float>()[row * of.one.row_stride() + j],
                    &b = of.several.host<float>()[row * of.several.row_stride() + j];
              if (!std::isnan(exact)) continue;
              EXPECT_TRUE(std::isnan(a) && std::isnan(b)) << what;
              exact = a = b = 0;
            }
            expect_close(of, length, c, what);
          };
          run([&](Kernels& k, auto of) {
            k.xielu(of(h), of(alphas), of(y));
            k.xielu_backward(of(h), of(alphas), of(dy), of(dalphas));
            k.sigmoid_gate(of(x), of(gate), of(gated));
          });
          expect(y, 1, 8, "xielu"), expect(h, 1, 8, "xielu_backward y"), expect(dy, 1, 8, "xielu_backward");
          expect(dalphas, cols, 8, "xielu_backward's alphas"), expect(gated, 1, 8, "sigmoid_gate");
          run([&](Kernels& k, auto of) { k.sigmoid_gate_backward(of(x), of(gate), of(dgated), of(gated)); });
          expect(gate, 1, 8, "sigmoid_gate_backward's gate"), expect(dgated, 1, 8, "sigmoid_gate_backward");
          expect(gated, 1, 8, "sigmoid_gate_backward's output");
        }
}

// Far out an activation is 0 or what it was given, and its slope 0 or 1.
TEST_F(ActivationsCpu, ActivationsOfLargeNumbers) {
  std::vector<double> points;
  for (const double size :
       {30.0, 79.0, 81.0, 86.0, 88.0, 90.0, 110.0, 1e3, 1e6, 1e9, 1e11, 1e13, 1e18, 1e20, 1e36})
    points.insert(points.end(), {size, -size});
  const auto cols = std::ssize(points);
  const auto spread = [&](const Operand& x, std::int64_t begin, double factor) {
    for (std::int64_t j = 0; j < cols; ++j) {
      const auto value = static_cast<float>(factor * points[static_cast<std::size_t>(j)]);
      x.exact.host<double>()[begin + j] = value;
      x.one.host<float>()[begin + j] = x.several.host<float>()[begin + j] = value;
    }
  };
  const auto expect_each = [&](const Operand& x, const std::string& what) {
    for (std::int64_t j = 0; j < x.exact.numel(); ++j) {
      const double exact = x.exact.host<double>()[j];
      EXPECT_NEAR(x.one.host<float>()[j], exact, 1e-30 + 16 * eps * std::abs(exact))
          << what << " at " << points[static_cast<std::size_t>(j % cols)];
    }
  };
  for (const Activation a : {Activation::gelu, Activation::gelu_erf, Activation::relu}) {
    const Operand h = random(1, cols), y = random(1, cols), dy = random(1, cols);
    spread(h, 0, 1);
    run([&](Kernels& k, auto of) {
      k.fill(of(dy), 1);
      k.activate(a, of(h), Tensor(), of(y));
      k.activate_backward(a, of(h), of(dy));
    });
    expect_each(y, name_of(a)), expect_each(h, std::string(name_of(a)) + " of backward");
    expect_each(dy, std::string(name_of(a)) + "'s slope");
  }
  for (const Activation a : {Activation::swiglu, Activation::geglu, Activation::clamped_swiglu}) {
    const Operand h = random(1, 2 * cols), y = random(1, cols), dy = random(1, cols);
    run([&](Kernels& k, auto of) { k.fill(of(h), 1), k.fill(of(dy), 1); });
    spread(h, 0, 1);
    const SwigluClamp clamp{.alpha = 1.0, .limit = 2};
    run([&](Kernels& k, auto of) {
      k.gated(a, of(h), of(y), clamp);
      k.gated_backward(a, of(h), of(dy), clamp);
    });
    expect_each(y, name_of(a)), expect_each(h, std::string(name_of(a)) + ", the gate's gradient");
    expect_each(dy, std::string(name_of(a)) + " of backward");
  }
}

// What is not a number says that a run went wrong: no activation hides it, at any place of a vector.
TEST_F(ActivationsCpu, ActivationsKeepWhatIsNotANumber) {
  constexpr std::int64_t rows = 3, cols = 37;
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  const auto spoil = [&](const Operand& x) {
    for (std::int64_t i = 0; i < x.exact.numel(); i += 5) {
      x.exact.host<double>()[i] = nan;
      x.one.host<float>()[i] = x.several.host<float>()[i] = static_cast<float>(nan);
    }
  };
  std::int64_t found = 0;
  const auto expect_same = [&](const Operand& x, const std::string& what) {
    for (std::int64_t i = 0; i < x.exact.numel(); ++i) {
      const bool is_nan = std::isnan(x.exact.host<double>()[i]);
      found += is_nan;
      EXPECT_EQ(std::isnan(x.one.host<float>()[i]), is_nan) << what << ", element " << i;
      EXPECT_EQ(std::isnan(x.several.host<float>()[i]), is_nan) << what << ", element " << i;
    }
  };
  for (const Activation a : {Activation::gelu, Activation::gelu_erf, Activation::relu, Activation::relu2,
                             Activation::swiglu, Activation::geglu, Activation::clamped_swiglu})
    for (const bool of_gradient : {false, true}) {
      const std::string name = std::string(name_of(a)) + (of_gradient ? " of a gradient" : "");
      const SwigluClamp clamp{.alpha = 1.7, .limit = 0.8};
      const std::int64_t width = is_gated(a) ? 2 * cols : cols;
      const Operand h = random(rows, width), dy = random(rows, cols), y = random(rows, cols);
      spoil(of_gradient ? dy : h);
      run([&](Kernels& k, auto of) {
        if (is_gated(a)) {
          k.gated(a, of(h), of(y), clamp);
          k.gated_backward(a, of(h), of(dy), clamp);
        } else {
          k.activate(a, of(h), Tensor(), of(y));
          k.activate_backward(a, of(h), of(dy));
        }
      });
      found = 0;
      expect_same(y, name), expect_same(h, name + ", h of backward"),
          expect_same(dy, name + ", dy of backward");
      EXPECT_GT(found, 0) << name;
      if (a != Activation::swiglu && a != Activation::clamped_swiglu && a != Activation::relu2) continue;
      const Operand of_expert = random(rows, width), d_expert = random(rows, cols), weights = vector(rows),
                    d_weights = vector(rows);
      spoil(of_gradient ? d_expert : of_expert);
      run([&](Kernels& k, auto of) {
        k.weighted_activation_backward(a, of(of_expert), of(d_expert), of(weights), of(d_weights), clamp);
      });
      expect_same(of_expert, name + " of an expert"), expect_same(d_expert, name + " of an expert, dy");
      expect_same(d_weights, name + ", of the weights");
    }
}

TEST_F(ActivationsCpu, WeightedActivationsOfExperts) {
  for (const auto& [rows, cols] : sizes)
    for (const auto& [strided, activation] : {std::pair{false, Activation::swiglu},
                                              {true, Activation::swiglu},
                                              {true, Activation::clamped_swiglu},
                                              {false, Activation::relu2},
                                              {true, Activation::relu2}}) {
      const std::int64_t width = is_gated(activation) ? 2 * cols : cols;
      const Operand gate_up = random(rows, width, strided), dy = random(rows, cols, strided),
                    weights = vector(rows), d_weights = vector(rows);
      run([&, activation = activation](Kernels& k, auto of) {
        k.weighted_activation_backward(activation, of(gate_up), of(dy), of(weights), of(d_weights),
                                       {.alpha = 1.7, .limit = 0.8});
      });
      expect_close(gate_up, 1, 8, "weighted_activation_backward"), expect_close(dy, 1, 8, "weighted y");
      expect_close(d_weights, cols, 4, "gradient of the weights");
    }
}

}  // namespace
}  // namespace echelon::activations_cpu_test

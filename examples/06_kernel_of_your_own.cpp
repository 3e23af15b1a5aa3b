// A kernel of one's own: the mathematics once, as a function object for a team of lanes. One lane of the host
// is the reference that its gradient is held to.
#include <fmt/core.h>

#include <cmath>

#include "tensor/host_launch.h"

using namespace echelon;

namespace {

// y = softplus(x) = log(1 + e^x), without overflow; x and y may be the same.
template <class F>
struct Softplus {
  rows::Matrix<F> x, y;
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, std::int64_t j) const {
    const F v = x[i][j];
    y[i][j] = (v > F(0) ? v : F(0)) + std::log1p(std::exp(-std::abs(v)));
  }
};

// dx = dy times the slope, which is the logistic function of x.
template <class F>
struct SoftplusBackward {
  rows::Matrix<F> dy, x, dx;
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, std::int64_t j) const {
    dx[i][j] = dy[i][j] / (F(1) + std::exp(-x[i][j]));
  }
};

// As TokenKernels' elements() launches it: a block for each row.
template <class Body>
void each_element(const Tensor& t, const Body& body) {
  HostLaunch::run("example", t.rows(), rows::EachElement<Body>{body, t.cols(), t.cols()});
}

}  // namespace

int main() {
  constexpr std::int64_t rows = 3, cols = 5;
  constexpr double step = 1e-6, tolerance = 1e-9;  // central differences err by step^2 and eps / step
  Arena arena;
  const auto tensor = [&] { return Tensor(arena, MemoryCategory::other, DType::f64, {rows, cols}); };
  const Tensor x = tensor(), dy = tensor(), dx = tensor(), above = tensor(), below = tensor();
  const auto m = [](const Tensor& t) { return HostLaunch::matrix<double>(t); };
  for (std::int64_t k = 0; k < rows * cols; ++k) {
    x.host<double>()[k] = static_cast<double>(k) - 7;
    dy.host<double>()[k] = 1;
    above.host<double>()[k] = x.host<double>()[k] + step;
    below.host<double>()[k] = x.host<double>()[k] - step;
  }
  each_element(x, SoftplusBackward<double>{m(dy), m(x), m(dx)});
  each_element(above, Softplus<double>{m(above), m(above)});
  each_element(below, Softplus<double>{m(below), m(below)});
  double worst = 0;
  for (std::int64_t k = 0; k < rows * cols; ++k)
    worst = std::max(worst, std::abs((above.host<double>()[k] - below.host<double>()[k]) / (2 * step) -
                                     dx.host<double>()[k]));
  fmt::print("the slope is off by {:.1e}\n", worst);
  return worst < tolerance ? 0 : 1;
}

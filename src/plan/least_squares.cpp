#include "plan/least_squares.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace echelon {

double loss_of(const std::vector<double>& r, const std::vector<double>& u, double scale) {
  double sum = 0;
  for (double one : r) sum += 2 * (std::sqrt(1 + one * one / (scale * scale)) - 1);
  for (double one : u) sum += one * one;
  return sum;
}

namespace {

// Solves a x = b for a positive definite a, by Gaussian elimination.
std::vector<double> solved(std::vector<std::vector<double>> a, std::vector<double> b) {
  const std::size_t n = b.size();
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t k = i + 1; k < n; ++k) {
      const double factor = a[k][i] / a[i][i];
      for (std::size_t j = i; j < n; ++j) a[k][j] -= factor * a[i][j];
      b[k] -= factor * b[i];
    }
  for (std::size_t i = n; i-- > 0;) {
    for (std::size_t j = i + 1; j < n; ++j) b[i] -= a[i][j] * b[j];
    b[i] /= a[i][i];
  }
  return b;
}

struct Fit {
  std::vector<double> u;
  double loss = 0;
};

Fit fit_from(const Residuals& residuals, std::vector<double> u, double scale) {
  constexpr int rounds = 30;
  constexpr double difference = 0.02;  // wide enough to see past the last wave of a product's tiles
  const std::size_t size = u.size();
  std::vector<double> r = residuals(u);
  double now = loss_of(r, u, scale), damping = 0.1;
  for (int round = 0; round < rounds; ++round) {
    std::vector<std::vector<double>> slopes(size);
    for (std::size_t k = 0; k < size; ++k) {
      std::vector<double> moved = u;
      moved[k] += difference;
      slopes[k] = residuals(moved);
      for (std::size_t i = 0; i < r.size(); ++i) slopes[k][i] = (slopes[k][i] - r[i]) / difference;
    }
    std::vector<std::vector<double>> a(size, std::vector<double>(size, 0.0));
    std::vector<double> b(size);
    for (std::size_t k = 0; k < size; ++k) {
      a[k][k] = 1, b[k] = -u[k];
      for (std::size_t i = 0; i < r.size(); ++i) {
        const double weight = 1 / (scale * scale * std::sqrt(1 + r[i] * r[i] / (scale * scale)));
        b[k] -= weight * slopes[k][i] * r[i];
        for (std::size_t j = 0; j < size; ++j) a[k][j] += weight * slopes[k][i] * slopes[j][i];
      }
    }
    bool moved = false;
    double before = now;
    for (int tries = 0; tries < 8 && !moved; ++tries) {
      auto damped = a;
      for (std::size_t k = 0; k < size; ++k) damped[k][k] *= 1 + damping;
      const std::vector<double> step = solved(std::move(damped), b);
      std::vector<double> next = u;
      for (std::size_t k = 0; k < size; ++k) next[k] += std::clamp(step[k], -1.0, 1.0);
      const std::vector<double> there = residuals(next);
      if (const double then = loss_of(there, next, scale); then < now) {
        u = next, r = there, now = then, moved = true;
        damping = std::max(1e-6, damping / 3);
      } else {
        damping *= 4;
      }
    }
    if (!moved || before - now < 1e-6 * (1 + now)) break;
  }
  return {u, now};
}

}  // namespace

std::vector<double> most_likely(const Residuals& residuals, std::size_t size, double scale) {
  std::vector<Fit> starts{{std::vector<double>(size, 0.0), 0}};
  for (std::size_t k = 0; k < size; ++k)
    for (double there : {-1.5, 1.5}) {
      starts.push_back(starts.front());
      starts.back().u[k] = there;
    }
  for (Fit& start : starts) start.loss = loss_of(residuals(start.u), start.u, scale);
  std::sort(starts.begin() + 1, starts.end(), [](const Fit& a, const Fit& b) { return a.loss < b.loss; });
  constexpr std::size_t most_starts = 4;
  Fit best = fit_from(residuals, starts.front().u, scale);
  for (std::size_t i = 1; i < std::min(most_starts, starts.size()); ++i)
    if (Fit other = fit_from(residuals, starts[i].u, scale); other.loss < best.loss) best = std::move(other);
  return best.u;
}

}  // namespace echelon

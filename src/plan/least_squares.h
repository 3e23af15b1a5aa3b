// Fits a few numbers to a few measurements, of which there may be fewer than numbers.
#pragma once

#include <functional>
#include <vector>

namespace echelon {

// Residuals of a model at these coordinates: logarithms of predicted over measured.
using Residuals = std::function<std::vector<double>(const std::vector<double>&)>;

// Finds the `size` coordinates u that minimize sum of rho(r_i / scale) + sum of u_k^2, where rho(x) = 2
// (sqrt(1 + x^2) - 1) is a square near 0 and linear far from it, so that an outlier, such as a broken run,
// has limited influence. This is the most likely u if each u_k has a prior of mean 0 and standard deviation
// 1, and measurements have errors of `scale`. Uses Levenberg-Marquardt steps (Marquardt 1963) with reweighted
// residuals. Starts from 0 and from the best of the points 1.5 away along one coordinate, since the slope of
// a number is 0 where it is no bottleneck.
std::vector<double> most_likely(const Residuals& residuals, std::size_t size, double scale);

// The value of that sum for given residuals and coordinates.
double loss_of(const std::vector<double>& residuals, const std::vector<double>& u, double scale);

}  // namespace echelon

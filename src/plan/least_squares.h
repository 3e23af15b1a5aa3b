// Fits a few numbers to a few measurements where there may be fewer of these than of those.
#pragma once

#include <functional>
#include <vector>

namespace echelon {

// Residuals of a model at these coordinates: logarithms of predicted over measured.
using Residuals = std::function<std::vector<double>(const std::vector<double>&)>;

// Coordinates u, as many as `size`, that make least what is  sum of rho(r_i / scale) + sum of u_k^2,  with
// rho(x) = 2 (sqrt(1 + x^2) - 1): near 0 a square, far from it no more than a distance, so that a broken run
// does not pull. That is the most likely u where before any measurement each is 0 give or take 1, and
// measurements are `scale` off. Levenberg and Marquardt's steps (Marquardt 1963) with
// weights for the distances, from 0 and from the best of the points that lie 1.5 along one coordinate: what
// is no bottleneck has no slope.
std::vector<double> most_likely(const Residuals& residuals, std::size_t size, double scale);

// That sum at some coordinates.
double loss_of(const std::vector<double>& residuals, const std::vector<double>& u, double scale);

}  // namespace echelon

// Checks that stored weights are finite.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <string>

#include "base/error.h"
#include "spec/dtype.h"

namespace echelon {

// The request is valid, but what it names holds NaN or infinite values. Exit status 1 if that is the answer.
struct NotFinite : RequestError {
  using RequestError::RequestError;
};

// NotFinite; its text begins with `where` and names the tensor, how many values are not finite, and the
// first.
template <class T>
void refuse_nonfinite(const std::string& where, const std::string& tensor, std::span<const T> values) {
  std::int64_t count = 0, first = 0;
  for (std::int64_t i = std::ssize(values); i-- > 0;)
    if (!std::isfinite(values[static_cast<std::size_t>(i)])) {
      ++count;
      first = i;
    }
  if (count == 0) return;
  const double value = static_cast<double>(values[static_cast<std::size_t>(first)]);
  throw NotFinite(
      fmt::format("{}: tensor {}: {} of its {} values {} NaN or infinite, the first, {}, at index {}", where,
                  tensor, count, values.size(), count == 1 ? "is" : "are", value, first));
}

}  // namespace echelon

#include "tensor/top_k.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <type_traits>

#include "base/error.h"

namespace echelon {

// Radix selection: finds the k-th largest magnitude digit by digit from the top, with one count over all
// elements per digit, and without copying them.
template <class F>
void take_largest(F* x, std::int64_t n, std::int64_t k, std::int64_t first_index, F* values,
                  std::int32_t* indices) {
  using Bits = std::conditional_t<sizeof(F) == 4, std::uint32_t, std::uint64_t>;
  check(0 < k && k <= n && first_index + n - 1 <= std::numeric_limits<std::int32_t>::max(),
        "top-k takes at least one and at most all elements");
  const auto magnitude = [&](std::int64_t i) { return static_cast<Bits>(std::bit_cast<Bits>(x[i]) << 1); };
  constexpr int width = 11, bits = 8 * sizeof(F);
  Bits threshold = 0, known = 0;  // the known digits of the k-th largest magnitude, and their positions
  std::int64_t ties = k;          // how many to take of those that agree with it in all digits
  for (int shift = bits - width, digit_width = width; known != std::numeric_limits<Bits>::max();
       digit_width = std::min(width, shift), shift = std::max(shift - width, 0)) {
    const Bits digit_mask = (Bits{1} << digit_width) - 1;
    std::array<std::int64_t, 1 << width> counts{};
    for (std::int64_t i = 0; i < n; ++i)
      if (const Bits m = magnitude(i); (m & known) == threshold)
        ++counts[static_cast<std::size_t>(m >> shift & digit_mask)];
    auto digit = static_cast<std::size_t>(digit_mask);
    while (counts[digit] < ties) ties -= counts[digit--];
    threshold |= static_cast<Bits>(digit) << shift;
    known |= static_cast<Bits>(digit_mask << shift);
  }
  for (std::int64_t i = 0, taken = 0; i < n && taken < k; ++i) {
    const Bits m = magnitude(i);
    if (m < threshold || (m == threshold && ties-- <= 0)) continue;
    values[taken] = x[i];
    indices[taken++] = static_cast<std::int32_t>(first_index + i);
    x[i] = 0;
  }
}

template void take_largest(float*, std::int64_t, std::int64_t, std::int64_t, float*, std::int32_t*);
template void take_largest(double*, std::int64_t, std::int64_t, std::int64_t, double*, std::int32_t*);

}  // namespace echelon

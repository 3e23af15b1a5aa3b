// Applies a row of the conjugate table (spec/layout.h) to a matrix. All activations that cross ranks along tp
// go through here.
#pragma once

#include <array>
#include <functional>

#include "comm/rank.h"
#include "spec/layout.h"

namespace echelon {

// A tensor whose collective may still be under way.
class InFlight {
 public:
  InFlight() = default;
  explicit InFlight(Tensor ready) : value_(std::move(ready)) {}
  InFlight(Tensor value, Pending pending, std::function<void()> finish = {})
      : value_(std::move(value)), pending_(std::move(pending)), finish_(std::move(finish)) {}
  // Waits, and returns the tensor.
  Tensor get();

 private:
  Tensor value_;
  Pending pending_;
  std::function<void()> finish_;  // unpacks what arrived
};

// For InFlight's `finish`: keeps the sent tensor alive until get(), even if the others have taken it earlier.
// Peak memory then does not depend on the other ranks' speed.
inline std::function<void()> until_then(const Tensor& sent) {
  return [sent] {};
}

// Converts x from placement `from` to `to` along `axis`. `extent` is the logical (rows, cols); a sharded
// dimension is cut by split_range. x must be contiguous and may be overwritten (all_reduce works in place);
// the result may be x itself. The gradient goes back with redistribute(..., gradient_of(to),
// gradient_of(from), extent).
InFlight redistribute(const Rank& rank, Axis axis, const Tensor& x, const Placement& from,
                      const Placement& to, std::array<std::int64_t, 2> extent);

}  // namespace echelon

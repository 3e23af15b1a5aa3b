// delta = out . dout for each row and head, in f32 or bf16. A lane takes 16 bytes of a head, and as many
// lanes as a head has of these share it.
#pragma once

#include "tensor/rows/columns.h"
#include "tensor/rows/tiled_attention.h"

namespace echelon::rows {

// For heads of 16, 32, ... 512 bytes, rows aligned to 16 bytes, and whole warps.
template <class T>
class WarpAttentionDelta {
 public:
  static constexpr int columns = columns_of<T>;
  static bool takes(const AttentionSizes& s) {
    const int lanes = s.head_dim / columns;
    return s.head_dim % columns == 0 && lanes > 0 && (lanes & (lanes - 1)) == 0 && lanes <= 32 &&
           s.batch * s.q_len * s.num_heads * lanes < QuickDivision::limit;
  }
  WarpAttentionDelta(const AttentionSizes& s, const Matrix<T>& out, const Matrix<T>& dout, float* delta)
      : s_(s),
        out_(out),
        dout_(dout),
        delta_(delta),
        lanes_of_head_(s.head_dim / columns),
        lanes_of_row_(lanes_of_head_ * static_cast<int>(s.num_heads)),
        by_lanes_of_row_(static_cast<std::uint32_t>(lanes_of_row_)) {}
  std::int64_t num_blocks(std::int64_t lanes) const { return (all_lanes() + lanes - 1) / lanes; }

  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const auto warp = team.warp();
    const std::int64_t at = team.block() * team.lanes() + team.lane();
    const bool is = at < all_lanes();
    const std::int64_t row = is ? by_lanes_of_row_(static_cast<std::uint32_t>(at)) : 0;
    const int in_row = static_cast<int>(at - row * lanes_of_row_);
    float sum = 0;
    if (is) {
      const Columns<columns> here{static_cast<std::int64_t>(in_row) * columns};
      const auto x = here.read(out_[row]), y = here.read(dout_[row]);
      for (int k = 0; k < columns; ++k) sum += x[k] * y[k];
    }
    for (int apart = lanes_of_head_ / 2; apart > 0; apart /= 2) sum += warp.across(sum, apart);
    if (is && in_row % lanes_of_head_ == 0)
      delta_[s_.softmax(row / s_.q_len, in_row / lanes_of_head_, row % s_.q_len)] = sum;
  }

 private:
  ECHELON_HOST_DEVICE std::int64_t all_lanes() const { return s_.batch * s_.q_len * lanes_of_row_; }

  AttentionSizes s_;
  Matrix<T> out_, dout_;
  float* delta_;
  int lanes_of_head_, lanes_of_row_;
  QuickDivision by_lanes_of_row_;
};

}  // namespace echelon::rows

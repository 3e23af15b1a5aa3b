// Memory in which the logits of a chunk of tokens become their gradients. If both have the same width,
// gradients overwrite logits. If logits are wider (f32, with gradients in bf16), they exist for a piece of
// the chunk's rows at a time, placed after the gradients of the rows before; each piece has as many rows as
// fit. With twice the memory of the gradients, all rows pass in two products, each of which reads the whole
// table. If each piece would have to wait for other ranks, which hold parts of the vocabulary, there is
// memory for all rows at once.
#pragma once

#include <algorithm>

#include "parallel/vocabulary_logits.h"

namespace echelon {

class LogitsRoom {
 public:
  // For chunks of at most `rows` rows and `width` columns.
  LogitsRoom(const Rank& rank, std::int64_t rows, std::int64_t width, bool in_one_piece)
      : wide_(rank.precision().statistics),
        narrow_(rank.precision().activations),
        width_(width),
        stride_(logits_row_stride(width)),
        room_(rows + (wide_ == narrow_ ? 0
                      : in_one_piece   ? ratio() * rows
                                       : std::max(ratio(), rows))),
        bytes_(rank.arena(), MemoryCategory::activations, DType::u8,
               {room_ * row_bytes() + (wide_ == narrow_ ? 0 : alignment)}) {}

  // The gradients (rows, width), after visit() has computed them.
  Tensor gradients(std::int64_t rows) const { return matrix(0, narrow_, rows); }

  // Calls visit(piece, logits, gradients) for all rows of a chunk, in order. It turns the piece's logits,
  // which are then discarded, into gradients, which stay.
  template <class Visit>
  void each_piece(std::int64_t rows, const Visit& visit) const {
    if (wide_ == narrow_) return visit(Range{0, rows}, gradients(rows), gradients(rows));
    for (std::int64_t begin = 0; begin < rows;) {
      const std::int64_t here = std::min(rows - begin, (room_ - begin) / (1 + ratio()));
      // At the end of the memory, since only there is alignment certain.
      const std::int64_t at = (bytes_.numel() - here * ratio() * row_bytes()) / alignment * alignment;
      visit(Range{begin, begin + here}, matrix(at, wide_, here),
            gradients(rows).row_range(begin, begin + here));
      begin += here;
    }
  }

 private:
  static constexpr std::int64_t alignment = 64;
  std::int64_t ratio() const { return element_bytes(wide_) / element_bytes(narrow_); }
  std::int64_t row_bytes() const { return stride_ * element_bytes(narrow_); }
  Tensor matrix(std::int64_t at, DType dtype, std::int64_t rows) const {
    return bytes_.typed(at, dtype, {rows, stride_}).column_range(0, width_);
  }

  DType wide_, narrow_;
  std::int64_t width_, stride_;
  std::int64_t room_;  // rows of gradients that fit
  Tensor bytes_;
};

}  // namespace echelon

// Where the logits of a chunk of tokens become their gradients. As wide as these they share the memory, chunk
// by chunk. Wider (f32 beside gradients in bf16), the logits exist for some rows of the chunk at a time,
// behind the gradients of the rows before them, and each time for as many as there is room for: twice what
// the gradients take lets all rows through in two products, each of which reads the whole table. Where each
// piece would wait for other ranks, which have parts of the vocabulary, there is room for all rows at once.
#pragma once

#include <algorithm>

#include "parallel/vocabulary_logits.h"

namespace echelon {

class LogitsRoom {
 public:
  // For chunks of at most so many rows, `width` columns.
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

  // (rows, width), once visit() has made them.
  Tensor gradients(std::int64_t rows) const { return matrix(0, narrow_, rows); }

  // visit(piece, logits, gradients) for all rows of a chunk, in order: makes the gradients of the piece,
  // which stay, of its logits, which do not.
  template <class Visit>
  void each_piece(std::int64_t rows, const Visit& visit) const {
    if (wide_ == narrow_) return visit(Range{0, rows}, gradients(rows), gradients(rows));
    for (std::int64_t begin = 0; begin < rows;) {
      const std::int64_t here = std::min(rows - begin, (room_ - begin) / (1 + ratio()));
      // From the room's end, as only there is it certain to be aligned.
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
  std::int64_t room_;  // rows of gradients that there is memory for
  Tensor bytes_;
};

}  // namespace echelon

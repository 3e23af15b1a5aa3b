// Memory in which the logits of a chunk of tokens become their gradients. If both have the same width,
// gradients overwrite logits. If logits are wider (f32, with gradients in bf16), they exist for a piece of
// the chunk's rows at a time, behind the gradients of the rows before, and a piece's gradients overwrite
// those of its logits that have been read. With two thirds of the memory of all logits, all rows pass in two
// products, each of which reads the whole table. If each piece would have to wait for other ranks, which
// hold parts of the vocabulary, there is memory for all rows at once.
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
        room_(wide_ == narrow_ ? rows
              : in_one_piece   ? before(rows) + ratio() * rows
                               : before(rows) + ratio() * wide_logits_rows(rows)),
        bytes_(rank.arena(), MemoryCategory::activations, DType::u8, {room_ * row_bytes()}) {}

  // The gradients (rows, width), as far as each_group() has passed.
  Tensor gradients(std::int64_t rows) const { return matrix(0, narrow_, rows); }

  struct Piece {
    Range rows;     // of the chunk
    Tensor logits;  // of these rows
    std::int64_t
        distance;  // from the first row of their gradients to that of the logits, in rows of gradients
  };
  // Calls visit(piece) for all rows of a chunk, in order. It turns the piece's logits, which are then
  // discarded, into gradients, which stay.
  template <class Visit>
  void each_piece(std::int64_t rows, const Visit& visit) const {
    if (wide_ == narrow_) return visit(Piece{{0, rows}, gradients(rows), 0});
    for (Range here; here.end < rows;) {
      here.begin = here.end;
      here.end = std::min(rows, here.begin + (room_ - before(rows) - here.begin) / ratio());
      const std::int64_t at = room_ - ratio() * here.size();
      visit(Piece{here, matrix(at, wide_, here.size()), at - here.begin});
    }
  }

  // Calls visit(group) for all rows of the piece (0: its first), in groups in order. It makes the gradients
  // of a group; then only logits of later groups are intact.
  template <class Visit>
  void each_group(const Piece& piece, const Visit& visit) const {
    const std::int64_t rows = piece.rows.size();
    if (wide_ == narrow_) return visit(Range{0, rows});
    for (Range group; group.end < rows;) {
      group.begin = group.end;
      group.end = std::min(rows, piece.distance + ratio() * group.begin);
      visit(group);
    }
  }

 private:
  // How far logits are at least behind their gradients. Each group has twice as many rows as the one before.
  static std::int64_t before(std::int64_t rows) { return std::min<std::int64_t>(rows, 16); }
  std::int64_t ratio() const { return element_bytes(wide_) / element_bytes(narrow_); }
  std::int64_t row_bytes() const { return stride_ * element_bytes(narrow_); }
  Tensor matrix(std::int64_t row, DType dtype, std::int64_t rows) const {
    return bytes_.typed(row * row_bytes(), dtype, {rows, stride_}).column_range(0, width_);
  }

  DType wide_, narrow_;
  std::int64_t width_, stride_;
  std::int64_t room_;  // rows of gradients that fit
  Tensor bytes_;
};

}  // namespace echelon

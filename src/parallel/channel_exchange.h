// Context parallelism of layers that process each channel of a whole sequence by itself (state spaces,
// convolutions). An all-to-all over the cp group turns a part of the tokens with all channels into all tokens
// with a part of the channels; the layer then needs no communication; a second all-to-all brings its output
// back. The exchange covers the whole cp group and goes by positions, so it is the same whichever layout
// attention layers use (spec/context_layout.h).
//
// Bytes that a rank sends in each: (cp-1)/cp of its rows of the matrix. Columns that several ranks need are
// sent to each of them, and their gradient is the sum over these.
#pragma once

#include <vector>

#include "comm/rank.h"
#include "parallel/whole_rows.h"

namespace echelon {

// By rank of the group: the columns of a matrix that it gets, equally many on each.
using ExchangedColumns = std::vector<std::vector<Range>>;

class ChannelExchange {
 public:
  // `rank` outlives this.
  ChannelExchange(const Rank& rank, const Plan& plan) : rank_(&rank), rows_(rank, plan) {}

  // to_channels(): from the rows of this rank's tokens (rows, all columns) to all rows of this rank's
  // columns. to_tokens(): back, into `x`; columns that several ranks had are summed.
  Tensor to_channels(const Tensor& x, const ExchangedColumns& columns) const;
  void to_tokens(const Tensor& of_channels, const ExchangedColumns& columns, const Tensor& x) const;

 private:
  const Rank* rank_;
  WholeRows rows_;
};

}  // namespace echelon

// Context parallelism of layers that take in a channel of a whole sequence at a time (state spaces,
// convolutions): an all-to-all takes each rank of the cp group from its tokens of all channels to all tokens
// of its part of them, where nothing is sent, and another one brings back what they become. It is over the
// whole group and by positions, so it is the same wherever attention of other layers has its tokens
// (spec/context_layout.h).
//
// Bytes that a rank sends in each: (cp-1)/cp of its rows of the matrix; columns that several ranks get are
// sent to each of them, and their gradient is the sum of theirs.
#pragma once

#include <vector>

#include "comm/rank.h"
#include "parallel/whole_rows.h"

namespace echelon {

// Of each rank of the group the columns of a matrix that it gets: as many on each.
using ExchangedColumns = std::vector<std::vector<Range>>;

class ChannelExchange {
 public:
  // `rank` outlives this.
  ChannelExchange(const Rank& rank, const Plan& plan) : rank_(&rank), rows_(rank, plan) {}

  // Of the rows of the tokens here (rows, all columns) all rows of the columns of this rank, and back into
  // `x`; where several ranks have had a column the sum.
  Tensor to_channels(const Tensor& x, const ExchangedColumns& columns) const;
  void to_tokens(const Tensor& of_channels, const ExchangedColumns& columns, const Tensor& x) const;

 private:
  const Rank* rank_;
  WholeRows rows_;
};

}  // namespace echelon

// Helpers from which the algorithms of collectives.h are written.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "comm/communicator.h"

namespace echelon {

// Rank i of a ring of n, wrapped around in either direction.
inline int around(int i, int n) { return (i % n + n) % n; }

// Splits a buffer into parts of counts[i] elements, in rank order.
std::vector<Tensor> cut(const Tensor& whole, std::span<const std::int64_t> counts);
// Counts that differ by at most one element.
std::vector<std::int64_t> even_counts(std::int64_t count, int n);

// Sends `out` to one rank and receives `in` from another, or from the same.
void send_receive(Communicator& group, const Tensor& out, int to, const Tensor& in, int from);

// Does nothing if both are the same memory. `stream`: see copy_bytes().
void copy(const Tensor& from, const Tensor& to, bool stream = false);

// out = the sum (or maximum) of all, grouped like ranks (halving_tree.h). `out` may be one of them.
void reduce_several(ReduceOp op, std::span<const Tensor> from, const Tensor& out);
// out = left op right. `out` may be either.
void reduce_two(ReduceOp op, const Tensor& left, const Tensor& right, const Tensor& out);

}  // namespace echelon

#include "parallel/redistribute.h"

#include <vector>

#include "base/error.h"
#include "base/split.h"

namespace echelon {
namespace {

// What comes of x has its dtype.
Tensor like(const Rank& rank, const Tensor& x, std::vector<std::int64_t> shape) {
  return {rank.arena(), MemoryCategory::activations, x.dtype(), std::move(shape)};
}

using Extent = std::array<std::int64_t, 2>;

struct Cut {
  int dim;
  std::vector<Range> parts;
};

Cut cut_of(const Placement& placement, const Extent& extent, int size) {
  Cut cut{placement.dim, {}};
  for (int i = 0; i < size; ++i)
    cut.parts.push_back(split_range(extent[static_cast<std::size_t>(placement.dim)], size, i));
  return cut;
}

Tensor part(const Tensor& x, int dim, const Range& range) {
  return dim == 0 ? x.row_range(range.begin, range.end) : x.column_range(range.begin, range.end);
}

// Elements of each part of a matrix of `rows` x `cols` cut along `cut.dim`.
std::vector<std::int64_t> counts_of(const Cut& cut, std::int64_t rows, std::int64_t cols) {
  std::vector<std::int64_t> counts;
  for (const Range& range : cut.parts) counts.push_back(range.size() * (cut.dim == 0 ? cols : rows));
  return counts;
}

// The parts of x one after another in one buffer; x itself when they lie so already.
Tensor pack(const Rank& rank, const Tensor& x, const Cut& cut) {
  if (cut.dim == 0) return x;
  const Tensor packed = like(rank, x, {x.numel()});
  std::int64_t begin = 0;
  for (const Range& range : cut.parts) {
    const std::int64_t count = range.size() * x.rows();
    if (count > 0)
      rank.kernels().copy(part(x, cut.dim, range),
                          packed.flat_range(begin, begin + count).reshape({x.rows(), range.size()}));
    begin += count;
  }
  return packed;
}

// The inverse: parts that arrived one after another go to their places in `whole`.
void unpack(const Rank& rank, const Tensor& packed, const Cut& cut, const Tensor& whole) {
  std::int64_t begin = 0;
  for (const Range& range : cut.parts) {
    const Tensor place = part(whole, cut.dim, range);
    if (place.numel() > 0)
      rank.kernels().copy(
          packed.flat_range(begin, begin + place.numel()).reshape({place.rows(), place.cols()}), place);
    begin += place.numel();
  }
}

InFlight gather(const Rank& rank, Communicator& group, const Tensor& x, const Cut& cut,
                const Extent& extent) {
  const Tensor whole = like(rank, x, {extent[0], extent[1]});
  const std::vector<std::int64_t> counts = counts_of(cut, extent[0], extent[1]);
  if (cut.dim == 0) return {whole, group.all_gather(x, whole, counts)};
  const Tensor packed = like(rank, x, {whole.numel()});
  return {whole, group.all_gather(x, packed, counts),
          [&rank, packed, cut, whole] { unpack(rank, packed, cut, whole); }};
}

InFlight scatter_sum(const Rank& rank, Communicator& group, const Tensor& x, const Cut& cut,
                     const Extent& extent) {
  const std::int64_t own = cut.parts[static_cast<std::size_t>(group.rank())].size();
  const Tensor out = cut.dim == 0 ? like(rank, x, {own, extent[1]}) : like(rank, x, {extent[0], own});
  const Tensor packed = pack(rank, x, cut);
  return {out, group.reduce_scatter(packed, out, counts_of(cut, extent[0], extent[1])), until_then(packed)};
}

Tensor slice(const Rank& rank, int index, const Tensor& x, const Cut& cut) {
  const Tensor view = part(x, cut.dim, cut.parts[static_cast<std::size_t>(index)]);
  const Tensor out = like(rank, x, {view.rows(), view.cols()});
  if (out.numel() > 0) rank.kernels().copy(view, out);
  return out;
}

// From one sharded dimension to the other: each rank sends every rank its block of the new cut.
InFlight exchange(const Rank& rank, Communicator& group, const Tensor& x, const Cut& from, const Cut& to,
                  const Extent& extent) {
  const auto me = static_cast<std::size_t>(group.rank());
  const Range had = from.parts[me], gets = to.parts[me];
  std::vector<std::int64_t> send_counts, recv_counts;
  for (int i = 0; i < group.size(); ++i) {
    send_counts.push_back(had.size() * to.parts[static_cast<std::size_t>(i)].size());
    recv_counts.push_back(from.parts[static_cast<std::size_t>(i)].size() * gets.size());
  }
  const Tensor out =
      to.dim == 0 ? like(rank, x, {gets.size(), extent[1]}) : like(rank, x, {extent[0], gets.size()});
  const Tensor packed = like(rank, x, {out.numel()});
  return {out, group.all_to_all(pack(rank, x, to), send_counts, packed, recv_counts),
          [&rank, packed, from, out] { unpack(rank, packed, from, out); }};
}

}  // namespace

Tensor InFlight::get() {
  pending_.wait();
  if (finish_) finish_();
  finish_ = {};
  return std::move(value_);
}

InFlight redistribute(const Rank& rank, Axis axis, const Tensor& x, const Placement& from,
                      const Placement& to, std::array<std::int64_t, 2> extent) {
  Communicator& group = rank.along(axis);
  if (group.size() == 1) return InFlight(x);
  switch (transition(from, to).forward) {
    case Collective::none:
      return InFlight(x);
    case Collective::all_reduce:
      return {x, group.all_reduce(x)};
    case Collective::all_gather:
      return gather(rank, group, x, cut_of(from, extent, group.size()), extent);
    case Collective::reduce_scatter:
      return scatter_sum(rank, group, x, cut_of(to, extent, group.size()), extent);
    case Collective::slice:
      return InFlight(slice(rank, group.rank(), x, cut_of(to, extent, group.size())));
    case Collective::all_to_all:
      return exchange(rank, group, x, cut_of(from, extent, group.size()), cut_of(to, extent, group.size()),
                      extent);
  }
  throw InvariantError("redistribute: unknown collective");
}

}  // namespace echelon

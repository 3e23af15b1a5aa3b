#include "spec/param_spec.h"

#include <algorithm>

#include "base/error.h"

namespace echelon {

std::int64_t ParamSpec::numel() const {
  std::int64_t count = 1;
  for (std::int64_t extent : shape) count *= extent;
  return count;
}

// Ranks that share one unit of this piece.
static int piece_replicas(const Piece& piece, int tp) {
  const std::int64_t units = piece.length / piece.unit;
  check(piece.length % piece.unit == 0, "a piece consists of whole units");
  check(units >= tp || (piece.repeats && tp % units == 0), "ranks share the units of a piece evenly");
  return units >= tp ? 1 : static_cast<int>(tp / units);
}

std::vector<Range> local_ranges(const ParamSpec& spec, int tp, int index) {
  if (spec.shard_dim < 0) return {Range{0, spec.shape.empty() ? 1 : spec.shape[0]}};
  index += spec.part * tp;
  tp *= spec.parts;
  std::vector<Range> ranges;
  std::int64_t start = 0;
  for (const Piece& piece : spec.pieces) {
    const int replicas = piece_replicas(piece, tp);
    const Range units = split_range(piece.length / piece.unit, tp / replicas, index / replicas);
    ranges.push_back({start + units.begin * piece.unit, start + units.end * piece.unit});
    start += piece.length;
  }
  return ranges;
}

std::vector<std::int64_t> local_shape(const ParamSpec& spec, int tp, int index) {
  std::vector<std::int64_t> shape = spec.shape;
  if (spec.shard_dim < 0) return shape;
  std::int64_t extent = 0;
  for (const Range& range : local_ranges(spec, tp, index)) extent += range.size();
  shape[static_cast<std::size_t>(spec.shard_dim)] = extent;
  return shape;
}

int tp_replicas(const ParamSpec& spec, int tp) {
  if (spec.shard_dim < 0) return tp;
  const int replicas = piece_replicas(spec.pieces.at(0), tp * spec.parts);
  for (const Piece& piece : spec.pieces)
    check(piece_replicas(piece, tp * spec.parts) == replicas, "pieces of one parameter are replicated alike");
  return replicas;
}

void for_each_run(const ParamSpec& spec, int tp, int index,
                  const std::function<void(std::int64_t, std::int64_t, std::int64_t)>& visit) {
  if (spec.shard_dim < 0) return visit(0, 0, spec.numel());
  const auto dim = static_cast<std::size_t>(spec.shard_dim);
  std::int64_t outer = 1, inner = 1;
  for (std::size_t i = 0; i < dim; ++i) outer *= spec.shape[i];
  for (std::size_t i = dim + 1; i < spec.shape.size(); ++i) inner *= spec.shape[i];
  const std::vector<Range> ranges = local_ranges(spec, tp, index);
  std::int64_t local = 0;
  for (std::int64_t o = 0; o < outer; ++o)
    for (const Range& range : ranges) {
      const std::int64_t count = range.size() * inner;
      visit((o * spec.shape[dim] + range.begin) * inner, local, count);
      local += count;
    }
}

std::vector<LogicalRun> logical_runs(const ParamSpec& spec, int tp, int index, Range part) {
  std::vector<LogicalRun> runs;
  for_each_run(spec, tp, index, [&](std::int64_t logical, std::int64_t local, std::int64_t count) {
    const std::int64_t begin = std::max(local, part.begin), end = std::min(local + count, part.end);
    if (begin < end) runs.push_back({logical + begin - local, end - begin});
  });
  return runs;
}

}  // namespace echelon

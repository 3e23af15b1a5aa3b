// Where a rank's parameters lie in its flat buffers, and how those are cut into gradient buckets. Read by the
// trainer's parameter store and data parallelism, and by the memory and traffic predictions.
#pragma once

#include <cstdint>
#include <vector>

#include "spec/model_spec.h"

namespace echelon {

// First everything that is cut over tp, group by group (embedding, each block, head), so that what a backward
// pass has finished lies in one piece; then the routed experts, group by group: fewer ranks hold the same
// ones; then everything that each tp rank holds whole: few elements, whose gradients need one more sum under
// sequence parallelism, the last of them (ParamSpec::tp_partial) always. All that is frozen lies behind that,
// in the same order.
struct FlatLayout {
  std::vector<std::int64_t> offsets, sizes;      // of each parameter, in the order of the groups
  std::vector<Range> cut_ranges, expert_ranges;  // of each group: of what is trained
  Range whole_range, partial_range;              // the second at the end of the first
  struct Frozen {
    std::vector<Range> cut_ranges, expert_ranges;
    Range whole_range;
  };
  Frozen frozen;
  std::int64_t trained_size() const { return whole_range.end; }
  std::int64_t size() const { return frozen.whole_range.end; }
};

FlatLayout flat_layout(const std::vector<std::vector<ParamSpec>>& groups, int tp, int index);

// The gradient norm adds the squares of so many elements of a parameter (as a rank holds it) at a time, then
// the sums of so many of these blocks in order, and then these in order. Its bits then depend on tp alone.
inline constexpr std::int64_t norm_block = 1024, norm_blocks_at_once = 64;
inline std::int64_t norm_blocks(std::int64_t elements) { return (elements + norm_block - 1) / norm_block; }

// Elements that rank `index` of `tp` holds of a parameter.
std::int64_t local_numel(const ParamSpec& spec, int tp, int index);

struct BucketRange {
  Range range;
  bool experts = false;
};
// Gradient buckets in the order in which the backward pass completes them (last group first, the whole
// parameters at the end): each at least `bucket_elements` long, but for the last of the cut ranges, the last
// of the experts, and the whole range.
std::vector<BucketRange> gradient_buckets(const FlatLayout& layout, std::int64_t bucket_elements);

}  // namespace echelon

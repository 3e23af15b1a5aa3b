// Where a rank's parameters lie in its flat buffers, and how these are divided into gradient buckets. The
// trainer's parameter store, data parallelism, and the memory and traffic predictions read this.
#pragma once

#include <cstdint>
#include <vector>

#include "spec/model_spec.h"

namespace echelon {

// The order of a flat buffer. First the parameters that are cut over tp, group by group (embedding, each
// block, head), so that what a backward pass has just finished is contiguous. Then the routed experts, group
// by group, since fewer ranks hold the same ones. Then the parameters that every tp rank holds whole: they
// are few elements, and their gradients need one more sum, under sequence parallelism or always
// (ParamSpec::tp_partial; these come last). Frozen parameters follow, in the same order.
struct FlatLayout {
  std::vector<std::int64_t> offsets, sizes;  // by parameter, in the order of the groups
  // by group: trained parameters only
  std::vector<Range> cut_ranges, expert_ranges;
  Range whole_range, partial_range;  // the second is the end of the first
  struct Frozen {
    std::vector<Range> cut_ranges, expert_ranges;
    Range whole_range;
  };
  Frozen frozen;
  std::int64_t trained_size() const { return whole_range.end; }
  std::int64_t size() const { return frozen.whole_range.end; }
};

FlatLayout flat_layout(const std::vector<std::vector<ParamSpec>>& groups, int tp, int index);

// The gradient norm sums the squares of a parameter, as a rank holds it, in blocks of norm_block elements;
// then groups of norm_blocks_at_once block sums in order; then these in order. Its bits thus depend on tp
// alone.
inline constexpr std::int64_t norm_block = 1024, norm_blocks_at_once = 64;
inline std::int64_t norm_blocks(std::int64_t elements) { return (elements + norm_block - 1) / norm_block; }

// The number of elements of a parameter that rank `index` of `tp` holds.
std::int64_t local_numel(const ParamSpec& spec, int tp, int index);

struct BucketRange {
  Range range;
  bool experts = false;
};
// Gradient buckets in the order in which the backward pass completes them: the last group first, the whole
// parameters at the end. Each has at least `bucket_elements`, except the last of the cut ranges, the last of
// the experts, and the whole range.
std::vector<BucketRange> gradient_buckets(const FlatLayout& layout, std::int64_t bucket_elements);

}  // namespace echelon

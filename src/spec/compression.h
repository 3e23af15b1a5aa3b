// Compression of the gradients that travel along the data-parallel axis, as data: what --compress says, how a
// bucket is divided for it, and the bytes that it sends and holds. parallel/compression runs it.
//
// One rule holds for every method: the compressed gradient of a parameter depends only on that parameter's
// gradients, its name and the step; not on its bucket, the order of buckets, or other parameters. So ranks
// that hold copies of the same parameter (a tied embedding on two pipeline ranks, key/value heads on two tp
// ranks) keep the same bits.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "spec/dtype.h"
#include "spec/flat_layout.h"

namespace echelon {

enum class CompressionKind { none, bf16, fp16, int8, topk, powersgd };

struct Compression {
  CompressionKind kind = CompressionKind::none;
  double fraction = 1;            // topk: the part of each parameter's elements that is sent
  std::int64_t rank = 1;          // powersgd: of the approximation of each matrix
  std::int64_t warmup_steps = 0;  // powersgd: steps at the start without compression
  bool operator==(const Compression&) const = default;
};

// Parses "none", "bf16", "fp16", "int8", "topk:R" (0 < R <= 1), "powersgd:R" or "powersgd:R:W" (R >= 1, W >=
// 0). RequestError naming `field`, the value and what is legal otherwise.
Compression parse_compression(const std::string& text, const std::string& field);
// The text that parse_compression() turns into this.
std::string compression_text(const Compression& compression);

// The part of a bucket that is one whole parameter, as this rank holds it.
struct GradientSection {
  std::string name;
  int slice = 0;  // which cut of the logical parameter; tp ranks with the same data have the same number
  Range range;    // elements of the bucket
  std::int64_t rows = 0, cols = 0;  // as a matrix: the first dimension, and the product of the others
};

struct GradientBucket {
  Range range;                            // in the flat order of the rank's parameters
  bool experts = false;                   // of routed experts: summed over the ranks that hold the same ones
  std::vector<GradientSection> sections;  // in order, without gaps
  // Empty: every rank gets the whole sum (all-reduce). Otherwise the size of each rank's shard, in rank order
  // (reduce-scatter).
  std::vector<std::int64_t> shards;
  std::int64_t numel() const { return sections.empty() ? 0 : sections.back().range.end; }
};

// What rank `index` of `tp` holds of a parameter, as a section that starts at 0.
GradientSection gradient_section(const ParamSpec& spec, int tp, int index);
// The parameters in the range `bucket` of the flat buffer of tp rank `index`. InvariantError if one of them
// is only partly inside.
GradientBucket gradient_bucket(const std::vector<std::vector<ParamSpec>>& groups, const FlatLayout& layout,
                               Range bucket, int tp, int index);

// ---- bf16, fp16, int8

// Elements of a parameter that share a scale.
inline constexpr std::int64_t scale_block = 256;
// Whether each block is sent with a scale (f32), and the bytes of a packed element.
constexpr bool has_scales(CompressionKind kind) {
  return kind == CompressionKind::fp16 || kind == CompressionKind::int8;
}
constexpr std::int64_t quantized_element_bytes(CompressionKind kind) {
  return kind == CompressionKind::int8 ? 1 : 2;
}
// The elements that each of `size` ranks sums: its shard, or an even cut rounded up to the end of a block.
std::vector<Range> quantized_parts(CompressionKind kind, const GradientBucket& bucket, int size);
// Calls visit(section, block, piece) for each block with elements in `part`, in order; `piece` is the block's
// intersection with `part`. Ranges are relative to the bucket.
void for_each_block(const GradientBucket& bucket, Range part,
                    const std::function<void(const GradientSection&, Range block, Range piece)>& visit);
// Bytes of the packed elements of `part` and of the scales of every block that it touches.
std::int64_t quantized_bytes(CompressionKind kind, const GradientBucket& bucket, Range part);

// ---- topk, powersgd

// How many elements of a section topk:R sends: the fraction R, rounded to the nearest number, at least one.
std::int64_t elements_kept(const Compression& compression, const GradientSection& section);
// Whether powersgd:R sends the section as two factors, because that is fewer elements: (rows + cols) R < rows
// cols.
bool is_factored(const Compression& compression, const GradientSection& section);

// The smallest R at which powersgd:R sends the section uncompressed.
std::int64_t uncompressed_rank(const GradientSection& section);
// Whether the section has a residual (error feedback): what was not sent and is carried over to later steps.
bool has_residual(const Compression& compression, const GradientSection& section);
// Whether the method has residuals at all, so that it must not be turned off in the middle of a run.
constexpr bool has_residuals(CompressionKind kind) {
  return kind == CompressionKind::topk || kind == CompressionKind::powersgd;
}

}  // namespace echelon

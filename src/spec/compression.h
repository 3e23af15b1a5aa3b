// Compression of gradients on the data-parallel axis, as data: what --compress says, how a bucket is cut for
// it, and the bytes that it sends and holds. parallel/compression runs it.
//
// One law for every method: what becomes of a parameter's gradient depends on that parameter's gradients, its
// name and the step alone, not on the bucket it lies in, the order of buckets, or other parameters. Ranks
// that hold the same parameter twice (a tied embedding on two pipeline ranks, key/value heads on two tp
// ranks) so keep the same bits.
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
  double fraction = 1;            // topk: of each parameter's elements that is sent
  std::int64_t rank = 1;          // powersgd: of each matrix's approximation
  std::int64_t warmup_steps = 0;  // powersgd: steps at the start that are not compressed
  bool operator==(const Compression&) const = default;
};

// "none", "bf16", "fp16", "int8", "topk:R" (0 < R <= 1), "powersgd:R" or "powersgd:R:W" (R >= 1, W >= 0).
// RequestError naming `field`, the value and what is legal.
Compression parse_compression(const std::string& text, const std::string& field);
// The text that parses to the same.
std::string compression_text(const Compression& compression);

// The part of a bucket that is one whole parameter, as this rank holds it.
struct GradientSection {
  std::string name;
  int slice = 0;  // which cut of the logical parameter: tp ranks that hold the same have the same
  Range range;    // elements of the bucket
  std::int64_t rows = 0, cols = 0;  // as a matrix: the first dimension, and all others together
};

struct GradientBucket {
  Range range;                            // in the flat order of the rank's parameters
  bool experts = false;                   // routed experts: summed over the ranks that hold the same ones
  std::vector<GradientSection> sections;  // in order, without gaps
  // Empty: every rank gets the whole sum (all-reduce). Else the elements of each rank's shard, in rank order
  // (reduce-scatter).
  std::vector<std::int64_t> shards;
  std::int64_t numel() const { return sections.empty() ? 0 : sections.back().range.end; }
};

// All that rank `index` of `tp` holds of a parameter, as a bucket of its own.
GradientSection gradient_section(const ParamSpec& spec, int tp, int index);
// The parameters that lie in the range `bucket` of the flat buffer of tp rank `index`. A parameter that lies
// in it only in part is an InvariantError.
GradientBucket gradient_bucket(const std::vector<std::vector<ParamSpec>>& groups, const FlatLayout& layout,
                               Range bucket, int tp, int index);

// ---- bf16, fp16, int8

// Elements of a parameter that share a scale.
inline constexpr std::int64_t scale_block = 256;
// Whether each block travels with a scale (f32), and bytes of an element.
constexpr bool has_scales(CompressionKind kind) {
  return kind == CompressionKind::fp16 || kind == CompressionKind::int8;
}
constexpr std::int64_t quantized_element_bytes(CompressionKind kind) {
  return kind == CompressionKind::int8 ? 1 : 2;
}
// The elements that each of `size` ranks sums: its shard, or an even cut moved up to the end of a block.
std::vector<Range> quantized_parts(CompressionKind kind, const GradientBucket& bucket, int size);
// Calls visit(section, block, piece) for each block that has elements in `part`, in order; `piece` is what it
// has there. Ranges are of the bucket.
void for_each_block(const GradientBucket& bucket, Range part,
                    const std::function<void(const GradientSection&, Range block, Range piece)>& visit);
// Bytes of the packed elements of `part` with the scales of every block that it touches.
std::int64_t quantized_bytes(CompressionKind kind, const GradientBucket& bucket, Range part);

// ---- topk, powersgd

// Elements that topk:R sends of a section: R of them, rounded to the nearest number, at least one.
std::int64_t elements_kept(const Compression& compression, const GradientSection& section);
// Whether powersgd:R sends fewer elements of the section as two factors: (rows + cols) R < rows cols.
bool is_factored(const Compression& compression, const GradientSection& section);

// The smallest R of powersgd:R that sends the section as it is.
std::int64_t uncompressed_rank(const GradientSection& section);
// Whether the section has a residual: what is not sent now and is carried over to later steps.
bool has_residual(const Compression& compression, const GradientSection& section);
// Whether the method can have one, and so must not be left off in the middle of a run.
constexpr bool has_residuals(CompressionKind kind) {
  return kind == CompressionKind::topk || kind == CompressionKind::powersgd;
}

}  // namespace echelon

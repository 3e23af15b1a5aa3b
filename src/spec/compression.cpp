#include "spec/compression.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "base/error.h"

namespace echelon {
namespace {

constexpr std::array<const char*, 6> kind_names{"none", "bf16", "fp16", "int8", "topk", "powersgd"};
constexpr std::int64_t most_rank = 65536, most_warmup = 1'000'000'000;

const char* kind_name(CompressionKind kind) { return kind_names[static_cast<std::size_t>(kind)]; }

// The whole text as a number, or nothing.
template <class T>
std::optional<T> number(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

Compression parse_topk(const std::string& text, const std::string& field, std::string_view argument) {
  const auto fraction = number<double>(argument);
  if (!fraction || !(*fraction > 0 && *fraction <= 1))
    refuse("{} {}: legal: topk:R, where R, the fraction of elements sent, is above 0 and at most 1", field,
           text);
  return {.kind = CompressionKind::topk, .fraction = *fraction};
}

Compression parse_powersgd(const std::string& text, const std::string& field, std::string_view argument) {
  const std::size_t colon = argument.find(':');
  const auto rank = number<std::int64_t>(argument.substr(0, colon));
  const auto warmup = colon == argument.npos ? std::optional<std::int64_t>(0)
                                             : number<std::int64_t>(argument.substr(colon + 1));
  if (!rank || *rank < 1 || *rank > most_rank || !warmup || *warmup < 0 || *warmup > most_warmup)
    refuse(
        "{} {}: legal: powersgd:R or powersgd:R:W, where R is the rank of the approximation (1 to {}) and W "
        "the number of first steps that are not compressed (0 to {}, 0 when left out)",
        field, text, most_rank, most_warmup);
  return {.kind = CompressionKind::powersgd, .rank = *rank, .warmup_steps = *warmup};
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

std::int64_t ceil_to_block(std::int64_t x) { return ceil_div(x, scale_block) * scale_block; }

std::int64_t shard_of(const GradientBucket& bucket, int rank) {
  return bucket.shards[static_cast<std::size_t>(rank)];
}

}  // namespace

Compression parse_compression(const std::string& text, const std::string& field) {
  const std::size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  const std::string_view argument =
      colon == text.npos ? std::string_view() : std::string_view(text).substr(colon + 1);
  if (name == "topk") return parse_topk(text, field, argument);
  if (name == "powersgd") return parse_powersgd(text, field, argument);
  for (CompressionKind kind :
       {CompressionKind::none, CompressionKind::bf16, CompressionKind::fp16, CompressionKind::int8})
    if (text == kind_name(kind)) return {.kind = kind};
  refuse("{} {}: no such method; legal: none, bf16, fp16, int8, topk:R, powersgd:R", field, text);
}

std::string compression_text(const Compression& compression) {
  std::string name = kind_name(compression.kind);
  if (compression.kind == CompressionKind::topk) return fmt::format("{}:{}", name, compression.fraction);
  if (compression.kind != CompressionKind::powersgd) return name;
  if (compression.warmup_steps == 0) return fmt::format("{}:{}", name, compression.rank);
  return fmt::format("{}:{}:{}", name, compression.rank, compression.warmup_steps);
}

GradientSection gradient_section(const ParamSpec& spec, int tp, int index) {
  const std::int64_t numel = local_numel(spec, tp, index), rows = local_shape(spec, tp, index).front();
  return {.name = spec.name,
          .slice = index / tp_replicas(spec, tp),
          .range = {0, numel},
          .rows = rows,
          .cols = rows == 0 ? 0 : numel / rows};
}

GradientBucket gradient_bucket(const std::vector<std::vector<ParamSpec>>& groups, const FlatLayout& layout,
                               Range bucket, int tp, int index) {
  GradientBucket cut;
  cut.range = bucket;
  std::size_t i = 0;
  for (const auto& group : groups)
    for (const ParamSpec& spec : group) {
      const std::int64_t begin = layout.offsets[i], numel = layout.sizes[i];
      ++i;
      if (begin + numel <= bucket.begin || begin >= bucket.end || numel == 0) continue;
      check(begin >= bucket.begin && begin + numel <= bucket.end, "a bucket holds whole parameters");
      cut.sections.push_back(gradient_section(spec, tp, index));
      cut.sections.back().range = {begin - bucket.begin, begin - bucket.begin + numel};
    }
  std::sort(cut.sections.begin(), cut.sections.end(),
            [](const GradientSection& a, const GradientSection& b) { return a.range.begin < b.range.begin; });
  check(cut.numel() == bucket.size(), "a bucket's parameters fill it");
  return cut;
}

std::vector<Range> quantized_parts(CompressionKind kind, const GradientBucket& bucket, int size) {
  std::vector<Range> parts;
  std::int64_t begin = 0;
  for (int rank = 0; rank < size; ++rank) {
    std::int64_t end =
        bucket.shards.empty() ? split_range(bucket.numel(), size, rank).end : begin + shard_of(bucket, rank);
    if (bucket.shards.empty() && has_scales(kind))
      for (const GradientSection& s : bucket.sections)
        if (s.range.begin < end && end < s.range.end) {
          end = std::min(s.range.end, s.range.begin + ceil_to_block(end - s.range.begin));
          break;
        }
    parts.push_back({begin, end});
    begin = end;
  }
  return parts;
}

void for_each_block(const GradientBucket& bucket, Range part,
                    const std::function<void(const GradientSection&, Range block, Range piece)>& visit) {
  for (const GradientSection& s : bucket.sections) {
    const std::int64_t end = std::min(part.end, s.range.end);
    std::int64_t begin = std::max(part.begin, s.range.begin);
    while (begin < end) {
      const std::int64_t first = s.range.begin + (begin - s.range.begin) / scale_block * scale_block;
      const Range block{first, std::min(first + scale_block, s.range.end)};
      visit(s, block, {begin, std::min(block.end, end)});
      begin = block.end;
    }
  }
}

std::int64_t quantized_bytes(CompressionKind kind, const GradientBucket& bucket, Range part) {
  std::int64_t bytes = part.size() * quantized_element_bytes(kind);
  if (!has_scales(kind)) return bytes;
  for (const GradientSection& s : bucket.sections) {
    const std::int64_t begin = std::max(part.begin, s.range.begin) - s.range.begin,
                       end = std::min(part.end, s.range.end) - s.range.begin;
    if (begin < end) bytes += 4 * (ceil_div(end, scale_block) - begin / scale_block);
  }
  return bytes;
}

std::int64_t elements_kept(const Compression& compression, const GradientSection& section) {
  return std::max<std::int64_t>(
      1, std::llround(compression.fraction * static_cast<double>(section.range.size())));
}

std::int64_t uncompressed_rank(const GradientSection& section) {
  return ceil_div(section.rows * section.cols, section.rows + section.cols);
}

bool has_residual(const Compression& compression, const GradientSection& section) {
  return section.range.size() > 0 &&
         (compression.kind == CompressionKind::topk ||
          (compression.kind == CompressionKind::powersgd && is_factored(compression, section)));
}

bool is_factored(const Compression& compression, const GradientSection& section) {
  return (section.rows + section.cols) * compression.rank < section.rows * section.cols;
}

}  // namespace echelon

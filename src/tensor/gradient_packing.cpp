#include "tensor/gradient_packing.h"

#include <array>
#include <cstring>

#include "tensor/codecs.h"

namespace echelon {

template <class F>
void pack_part(CompressionKind kind, const GradientBucket& bucket, Range part,
               std::span<const Philox> rounding, const F* x, std::byte* out) {
  if (kind == CompressionKind::bf16) return encode_bf16(x + part.begin, part.size(), out);
  for_each_block(bucket, part, [&](const GradientSection& section, Range block, Range piece) {
    // If a part ends within a block, both sides send the scale of the whole block.
    const auto largest = static_cast<double>(largest_magnitude(x + block.begin, block.size()));
    const float scale = kind == CompressionKind::fp16 ? fp16_scale(largest) : int8_scale(largest);
    std::memcpy(out, &scale, sizeof scale);
    out += sizeof scale;
    if (kind == CompressionKind::fp16) {
      encode_fp16(x + piece.begin, piece.size(), scale, out);
    } else {
      std::array<std::uint32_t, scale_block> random;
      rounding[static_cast<std::size_t>(&section - bucket.sections.data())].fill_words(
          static_cast<std::uint64_t>(piece.begin - section.range.begin),
          static_cast<std::uint64_t>(piece.size()), random.data());
      encode_int8(x + piece.begin, piece.size(), scale, random.data(), out);
    }
    out += piece.size() * quantized_element_bytes(kind);
  });
}

template <class F>
void unpack_part(CompressionKind kind, const GradientBucket& bucket, Range part, const std::byte* in,
                 bool accumulate, F* y) {
  if (kind == CompressionKind::bf16) return decode_bf16(in, part.size(), accumulate, y);
  for_each_block(bucket, part, [&](const GradientSection&, Range, Range piece) {
    float scale;
    std::memcpy(&scale, in, sizeof scale);
    in += sizeof scale;
    F* const to = y + (piece.begin - part.begin);
    if (kind == CompressionKind::fp16)
      decode_fp16(in, piece.size(), scale, accumulate, to);
    else
      decode_int8(in, piece.size(), scale, accumulate, to);
    in += piece.size() * quantized_element_bytes(kind);
  });
}

template void pack_part<float>(CompressionKind, const GradientBucket&, Range, std::span<const Philox>,
                               const float*, std::byte*);
template void unpack_part<float>(CompressionKind, const GradientBucket&, Range, const std::byte*, bool,
                                 float*);
template void pack_part<double>(CompressionKind, const GradientBucket&, Range, std::span<const Philox>,
                                const double*, std::byte*);
template void unpack_part<double>(CompressionKind, const GradientBucket&, Range, const std::byte*, bool,
                                  double*);

}  // namespace echelon

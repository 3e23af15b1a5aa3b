#include "tensor/matmul_packing.h"

#include "tensor/three_parts.h"

namespace echelon {

std::int64_t depth_of(const MicroKernel& kernel, DType c) {
  return (kernel.pairs ? 2 : 1) * (c == DType::f32 ? kernel.depth : kernel.whole_depth);
}

Range run_of_depth(const MicroKernel& kernel, DType c, Range all, std::int64_t from) {
  const std::int64_t deep = depth_of(kernel, c), pair = 2 * deep,
                     left = std::min(pair - (from - all.begin) % pair, all.end - from);
  if (left <= deep || left == pair) return {from, from + std::min(left, deep)};
  const std::int64_t even = 2 * kernel.group;
  return {from, from + (kernel.pairs ? (left / 2 + even - 1) / even * even : (left + 1) / 2)};
}

std::int64_t filled_words(const MicroKernel& kernel, std::int64_t elements) {
  return kernel.pairs ? (elements + 1) / 2 : elements;
}

std::int64_t words_of(const MicroKernel& kernel, std::int64_t filled) {
  return (filled + kernel.group - 1) / kernel.group * kernel.unit();
}

Packing packing_of_a(const MicroKernel& kernel) {
  const MatmulPasses& to = matmul_passes();
  if (kernel.parts > 1) {
    const PartPasses& parts = *avx512_part_passes();
    return {{parts.groups_across, parts.groups_along}, {}, kernel.rows, kernel.pack_rows, true, kernel.parts};
  }
  if (kernel.group > 1) return {{}, {to.groups_across, to.groups_along}, kernel.rows, 2 * kernel.group, true};
  Packing packing = packing_of_b(kernel);
  packing.width = kernel.rows;
  return packing;
}

Packing packing_of_b(const MicroKernel& kernel) {
  const MatmulPasses& to = matmul_passes();
  if (kernel.parts > 1) {
    const PartPasses& parts = *avx512_part_passes();
    return {{parts.words_across, parts.words_along}, {}, kernel.cols, kernel.pack_rows, true, kernel.parts};
  }
  if (kernel.pairs) return {{}, {to.pairs_across, to.pairs_along}, kernel.cols, kernel.pack_rows, false};
  return {{to.floats_across, to.floats_along},
          {to.widened_across, to.widened_along},
          kernel.cols,
          kernel.pack_rows,
          false};
}

void pack(const ConstPanel& x, bool along, const Packing& packing, std::int64_t line, std::int64_t lines,
          Range k, std::int64_t filled, std::int64_t words, std::uint32_t* to) {
  const std::int64_t width = packing.width, elements = filled < k.size() ? 2 : 1;  // in a word
  // Lines along k are read one panel after the other.
  const std::int64_t at_once = along ? std::max<std::int64_t>(k.size(), 1) : packing.rows;
  for (std::int64_t begin = 0; begin < k.size(); begin += at_once)
    for (std::int64_t done = 0; done < lines; done += width) {
      const std::int64_t depth_here = std::min(at_once, k.size() - begin);
      const ConstPanel from = at(x, along ? Transpose::no : Transpose::yes, line + done, k.begin + begin);
      std::uint32_t* const panel = to + done * words + begin / elements * width * packing.parts;
      if (x.type == DType::f32)
        packing.floats[along](static_cast<const float*>(from.data), x.stride, lines - done, depth_here, width,
                              panel);
      else
        packing.narrow[along](static_cast<const bf16*>(from.data), x.stride, lines - done, depth_here, width,
                              panel);
    }
  if (packing.pads) return;
  for (std::int64_t done = 0; done < lines; done += width)
    std::fill(to + done * words + filled * width, to + (done + width) * words, 0u);
}

}  // namespace echelon

#include "data/checksum.h"

#ifndef XXH_INLINE_ALL  // of a few bytes at a time, most of the time would be the call
#define XXH_INLINE_ALL
#endif
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

namespace echelon {

std::uint64_t checksum(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

std::uint64_t checksum_of_elements(std::uint64_t seed, std::int64_t first, std::span<const std::byte> bytes,
                                   std::int64_t element_bytes) {
  const auto width = static_cast<std::size_t>(element_bytes);
  std::array<std::uint64_t, 2> word{static_cast<std::uint64_t>(first), 0};
  std::uint64_t sum = 0;
  for (std::size_t at = 0; at < bytes.size(); at += width, ++word[0]) {
    std::memcpy(&word[1], bytes.data() + at, width);
    sum += XXH3_64bits_withSeed(word.data(), sizeof word, seed);
  }
  return sum;
}

std::uint64_t checksum(const OpenFile& file) {
  RunningChecksum sum;
  std::vector<std::byte> piece(1 << 20);
  for (std::int64_t at = 0; at < file.size(); at += std::ssize(piece)) {
    const auto here =
        std::span(piece).first(static_cast<std::size_t>(std::min(std::ssize(piece), file.size() - at)));
    file.read(at, here);
    sum.add(here);
  }
  return sum.take();
}

struct RunningChecksum::State {
  XXH3_state_t sum;
};

RunningChecksum::RunningChecksum() : state_(std::make_unique<State>()) { XXH3_64bits_reset(&state_->sum); }

RunningChecksum::~RunningChecksum() = default;

void RunningChecksum::add(std::span<const std::byte> bytes) {
  XXH3_64bits_update(&state_->sum, bytes.data(), bytes.size());
}

std::uint64_t RunningChecksum::take() {
  const std::uint64_t value = XXH3_64bits_digest(&state_->sum);
  XXH3_64bits_reset(&state_->sum);
  return value;
}

}  // namespace echelon

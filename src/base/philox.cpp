#include "base/philox.h"

#include <algorithm>

#include "base/philox_words.h"

namespace echelon {

Philox::Philox(std::uint64_t seed, Stream stream, std::uint64_t substream)
    : seed_(seed), stream_(static_cast<std::uint32_t>(stream)), substream_(substream) {}

std::array<std::uint32_t, 4> Philox::words(std::uint64_t index) const {
  const auto block = philox_block(key(), index);
  return {block[0], block[1], block[2], block[3]};
}

void Philox::fill_words(std::uint64_t first, std::uint64_t count, std::uint32_t* out) const {
  std::uint64_t i = 0;
  for (; i < count && (first + i) % 4 != 0; ++i) out[i] = words((first + i) / 4)[(first + i) % 4];
  for (; i + 4 <= count; i += 4) {
    const auto block = words((first + i) / 4);
    std::copy(block.begin(), block.end(), out + i);
  }
  for (; i < count; ++i) out[i] = words((first + i) / 4)[(first + i) % 4];
}

double Philox::uniform(std::uint64_t index) const {
  const auto w = words(index);
  return philox_unit(w[0], w[1]);
}

std::uint64_t Philox::below(std::uint64_t index, std::uint64_t bound) const {
  const auto w = words(index);
  const std::uint64_t bits = std::uint64_t{w[0]} << 32 | w[1];
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::uint64_t>(static_cast<Wide>(bits) * bound >> 64);
}

double Philox::normal(std::uint64_t index) const { return philox_normal(key(), index); }

void Philox::fill_normal(std::uint64_t first, std::uint64_t count, double* out) const {
  std::uint64_t i = 0;
  if (first % 2 == 1 && count > 0) out[i++] = normal(first);
  for (; i + 1 < count; i += 2) {
    const NormalPair pair = philox_normal_pair(philox_block(key(), (first + i) / 2));
    out[i] = pair.first;
    out[i + 1] = pair.second;
  }
  if (i < count) out[i] = normal(first + i);
}

std::uint64_t name_hash(const char* text) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (; *text != '\0'; ++text) hash = (hash ^ static_cast<unsigned char>(*text)) * 0x100000001b3ull;
  return hash;
}

}  // namespace echelon

// Counter-based random numbers (Philox4x32-10, Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405).
// A value depends on (seed, stream, index) alone, so every mesh draws the same numbers for the same logical
// element.
#pragma once

#include <array>
#include <cstdint>

namespace echelon {

// Names of independent streams of one seed.
enum class Stream : std::uint32_t {
  initial_value = 1,
  data_order = 2,
  sampling = 3,
  test = 4,
  rounding = 5,
  low_rank = 6,
  routing = 7,
  weight_rounding = 8,
  document_lengths = 9
};

// What determines a generator's words: a plain value that can be passed to a device.
struct PhiloxKey {
  std::uint32_t low, high;
  std::uint64_t substream;
};

class Philox {
 public:
  // `substream` separates uses with one purpose, such as parameters (by a hash of the name) or steps.
  Philox(std::uint64_t seed, Stream stream, std::uint64_t substream);

  // Key = seed; counter = (index, substream). The stream is folded into the seed's high word.
  PhiloxKey key() const {
    return {static_cast<std::uint32_t>(seed_),
            static_cast<std::uint32_t>(seed_ >> 32) ^ (stream_ * 0x9E3779B9u), substream_};
  }

  // Four independent uniform 32-bit words for counter value `index`.
  std::array<std::uint32_t, 4> words(std::uint64_t index) const;

  // out[i] = words((first + i) / 4)[(first + i) % 4] for i in [0, count): every word of every block, in
  // order.
  void fill_words(std::uint64_t first, std::uint64_t count, std::uint32_t* out) const;

  // Uniform in [0, 1) with 53 bits.
  double uniform(std::uint64_t index) const;

  // Uniform integer in [0, bound), bound > 0; the bias is below bound / 2^64.
  std::uint64_t below(std::uint64_t index, std::uint64_t bound) const;

  // Standard normal (Box-Muller in double precision). Elements 2i and 2i+1 share one counter block.
  double normal(std::uint64_t index) const;

  // out[i] = normal(first + i) for i in [0, count): the same numbers as normal(), two for each block drawn.
  void fill_normal(std::uint64_t first, std::uint64_t count, double* out) const;

 private:
  std::uint64_t seed_;
  std::uint32_t stream_;
  std::uint64_t substream_;
};

// FNV-1a, 64 bit: a stable hash of a parameter's name for `substream`.
std::uint64_t name_hash(const char* text);

}  // namespace echelon

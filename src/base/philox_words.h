// Single words of the generator in base/philox.h, for host and device.
#pragma once

#include <cmath>
#include <numbers>

#include "base/host_device.h"
#include "base/philox.h"

#ifndef R123_CUDA_DEVICE
#define R123_CUDA_DEVICE ECHELON_HOST_DEVICE
#endif
// Random123's SSE type is not used here, and would include a header of all the processor's instructions.
#ifndef R123_USE_SSE
#define R123_USE_SSE 0
#endif
#include <Random123/philox.h>

namespace echelon {

// Block `index` of four words.
ECHELON_HOST_DEVICE inline r123::Philox4x32::ctr_type philox_block(const PhiloxKey& key,
                                                                   std::uint64_t index) {
  const r123::Philox4x32::key_type of_seed{{key.low, key.high}};
  const r123::Philox4x32::ctr_type counter{
      {static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32),
       static_cast<std::uint32_t>(key.substream), static_cast<std::uint32_t>(key.substream >> 32)}};
  return r123::Philox4x32{}(counter, of_seed);
}

// Element i of Philox::fill_words().
ECHELON_HOST_DEVICE inline std::uint32_t philox_word(const PhiloxKey& key, std::uint64_t i) {
  return philox_block(key, i / 4).v[i % 4];
}

// Uniform in [0, 1) with 53 bits.
ECHELON_HOST_DEVICE inline double philox_unit(std::uint32_t high, std::uint32_t low) {
  const std::uint64_t bits = (std::uint64_t{high} << 32 | low) >> 11;
  return static_cast<double>(bits) * 0x1.0p-53;
}

// Two standard normal numbers from one block (Box & Muller 1958).
struct NormalPair {
  double first, second;
};
ECHELON_HOST_DEVICE inline NormalPair philox_normal_pair(const r123::Philox4x32::ctr_type& block) {
  const double radius = std::sqrt(-2.0 * std::log(1.0 - philox_unit(block.v[0], block.v[1])));
  const double angle = 2.0 * std::numbers::pi * philox_unit(block.v[2], block.v[3]);
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

// As Philox::normal().
ECHELON_HOST_DEVICE inline double philox_normal(const PhiloxKey& key, std::uint64_t i) {
  const NormalPair pair = philox_normal_pair(philox_block(key, i / 2));
  return i % 2 == 0 ? pair.first : pair.second;
}

}  // namespace echelon

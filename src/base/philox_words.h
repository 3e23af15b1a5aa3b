// The words of base/philox.h, one at a time, wherever they are wanted.
#pragma once

#include "base/host_device.h"
#include "base/philox.h"

#ifndef R123_CUDA_DEVICE
#define R123_CUDA_DEVICE ECHELON_HOST_DEVICE
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

// As Philox::fill_words() gives for element i.
ECHELON_HOST_DEVICE inline std::uint32_t philox_word(const PhiloxKey& key, std::uint64_t i) {
  return philox_block(key, i / 4).v[i % 4];
}

}  // namespace echelon

// CRC-32C, with Castagnoli's polynomial: the checksum of iSCSI, ext4 and TFRecord files (RFC 3720, B.4).
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace echelon {

inline std::uint32_t crc32c(std::string_view bytes) {
  static const std::array<std::uint32_t, 256> table = [] {
    std::array<std::uint32_t, 256> of_byte{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      std::uint32_t rest = byte;
      for (int bit = 0; bit < 8; ++bit) rest = (rest >> 1) ^ ((rest & 1) != 0 ? 0x82f63b78u : 0u);
      of_byte[byte] = rest;
    }
    return of_byte;
  }();
  std::uint32_t crc = 0xffffffffu;
  for (const char c : bytes) crc = (crc >> 8) ^ table[(crc ^ static_cast<unsigned char>(c)) & 0xff];
  return crc ^ 0xffffffffu;
}

}  // namespace echelon

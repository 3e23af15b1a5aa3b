#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/open_file.h"

namespace echelon {

// XXH3-64 of some bytes.
std::uint64_t checksum(std::span<const std::byte> bytes);
// Sum, modulo 2^64, of XXH3-64 of each element of 1 to 8 bytes with its place, from `first` on, and `seed`:
// the pieces of a tensor add up to the same however it is cut.
std::uint64_t checksum_of_elements(std::uint64_t seed, std::int64_t first, std::span<const std::byte> bytes,
                                   std::int64_t element_bytes);
// Of all bytes of a file.
std::uint64_t checksum(const OpenFile& file);

// Of bytes that come one piece after the other.
class RunningChecksum {
 public:
  RunningChecksum();
  ~RunningChecksum();
  void add(std::span<const std::byte> bytes);
  std::uint64_t take();  // of all so far; then it begins anew

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace echelon

#include "data/checksum.h"

#include <xxhash.h>

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

namespace echelon {

std::uint64_t checksum(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

std::uint64_t checksum(const OpenFile& file) {
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(),
                                                                              XXH3_freeState);
  if (!state) throw std::bad_alloc();
  XXH3_64bits_reset(state.get());
  std::vector<std::byte> piece(1 << 20);
  for (std::int64_t at = 0; at < file.size(); at += std::ssize(piece)) {
    const auto here =
        std::span(piece).first(static_cast<std::size_t>(std::min(std::ssize(piece), file.size() - at)));
    file.read(at, here);
    XXH3_64bits_update(state.get(), here.data(), here.size());
  }
  return XXH3_64bits_digest(state.get());
}

}  // namespace echelon

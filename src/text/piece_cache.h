// The ids of the short pieces that came last. Text repeats its words, so most are here.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

namespace echelon {

class PieceCache {
 public:
  static constexpr std::size_t longest_piece = 30, most_ids = 8;
  PieceCache() : slots_(1 << 15) {}

  struct alignas(64) Slot {
    std::uint8_t length = 0, count = 0;
    std::array<char, longest_piece> piece{};
    std::array<std::int32_t, most_ids> ids{};
  };
  // Where the piece (1 to longest_piece bytes) is or would be.
  Slot& slot(std::string_view piece) { return slots_[hash(piece) >> 49]; }
  static bool holds(const Slot& slot, std::string_view piece) {
    return slot.length == piece.size() && std::memcmp(slot.piece.data(), piece.data(), piece.size()) == 0;
  }
  static void put(Slot& slot, std::string_view piece, std::span<const std::int32_t> ids) {
    if (ids.size() > most_ids) return;
    slot.length = static_cast<std::uint8_t>(piece.size());
    slot.count = static_cast<std::uint8_t>(ids.size());
    std::memcpy(slot.piece.data(), piece.data(), piece.size());
    std::copy(ids.begin(), ids.end(), slot.ids.begin());
  }

 private:
  static std::uint64_t hash(std::string_view piece) {
    std::uint64_t h = piece.size() * 0x9e3779b97f4a7c15u;
    for (std::size_t i = 0; i < piece.size(); i += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, piece.data() + i, std::min<std::size_t>(8, piece.size() - i));
      h = (h ^ word) * 0xff51afd7ed558ccdu;
      h ^= h >> 32;
    }
    return h * 0x9e3779b97f4a7c15u;
  }
  std::vector<Slot> slots_;
};

}  // namespace echelon

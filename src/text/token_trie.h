// All tokens of a vocabulary, byte by byte: (node, byte) -> node in one open-addressed table.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>
#include <vector>

#include "text/token_model.h"

namespace echelon {

class TokenTrie {
 public:
  explicit TokenTrie(const TokenIds& ids) : ends_(1, -1) {
    std::size_t bytes = 0;
    for (const auto& [token, id] : ids) bytes += token.size();
    entries_.resize(std::bit_ceil(bytes * 2 + 2));
    for (const auto& [token, id] : ids) {
      std::uint32_t node = 0;
      for (const char c : token) {
        Entry& entry = entries_[place(node, c)];
        if (entry.node == 0) {
          entry = {key(node, c), static_cast<std::uint32_t>(ends_.size())};
          ends_.push_back(-1);
        }
        node = entry.node;
      }
      ends_[node] = id;
    }
  }
  // The node after `node`, or 0: no token goes on like this.
  std::uint32_t step(std::uint32_t node, char c) const { return entries_[place(node, c)].node; }
  std::int32_t end(std::uint32_t node) const {
    return ends_[node];
  }  // the token's id; negative: none ends here

 private:
  struct Entry {
    std::uint64_t key = 0;
    std::uint32_t node = 0;
  };
  static std::uint64_t key(std::uint32_t node, char c) {
    return static_cast<std::uint64_t>(node) << 8 | static_cast<unsigned char>(c);
  }
  std::size_t place(std::uint32_t node, char c) const {
    const std::uint64_t wanted = key(node, c);
    std::size_t at = (wanted * 0x9e3779b97f4a7c15u >> 20) & (entries_.size() - 1);
    while (entries_[at].node != 0 && entries_[at].key != wanted) at = (at + 1) & (entries_.size() - 1);
    return at;
  }
  std::vector<Entry> entries_;
  std::vector<std::int32_t> ends_;
};

}  // namespace echelon

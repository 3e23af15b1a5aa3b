// Something that a rank has for each other rank that it deals with: a few neighbours, however many ranks.
#pragma once

#include <utility>
#include <vector>

namespace echelon {

template <class T>
class PerPeer {
 public:
  // Made where it is not there yet; other references are lost then.
  T& operator[](int peer) {
    for (auto& [rank, value] : values_)
      if (rank == peer) return value;
    return values_.emplace_back(peer, T{}).second;
  }
  const std::vector<std::pair<int, T>>& all() const { return values_; }

 private:
  std::vector<std::pair<int, T>> values_;
};

}  // namespace echelon

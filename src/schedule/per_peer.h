// A map from the few ranks that a rank communicates with to values, whose size does not grow with the job.
#pragma once

#include <utility>
#include <vector>

namespace echelon {

template <class T>
class PerPeer {
 public:
  // Inserts a missing value, which invalidates references to others.
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

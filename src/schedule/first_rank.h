// Finds, of many ranks, the one that can start first: for schedulers that simulate all ranks at once.
#pragma once

#include <cstddef>
#include <limits>
#include <vector>

namespace echelon {

// Returns the lowest-numbered of equally early ranks. A tournament tree: set() takes time logarithmic in the
// number of ranks.
class FirstRank {
 public:
  static constexpr double never = std::numeric_limits<double>::infinity();

  explicit FirstRank(std::size_t count) {
    while (leaves_ < count) leaves_ *= 2;
    begin_.assign(leaves_, never);
    winner_.resize(2 * leaves_);
    for (std::size_t leaf = 0; leaf < leaves_; ++leaf) winner_[leaves_ + leaf] = leaf;
    for (std::size_t node = leaves_; node-- > 1;) replay(node);
  }
  void set(std::size_t rank, double begin) {
    begin_[rank] = begin;
    for (std::size_t node = (leaves_ + rank) / 2; node >= 1; node /= 2) replay(node);
  }
  std::size_t rank() const { return winner_[1]; }
  double begin() const { return begin_[winner_[1]]; }

 private:
  void replay(std::size_t node) {
    const std::size_t left = winner_[2 * node], right = winner_[2 * node + 1];
    winner_[node] = begin_[right] < begin_[left] ? right : left;
  }

  std::size_t leaves_ = 1;
  std::vector<double> begin_;
  std::vector<std::size_t> winner_;  // of each node; the children of node k are 2k and 2k+1
};

}  // namespace echelon

// What the ranks of a group tell each other of numbers that the host works with: counts, losses, norms.
// Beside the tensors of the group and over the same communicator, in the order of its calls; the numbers are
// in memory of the host's own, which no arena counts, and their bytes are traffic like any. Every rank of the
// group calls the same.
//
// Where the other ranks are imagined (imagined.h) a sum is this rank's own numbers.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "comm/communicator.h"

namespace echelon {

// Numbers under way.
class HostNumbers {
 public:
  HostNumbers() = default;
  // Waits for them, once.
  std::vector<double> get();

 private:
  friend class HostGroup;
  HostNumbers(Tensor numbers, Pending pending) : numbers_(std::move(numbers)), pending_(std::move(pending)) {}
  Tensor numbers_;
  Pending pending_;
};

class HostGroup {
 public:
  explicit HostGroup(Communicator& group) : group_(&group) {}

  // Number by number.
  std::vector<double> sum(std::span<const double> numbers) const;
  double sum(double number) const { return sum({&number, 1}).front(); }
  double max(double number) const;
  HostNumbers begin_sum(std::span<const double> numbers) const;
  // As many of each rank, in rank order.
  HostNumbers begin_gather(std::span<const double> numbers) const;
  // As many counts for each rank, in rank order -> what each rank has for this one.
  std::vector<std::int32_t> exchange(std::span<const std::int32_t> counts) const;

 private:
  Communicator* group_;
};

}  // namespace echelon

// What the ranks of a group tell each other of numbers that the host works with: counts, losses, norms.
// Beside the tensors of the group and over the same communicator, in the order of its calls; the numbers are
// in memory of the host's own, which no arena counts, and their bytes are traffic like any. Every rank of the
// group calls the same.
//
// Where the other ranks are imagined (imagined.h) a sum is this rank's own numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <type_traits>
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
  template <class T>  // double or std::int32_t
  std::vector<T> max(const std::vector<T>& numbers) const;
  double max(double number) const { return max(std::vector{number}).front(); }
  // Those of `root` go to all.
  void broadcast(std::vector<double>& numbers, int root) const;
  HostNumbers begin_sum(std::span<const double> numbers) const;
  // As many of each rank, in rank order.
  HostNumbers begin_gather(std::span<const double> numbers) const;
  // On rank 0 the records of each rank, however many, in rank order; nothing on the others.
  template <class Record>
  std::vector<std::vector<Record>> gather_records(const std::vector<Record>& mine) const {
    static_assert(std::is_trivially_copyable_v<Record>);
    std::vector<std::vector<Record>> all;
    gather_bytes(std::as_bytes(std::span(mine)), [&](std::size_t bytes) {
      return std::as_writable_bytes(std::span(all.emplace_back(bytes / sizeof(Record))));
    });
    return all;
  }
  // As many counts for each rank, in rank order -> what each rank has for this one.
  std::vector<std::int32_t> exchange(std::span<const std::int32_t> counts) const;

 private:
  // Rank by rank into the room that is given for so many bytes.
  void gather_bytes(std::span<const std::byte> mine,
                    const std::function<std::span<std::byte>(std::size_t bytes)>& room) const;

  Communicator* group_;
};

}  // namespace echelon

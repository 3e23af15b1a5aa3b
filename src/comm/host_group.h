// Collectives on numbers that the host works with: counts, losses, norms. They use the group's communicator,
// in the order of its calls, with buffers in host memory that no arena counts; their bytes count as traffic
// like any others. Every rank of the group makes the same calls.
//
// If the other ranks are imagined (imagined.h), a sum is this rank's own numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <type_traits>
#include <vector>

#include "comm/communicator.h"

namespace echelon {

// The pending result of a collective.
class HostNumbers {
 public:
  HostNumbers() = default;
  // Waits for the numbers; call once.
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

  // Elementwise.
  std::vector<double> sum(std::span<const double> numbers) const;
  double sum(double number) const { return sum({&number, 1}).front(); }
  template <class T>  // double or std::int32_t
  std::vector<T> max(const std::vector<T>& numbers) const;
  double max(double number) const { return max(std::vector{number}).front(); }
  // Sends root's numbers to all.
  void broadcast(std::vector<double>& numbers, int root) const;
  HostNumbers begin_sum(std::span<const double> numbers) const;
  // Equally many numbers of each rank, in rank order.
  HostNumbers begin_gather(std::span<const double> numbers) const;
  // Returns on rank 0 the records of each rank, any number of them, in rank order; nothing on the others.
  template <class Record>
  std::vector<std::vector<Record>> gather_records(const std::vector<Record>& mine) const {
    static_assert(std::is_trivially_copyable_v<Record>);
    std::vector<std::vector<Record>> all;
    gather_bytes(std::as_bytes(std::span(mine)), [&](std::size_t bytes) {
      return std::as_writable_bytes(std::span(all.emplace_back(bytes / sizeof(Record))));
    });
    return all;
  }
  // Sends equally many counts to each rank, in rank order; returns what each rank has for this one.
  std::vector<std::int32_t> exchange(std::span<const std::int32_t> counts) const;

 private:
  // Gathers rank by rank, into the memory that `room` returns for that many bytes.
  void gather_bytes(std::span<const std::byte> mine,
                    const std::function<std::span<std::byte>(std::size_t bytes)>& room) const;

  Communicator* group_;
};

}  // namespace echelon

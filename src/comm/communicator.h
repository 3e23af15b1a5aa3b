// One group of ranks along one mesh axis, and the eight verbs. The seam between Echelon and what moves the
// bytes.
//
// Laws. Every rank of the group calls the same collectives in the same order. A send posts and returns; each
// directed pair of ranks is one in-order channel. Sums are grouped by halves of the group's ranks
// (halving_tree.h), whatever the order of arrival: all_reduce and reduce_scatter give the same bits, and a
// sum over k 2^j ranks has those of a sum inside 2^j groups of k neighbours followed by one across the
// groups. bf16 is summed in f32 in that order and rounded once, where a rank has all summands, as with direct
// collectives: |error| <= (u + c eps) sum |x| with u = 2^-8, eps = 2^-23 and c = ceil(log2 n) levels. Where
// partial sums travel (collectives.h) they travel as bf16. So of bf16 a sum inside groups followed by one
// across has the flat sum's value within 2 u sum |x|, and not its bits. Buffers handed to a verb must stay
// untouched until its Pending has been waited for (it keeps the views alive). A rank that disagrees on verb,
// counts or dtype, throws, or does not arrive before the deadline makes every rank of the job throw
// CommError; nothing hangs.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>

#include "spec/reduce_op.h"
#include "spec/traffic.h"
#include "tensor/tensor.h"

namespace echelon {

// What an operation did on a device, on a stream of its own: from the one event to the other. Null where it
// did nothing there.
struct DeviceWork {
  std::shared_ptr<DeviceEvent> begin{}, end{};
};

// What a backend knows of one operation under way. In memory of a device the host waits for the other ranks'
// calls alone, and the rank's stream for the work.
class Operation {
 public:
  virtual ~Operation() = default;
  // Does what can be done without waiting; true when finished, on the device too.
  virtual bool progress() = 0;
  // Waits until finished. CommError on abort, mismatch or time-out.
  virtual void wait() = 0;
  // Of a finished one.
  virtual DeviceWork on_device() const { return {}; }
};

// Handle on an operation under way. A default-constructed one is finished.
class Pending {
 public:
  Pending() = default;
  explicit Pending(std::shared_ptr<Operation> operation) : operation_(std::move(operation)) {}
  // Lets the operation advance between two pieces of computation; true when finished.
  bool progress() {
    if (operation_ && operation_->progress()) operation_.reset();
    return operation_ == nullptr;
  }
  void wait() {
    if (operation_) operation_->wait();
    operation_.reset();
  }
  // progress() and wait() for whoever asks when it ran.
  bool progress(DeviceWork& work) {
    if (!operation_ || !operation_->progress()) return operation_ == nullptr;
    work = std::exchange(operation_, {})->on_device();
    return true;
  }
  void wait(DeviceWork& work) {
    if (operation_) operation_->wait();
    if (operation_) work = std::exchange(operation_, {})->on_device();
  }
  // Whether it is known to be; does nothing for it.
  bool finished() const { return operation_ == nullptr; }

 private:
  std::shared_ptr<Operation> operation_;
};

// Tensors are contiguous and of any dtype (all_reduce and reduce_scatter: not u8); only the element count
// matters, not the shape.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;  // in the group
  virtual int size() const = 0;

  // In place. `x` has the same element count on every rank.
  [[nodiscard]] virtual Pending all_reduce(const Tensor& x, ReduceOp op = ReduceOp::sum) = 0;
  // in: counts[rank()] elements; out: sum of counts, in rank order. `in` may be its own place inside `out`.
  [[nodiscard]] virtual Pending all_gather(const Tensor& in, const Tensor& out,
                                           std::span<const std::int64_t> counts) = 0;
  // in: sum of counts elements; out: counts[rank()], the sum over ranks of their part for me. `out` may be
  // its own place inside `in`; nothing else of `in` changes.
  [[nodiscard]] virtual Pending reduce_scatter(const Tensor& in, const Tensor& out,
                                               std::span<const std::int64_t> counts) = 0;
  // in: send_counts[i] elements for rank i, in rank order; out: recv_counts[i] elements from rank i, in rank
  // order.
  [[nodiscard]] virtual Pending all_to_all(const Tensor& in, std::span<const std::int64_t> send_counts,
                                           const Tensor& out, std::span<const std::int64_t> recv_counts) = 0;
  [[nodiscard]] virtual Pending broadcast(const Tensor& x, int root) = 0;
  // The message is copied or handed over before send's Pending finishes; a send never waits for its receive.
  [[nodiscard]] virtual Pending send(const Tensor& x, int to) = 0;
  [[nodiscard]] virtual Pending recv(const Tensor& x, int from) = 0;
  [[nodiscard]] virtual Pending barrier() = 0;
};

}  // namespace echelon

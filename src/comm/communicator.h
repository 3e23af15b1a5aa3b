// A group of ranks along one mesh axis, and its eight communication verbs. This interface separates Echelon
// from the backends that move bytes.
//
// Rules. Every rank of the group calls the same collectives in the same order. A send returns at once; each
// ordered pair of ranks is a FIFO channel. Buffers passed to a verb must not be touched until its Pending has
// been waited for (which keeps the tensors alive). If a rank disagrees on verb, counts or dtype, throws, or
// does not arrive before the deadline, every rank of the job throws CommError; nothing hangs.
//
// Sums are grouped by halves of the group's ranks (halving_tree.h), whatever the order of arrival. So
// all_reduce and reduce_scatter give the same bits, and a sum over k 2^j ranks has the bits of a sum inside
// 2^j groups of k neighbours followed by one across the groups.
//
// bf16 is summed in f32 in that order and rounded once if one rank has all summands, as with direct
// collectives: |error| <= (u + c eps) sum |x| with u = 2^-8, eps = 2^-23 and c = ceil(log2 n) levels. Where
// partial sums travel (collectives.h), they travel as bf16. So in bf16 a sum inside groups followed by one
// across them is within 2 u sum |x| of the flat sum, but without its bits.
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

// The work of an operation on a device, on a stream of its own, between two events. Null if it did nothing
// there.
struct DeviceWork {
  std::shared_ptr<DeviceEvent> begin{}, end{};
};

// A backend's operation in progress. In device memory, the host waits only for the other ranks' calls, and
// the rank's stream for the work.
class Operation {
 public:
  virtual ~Operation() = default;
  // Advances without waiting; true when finished, on the device too.
  virtual bool progress() = 0;
  // Waits until finished. CommError on abort, mismatch or timeout.
  virtual void wait() = 0;
  // Only of a finished operation.
  virtual DeviceWork on_device() const { return {}; }
};

// Handle of an operation in progress. A default-constructed one is finished.
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
  // progress() and wait() that also report when the operation ran.
  bool progress(DeviceWork& work) {
    if (!operation_ || !operation_->progress()) return operation_ == nullptr;
    work = std::exchange(operation_, {})->on_device();
    return true;
  }
  void wait(DeviceWork& work) {
    if (operation_) operation_->wait();
    if (operation_) work = std::exchange(operation_, {})->on_device();
  }
  // Whether it is known to be finished; does not advance it.
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
  // in: sum of counts elements; out: counts[rank()] elements, the sum over ranks of this rank's part. `out`
  // may be its own place inside `in`; the rest of `in` does not change.
  [[nodiscard]] virtual Pending reduce_scatter(const Tensor& in, const Tensor& out,
                                               std::span<const std::int64_t> counts) = 0;
  // in: send_counts[i] elements for each rank i, in rank order; out: recv_counts[i] elements from each rank
  // i, in rank order.
  [[nodiscard]] virtual Pending all_to_all(const Tensor& in, std::span<const std::int64_t> send_counts,
                                           const Tensor& out, std::span<const std::int64_t> recv_counts) = 0;
  [[nodiscard]] virtual Pending broadcast(const Tensor& x, int root) = 0;
  // The message is copied or delivered before the send's Pending finishes; a send never waits for its
  // receive.
  [[nodiscard]] virtual Pending send(const Tensor& x, int to) = 0;
  [[nodiscard]] virtual Pending recv(const Tensor& x, int from) = 0;
  [[nodiscard]] virtual Pending barrier() = 0;
};

}  // namespace echelon

// The interface to a vendor's collectives between devices, modelled on NCCL's calls.
// cuda/collectives_nccl.cpp implements it with NCCL; tests have one for devices that are this machine's
// memory.
//
// A member is one rank's end of a group of ranks, each on its own device. Calls queue work on a stream of
// that device and return. The work begins when every member has queued its own and each stream has reached
// it: members that queue in different orders deadlock until they are aborted. The caller ensures the order,
// and that all members make matching calls; nothing here compares them. The library chooses the grouping of
// sums; sums of bf16 may be rounded at every step, and the maximum need not propagate NaN.
//
// Any thread may call, but for one member only one at a time, except error(). Failures are RunErrors.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "spec/dtype.h"
#include "spec/reduce_op.h"
#include "tensor/device_driver.h"

namespace echelon {

class DeviceCollectives {
 public:
  using Id = std::array<std::byte, 128>;  // of a group, to be passed to its ranks
  struct Member {
    void* handle = nullptr;
    int device = 0;
  };

  DeviceCollectives() = default;
  virtual ~DeviceCollectives() = default;
  DeviceCollectives(const DeviceCollectives&) = delete;
  DeviceCollectives& operator=(const DeviceCollectives&) = delete;

  virtual std::string name() = 0;  // "NCCL 2.32.3"
  virtual Id make_id() = 0;
  // Waits until every rank has called it. RunError if given_up(), which is polled, says so.
  virtual Member join(const Id& id, int device, int rank, int size,
                      const std::function<bool()>& given_up) = 0;
  // Each of these ends a member: leave() when nothing of it is in progress, abort() to cancel what is.
  virtual void leave(Member member) noexcept = 0;
  virtual void abort(Member member) noexcept = 0;
  // An error of the work in progress; empty if there is none.
  virtual std::string error(Member member) = 0;

  // The calling thread's operations of the member between these calls form one group: its sends and receives
  // do not wait for each other.
  virtual void begin_together() = 0;
  virtual void end_together(Member member) = 0;

  // Counts are in elements. `in` and `out` are the same memory, overlap as in Communicator, or are disjoint.
  virtual void all_reduce(const std::byte* in, std::byte* out, std::int64_t count, DType dtype, ReduceOp op,
                          Member member, StreamHandle stream) = 0;
  virtual void all_gather(const std::byte* in, std::byte* out, std::int64_t count_each, DType dtype,
                          Member member, StreamHandle stream) = 0;
  virtual void reduce_scatter(const std::byte* in, std::byte* out, std::int64_t count_each, DType dtype,
                              Member member, StreamHandle stream) = 0;
  virtual void broadcast(const std::byte* in, std::byte* out, std::int64_t count, DType dtype, int root,
                         Member member, StreamHandle stream) = 0;
  // The sum, on the root only.
  virtual void reduce(const std::byte* in, std::byte* out, std::int64_t count, DType dtype, int root,
                      Member member, StreamHandle stream) = 0;
  virtual void send(const std::byte* in, std::int64_t count, DType dtype, int to, Member member,
                    StreamHandle stream) = 0;
  virtual void receive(std::byte* out, std::int64_t count, DType dtype, int from, Member member,
                       StreamHandle stream) = 0;
};

// NCCL. RequestError if this build has none; no_nccl() says why, and is empty if it has.
std::unique_ptr<DeviceCollectives> make_nccl();
std::string no_nccl();

}  // namespace echelon

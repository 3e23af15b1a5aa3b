// What Echelon asks of a vendor's collectives between devices: the calls of NCCL, behind a seam.
// cuda/collectives_nccl.cpp is NCCL's; tests have one on the devices that are this machine's memory.
//
// A member is one rank's end of a group of ranks, each on a device of its own. Calls queue work on a stream
// of that device and return. The work begins when every member has queued its own and each stream has come
// to it: members that queue in different orders wait for ever, until they are aborted. Who calls sees to the
// order, and that all members call alike: nothing here compares them. How sums are grouped is the library's
// choice; sums of bf16 may be rounded at every step, and the maximum need not pass on NaN.
//
// Any thread may call, about one member one at a time but for error(). Failures are a RunError.
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
  using Id = std::array<std::byte, 128>;  // of a group; bytes, to be handed to its ranks
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
  // Waits until every rank has called it, or given_up(), which is asked now and then: RunError.
  virtual Member join(const Id& id, int device, int rank, int size,
                      const std::function<bool()>& given_up) = 0;
  // One of the two ends a member. Nothing of it is under way; or what is ends, undone.
  virtual void leave(Member member) noexcept = 0;
  virtual void abort(Member member) noexcept = 0;
  // What has gone wrong with the work under way; empty where nothing has.
  virtual std::string error(Member member) = 0;

  // What the calling thread asks of the member between the two is one piece of work: sends and receives in it
  // wait for none of each other.
  virtual void begin_together() = 0;
  virtual void end_together(Member member) = 0;

  // Counts in elements. `in` and `out` are the same memory, or their parts as in Communicator, or apart.
  virtual void all_reduce(const std::byte* in, std::byte* out, std::int64_t count, DType dtype, ReduceOp op,
                          Member member, StreamHandle stream) = 0;
  virtual void all_gather(const std::byte* in, std::byte* out, std::int64_t count_each, DType dtype,
                          Member member, StreamHandle stream) = 0;
  virtual void reduce_scatter(const std::byte* in, std::byte* out, std::int64_t count_each, DType dtype,
                              Member member, StreamHandle stream) = 0;
  virtual void broadcast(const std::byte* in, std::byte* out, std::int64_t count, DType dtype, int root,
                         Member member, StreamHandle stream) = 0;
  // The sum, on the root alone.
  virtual void reduce(const std::byte* in, std::byte* out, std::int64_t count, DType dtype, int root,
                      Member member, StreamHandle stream) = 0;
  virtual void send(const std::byte* in, std::int64_t count, DType dtype, int to, Member member,
                    StreamHandle stream) = 0;
  virtual void receive(std::byte* out, std::int64_t count, DType dtype, int from, Member member,
                       StreamHandle stream) = 0;
};

// NCCL. RequestError where there is none, as no_nccl() says: empty where this build has it.
std::unique_ptr<DeviceCollectives> make_nccl();
std::string no_nccl();

}  // namespace echelon

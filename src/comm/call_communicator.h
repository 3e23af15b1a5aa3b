// A Communicator that turns its verbs into Calls, describes and checks them in one place, and passes them to
// the backend.
#pragma once

#include <string>

#include "comm/call.h"

namespace echelon {

class CallCommunicator : public Communicator {
 public:
  Pending all_reduce(const Tensor& x, ReduceOp op) final;
  Pending all_gather(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) final;
  Pending reduce_scatter(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) final;
  Pending all_to_all(const Tensor& in, std::span<const std::int64_t> send_counts, const Tensor& out,
                     std::span<const std::int64_t> recv_counts) final;
  Pending broadcast(const Tensor& x, int root) final;
  Pending send(const Tensor& x, int to) final;
  Pending recv(const Tensor& x, int from) final;
  Pending barrier() final;

 protected:
  // start() begins a collective of several ranks, or a receive, from another rank or from this one. Arguments
  // are checked, and the Call points to their memory; the tensors live as long as the Pending.
  virtual Pending start(Call call, const Tensor& in, const Tensor& out) = 0;
  // Begins a send, which never waits; on a device the rank's stream waits for its Pending.
  virtual Pending post(Call call, const Tensor& x) = 0;
  // Ends the job, since the other ranks would wait for this call.
  [[noreturn]] virtual void fail(const std::string& why) = 0;
  virtual void throw_if_failed() = 0;
  virtual const std::string& group_name() const = 0;
  virtual int world_rank() const = 0;

 private:
  Call checked(Call call, const Tensor& in, const Tensor& out);
  Pending collective(Call call, const Tensor& in, const Tensor& out);

  const Tensor nothing_;  // the buffer of a barrier
};

}  // namespace echelon

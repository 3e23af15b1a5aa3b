#include "comm/call_communicator.h"

#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "tensor/device_stream.h"

namespace echelon {

Pending CallCommunicator::all_reduce(const Tensor& x, ReduceOp op) {
  return collective({.verb = Verb::all_reduce, .op = op, .counts = {x.numel()}}, x, x);
}

Pending CallCommunicator::all_gather(const Tensor& in, const Tensor& out,
                                     std::span<const std::int64_t> counts) {
  return collective({.verb = Verb::all_gather, .counts = {counts.begin(), counts.end()}}, in, out);
}

Pending CallCommunicator::reduce_scatter(const Tensor& in, const Tensor& out,
                                         std::span<const std::int64_t> counts) {
  return collective({.verb = Verb::reduce_scatter, .counts = {counts.begin(), counts.end()}}, in, out);
}

Pending CallCommunicator::all_to_all(const Tensor& in, std::span<const std::int64_t> send_counts,
                                     const Tensor& out, std::span<const std::int64_t> recv_counts) {
  return collective({.verb = Verb::all_to_all,
                     .counts = {send_counts.begin(), send_counts.end()},
                     .recv_counts = {recv_counts.begin(), recv_counts.end()}},
                    in, out);
}

Pending CallCommunicator::broadcast(const Tensor& x, int root) {
  return collective({.verb = Verb::broadcast, .root = root, .counts = {x.numel()}}, x, x);
}

Pending CallCommunicator::barrier() { return collective({.verb = Verb::barrier}, nothing_, nothing_); }

Pending CallCommunicator::send(const Tensor& x, int to) {
  return post(checked({.verb = Verb::send, .root = to, .counts = {x.numel()}}, x, x), x);
}

Pending CallCommunicator::recv(const Tensor& x, int from) {
  return start(checked({.verb = Verb::recv, .root = from, .counts = {x.numel()}}, x, x), x, x);
}

Call CallCommunicator::checked(Call call, const Tensor& in, const Tensor& out) {
  call.dtype = in.dtype();
  const std::string wrong = wrong_arguments(call, rank(), size(), in, out);
  if (!wrong.empty())
    fail(fmt::format("{}: rank {} called {}: {}", group_name(), world_rank(), describe(call), wrong));
  if (in.device() == Device::none || out.device() == Device::none) return call;
  call.in = in.address();
  call.out = out.address();
  call.device = in.device();
  return call;
}

Pending CallCommunicator::collective(Call call, const Tensor& in, const Tensor& out) {
  call = checked(std::move(call), in, out);
  if (size() > 1) return start(std::move(call), in, out);
  throw_if_failed();
  if (call.in == call.out || in.numel() == 0) return {};
  if (call.device == Device::cuda)
    in.stream().driver().copy(
        {.to = call.out, .from = call.in, .row_bytes = static_cast<std::size_t>(in.bytes())},
        in.stream().handle());
  else
    std::memcpy(call.out, call.in, static_cast<std::size_t>(in.bytes()));
  return {};
}

}  // namespace echelon

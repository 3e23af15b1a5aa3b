#include "comm/exchange.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <initializer_list>

#include "base/split.h"
#include "comm/collectives.h"
#include "comm/reduce.h"
#include "comm/whole_or_waited_for.h"
#include "tensor/device_stream.h"

namespace echelon {

Scratch::Scratch() = default;
Scratch::~Scratch() = default;

Tensor Scratch::first(const Tensor& like, std::int64_t count) {
  const DType dtype = like.dtype();
  const std::int64_t bytes = count * element_bytes(dtype);
  if (like.device() == Device::cuda) {
    const DeviceStream& stream = like.stream();
    if (!device_arena_) device_arena_ = std::make_unique<Arena>(&stream.driver(), stream.device());
    if (!on_device_.defined() || on_device_.dtype() != dtype || on_device_.numel() < count) {
      on_device_ = {};  // not both at a time
      on_device_ = Tensor(*device_arena_, MemoryCategory::communication, dtype, {count});
    }
    return on_device_.flat_range(0, count);
  }
  if (bytes > capacity_ || !memory_) {
    memory_.reset();  // not both at a time
    memory_ = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes));
    capacity_ = bytes;
  }
  return Tensor::view_of(memory_.get(), dtype, {count});
}

std::vector<Tensor> cut(const Tensor& whole, std::span<const std::int64_t> counts) {
  std::vector<Tensor> parts;
  std::int64_t begin = 0;
  for (std::int64_t count : counts) {
    parts.push_back(whole.flat_range(begin, begin + count));
    begin += count;
  }
  return parts;
}

std::vector<std::int64_t> even_counts(std::int64_t count, int n) {
  std::vector<std::int64_t> counts;
  for (int i = 0; i < n; ++i) counts.push_back(split_range(count, n, i).size());
  return counts;
}

void send_receive(Communicator& group, const Tensor& out, int to, const Tensor& in, int from) {
  Pending receiving = group.recv(in, from);
  group.send(out, to).wait();
  receiving.wait();
}

// In a dry run nothing is moved, though room to move it in is the host's.
static bool is_dry(const Tensor& x, const Tensor& y) {
  return x.device() == Device::none || y.device() == Device::none;
}

// Runs queue() on the stream of `at`, after the work queued so far on the others' streams, whose later work
// follows it.
template <class Queue>
static void in_order(const Tensor& at, std::initializer_list<const Tensor*> others, const Queue& queue) {
  const DeviceStream* const stream = &at.stream();
  whole_or_waited_for(std::span(&stream, 1), [&] {
    for (const Tensor* other : others)
      if (&other->stream() != stream) stream->wait_for(*other->stream().record());
    queue(*stream);
    for (const Tensor* other : others)
      if (&other->stream() != stream) other->stream().wait_for(*stream->record());
  });
}

void copy(const Tensor& from, const Tensor& to, bool stream) {
  if (is_dry(from, to) || from.begins_with(to) || from.numel() == 0) return;
  if (to.device() == Device::cuda)
    return in_order(to, {&from}, [&](const DeviceStream& queue) {
      queue.driver().copy(
          {.to = to.address(), .from = from.address(), .row_bytes = static_cast<std::size_t>(from.bytes())},
          queue.handle());
    });
  const std::array<std::byte*, 1> destinations{static_cast<std::byte*>(to.host_bytes())};
  if (stream)
    copy_bytes(static_cast<const std::byte*>(from.host_bytes()), destinations, 0, from.bytes(), true);
  else
    std::memcpy(to.host_bytes(), from.host_bytes(), static_cast<std::size_t>(from.bytes()));
}

void reduce_several(ReduceOp op, std::span<const Tensor> from, const Tensor& out) {
  if (out.device() == Device::none) return;
  std::vector<const std::byte*> sources;
  for (const Tensor& t : from) sources.push_back(static_cast<const std::byte*>(t.host_bytes()));
  const std::array<std::byte*, 1> to{static_cast<std::byte*>(out.host_bytes())};
  reduce_elements(op, out.dtype(), sources, 0, to, 0, out.numel());
}

void reduce_two(ReduceOp op, const Tensor& left, const Tensor& right, const Tensor& out) {
  if (is_dry(left, right) || out.device() == Device::none) return;
  if (out.device() == Device::cuda) {
    if (out.numel() == 0) return;
    const std::array<const std::byte*, 2> from{left.address(), right.address()};
    const std::array<std::byte*, 1> to{out.address()};
    return in_order(out, {&left, &right}, [&](const DeviceStream& queue) {
      queue.driver().reduce({op, out.dtype(), from, to, out.numel()}, queue.handle());
    });
  }
  const std::array<const std::byte*, 2> sources{static_cast<const std::byte*>(left.host_bytes()),
                                                static_cast<const std::byte*>(right.host_bytes())};
  const std::array<std::byte*, 1> to{static_cast<std::byte*>(out.host_bytes())};
  reduce_elements(op, out.dtype(), sources, 0, to, 0, out.numel());
}

}  // namespace echelon

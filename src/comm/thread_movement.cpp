#include "comm/thread_movement.h"

#include <algorithm>
#include <array>

#include "base/split.h"
#include "comm/reduce.h"
#include "tensor/device_stream.h"

namespace echelon {
namespace {

// Copies of more than this in all go past the caches (see copy_bytes); measured on a 32 MiB last-level cache.
constexpr std::int64_t stream_bytes = 16 << 20;

}  // namespace

Movement::Movement(std::vector<Call> calls) : calls_(std::move(calls)) {
  const std::size_t n = calls_.size();
  const Verb verb = calls_[0].verb;
  for (const Call& call : calls_) {
    ins_.push_back(call.in);
    outs_.push_back(call.out);
  }
  if (verb == Verb::broadcast) outs_.erase(outs_.begin() + calls_[0].root);
  if (verb == Verb::all_gather || verb == Verb::reduce_scatter) {
    offsets_.resize(n);
    std::exclusive_scan(calls_[0].counts.begin(), calls_[0].counts.end(), offsets_.begin(), std::int64_t{0});
  }
  if (verb == Verb::all_to_all) {
    send_offsets_.resize(n * n);
    for (std::size_t from = 0; from < n; ++from) {
      std::int64_t offset = 0;
      for (std::size_t to = 0; to < n; ++to) {
        send_offsets_[to * n + from] = offset;
        offset += calls_[from].counts[to];
      }
    }
  }
  for (int part = 0; part < num_parts(); ++part) bytes_ += part_length(part) * element_bytes(dtype());
  const std::int64_t copies = verb == Verb::all_gather || verb == Verb::broadcast ? num_parts() - 1 : 1;
  stream_ = bytes_ * copies > stream_bytes;
}

// Cuts between cache lines, so that no two ranks write to one line. Where the cuts lie changes no result.
std::int64_t Movement::part_begin(int part) const {
  const std::int64_t count = calls_[0].counts[0], line = 64 / element_bytes(dtype());
  return std::min(count, line * split_range((count + line - 1) / line, num_parts(), part).begin);
}

std::int64_t Movement::part_length(int part) const {
  switch (calls_[0].verb) {
    case Verb::all_reduce:
    case Verb::broadcast:
      return (part + 1 < num_parts() ? part_begin(part + 1) : calls_[0].counts[0]) - part_begin(part);
    case Verb::all_gather:
    case Verb::reduce_scatter:
      return count(part);
    case Verb::all_to_all:
      return sum_of(calls_[static_cast<std::size_t>(part)].recv_counts);
    default:
      return 0;
  }
}

// Every verb takes one step after its last rank has called it, without staging copies (a ring takes 2(n-1) or
// n-1 steps). The bytes below are what a rank reads from, or writes to, the memory of others, for a buffer of
// b bytes divided evenly.
void Movement::run(int part, std::int64_t begin, std::int64_t end) const {
  if (begin == end) return;
  const Call& first = calls_[0];
  const std::int64_t width = element_bytes(first.dtype), bytes = (end - begin) * width;
  const auto index = static_cast<std::size_t>(part);
  switch (first.verb) {
    case Verb::all_reduce: {
      // The owner of a segment reads it from all ranks and writes the sum to all. Reads (n-1)/n b, writes
      // (n-1)/n b.
      const std::int64_t at = part_begin(part) + begin;
      return reduce_elements(first.op, first.dtype, ins_, at, outs_, at, end - begin);
    }
    case Verb::reduce_scatter: {
      // The owner reads its part from all ranks. Reads (n-1)/n b.
      const std::span<std::byte* const> out(&outs_[index], 1);
      const std::int64_t at = offsets_[index] + begin;
      if (!stream_) return reduce_elements(first.op, first.dtype, ins_, at, out, begin, end - begin);
      // By way of a block in the first-level cache, as `out` is not among the sources and need not be read.
      alignas(64) std::array<std::byte, 8192> block;
      const std::array<std::byte*, 1> to_block{block.data()};
      const auto length = static_cast<std::int64_t>(block.size()) / width;
      for (std::int64_t i = 0; i < end - begin; i += length) {
        const std::int64_t count = std::min(length, end - begin - i);
        reduce_elements(first.op, first.dtype, ins_, at + i, to_block, 0, count);
        copy_bytes(block.data(), out, (begin + i) * width, count * width, true);
      }
      return;
    }
    case Verb::all_gather:
      // The owner reads its part once and writes it to all ranks. Writes (n-1)/n b.
      return copy_bytes(ins_[index] + begin * width, outs_, (offsets_[index] + begin) * width, bytes,
                        stream_);
    case Verb::broadcast: {
      // All ranks share the root's work: each writes one segment of the root's buffer to all others. Writes
      // (n-1)/n b.
      const std::int64_t at = (part_begin(part) + begin) * width;
      return copy_bytes(ins_[static_cast<std::size_t>(first.root)] + at, outs_, at, bytes, stream_);
    }
    case Verb::all_to_all:
      // Each reads what is meant for it from all ranks. Reads (n-1)/n b.
      return exchange(part, begin, end);
    default:
      return;
  }
}

void Movement::queue_copy(DeviceStream& stream, const std::byte* source,
                          std::span<std::byte* const> destinations, std::int64_t destination_begin,
                          std::int64_t elements) const {
  const std::int64_t width = element_bytes(dtype());
  if (elements == 0) return;
  for (std::byte* destination : destinations)
    if (std::byte* const to = destination + destination_begin * width; to != source)
      stream.driver().copy(
          {.to = to, .from = source, .row_bytes = static_cast<std::size_t>(elements * width)},
          stream.handle());
}

bool Movement::reduces() const {
  return calls_[0].verb == Verb::all_reduce || calls_[0].verb == Verb::reduce_scatter;
}

void Movement::queue_on(std::span<DeviceStream* const> streams) const {
  const Call& first = calls_[0];
  const std::int64_t width = element_bytes(first.dtype);
  // Elements [at, at + count) of all sources to those of all destinations from `to_at` on.
  const auto reduce = [&](DeviceStream& stream, std::int64_t at, std::span<std::byte* const> destinations,
                          std::int64_t to_at, std::int64_t count) {
    if (count == 0) return;
    std::vector<const std::byte*> from;
    std::vector<std::byte*> to;
    for (const std::byte* in : ins_) from.push_back(in + at * width);
    for (std::byte* out : destinations) to.push_back(out + to_at * width);
    stream.driver().reduce({first.op, first.dtype, from, to, count}, stream.handle());
  };
  const bool on_one =
      std::all_of(streams.begin(), streams.end(), [&](const auto* stream) { return stream == streams[0]; });
  if (first.verb == Verb::all_reduce && on_one) return reduce(*streams[0], 0, outs_, 0, first.counts[0]);
  for (int rank = 0; rank < num_parts(); ++rank) {
    const auto part = static_cast<std::size_t>(rank);
    DeviceStream& stream = *streams[part];
    std::byte* const own = calls_[part].out;
    if (first.verb == Verb::all_reduce) {
      reduce(stream, part_begin(rank), outs_, part_begin(rank), part_length(rank));
    } else if (first.verb == Verb::broadcast) {
      if (rank != first.root)
        queue_copy(stream, ins_[static_cast<std::size_t>(first.root)], {&own, 1}, 0, first.counts[0]);
    } else if (first.verb == Verb::all_gather) {
      queue_copy(stream, ins_[part], outs_, offsets_[part], first.counts[part]);
    } else if (first.verb == Verb::reduce_scatter) {
      reduce(stream, offsets_[part], {&own, 1}, 0, first.counts[part]);
    } else if (first.verb == Verb::all_to_all) {
      std::int64_t at = 0;
      for (std::size_t from = 0; from < calls_.size(); ++from) {
        const std::int64_t count = calls_[part].recv_counts[from];
        queue_copy(stream, ins_[from] + send_offsets_[part * calls_.size() + from] * width, {&own, 1}, at,
                   count);
        at += count;
      }
    }
  }
}

void Movement::exchange(int part, std::int64_t begin, std::int64_t end) const {
  const auto to = static_cast<std::size_t>(part);
  const std::int64_t width = element_bytes(dtype());
  const std::span<std::byte* const> out(&outs_[to], 1);
  std::int64_t offset = 0;
  for (std::size_t from = 0; from < calls_.size(); ++from) {
    const std::int64_t count = calls_[to].recv_counts[from];
    const std::int64_t lower = std::max(begin, offset), upper = std::min(end, offset + count);
    if (lower < upper) {
      const std::int64_t source = send_offsets_[to * calls_.size() + from] + lower - offset;
      copy_bytes(ins_[from] + source * width, out, lower * width, (upper - lower) * width, stream_);
    }
    offset += count;
  }
}

}  // namespace echelon

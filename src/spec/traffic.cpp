#include "spec/traffic.h"

#include "base/error.h"
#include "base/split.h"

namespace echelon {

const char* verb_name(Verb verb) {
  switch (verb) {
    case Verb::all_reduce:
      return "all_reduce";
    case Verb::all_gather:
      return "all_gather";
    case Verb::reduce_scatter:
      return "reduce_scatter";
    case Verb::all_to_all:
      return "all_to_all";
    case Verb::broadcast:
      return "broadcast";
    case Verb::send:
      return "send";
    case Verb::recv:
      return "recv";
    case Verb::barrier:
      return "barrier";
  }
  return "?";
}

std::int64_t Traffic::bytes(Axis axis) const {
  std::int64_t sum = 0;
  for (Verb verb : all_verbs) sum += at(axis, verb).bytes;
  return sum;
}

template <class Change>
static Traffic changed(Traffic traffic, const Change& change) {
  for (Axis axis : traffic_axes)
    for (Verb verb : all_verbs) change(traffic.at(axis, verb), axis, verb);
  return traffic;
}

Traffic Traffic::operator-(const Traffic& before) const {
  return changed(*this, [&](VerbTraffic& cell, Axis axis, Verb verb) {
    cell.calls -= before.at(axis, verb).calls;
    cell.bytes -= before.at(axis, verb).bytes;
  });
}

Traffic& Traffic::operator+=(const Traffic& more) {
  return *this = changed(*this, [&](VerbTraffic& cell, Axis axis, Verb verb) {
    cell.calls += more.at(axis, verb).calls;
    cell.bytes += more.at(axis, verb).bytes;
  });
}

Traffic Traffic::operator/(std::int64_t steps) const {
  return changed(*this, [&](VerbTraffic& cell, Axis, Verb) {
    cell.calls /= steps;
    cell.bytes /= steps;
  });
}

MovedCopies& MovedCopies::operator+=(const MovedCopies& more) {
  forward_sent += more.forward_sent;
  forward_received += more.forward_received;
  backward_sent += more.backward_sent;
  backward_received += more.backward_received;
  forward_rows += more.forward_rows;
  backward_rows += more.backward_rows;
  again_sent += more.again_sent;
  again_received += more.again_received;
  again_rows += more.again_rows;
  gathered_bytes += more.gathered_bytes;
  exchanged_bytes += more.exchanged_bytes;
  return *this;
}

std::int64_t bytes_sent(Verb verb, std::span<const std::int64_t> counts, int rank,
                        std::int64_t element_bytes) {
  const auto n = static_cast<std::int64_t>(counts.size());
  const std::int64_t own = counts[static_cast<std::size_t>(rank)];
  const std::int64_t total = sum_of(counts);
  switch (verb) {
    case Verb::all_gather:
      return (n - 1) * own * element_bytes;
    case Verb::reduce_scatter:
      return (total - own) * element_bytes;
    case Verb::all_to_all:
      return (total - own) * element_bytes;
    case Verb::all_reduce:
      return (total - own + (n - 1) * own) * element_bytes;
    default:
      throw InvariantError("bytes_sent: not a verb with counts");
  }
}

std::int64_t all_reduce_bytes_sent(std::int64_t count, int n, int rank, std::int64_t element_bytes) {
  const std::int64_t own = split_range(count, n, rank).size();
  return (count - own + (n - 1) * own) * element_bytes;
}

}  // namespace echelon

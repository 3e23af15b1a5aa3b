#include "comm/call.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/error.h"
#include "base/split.h"

namespace echelon {
namespace {

std::string wrong_counts(const std::vector<std::int64_t>& counts, const char* name, int size) {
  if (counts.size() != static_cast<std::size_t>(size))
    return fmt::format("{} has {} entries for {} ranks", name, counts.size(), size);
  if (std::any_of(counts.begin(), counts.end(), [](std::int64_t count) { return count < 0; }))
    return fmt::format("{} has a negative entry", name);
  return "";
}

std::string wrong_tensor(const Tensor& x, const char* name, std::int64_t count) {
  if (!x.defined() && x.numel() > 0) return fmt::format("{} is not defined", name);
  if (!x.contiguous()) return fmt::format("{} is not contiguous", name);
  if (x.numel() != count) return fmt::format("{} has {} elements, not {}", name, x.numel(), count);
  return "";
}

std::string wrong_sum(const Tensor& x) {
  if (x.dtype() == DType::u8) return "u8 is packed bytes, which have no sum";
  return x.dtype() == DType::i16 ? "i16 is what weights are rounded off by, which has no sum" : "";
}

std::string wrong_peer(int peer, const char* name, int size) {
  if (peer >= 0 && peer < size) return "";
  return fmt::format("{} is {}, not a rank of a group of {}", name, peer, size);
}

}  // namespace

std::string describe(const Call& call) {
  const char* const verb = verb_name(call.verb);
  const char* const dtype = dtype_name(call.dtype);
  switch (call.verb) {
    case Verb::all_reduce:
      return fmt::format("all_reduce{} of {} {}", call.op == ReduceOp::max ? " (max)" : "", call.counts[0],
                         dtype);
    case Verb::broadcast:
      return fmt::format("broadcast from {} of {} {}", call.root, call.counts[0], dtype);
    case Verb::all_to_all:
      return fmt::format("all_to_all sending [{}] and receiving [{}] {}", fmt::join(call.counts, ", "),
                         fmt::join(call.recv_counts, ", "), dtype);
    case Verb::barrier:
      return verb;
    default:
      return fmt::format("{} of [{}] {}", verb, fmt::join(call.counts, ", "), dtype);
  }
}

bool agree(const Call& a, int a_rank, const Call& b, int b_rank) {
  if (a.verb != b.verb || a.op != b.op || a.dtype != b.dtype || a.root != b.root || a.device != b.device)
    return false;
  if (a.verb != Verb::all_to_all) return a.counts == b.counts;
  const auto i = static_cast<std::size_t>(a_rank), j = static_cast<std::size_t>(b_rank);
  return a.counts[j] == b.recv_counts[i] && b.counts[i] == a.recv_counts[j];
}

std::string wrong_arguments(const Call& call, int rank, int size, const Tensor& in, const Tensor& out) {
  const auto me = static_cast<std::size_t>(rank);
  std::string wrong;
  switch (call.verb) {
    case Verb::barrier:
      return "";
    case Verb::all_reduce:
      wrong = wrong_tensor(in, "x", in.numel());
      return wrong.empty() ? wrong_sum(in) : wrong;
    case Verb::broadcast:
    case Verb::send:
    case Verb::recv:
      wrong = wrong_peer(call.root,
                         call.verb == Verb::send   ? "to"
                         : call.verb == Verb::recv ? "from"
                                                   : "root",
                         size);
      return wrong.empty() ? wrong_tensor(in, "x", in.numel()) : wrong;
    case Verb::all_gather:
    case Verb::reduce_scatter: {
      wrong = wrong_counts(call.counts, "counts", size);
      if (!wrong.empty()) return wrong;
      const bool gather = call.verb == Verb::all_gather;
      const std::int64_t part = call.counts[me], whole = sum_of(call.counts);
      wrong = wrong_tensor(in, "in", gather ? part : whole);
      if (wrong.empty()) wrong = wrong_tensor(out, "out", gather ? whole : part);
      if (wrong.empty() && !gather) wrong = wrong_sum(in);
      break;
    }
    case Verb::all_to_all:
      wrong = wrong_counts(call.counts, "send_counts", size);
      if (wrong.empty()) wrong = wrong_counts(call.recv_counts, "recv_counts", size);
      if (!wrong.empty()) return wrong;
      wrong = wrong_tensor(in, "in", sum_of(call.counts));
      if (wrong.empty()) wrong = wrong_tensor(out, "out", sum_of(call.recv_counts));
      if (wrong.empty() && call.counts[me] != call.recv_counts[me])
        wrong =
            fmt::format("it sends itself {} elements but receives {}", call.counts[me], call.recv_counts[me]);
      break;
  }
  if (wrong.empty() && in.device() != out.device()) wrong = "in and out are on two devices";
  if (wrong.empty() && in.dtype() != out.dtype())
    wrong = fmt::format("in is {} but out is {}", dtype_name(in.dtype()), dtype_name(out.dtype()));
  return wrong;
}

void check_arguments(Call call, const Communicator& group, const Tensor& in, const Tensor& out) {
  const std::string wrong = wrong_arguments(call, group.rank(), group.size(), in, out);
  if (wrong.empty()) return;
  call.dtype = in.dtype();
  throw CommError(fmt::format("rank {} called {}: {}", group.rank(), describe(call), wrong));
}

}  // namespace echelon

#include "comm/witness.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "base/error.h"
#include "comm/call.h"
#include "comm/exchange.h"

namespace echelon {

void Witness::begin_step(std::int64_t step) { step_ = step; }

Witness::Log Witness::take_log() {
  std::fill(next_.begin(), next_.end(), 0);
  return std::exchange(log_, {});
}

std::uint32_t Witness::add_stream(const Stream& stream) {
  streams_.push_back(stream);
  next_.push_back(0);
  return static_cast<std::uint32_t>(streams_.size() - 1);
}

void Witness::note(std::uint32_t stream, std::uint32_t number, std::uint64_t fingerprint) {
  if (step_) log_.push_back({stream, number, *step_, fingerprint});
}

void Witness::note_repeat(int from, const std::string& group) { repeats_.push_back({*step_, from, group}); }

std::uint64_t Witness::fingerprint(const Tensor& block) const {
  if (block.numel() == 0) return hash_({});
  return hash_({static_cast<const std::byte*>(block.host_bytes()), static_cast<std::size_t>(block.bytes())});
}

void Witness::plant(std::uint64_t bit) {
  planted_ = bit;
  bits_sent_ = 0;
}

std::optional<std::int64_t> Witness::strike(std::int64_t bits) {
  if (!planted_) return {};
  const std::uint64_t before = bits_sent_;
  bits_sent_ += static_cast<std::uint64_t>(bits);
  if (*planted_ >= bits_sent_) return {};
  return static_cast<std::int64_t>(*std::exchange(planted_, {}) - before);
}

static std::vector<std::vector<const Witness::Entry*>> by_stream(const Witness::Log& log) {
  std::vector<std::vector<const Witness::Entry*>> entries;
  for (const Witness::Entry& entry : log) {
    if (entries.size() <= entry.stream) entries.resize(entry.stream + 1);
    auto& of_stream = entries[entry.stream];
    if (of_stream.size() <= entry.number) of_stream.resize(entry.number + 1);
    of_stream[entry.number] = &entry;
  }
  return entries;
}

const Witness::Entry* first_difference(const Witness::Log& before, const Witness::Log& again) {
  const auto entries = by_stream(before);
  for (const Witness::Entry& entry : again) {
    if (entry.stream >= entries.size() || entry.number >= entries[entry.stream].size()) continue;
    const Witness::Entry* const other = entries[entry.stream][entry.number];
    if (other != nullptr && other->fingerprint != entry.fingerprint) return &entry;
  }
  return nullptr;
}

bool is_same(const Witness::Log& before, const Witness::Log& again, std::uint32_t stream,
             std::uint32_t number) {
  const auto find = [&](const Witness::Log& log) {
    return std::find_if(log.begin(), log.end(), [&](const Witness::Entry& entry) {
      return entry.stream == stream && entry.number == number;
    });
  };
  const auto one = find(before), other = find(again);
  return one != before.end() && other != again.end() && one->fingerprint == other->fingerprint;
}

namespace {

using Side = Witness::Side;
using Way = Witness::Way;

// A receive whose block is witnessed as the program learns that it is there.
class WitnessedReceive final : public Operation {
 public:
  WitnessedReceive(Pending inner, Witness& witness, std::uint32_t stream, Tensor x)
      : inner_(std::move(inner)),
        witness_(witness),
        stream_(stream),
        number_(witness.next_number(stream)),
        x_(std::move(x)) {}

  bool progress() override {
    if (!inner_.progress()) return false;
    note();
    return true;
  }
  void wait() override {
    inner_.wait();
    note();
  }

 private:
  void note() { witness_.note(stream_, number_, witness_.fingerprint(x_)); }

  Pending inner_;
  Witness& witness_;
  std::uint32_t stream_, number_;
  Tensor x_;
};

Tensor copy_of(const Tensor& x) {
  Tensor copied = Tensor::of_host(x.dtype(), {x.numel()});
  copy(x, copied);
  return copied;
}

void change_bit(const Tensor& x, std::int64_t bit) {
  echelon::change_bit(static_cast<std::byte*>(x.host_bytes()), static_cast<std::uint64_t>(bit));
}

// See the page's beginning. `x` is as large on every rank.
bool steers(const Tensor& x) {
  return x.dtype() == DType::i32 || (x.dtype() == DType::f64 && x.bytes() <= (64 << 10));
}

class WitnessCommunicator final : public Communicator {
 public:
  WitnessCommunicator(std::unique_ptr<Communicator> inner, Witness& witness, std::vector<int> ranks,
                      const std::string& name)
      : inner_(std::move(inner)),
        witness_(witness),
        ranks_(std::move(ranks)),
        group_(fmt::format("{} [{}]", name, fmt::join(ranks_, ", "))) {
    for (const Way way : {Way::gather, Way::broadcast})
      to_all_[way] = witness.add_stream({Side::sent, way, group_, -1});
    for (int peer : ranks_)
      for (const Way way : {Way::exchange, Way::gather, Way::broadcast, Way::message}) {
        from_[way].push_back(witness.add_stream({Side::received, way, group_, peer}));
        to_[way].push_back(witness.add_stream({Side::sent, way, group_, peer}));
      }
  }

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }

  Pending all_reduce(const Tensor& x, ReduceOp op) override {
    if (!watches()) return inner_->all_reduce(x, op);
    check_arguments({.verb = Verb::all_reduce, .op = op, .counts = {x.numel()}}, *this, x, x);
    const std::vector<std::int64_t> counts = even_counts(x.numel(), size());
    const Tensor part = sum_of_parts(x.flat(), counts, op);
    gather(part, x.flat(), counts);
    return {};
  }

  Pending all_gather(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) override {
    if (!watches()) return inner_->all_gather(in, out, counts);
    check_arguments({.verb = Verb::all_gather, .counts = {counts.begin(), counts.end()}}, *this, in, out);
    gather(in.flat(), out.flat(), counts);
    return {};
  }

  Pending reduce_scatter(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) override {
    if (!watches()) return inner_->reduce_scatter(in, out, counts);
    check_arguments({.verb = Verb::reduce_scatter, .counts = {counts.begin(), counts.end()}}, *this, in, out);
    copy(sum_of_parts(in.flat(), counts, ReduceOp::sum), out);
    return {};
  }

  Pending all_to_all(const Tensor& in, std::span<const std::int64_t> send_counts, const Tensor& out,
                     std::span<const std::int64_t> recv_counts) override {
    if (!watches()) return inner_->all_to_all(in, send_counts, out, recv_counts);
    check_arguments({.verb = Verb::all_to_all,
                     .counts = {send_counts.begin(), send_counts.end()},
                     .recv_counts = {recv_counts.begin(), recv_counts.end()}},
                    *this, in, out);
    // Its numbers in f64 are those of tensors, of which each rank sends as many as it has.
    exchange(in.flat(), send_counts, out.flat(), recv_counts, in.dtype() == DType::i32);
    return {};
  }

  Pending broadcast(const Tensor& x, int root) override {
    if (!watches()) return inner_->broadcast(x, root);
    if (rank() != root) {
      inner_->broadcast(x, root).wait();
      received(Way::broadcast, root, x);
      return {};
    }
    sent_to_all(Way::broadcast, x);
    inner_->broadcast(on_its_way(x), root).wait();
    return {};
  }

  Pending send(const Tensor& x, int to) override {
    if (!watches()) return inner_->send(x, to);
    sent(Way::message, to, x);
    return inner_->send(on_its_way(x), to);
  }

  Pending recv(const Tensor& x, int from) override {
    Pending pending = inner_->recv(x, from);
    if (!watches()) return pending;
    return Pending(std::make_shared<WitnessedReceive>(std::move(pending), witness_,
                                                      stream(from_, Way::message, from), x));
  }

  Pending barrier() override { return inner_->barrier(); }

 private:
  using Streams = std::map<Way, std::vector<std::uint32_t>>;  // by group rank
  static std::uint32_t stream(const Streams& streams, Way way, int peer) {
    return streams.at(way)[static_cast<std::size_t>(peer)];
  }
  bool watches() const { return witness_.watches() && size() > 1; }
  void sent(Way way, int to, const Tensor& x) {
    witness_.note(stream(to_, way, to), witness_.fingerprint(x));
  }
  void sent_to_all(Way way, const Tensor& x) { witness_.note(to_all_.at(way), witness_.fingerprint(x)); }
  void received(Way way, int from, const Tensor& x) {
    witness_.note(stream(from_, way, from), witness_.fingerprint(x));
  }

  // Itself, or a copy of it with a planted change.
  Tensor on_its_way(const Tensor& x) {
    const auto bit = witness_.strike(8 * x.bytes());
    if (!bit) return x;
    Tensor changed = copy_of(x);
    change_bit(changed, *bit);
    return changed;
  }

  // Of all ranks' parts for this one.
  Tensor sum_of_parts(const Tensor& in, std::span<const std::int64_t> counts, ReduceOp op) {
    const std::int64_t mine = counts[static_cast<std::size_t>(rank())];
    const std::vector<std::int64_t> each(static_cast<std::size_t>(size()), mine);
    const Tensor parts = Tensor::of_host(in.dtype(), {mine * size()});
    exchange(in, counts, parts, each, steers(in));
    const std::vector<Tensor> from = cut(parts, each);
    if (mine > 0) reduce_several(op, from, from.front());
    return from.front();
  }

  void exchange(const Tensor& in, std::span<const std::int64_t> send_counts, const Tensor& out,
                std::span<const std::int64_t> recv_counts, bool steers) {
    const std::vector<Tensor> leaving = cut(in, send_counts), arriving = cut(out, recv_counts);
    Tensor first = in;
    for (int to = 0; to < size(); ++to) {
      if (to == rank()) continue;
      const Tensor& block = leaving[static_cast<std::size_t>(to)];
      sent(Way::exchange, to, block);
      const auto bit = witness_.strike(8 * block.bytes());
      if (!bit) continue;
      first = copy_of(in);
      change_bit(cut(first, send_counts)[static_cast<std::size_t>(to)], *bit);
    }
    until_same(leaving, arriving, steers, [&](bool again) {
      inner_->all_to_all(again ? in : first, send_counts, out, recv_counts).wait();
    });
    for (int from = 0; from < size(); ++from)
      if (from != rank()) received(Way::exchange, from, arriving[static_cast<std::size_t>(from)]);
  }

  void gather(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) {
    const std::vector<Tensor> arriving = cut(out, counts);
    const Tensor& own = arriving[static_cast<std::size_t>(rank())];
    sent_to_all(Way::gather, in);
    Tensor first = in, kept;
    if (const auto bit = witness_.strike(8 * in.bytes())) {
      kept = copy_of(in);  // `in` may be its own place in `out`, where the changed one arrives too
      first = copy_of(in);
      change_bit(first, *bit);
    }
    until_same(std::vector<Tensor>(static_cast<std::size_t>(size()), kept.defined() ? kept : in), arriving,
               steers(out), [&](bool again) {
                 inner_->all_gather(again ? in : first, out, counts).wait();
                 if (kept.defined()) copy(kept, own);
               });
    for (int from = 0; from < size(); ++from)
      if (from != rank()) received(Way::gather, from, arriving[static_cast<std::size_t>(from)]);
  }

  // Moves once, and of numbers that steer, as all ranks say alike, again until what arrives is what left.
  template <class Move>
  void until_same(const std::vector<Tensor>& leaving, const std::vector<Tensor>& arriving, bool steers,
                  const Move& move) {
    constexpr int most = 3;
    for (int times = 1;; ++times) {
      move(times > 1);
      if (!steers || all_same(leaving, arriving)) return;
      if (times == most)
        fail(
            "{}: numbers arrive changed, {} times one after another; the machine, or what connects it, is "
            "not to be trusted",
            group_, most);
    }
  }

  // Whether the blocks are as they left, on all ranks.
  bool all_same(const std::vector<Tensor>& leaving, const std::vector<Tensor>& arriving) {
    constexpr std::int64_t width = sizeof(std::uint64_t);
    const auto n = static_cast<std::size_t>(size());
    std::vector<std::uint64_t> mine(n), theirs(n);
    for (std::size_t to = 0; to < n; ++to) mine[to] = witness_.fingerprint(leaving[to]);
    const std::vector<std::int64_t> each(n, width);
    const auto bytes = [&](std::vector<std::uint64_t>& words) {
      return Tensor::view_of(words.data(), DType::u8, {size() * width});
    };
    inner_->all_to_all(bytes(mine), each, bytes(theirs), each).wait();
    std::int32_t changed = 0;
    for (std::size_t from = 0; from < n; ++from) {
      if (static_cast<int>(from) == rank() || witness_.fingerprint(arriving[from]) == theirs[from]) continue;
      changed = 1;
      witness_.note_repeat(ranks_[from], group_);
    }
    const Tensor any = Tensor::view_of(&changed, DType::i32, {1});
    inner_->all_reduce(any, ReduceOp::max).wait();
    return changed == 0;
  }

  std::unique_ptr<Communicator> inner_;
  Witness& witness_;
  std::vector<int> ranks_;  // of the job
  std::string group_;
  Streams from_, to_;
  std::map<Way, std::uint32_t> to_all_;
};

}  // namespace

std::unique_ptr<Communicator> WitnessedWorld::join(int rank, const std::vector<int>& ranks,
                                                   const std::string& name) {
  auto group = inner_.join(rank, ranks, name);
  if (ranks.size() < 2) return group;
  return std::make_unique<WitnessCommunicator>(std::move(group), witness_, ranks, name);
}

}  // namespace echelon

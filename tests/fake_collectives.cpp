#include "fake_collectives.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/bf16.h"
#include "base/error.h"

namespace echelon::checks {
namespace {

using namespace std::chrono_literals;
using Lock = std::lock_guard<std::mutex>;

// One rank after another, each partial sum rounded, in the order that is given: as round a ring.
template <class T>
void add_in_turn(ReduceOp op, const std::vector<const std::byte*>& from, std::byte* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const auto at = [&](const std::byte* data) {
      T x;
      std::memcpy(&x, data + i * static_cast<std::int64_t>(sizeof x), sizeof x);
      return x;
    };
    T sum = at(from.front());
    for (std::size_t r = 1; r < from.size(); ++r) {
      const T x = at(from[r]);
      if (op == ReduceOp::max)
        sum = static_cast<float>(x) > static_cast<float>(sum) ? x : sum;
      else if constexpr (std::is_same_v<T, bf16>)
        sum = static_cast<bf16>(static_cast<float>(sum) + static_cast<float>(x));
      else
        sum = static_cast<T>(sum + x);
    }
    std::memcpy(to + i * static_cast<std::int64_t>(sizeof sum), &sum, sizeof sum);
  }
}

}  // namespace

FakeCollectives::FakeCollectives(FakeDriver& driver) : driver_(driver) {}

FakeCollectives::~FakeCollectives() {
  for (End* end : ends_) delete end;
}

void FakeCollectives::break_after(int others) {
  const Lock lock(mutex_);
  broken_from_ = pieces_ + others;
  says_so_ = true;
}

void FakeCollectives::stall_after(int others) {
  const Lock lock(mutex_);
  broken_from_ = pieces_ + others;
  says_so_ = false;
}

int FakeCollectives::members() const {
  const Lock lock(mutex_);
  return static_cast<int>(ends_.size());
}

DeviceCollectives::Id FakeCollectives::make_id() {
  const Lock lock(mutex_);
  Id id{};
  id.fill(std::byte{++next_id_});
  groups_[id] = std::make_shared<Group>();
  return id;
}

DeviceCollectives::Member FakeCollectives::join(const Id& id, int device, int rank, int size,
                                                const std::function<bool()>& given_up) {
  std::unique_lock lock(mutex_);
  check(groups_.contains(id), "a group is joined that nobody made");
  const std::shared_ptr<Group> group = groups_[id];
  check(group->size == 0 || group->size == size, "ranks join groups of several sizes");
  group->size = size;
  ++group->joined;
  changed_.notify_all();
  while (group->joined < size) {
    if (given_up()) fail("device {}: joining a group was given up", device);
    changed_.wait_for(lock, 1ms);
  }
  auto* const end = new End{group, rank, 0, {}, {}};
  ends_.insert(end);
  return {end, device};
}

FakeCollectives::End& FakeCollectives::known(Member member) {
  auto* const end = static_cast<End*>(member.handle);
  check(ends_.contains(end), "a member is used that has ended");
  return *end;
}

void FakeCollectives::end(Member member, bool aborted) noexcept {
  std::unique_lock lock(mutex_);
  auto* const end = static_cast<End*>(member.handle);
  if (ends_.erase(end) == 0) return driver_.complain("a member ends that is not there");
  const std::unique_ptr<End> ours(end);
  lock.unlock();
  for (const auto& piece : ours->own)
    if (aborted)
      driver_.give_up(*piece->meeting, ours->rank);
    else if (!driver_.is_done(*piece->meeting))
      driver_.complain("a member is left while its work is under way");
}

void FakeCollectives::leave(Member member) noexcept { end(member, false); }
void FakeCollectives::abort(Member member) noexcept { end(member, true); }

std::string FakeCollectives::error(Member member) {
  const Lock lock(mutex_);
  return known(member).group->broken && says_so_ ? "remote process exited or there was a network error" : "";
}

void FakeCollectives::begin_together() {
  const Lock lock(mutex_);
  ++depth_[std::this_thread::get_id()];
}

void FakeCollectives::end_together(Member member) {
  std::unique_lock lock(mutex_);
  --depth_[std::this_thread::get_id()];
  End& end = known(member);
  std::vector<Asked> together = std::exchange(end.together, {});
  if (!together.empty()) queue(end, std::move(together));
}

void FakeCollectives::ask(const Asked& asked, Member member) {
  const Lock lock(mutex_);
  End& end = known(member);
  check(asked.stream.device == member.device, "a member's work is queued on another device");
  end.together.push_back(asked);
  if (depth_[std::this_thread::get_id()] == 0) queue(end, std::exchange(end.together, {}));
}

// What a rank uses of its memory.
std::vector<FakeDriver::Use> FakeCollectives::uses_of(const Asked& asked, int size) const {
  const std::int64_t width = element_bytes(asked.dtype), parts = static_cast<std::int64_t>(size);
  const auto bytes = [&](std::int64_t times) {
    return static_cast<std::size_t>(asked.count * width * times);
  };
  std::vector<FakeDriver::Use> uses;
  if (asked.in != nullptr) uses.push_back({asked.in, bytes(asked.kind == Kind::reduce_scatter ? parts : 1)});
  if (asked.out != nullptr) uses.push_back({asked.out, bytes(asked.kind == Kind::all_gather ? parts : 1)});
  return uses;
}

void FakeCollectives::queue(End& end, std::vector<Asked> asked) {
  Group& group = *end.group;
  const auto size = static_cast<std::size_t>(group.size);
  if (group.pieces.size() <= end.next) {
    auto piece = std::make_shared<Piece>();
    piece->asked.resize(size);
    piece->meeting = driver_.make_meeting(group.size, [this, piece = piece.get()] { work(*piece); });
    group.pieces.push_back(std::move(piece));
  }
  const std::shared_ptr<Piece> piece = group.pieces[end.next++];
  end.own.push_back(piece);
  const StreamHandle stream = asked.front().stream;
  std::vector<FakeDriver::Use> uses;
  for (const Asked& one : asked)
    for (const FakeDriver::Use& use : uses_of(one, group.size)) uses.push_back(use);
  piece->asked[static_cast<std::size_t>(end.rank)] = std::move(asked);
  const int number = pieces_++;
  if (broken_from_ >= 0 && number >= broken_from_) {
    group.broken = true;
    driver_.break_off(*piece->meeting);
  }
  driver_.meet(piece->meeting, end.rank, "a collective", stream, std::move(uses));
}

void FakeCollectives::sum(const std::vector<const std::byte*>& from, std::int64_t at, std::byte* to,
                          std::int64_t count, const Asked& asked) {
  // From another rank on for each piece of the buffer, backwards: no order that the house has.
  std::vector<const std::byte*> turned;
  const std::size_t n = from.size(), first = static_cast<std::size_t>(at) % n;
  for (std::size_t r = 0; r < n; ++r)
    turned.push_back(from[(first + n - r) % n] + at * element_bytes(asked.dtype));
  switch (asked.dtype) {
    case DType::f32:
      return add_in_turn<float>(asked.op, turned, to, count);
    case DType::f64:
      return add_in_turn<double>(asked.op, turned, to, count);
    case DType::bf16:
      return add_in_turn<bf16>(asked.op, turned, to, count);
    case DType::i32:
      return add_in_turn<std::int32_t>(asked.op, turned, to, count);
    case DType::i16:
    case DType::u8:
      driver_.complain("packed bytes or remainders are added");
  }
}

// Call number `index` of every rank, which is one collective.
void FakeCollectives::collective(const Piece& piece, std::size_t index) {
  const std::size_t n = piece.asked.size();
  const Asked& first = piece.asked[0][index];
  const std::int64_t bytes = first.count * element_bytes(first.dtype);
  std::vector<const std::byte*> ins;
  std::vector<std::byte*> outs;
  for (const auto& of_rank : piece.asked) {
    const Asked& a = of_rank[index];
    if (a.kind != first.kind || a.count != first.count || a.dtype != first.dtype || a.op != first.op ||
        a.peer != first.peer)
      return driver_.complain("ranks queue different collectives");
    ins.push_back(a.in == nullptr ? nullptr : driver_.seen_by_work(a.in));
    outs.push_back(a.out == nullptr ? nullptr : driver_.seen_by_work(a.out));
  }
  const auto root = static_cast<std::size_t>(first.peer);
  std::vector<std::byte> result(static_cast<std::size_t>(bytes) * n);
  switch (first.kind) {
    case Kind::all_reduce:
    case Kind::reduce:
      sum(ins, 0, result.data(), first.count, first);
      for (std::size_t r = 0; r < n; ++r)
        if (first.kind == Kind::all_reduce || r == root)
          std::memcpy(outs[r], result.data(), static_cast<std::size_t>(bytes));
      return;
    case Kind::reduce_scatter:
      for (std::size_t r = 0; r < n; ++r)
        sum(ins, static_cast<std::int64_t>(r) * first.count,
            result.data() + static_cast<std::int64_t>(r) * bytes, first.count, first);
      for (std::size_t r = 0; r < n; ++r)
        std::memcpy(outs[r], result.data() + static_cast<std::int64_t>(r) * bytes,
                    static_cast<std::size_t>(bytes));
      return;
    case Kind::all_gather:
      for (std::size_t r = 0; r < n; ++r)
        std::memcpy(result.data() + static_cast<std::int64_t>(r) * bytes, ins[r],
                    static_cast<std::size_t>(bytes));
      for (std::size_t r = 0; r < n; ++r) std::memcpy(outs[r], result.data(), result.size());
      return;
    case Kind::broadcast:
      for (std::size_t r = 0; r < n; ++r) std::memmove(outs[r], ins[root], static_cast<std::size_t>(bytes));
      return;
    case Kind::send:
    case Kind::receive:
      break;
  }
}

// Sends and receives of all ranks: on each pair in the order that both have asked.
void FakeCollectives::exchange(const Piece& piece) {
  for (std::size_t to = 0; to < piece.asked.size(); ++to) {
    std::vector<std::size_t> taken(piece.asked.size());  // sends of each rank to this one, so far
    for (const Asked& receive : piece.asked[to]) {
      if (receive.kind != Kind::receive) continue;
      const auto& theirs = piece.asked[static_cast<std::size_t>(receive.peer)];
      std::size_t skip = taken[static_cast<std::size_t>(receive.peer)]++;
      const auto send = std::find_if(theirs.begin(), theirs.end(), [&](const Asked& a) {
        return a.kind == Kind::send && a.peer == static_cast<int>(to) && skip-- == 0;
      });
      if (send == theirs.end() || send->count != receive.count || send->dtype != receive.dtype)
        return driver_.complain("a receive has no send that is like it");
      std::memcpy(driver_.seen_by_work(receive.out), driver_.seen_by_work(send->in),
                  static_cast<std::size_t>(send->count * element_bytes(send->dtype)));
    }
  }
}

void FakeCollectives::work(const Piece& piece) {
  for (const auto& of_rank : piece.asked)
    if (std::any_of(of_rank.begin(), of_rank.end(),
                    [](const Asked& a) { return a.kind == Kind::send || a.kind == Kind::receive; }))
      return exchange(piece);
  for (const auto& of_rank : piece.asked)
    if (of_rank.size() != piece.asked[0].size())
      return driver_.complain("ranks queue different numbers of collectives");
  for (std::size_t index = 0; index < piece.asked[0].size(); ++index) collective(piece, index);
}

void FakeCollectives::all_reduce(const std::byte* in, std::byte* out, std::int64_t count, DType dtype,
                                 ReduceOp op, Member member, StreamHandle stream) {
  ask({Kind::all_reduce, in, out, count, dtype, op, 0, stream}, member);
}
void FakeCollectives::all_gather(const std::byte* in, std::byte* out, std::int64_t count_each, DType dtype,
                                 Member member, StreamHandle stream) {
  ask({Kind::all_gather, in, out, count_each, dtype, ReduceOp::sum, 0, stream}, member);
}
void FakeCollectives::reduce_scatter(const std::byte* in, std::byte* out, std::int64_t count_each,
                                     DType dtype, Member member, StreamHandle stream) {
  ask({Kind::reduce_scatter, in, out, count_each, dtype, ReduceOp::sum, 0, stream}, member);
}
void FakeCollectives::broadcast(const std::byte* in, std::byte* out, std::int64_t count, DType dtype,
                                int root, Member member, StreamHandle stream) {
  ask({Kind::broadcast, in, out, count, dtype, ReduceOp::sum, root, stream}, member);
}
void FakeCollectives::reduce(const std::byte* in, std::byte* out, std::int64_t count, DType dtype, int root,
                             Member member, StreamHandle stream) {
  ask({Kind::reduce, in, out, count, dtype, ReduceOp::sum, root, stream}, member);
}
void FakeCollectives::send(const std::byte* in, std::int64_t count, DType dtype, int to, Member member,
                           StreamHandle stream) {
  ask({Kind::send, in, nullptr, count, dtype, ReduceOp::sum, to, stream}, member);
}
void FakeCollectives::receive(std::byte* out, std::int64_t count, DType dtype, int from, Member member,
                              StreamHandle stream) {
  ask({Kind::receive, nullptr, out, count, dtype, ReduceOp::sum, from, stream}, member);
}

}  // namespace echelon::checks

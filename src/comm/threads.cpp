#include "comm/threads.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "comm/thread_job.h"

namespace echelon {
namespace {

// What a Pending holds: tells the job when it is waited for or dropped.
class Handle final : public Operation {
 public:
  Handle(ThreadJob& job, int rank, std::shared_ptr<Task> task)
      : job_(job), rank_(rank), task_(std::move(task)) {}
  ~Handle() override { job_.drop(rank_, task_); }
  bool progress() override { return job_.progress(rank_, *task_); }
  void wait() override { job_.wait(rank_, *task_); }

 private:
  ThreadJob& job_;
  int rank_;
  std::shared_ptr<Task> task_;
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(ThreadJob& job, Group& group, int rank)
      : job_(job), group_(group), world_rank_(group.ranks[static_cast<std::size_t>(rank)]), rank_(rank) {}
  // What was dropped without a wait is finished while its tensors' arena certainly still lives.
  ~ThreadCommunicator() override { job_.finish_dropped(world_rank_, group_); }

  int rank() const override { return rank_; }
  int size() const override { return group_.size(); }

  Pending all_reduce(const Tensor& x, ReduceOp op) override {
    const Call call{.verb = Verb::all_reduce, .op = op, .counts = {x.numel()}};
    check_tensor(call, x, "x");
    return collective(call, x, x);
  }

  Pending all_gather(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) override {
    const Call call{.verb = Verb::all_gather, .counts = {counts.begin(), counts.end()}};
    check_counts(call, counts, "counts");
    check_size(call, in, "in", counts[static_cast<std::size_t>(rank_)]);
    check_size(call, out, "out", total(counts));
    return collective(call, in, out);
  }

  Pending reduce_scatter(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) override {
    const Call call{.verb = Verb::reduce_scatter, .counts = {counts.begin(), counts.end()}};
    check_counts(call, counts, "counts");
    check_size(call, in, "in", total(counts));
    check_size(call, out, "out", counts[static_cast<std::size_t>(rank_)]);
    return collective(call, in, out);
  }

  Pending all_to_all(const Tensor& in, std::span<const std::int64_t> send_counts, const Tensor& out,
                     std::span<const std::int64_t> recv_counts) override {
    const Call call{.verb = Verb::all_to_all,
                    .counts = {send_counts.begin(), send_counts.end()},
                    .recv_counts = {recv_counts.begin(), recv_counts.end()}};
    check_counts(call, send_counts, "send_counts");
    check_counts(call, recv_counts, "recv_counts");
    check_size(call, in, "in", total(send_counts));
    check_size(call, out, "out", total(recv_counts));
    const auto me = static_cast<std::size_t>(rank_);
    if (send_counts[me] != recv_counts[me])
      refuse_call(
          call, fmt::format("it sends itself {} elements but receives {}", send_counts[me], recv_counts[me]));
    return collective(call, in, out);
  }

  Pending broadcast(const Tensor& x, int root) override {
    const Call call{.verb = Verb::broadcast, .root = root, .counts = {x.numel()}};
    check_peer(call, root, "root");
    check_tensor(call, x, "x");
    return collective(call, x, x);
  }

  Pending barrier() override { return collective({.verb = Verb::barrier}, nothing_, nothing_); }

  Pending send(const Tensor& x, int to) override {
    const Call call{.verb = Verb::send, .dtype = x.dtype(), .counts = {x.numel()}};
    check_peer(call, to, "to");
    check_tensor(call, x, "x");
    job_.send(group_, rank_, to, x);
    return {};
  }

  Pending recv(const Tensor& x, int from) override {
    const Call call{.verb = Verb::recv, .dtype = x.dtype(), .counts = {x.numel()}};
    check_peer(call, from, "from");
    check_tensor(call, x, "x");
    return pending(job_.receive(group_, rank_, from, x));
  }

 private:
  static std::int64_t total(std::span<const std::int64_t> counts) {
    return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  }

  // A wrong argument here is an error on every rank: the others would wait for this call.
  [[noreturn]] void refuse_call(const Call& call, const std::string& why) {
    job_.fail(world_rank_,
              fmt::format("{}: rank {} called {}: {}", group_.name, world_rank_, describe(call), why));
  }

  void check_counts(const Call& call, std::span<const std::int64_t> counts, const char* name) {
    if (counts.size() != static_cast<std::size_t>(size()))
      refuse_call(call, fmt::format("{} has {} entries for {} ranks", name, counts.size(), size()));
    if (std::any_of(counts.begin(), counts.end(), [](std::int64_t count) { return count < 0; }))
      refuse_call(call, fmt::format("{} has a negative entry", name));
  }

  void check_tensor(const Call& call, const Tensor& x, const char* name) {
    if (!x.defined() && x.numel() > 0) refuse_call(call, fmt::format("{} is not defined", name));
    if (!x.contiguous()) refuse_call(call, fmt::format("{} is not contiguous", name));
  }

  void check_size(const Call& call, const Tensor& x, const char* name, std::int64_t count) {
    check_tensor(call, x, name);
    if (x.numel() != count)
      refuse_call(call, fmt::format("{} has {} elements, not {}", name, x.numel(), count));
  }

  void check_peer(const Call& call, int peer, const char* name) {
    if (peer < 0 || peer >= size())
      refuse_call(call, fmt::format("{} is {}, not a rank of a group of {}", name, peer, size()));
  }

  Pending collective(Call call, const Tensor& in, const Tensor& out) {
    call.dtype = in.dtype();
    if (in.dtype() != out.dtype())
      refuse_call(call,
                  fmt::format("in is {} but out is {}", dtype_name(in.dtype()), dtype_name(out.dtype())));
    call.in = static_cast<const std::byte*>(in.raw());
    call.out = static_cast<std::byte*>(out.raw());
    if (size() > 1) return pending(job_.call(group_, rank_, std::move(call), in, out));
    job_.throw_if_aborted(world_rank_);
    if (call.verb == Verb::all_reduce || call.verb == Verb::broadcast) return {};
    const Movement alone({std::move(call)});
    alone.run(0, 0, alone.part_length(0));
    return {};
  }

  Pending pending(std::shared_ptr<Task> task) {
    if (!task) return {};
    return Pending(std::make_shared<Handle>(job_, world_rank_, std::move(task)));
  }

  ThreadJob& job_;
  Group& group_;
  const int world_rank_, rank_;
  const Tensor nothing_;
};

}  // namespace

ThreadWorld::ThreadWorld(int num_ranks, std::chrono::milliseconds timeout)
    : state_(std::make_unique<State>(num_ranks, timeout)) {}

ThreadWorld::~ThreadWorld() = default;

int ThreadWorld::num_ranks() const { return state_->job.num_ranks(); }

std::unique_ptr<Communicator> ThreadWorld::join(int rank, const std::vector<int>& ranks,
                                                const std::string& name) {
  for (int member : ranks)
    if (member < 0 || member >= num_ranks())
      refuse("group {} [{}]: {} is not a rank of a job of {}", name, fmt::join(ranks, ", "), member,
             num_ranks());
  if (std::set<int>(ranks.begin(), ranks.end()).size() != ranks.size())
    refuse("group {} [{}]: a rank appears twice", name, fmt::join(ranks, ", "));
  const auto at = std::find(ranks.begin(), ranks.end(), rank);
  if (at == ranks.end()) refuse("group {} [{}]: rank {} is not in it", name, fmt::join(ranks, ", "), rank);
  return std::make_unique<ThreadCommunicator>(state_->job, state_->job.group(name, ranks),
                                              static_cast<int>(at - ranks.begin()));
}

void ThreadWorld::abort(const std::string& why) { state_->job.abort(-1, why); }

}  // namespace echelon

#include "comm/threads.h"

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
    return collective({.verb = Verb::all_reduce, .op = op, .counts = {x.numel()}}, x, x);
  }

  Pending all_gather(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) override {
    return collective({.verb = Verb::all_gather, .counts = {counts.begin(), counts.end()}}, in, out);
  }

  Pending reduce_scatter(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) override {
    return collective({.verb = Verb::reduce_scatter, .counts = {counts.begin(), counts.end()}}, in, out);
  }

  Pending all_to_all(const Tensor& in, std::span<const std::int64_t> send_counts, const Tensor& out,
                     std::span<const std::int64_t> recv_counts) override {
    return collective({.verb = Verb::all_to_all,
                       .counts = {send_counts.begin(), send_counts.end()},
                       .recv_counts = {recv_counts.begin(), recv_counts.end()}},
                      in, out);
  }

  Pending broadcast(const Tensor& x, int root) override {
    return collective({.verb = Verb::broadcast, .root = root, .counts = {x.numel()}}, x, x);
  }

  Pending barrier() override { return collective({.verb = Verb::barrier}, nothing_, nothing_); }

  Pending send(const Tensor& x, int to) override {
    check({.verb = Verb::send, .dtype = x.dtype(), .root = to, .counts = {x.numel()}}, x, x);
    job_.send(group_, rank_, to, x);
    return {};
  }

  Pending recv(const Tensor& x, int from) override {
    check({.verb = Verb::recv, .dtype = x.dtype(), .root = from, .counts = {x.numel()}}, x, x);
    return pending(job_.receive(group_, rank_, from, x));
  }

 private:
  // A wrong argument here is an error on every rank: the others would wait for this call.
  void check(const Call& call, const Tensor& in, const Tensor& out) {
    const std::string wrong = wrong_arguments(call, rank_, size(), in, out);
    if (!wrong.empty())
      job_.fail(world_rank_,
                fmt::format("{}: rank {} called {}: {}", group_.name, world_rank_, describe(call), wrong));
  }

  Pending collective(Call call, const Tensor& in, const Tensor& out) {
    call.dtype = in.dtype();
    check(call, in, out);
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

ThreadWorld::ThreadWorld(int num_ranks, std::chrono::milliseconds timeout, FailureHooks hooks)
    : state_(std::make_unique<State>(num_ranks, timeout, std::move(hooks))) {}

ThreadWorld::~ThreadWorld() = default;

int ThreadWorld::num_ranks() const { return state_->job.num_ranks(); }

std::unique_ptr<Communicator> ThreadWorld::join(int rank, const std::vector<int>& ranks,
                                                const std::string& name) {
  const int me = place_in_group(rank, ranks, num_ranks(), name);
  return std::make_unique<ThreadCommunicator>(state_->job, state_->job.group(name, ranks), me);
}

void ThreadWorld::abort(const std::string& why) { state_->job.abort(-1, why); }

FlightRecorder& ThreadWorld::recorder(int rank) { return state_->job.recorder(rank); }

}  // namespace echelon

#include "comm/threads.h"

#include "comm/call_communicator.h"
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
  DeviceWork on_device() const override { return task_->on_own_device(); }

 private:
  ThreadJob& job_;
  int rank_;
  std::shared_ptr<Task> task_;
};

class ThreadCommunicator final : public CallCommunicator {
 public:
  ThreadCommunicator(ThreadJob& job, Group& group, int rank)
      : job_(job), group_(group), world_rank_(group.ranks[static_cast<std::size_t>(rank)]), rank_(rank) {}
  // What was dropped without a wait is finished while its tensors' arena certainly still lives.
  ~ThreadCommunicator() override { job_.finish_dropped(world_rank_, group_); }

  int rank() const override { return rank_; }
  int size() const override { return group_.size(); }

 private:
  Pending start(Call call, const Tensor& in, const Tensor& out) override {
    return handle(call.verb == Verb::recv ? job_.receive(group_, rank_, call.root, out)
                                          : job_.call(group_, rank_, std::move(call), in, out));
  }
  Pending post(Call call, const Tensor& x) override { return handle(job_.send(group_, rank_, call.root, x)); }
  [[noreturn]] void fail(const std::string& why) override { job_.fail(world_rank_, why); }
  void throw_if_failed() override { job_.throw_if_aborted(world_rank_); }
  const std::string& group_name() const override { return group_.name; }
  int world_rank() const override { return world_rank_; }

  Pending handle(std::shared_ptr<Task> task) {
    if (!task) return {};
    return Pending(std::make_shared<Handle>(job_, world_rank_, std::move(task)));
  }

  ThreadJob& job_;
  Group& group_;
  const int world_rank_, rank_;
};

}  // namespace

ThreadWorld::ThreadWorld(int num_ranks, std::chrono::milliseconds timeout, FailureHooks hooks,
                         const Time& time)
    : state_(std::make_unique<State>(num_ranks, timeout, std::move(hooks), time)) {}

ThreadWorld::~ThreadWorld() = default;

int ThreadWorld::num_ranks() const { return state_->job.num_ranks(); }

std::unique_ptr<Communicator> ThreadWorld::join(int rank, const std::vector<int>& ranks,
                                                const std::string& name) {
  const int me = place_in_group(rank, ranks, num_ranks(), name);
  return std::make_unique<ThreadCommunicator>(state_->job, state_->job.group(name, ranks), me);
}

void ThreadWorld::abort(const std::string& why) { state_->job.abort(-1, why); }

bool ThreadWorld::failed() const { return state_->job.aborted(); }
std::chrono::milliseconds ThreadWorld::timeout() const { return state_->job.timeout(); }

FlightRecorder& ThreadWorld::recorder(int rank) { return state_->job.recorder(rank); }
std::vector<RankState> ThreadWorld::states() { return state_->job.states(); }
const Time& ThreadWorld::time() const { return state_->job.time(); }

}  // namespace echelon

#include "comm/thread_job.h"

#include <fmt/ranges.h>
#include <hwy/cache_control.h>

#include <algorithm>
#include <thread>

#include "comm/diagnosis.h"

namespace echelon {

namespace {
// Shorter than putting a thread to sleep and waking it.
constexpr std::chrono::microseconds spin_time{20};
}  // namespace

ThreadJob::ThreadJob(int num_ranks, std::chrono::milliseconds timeout, const Time& time)
    : timeout_(timeout),
      time_(time),
      may_spin_(static_cast<unsigned>(num_ranks) <= std::thread::hardware_concurrency()) {
  if (num_ranks < 1) refuse("number of thread ranks {}: at least 1 is needed", num_ranks);
  for (int rank = 0; rank < num_ranks; ++rank) ranks_.emplace_back(time_);
}

Group& ThreadJob::group(const std::string& name, const std::vector<int>& ranks) {
  const std::lock_guard lock(mutex_);
  Group& group = groups_[{name, ranks}];
  if (group.ranks.empty()) {
    group.name = name;
    group.ranks = ranks;
    group.next.assign(ranks.size(), 1);
  }
  return group;
}

// ---- waking and waiting

void ThreadJob::wake(ThreadState& rank) {
  rank.events.fetch_add(1, std::memory_order_release);
  if (rank.sleeping) rank.changed.notify_one();
}

void ThreadJob::wake(const Group& group) {
  for (int rank : group.ranks) wake(state(rank));
}

void ThreadJob::wake_all() {
  for (ThreadState& rank : ranks_) wake(rank);
}

void ThreadJob::wait(int rank, Task& task) {
  ThreadState& self = state(rank);
  for (;;) {
    const std::uint32_t seen = self.events.load(std::memory_order_acquire);
    if (task.finished()) {
      task.order_stream();
      return self.recorder.finish(task.ticket);
    }
    throw_if_aborted(rank);
    if (task.advance(true)) continue;
    // Not ready. Others may be waiting for something that is.
    if (std::any_of(self.tasks.begin(), self.tasks.end(),
                    [](const auto& other) { return other->advance(true); }))
      continue;
    const auto now = Clock::now();
    if (may_spin_)
      while (self.events.load(std::memory_order_acquire) == seen && Clock::now() < now + spin_time)
        for (int i = 0; i < 16; ++i) hwy::Pause();
    sleep(rank, task, seen);
  }
}

// Without a deadline: give_up_late_waits() wakes it.
void ThreadJob::sleep(int rank, Task& task, std::uint32_t seen) {
  ThreadState& self = state(rank);
  std::unique_lock lock(mutex_);
  self.sleeping = true;
  self.waiting = &task;
  self.recorder.sleep(task.ticket);
  self.changed.wait(lock, [&] { return self.events.load(std::memory_order_relaxed) != seen; });
  self.sleeping = false;
  self.waiting = nullptr;
  self.recorder.wake();
}

// What a device has still to do is no reason for the rank's stream to stand still.
bool ThreadJob::progress(int rank, Task& task) {
  if (!task.finished()) {
    throw_if_aborted(rank);
    task.advance(false);
  }
  if (!task.finished() || !task.settled()) return false;
  state(rank).recorder.finish(task.ticket);
  return true;
}

// On a device those are kept that their Pending has still to wait for.
void ThreadJob::forget_finished(ThreadState& rank) {
  std::erase_if(rank.tasks, [](const auto& task) {
    if (!task->finished()) return false;
    try {
      if (task->dropped) task->order_stream();
    } catch (const RunError&) {  // the device is lost, which every later call says
    }
    return task->ordered();
  });
}

DeviceWork Task::on_own_device() const {
  for (const DeviceWork& work : on_devices())
    if (work.end->handle().device == stream().device()) return work;
  return {};
}

void Task::order_stream() {
  if (ordered() || std::exchange(ordered_, true)) return;
  for (const DeviceWork& work : on_devices()) stream().wait_for(*work.end);
}

bool Task::settled() {
  if (!ordered())
    ordered_ = std::all_of(on_devices().begin(), on_devices().end(),
                           [](const DeviceWork& work) { return work.end->has_happened(); });
  return ordered();
}

void Task::let_go() const noexcept {
  if (!finished()) return;
  for (const DeviceWork& work : on_devices()) try {
      work.end->synchronize();
    } catch (const std::exception&) {  // the device is lost
    }
}

void ThreadJob::drop(int rank, const std::shared_ptr<Task>& task) {
  task->dropped = true;
  if (!task->finished()) {
    // The exception that unwinds may free the tensors next, so nobody may go on using them.
    if (std::uncaught_exceptions() > 0) {
      const std::string name = [&] {
        const std::lock_guard lock(mutex_);
        return task->name();
      }();
      abort(rank, fmt::format("rank {} left {} because of an exception", rank, name));
    }
    if (aborted()) quiesce(rank);
  }
  forget_finished(state(rank));
}

void ThreadJob::finish_dropped(int rank, const Group& group) {
  ThreadState& self = state(rank);
  forget_finished(self);
  const std::vector<std::shared_ptr<Task>> tasks = self.tasks;
  for (const auto& task : tasks) {
    if (!task->dropped || &task->group() != &group) continue;
    if (std::uncaught_exceptions() > 0) return drop(rank, task);
    try {
      wait(rank, *task);
    } catch (const CommError&) {
      return;  // called by a destructor; every later call of the rank says it again
    } catch (const RunError& error) {  // the device's, which is to be said again too
      abort(rank, fmt::format("rank {} failed: {}", rank, error.what()));
      return quiesce(rank);
    }
  }
  forget_finished(self);
}

// ---- failing

std::vector<RankState> ThreadJob::states_locked() {
  std::vector<RankState> all;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    RankState& stands = all.emplace_back(state(rank).recorder.state());
    stands.rank = rank;
    if (const Task* const waiting = state(rank).waiting) {
      stands.waits_in = waiting->name();
      stands.waits_for = waiting->missing();
    }
  }
  return all;
}

std::vector<RankState> ThreadJob::states() {
  const std::lock_guard lock(mutex_);
  return states_locked();
}

void ThreadJob::abort_locked(int origin, std::string why) {
  if (aborted()) return;
  abort_.why = std::move(why);
  abort_.origin = abort_.at_fault = origin;
  try {
    abort_.states = states_locked();
  } catch (const std::bad_alloc&) {  // why it ends is said without them
    abort_.states.clear();
  }
  aborted_.store(true, std::memory_order_release);
  wake_all();
}

void ThreadJob::give_up_late_waits() {
  if (suspension_.forgives(Clock::now(), timeout_)) return;
  const double patience = std::chrono::duration<double>(timeout_).count();
  if (std::none_of(ranks_.begin(), ranks_.end(),
                   [&](const ThreadState& rank) { return rank.recorder.wait_seconds() > patience; }))
    return;
  const std::lock_guard lock(mutex_);
  if (aborted()) return;
  const std::vector<RankState> states = states_locked();
  const RankState* late = nullptr;
  for (const RankState& s : states)
    if (waits_too_long(s, timeout_, [](int) { return 0.0; }) &&
        (late == nullptr || s.seconds > late->seconds))
      late = &s;
  if (late == nullptr) return;
  const Diagnosis diagnosis = diagnose(states, late->rank);
  abort_locked(late->rank, describe_late_wait(*late, timeout_) + diagnosis.verdict);
  abort_.at_fault = diagnosis.at_fault;
}

void ThreadJob::abort(int origin, std::string why) {
  const std::lock_guard lock(mutex_);
  abort_locked(origin, std::move(why));
}

void ThreadJob::fail_locked(std::unique_lock<std::mutex>& lock, int rank, const std::string& why) {
  abort_locked(rank, why);
  lock.unlock();
  throw_if_aborted(rank);
  throw InvariantError("internal error: an abort was lost");
}

void ThreadJob::fail(int rank, const std::string& why) {
  std::unique_lock lock(mutex_);
  fail_locked(lock, rank, why);
}

const ThreadJob::Abort& ThreadJob::how_it_was_aborted() {
  const std::lock_guard lock(mutex_);
  return abort_;
}

void ThreadJob::throw_if_aborted(int rank) {
  if (!aborted()) return;
  quiesce(rank);
  const std::lock_guard lock(mutex_);
  if (abort_.origin == rank) throw CommError(abort_.why);
  throw EchoError(abort_.why);
}

void ThreadJob::quiesce(int rank) {
  // No thread starts on a collective of an aborted job, and those at work stop after their piece.
  ThreadState& self = state(rank);
  std::unique_lock lock(mutex_);
  self.sleeping = true;
  self.changed.wait(lock, [&] {
    return std::none_of(self.tasks.begin(), self.tasks.end(),
                        [](const auto& task) { return task->in_use(); });
  });
  self.sleeping = false;
  lock.unlock();
  for (const auto& task : self.tasks) task->let_go();
  self.tasks.clear();
}

void ThreadJob::leave(int rank) {
  ThreadState& self = state(rank);
  {
    std::unique_lock lock(mutex_);
    self.left = any_left_ = true;
    for (auto& [key, group] : groups_) {
      const auto at = std::find(group.ranks.begin(), group.ranks.end(), rank);
      if (at == group.ranks.end()) continue;
      const auto me = static_cast<std::size_t>(at - group.ranks.begin());
      for (const auto& collective : group.open)
        if (!collective->calls[me])
          fail_locked(lock, rank,
                      fmt::format("{} collective {}: rank {} has finished, but {}", group.name,
                                  collective->number, rank, list_calls(group, *collective)));
      for (const auto& [ends, channel] : group.channels) {
        if (ends.first != static_cast<int>(me)) continue;
        for (const auto& m : channel.open)
          if (!m->sent)
            fail_locked(
                lock, rank,
                fmt::format("{} message {}: rank {} has finished, but rank {} waits for it", group.name,
                            m->number, rank, group.ranks[static_cast<std::size_t>(ends.second)]));
      }
    }
  }
  while (!self.tasks.empty()) {
    const std::shared_ptr<Task> task = self.tasks.back();
    wait(rank, *task);
    forget_finished(self);
  }
}

void ThreadJob::restart() {
  const std::lock_guard lock(mutex_);
  any_left_ = false;
  for (ThreadState& rank : ranks_) rank.left = false;
}

}  // namespace echelon

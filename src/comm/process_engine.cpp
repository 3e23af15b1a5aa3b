#include "comm/process_engine.h"

#include <hwy/cache_control.h>
#include <sched.h>

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "base/error.h"
#include "base/start_thread.h"
#include "comm/world.h"

namespace echelon {

using namespace std::chrono_literals;

namespace {
// While the rank computes, what it has under way is looked at this often.
constexpr auto background_period = 100us;
// A rank that waits looks all the time at first, then now and then.
constexpr auto eager_time = 200us, lazy_period = 50us;

RankState stands_in(const ProcessOperation& operation) {
  RankState s;
  s.waits_in = operation.name();
  s.waits_for = operation.missing();
  s.to_take = s.waits_for.empty();
  if (s.to_take) s.waits_for = operation.leaving();
  return s;
}
}  // namespace

ProcessEngine::ProcessEngine(ControlNetwork& control, FlightRecorder& recorder, bool crowded)
    : control_(control), recorder_(recorder), crowded_(crowded) {
  thread_ = start_thread("the messages between processes", [this] { run(); });
}

ProcessEngine::~ProcessEngine() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::shared_ptr<ProcessOperation> ProcessEngine::start(ProcessGroup& group, std::uint64_t number, Call call,
                                                       std::vector<std::unique_ptr<std::byte[]>> memory) {
  throw_if_failed();
  const FlightRecorder::Ticket ticket = recorder_.begin(group.name, number, call);
  std::shared_ptr<ProcessOperation> operation;
  {
    const std::lock_guard lock(mutex_);
    operation = std::make_shared<ProcessOperation>(group, number, std::move(call));
    operation->ticket = ticket;
    for (auto& kept : memory) operation->keep(std::move(kept));
    open_.push_back(operation);
    advance_all();
  }
  if (operation->finished()) recorder_.finish(ticket);
  changed_.notify_one();
  return operation;
}

void ProcessEngine::start_copied(ProcessGroup& group, std::uint64_t number, Call call, std::size_t bytes) {
  std::vector<std::unique_ptr<std::byte[]>> copy;
  copy.push_back(std::make_unique_for_overwrite<std::byte[]>(bytes));
  if (bytes > 0) std::memcpy(copy.front().get(), call.in, bytes);
  call.in = copy.front().get();
  const auto operation = start(group, number, std::move(call), std::move(copy));
  const std::lock_guard lock(mutex_);
  recorder_.finish(operation->ticket);
}

// Under the lock. After a failure MPI is not called any more: what it would write to may be gone.
void ProcessEngine::advance_all() {
  if (control_.failed()) return;
  try {
    std::erase_if(open_, [](const auto& operation) { return operation->advance(); });
  } catch (const CommError& error) {
    control_.fail({.why = error.what()});
  }
}

void ProcessEngine::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || (!open_.empty() && !rank_drives_ && !control_.failed()); });
    if (stopping_) return;
    advance_all();
    lock.unlock();
    std::this_thread::sleep_for(background_period);
    lock.lock();
  }
}

bool ProcessEngine::progress(ProcessOperation& operation) {
  throw_if_failed();
  const std::lock_guard lock(mutex_);
  advance_all();
  if (!operation.finished()) return false;
  recorder_.finish(operation.ticket);
  return true;
}

void ProcessEngine::wait(ProcessOperation& operation) {
  const auto begin = Clock::now();
  recorder_.sleep(operation.ticket);
  const auto drive = [&](bool drives) {
    const std::lock_guard lock(mutex_);
    rank_drives_ = drives;
    waits_in_ = drives ? &operation : nullptr;
    if (drives) advance_all();
    // Kept: the operation may be gone before anybody asks.
    if (!drives && !operation.finished()) held_up_ = stands_in(operation);
    return operation.finished();
  };
  while (!drive(true) && !control_.failed()) {
    if (Clock::now() >= begin + eager_time)
      std::this_thread::sleep_for(lazy_period);
    else if (crowded_)
      ::sched_yield();
    else
      for (int i = 0; i < 16; ++i) hwy::Pause();
  }
  const bool finished = drive(false);
  changed_.notify_one();
  if (!finished) throw_if_failed();  // its record goes on saying that it waits
  recorder_.wake();
  recorder_.finish(operation.ticket);
  throw_if_failed();
}

void ProcessEngine::finish_all() {
  for (;;) {
    std::shared_ptr<ProcessOperation> open;
    {
      const std::lock_guard lock(mutex_);
      if (!open_.empty()) open = open_.front();
    }
    if (!open) return throw_if_failed();
    wait(*open);
    const std::lock_guard lock(mutex_);
    std::erase(open_, open);
  }
}

RankState ProcessEngine::standing() {
  // Its holder may be held up in turn.
  for (int attempt = 0; attempt < 100; ++attempt) {
    if (const std::unique_lock lock(mutex_, std::try_to_lock); lock)
      return waits_in_ != nullptr ? stands_in(*waits_in_) : held_up_;
    std::this_thread::sleep_for(1ms);
  }
  return {};
}

std::vector<std::string> ProcessEngine::gather(const std::string& text) {
  throw_if_failed();
  const std::lock_guard lock(mutex_);
  return all_gather_text(text);
}

int ProcessEngine::open_space(const std::vector<int>& ranks) {
  throw_if_failed();
  const std::lock_guard lock(mutex_);
  return open_message_space(ranks);
}

void ProcessEngine::fail(const Failure& failure) {
  control_.fail(failure);
  throw_if_failed();
  throw InvariantError("internal error: a failure was lost");
}

void ProcessEngine::throw_if_failed() const {
  if (control_.failed()) throw EchoError(control_.failure().why);
}

}  // namespace echelon

#include "comm/process_engine.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <hwy/cache_control.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "base/clock.h"
#include "base/error.h"
#include "comm/world.h"

namespace echelon {

using namespace std::chrono_literals;

namespace {
// While the rank computes, what it has under way is looked at this often.
constexpr auto background_period = 100us;
// A rank that waits looks all the time at first, then now and then.
constexpr auto eager_time = 200us, lazy_period = 50us;
// Four beats of the control network.
constexpr double silence_seconds = 1.0;
// A wait that was not given up when its time had passed is looked at again this often.
constexpr auto review_period = 250ms;
}  // namespace

ProcessEngine::ProcessEngine(ControlNetwork& control, FlightRecorder& recorder,
                             std::chrono::milliseconds timeout, bool crowded, int rank)
    : control_(control), recorder_(recorder), timeout_(timeout), crowded_(crowded), rank_(rank) {
  thread_ = std::thread([this] { run(); });
}

ProcessEngine::~ProcessEngine() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::shared_ptr<ProcessOperation> ProcessEngine::start(ProcessGroup& group, std::uint64_t number, Call call) {
  throw_if_failed();
  const FlightRecorder::Ticket ticket = recorder_.begin(group.name, number, call);
  std::shared_ptr<ProcessOperation> operation;
  {
    const std::lock_guard lock(mutex_);
    operation = std::make_shared<ProcessOperation>(group, number, std::move(call));
    operation->ticket = ticket;
    open_.push_back(operation);
    advance_all();
  }
  if (operation->finished()) recorder_.finish(ticket);
  changed_.notify_one();
  return operation;
}

void ProcessEngine::start_copied(ProcessGroup& group, std::uint64_t number, Call call, std::size_t bytes) {
  auto copy = std::make_unique_for_overwrite<std::byte[]>(bytes);
  if (bytes > 0) std::memcpy(copy.get(), call.in, bytes);
  call.in = copy.get();
  const auto operation = start(group, number, std::move(call));
  const std::lock_guard lock(mutex_);
  operation->keep(std::move(copy));
  recorder_.finish(operation->ticket);
}

// Under the lock. After a failure MPI is not called any more: what it would write to may be gone.
void ProcessEngine::advance_all() {
  if (control_.failed()) return;
  try {
    std::erase_if(open_, [](const auto& operation) { return operation->advance(); });
  } catch (const CommError& error) {
    control_.fail({-1, error.what(), false});
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
  auto deadline = begin + timeout_, next_look = deadline;
  recorder_.sleep(operation.ticket);
  const auto drive = [&](bool drives) {
    const std::lock_guard lock(mutex_);
    rank_drives_ = drives;
    if (drives) advance_all();
    return operation.finished();
  };
  while (!drive(true)) {
    if (control_.failed()) break;
    const auto now = Clock::now();
    if (now < begin + eager_time) {
      if (crowded_)
        ::sched_yield();
      else
        for (int i = 0; i < 16; ++i) hwy::Pause();
      continue;
    }
    std::this_thread::sleep_for(lazy_period);
    if (now < next_look) continue;
    next_look = now + review_period;
    std::vector<int> late_ones;
    {
      const std::lock_guard lock(mutex_);
      late_ones = operation.missing();
      if (late_ones.empty()) {
        // What has come from everyone is only slow to leave: no reason to give up, but where the one that it
        // would leave for is not heard of either. It was stopped between its part and taking ours.
        deadline = now + timeout_;
        late_ones = silent(operation.leaving());
      } else if (now < deadline) {
        late_ones.clear();
      }
    }
    if (!late_ones.empty()) fail(late(operation.name(), late_ones));
  }
  (void)drive(false);
  changed_.notify_one();
  throw_if_failed();
  recorder_.wake();
  recorder_.finish(operation.ticket);
}

// Those that have not been heard of for as long as a rank is waited for.
std::vector<int> ProcessEngine::silent(std::vector<int> ranks) const {
  const double patience = std::max(std::chrono::duration<double>(timeout_).count(), silence_seconds);
  std::erase_if(ranks, [&](int rank) { return control_.seconds_since_heard(rank) <= patience; });
  return ranks;
}

void ProcessEngine::finish_all() {
  const auto deadline = Clock::now() + timeout_;
  for (;;) {
    throw_if_failed();
    std::string name;
    std::vector<int> others;
    {
      const std::lock_guard lock(mutex_);
      advance_all();
      if (open_.empty()) return;
      name = open_.front()->name();
      others = open_.front()->missing();
      if (others.empty()) others = open_.front()->leaving();
    }
    std::this_thread::sleep_for(lazy_period);
    if (Clock::now() > deadline) fail(late(name, others));
  }
}

std::vector<int> ProcessEngine::waits_for(const ProcessOperation& operation) {
  // MPI may hold the lock for long where ranks make a group together.
  for (int attempt = 0; attempt < 20; ++attempt) {
    if (const std::unique_lock lock(mutex_, std::try_to_lock); lock) {
      const std::vector<int> missing = operation.missing();
      return missing.empty() ? operation.leaving() : missing;
    }
    std::this_thread::sleep_for(1ms);
  }
  return {};
}

std::vector<std::string> ProcessEngine::gather(const std::string& text) {
  throw_if_failed();
  const std::lock_guard lock(mutex_);
  return all_gather_text(text);
}

// Names the rank that keeps the others: from one that is waited for to the one that it waits for, until one
// does not wait or is not heard of.
Failure ProcessEngine::late(const std::string& name, const std::vector<int>& missing) const {
  std::vector<std::string> waited_for;
  for (int r : missing) {
    const double silence = control_.seconds_since_heard(r);
    waited_for.push_back(
        silence > silence_seconds
            ? fmt::format("rank {} (silent since {:.1f} s: stopped, or its machine is)", r, silence)
            : fmt::format("rank {} ({})", r, describe(control_.last_heard(r))));
  }
  std::set<int> seen{rank_};
  int guilty = -1;
  for (std::vector<int> next = missing; !next.empty();) {
    const int at = next.back();
    next.pop_back();
    if (!seen.insert(at).second) continue;
    const RankState state = control_.last_heard(at);
    if (control_.seconds_since_heard(at) > silence_seconds) {
      guilty = at;
      break;
    }
    if (state.waits_in.empty() && guilty < 0) guilty = at;
    next.insert(next.end(), state.waits_for.begin(), state.waits_for.end());
  }
  return {guilty,
          fmt::format("{}: rank {} waited {} ms for {}{}", name, rank_, timeout_.count(),
                      fmt::join(waited_for, ", "),
                      guilty < 0 ? "; the ranks wait for one another"
                                 : fmt::format("; the rank at fault is rank {}", guilty)),
          false};
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

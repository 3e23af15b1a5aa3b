#include <algorithm>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/start_thread.h"
#include "base/utf8.h"
#include "comm/thread_job.h"

namespace echelon {
namespace {

struct RankFailure {
  int rank;
  std::exception_ptr error;
  bool echo;
};

// Called in a handler: what the other ranks are told.
std::string reason(int rank) {
  try {
    throw;
  } catch (const CommError& error) {
    return error.what();  // names the ranks itself
  } catch (const std::exception& error) {
    return fmt::format("rank {} failed: {}", rank, message_of(error));
  } catch (...) {
    return fmt::format("rank {} failed", rank);
  }
}

// How often the ranks are looked at; how long one may take to come back once the job is aborted.
constexpr std::chrono::milliseconds look_period{100}, abort_grace{1500};

bool is_refusal(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const RequestError&) {
    return true;
  } catch (...) {
    return false;
  }
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return echelon::message_of(e);
  } catch (...) {
    return "something that is no exception was thrown";
  }
}

bool is_echo() {
  try {
    throw;
  } catch (const EchoError&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

void ThreadWorld::run(const std::function<void(int rank)>& body) {
  ThreadJob& job = state_->job;
  job.restart();
  std::mutex mutex;
  std::condition_variable came_back;
  int back = 0;
  std::vector<RankFailure> failures;  // in order of time
  // What is done about a failure needs next to no memory: want of it may be the failure.
  failures.reserve(static_cast<std::size_t>(job.num_ranks()));
  const auto run = [&](int rank) {
    try {
      body(rank);
      job.leave(rank);
    } catch (...) {
      {
        const std::lock_guard lock(mutex);
        failures.push_back({rank, std::current_exception(), is_echo()});
      }
      std::string why = "out of memory";
      try {
        why = reason(rank);
      } catch (const std::bad_alloc&) {
      }
      job.abort(rank, std::move(why));
      job.quiesce(rank);
    }
    const std::lock_guard lock(mutex);
    ++back;
    came_back.notify_one();
  };
  const auto report = [&] {
    if (job.num_ranks() == 1) return;   // its own error says it all
    std::map<int, std::string> causes;  // of the ranks that failed by themselves
    {
      const std::lock_guard lock(mutex);
      for (const RankFailure& failure : failures)
        if (!failure.echo) causes[failure.rank] = message_of(failure.error);
    }
    const ThreadJob::Abort& abort = job.how_it_was_aborted();
    std::vector<std::string> further;
    for (const auto& [rank, cause] : causes)
      if (rank != abort.origin)
        further.push_back(fmt::format("rank {} failed too: {}", rank, printable(cause)));
    try {
      if (state_->hooks.report)
        state_->hooks.report(failure_report(abort.why, further, abort.at_fault, abort.states, {}));
    } catch (const std::exception&) {  // it cannot be said anywhere; the records and the status tell
    }
    if (!state_->hooks.record) return;
    for (int rank = 0; rank < job.num_ranks(); ++rank) {
      std::string lines = job.recorder(rank).json_lines(rank);
      if (causes.contains(rank)) lines += cause_line(rank, causes[rank]);
      state_->hooks.record(rank, lines);
    }
  };
  // A rank that is stuck in something else than a wait never comes back: the report does not wait for it.
  const auto wait_for_all = [&] {
    const Time& time = job.time();
    std::unique_lock lock(mutex);
    std::optional<Clock::time_point> aborted;
    while (!came_back.wait_for(lock, look_period, [&] { return back == job.num_ranks(); })) {
      lock.unlock();
      job.give_up_late_waits();
      if (job.aborted() && !aborted) aborted = time.now();
      if (aborted && state_->hooks.last_resort && time.now() >= *aborted + abort_grace) {
        report();
        return state_->hooks.last_resort();
      }
      lock.lock();
    }
  };

  std::vector<std::thread> threads;
  try {
    threads.reserve(static_cast<std::size_t>(job.num_ranks()));
    for (int rank = 0; rank < job.num_ranks(); ++rank)
      threads.push_back(start_thread(fmt::format("rank {}", rank), [&run, rank] { run(rank); }));
  } catch (const RunError& error) {
    job.abort(-1, error.what());
    for (std::thread& thread : threads) thread.join();
    throw;
  }
  wait_for_all();
  for (std::thread& thread : threads) thread.join();
  if (failures.empty() && job.aborted()) throw CommError(job.how_it_was_aborted().why);
  if (failures.empty()) return;
  if (std::none_of(failures.begin(), failures.end(),
                   [](const RankFailure& f) { return is_refusal(f.error); }))
    report();

  // First choice: the rank that aborted the job; else one that failed by itself; else one that was stopped by
  // an abort from outside.
  const int origin = job.how_it_was_aborted().origin;
  for (const RankFailure& failure : failures)
    if (failure.rank == origin) std::rethrow_exception(failure.error);
  for (const RankFailure& failure : failures)
    if (!failure.echo) std::rethrow_exception(failure.error);
  std::rethrow_exception(failures.front().error);
}

}  // namespace echelon

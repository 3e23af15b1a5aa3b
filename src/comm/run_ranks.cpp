#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "comm/thread_job.h"

namespace echelon {
namespace {

struct Failure {
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
    return fmt::format("rank {} failed: {}", rank, error.what());
  } catch (...) {
    return fmt::format("rank {} failed", rank);
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
  std::vector<Failure> failures;  // in order of time
  const auto run = [&](int rank) {
    try {
      body(rank);
      job.leave(rank);
    } catch (...) {
      {
        const std::lock_guard lock(mutex);
        failures.push_back({rank, std::current_exception(), is_echo()});
      }
      job.abort(rank, reason(rank));
      job.quiesce(rank);
    }
  };

  std::vector<std::thread> threads;
  try {
    for (int rank = 0; rank < job.num_ranks(); ++rank) threads.emplace_back(run, rank);
  } catch (const std::system_error& error) {
    const std::string why = fmt::format("no thread for rank {}: {}", threads.size(), error.what());
    job.abort(-1, why);
    for (std::thread& thread : threads) thread.join();
    throw RunError(why);
  }
  for (std::thread& thread : threads) thread.join();
  if (failures.empty()) return;

  // The rank that aborted the job first; else whoever failed by itself; else an echo of an abort from
  // outside.
  const int origin = job.origin();
  for (const Failure& failure : failures)
    if (failure.rank == origin) std::rethrow_exception(failure.error);
  for (const Failure& failure : failures)
    if (!failure.echo) std::rethrow_exception(failure.error);
  std::rethrow_exception(failures.front().error);
}

}  // namespace echelon

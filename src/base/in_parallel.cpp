#include "base/in_parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "base/start_thread.h"

namespace echelon {

void in_parallel(const std::string& what, int threads, std::size_t count,
                 const std::function<void(std::size_t)>& body) {
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::size_t first = count;
  std::exception_ptr thrown;
  const auto work = [&] {
    for (std::size_t i = next++; i < count; i = next++) try {
        body(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (i < first) thrown = std::current_exception();
        first = std::min(first, i);
        next = count;
      }
  };
  std::vector<std::thread> others;
  const auto join = [&] {
    for (std::thread& other : others) other.join();
  };
  try {
    for (int i = 1; i < threads && i < static_cast<int>(count); ++i)
      others.push_back(start_thread(what, work));
  } catch (...) {
    next = count;
    join();
    throw;
  }
  work();
  join();
  if (thrown) std::rethrow_exception(thrown);
}

}  // namespace echelon

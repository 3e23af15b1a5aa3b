#include "tensor/thread_team.h"

#include <fmt/format.h>

#include <atomic>
#include <thread>
#include <vector>

#include "base/start_thread.h"

namespace echelon {
namespace {

// Waits until `done`: first busily, about as long as usual gaps between kernels, and then asleep, so that a
// machine with other work loses little. `asleep` may return early.
template <class Done, class Asleep>
void wait_until(const Done& done, const Asleep& asleep) {
  constexpr int looks = 2000;  // tens of microseconds
  for (int i = 0; i < looks; ++i) {
    if (done()) return;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  while (!done()) asleep();
}

}  // namespace

struct ThreadTeam::Others {
  void (*act)(const void* of, int thread) = nullptr;
  const void* of = nullptr;
  std::atomic<std::uint32_t> round{0};
  std::atomic<int> working{0};
  bool ends = false;
  std::vector<std::thread> threads;

  void begin_round() {
    round.fetch_add(1, std::memory_order_release);
    round.notify_all();
  }

  // The work of thread `thread`, from its start to its end.
  void work(int thread) {
    for (std::uint32_t seen = 0;; ++seen) {
      wait_until([&] { return round.load(std::memory_order_acquire) != seen; },
                 [&] { round.wait(seen, std::memory_order_acquire); });
      if (ends) return;
      act(of, thread);
      if (working.fetch_sub(1, std::memory_order_acq_rel) == 1) working.notify_one();
    }
  }

  void end() {
    ends = true;
    begin_round();
    for (std::thread& thread : threads) thread.join();
  }
};

ThreadTeam::ThreadTeam(int threads, const std::function<void()>& begin_thread) : threads_(threads) {
  if (threads == 1) return;
  others_ = std::make_unique<Others>();
  try {
    for (int i = 1; i < threads; ++i)
      others_->threads.push_back(start_thread(fmt::format("{} compute threads a rank (--threads)", threads),
                                              [i, begin_thread, others = others_.get()] {
                                                if (begin_thread) begin_thread();
                                                others->work(i);
                                              }));
  } catch (...) {
    others_->end();
    throw;
  }
}

ThreadTeam::~ThreadTeam() {
  if (others_) others_->end();
}

void ThreadTeam::run(void (*act)(const void* of, int thread), const void* of) const {
  Others& others = *others_;
  others.act = act;
  others.of = of;
  others.working.store(threads_ - 1, std::memory_order_relaxed);
  others.begin_round();
  act(of, 0);
  wait_until([&] { return others.working.load(std::memory_order_acquire) == 0; },
             [&] {
               if (const int left = others.working.load(std::memory_order_acquire); left != 0)
                 others.working.wait(left, std::memory_order_acquire);
             });
}

}  // namespace echelon

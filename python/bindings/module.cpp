#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "base/start_thread.h"
#include "bindings/bindings.h"
#include "bindings/words.h"

namespace echelon::python {
namespace {

// Signals stay blocked in threads that are started while this lives.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    // What a thread's own mistake raises ends the process in any case; faulthandler may say where.
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) sigdelset(&all, signal);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_{};
};

}  // namespace

JsonObject from_json(const std::string& text) {
  const nb::object object = nb::module_::import_("json").attr("loads")(nb::str(text.c_str(), text.size()));
  return nb::cast<nb::dict>(object);
}

void run_apart_looking(const std::function<void(const Look& look)>& work,
                       const std::function<void()>& interrupt) {
  // Python runs handlers on its main thread alone.
  const nb::module_ threading = nb::module_::import_("threading");
  const bool hears = threading.attr("current_thread")().is(threading.attr("main_thread")());
  std::mutex mutex;
  std::condition_variable changed;
  bool ended = false;
  std::uint64_t asked = 0, looked = 0;  // how many looks
  std::exception_ptr failure;
  const Look look = [&] {
    if (!hears) return;
    std::unique_lock lock(mutex);
    const std::uint64_t mine = ++asked;
    changed.notify_all();
    changed.wait(lock, [&] { return looked >= mine; });
  };
  const auto body = [&] {
    try {
      work(look);
    } catch (...) {
      failure = std::current_exception();
    }
    const std::lock_guard lock(mutex);
    ended = true;
    changed.notify_all();
  };
  std::optional<nb::python_error> raised;
  std::thread thread;
  {
    const BlockedSignals blocked;
    thread = start_thread("a run", body);
  }
  {
    const nb::gil_scoped_release release;
    constexpr std::chrono::milliseconds between_looks{50};
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait_for(lock, between_looks, [&] { return ended || asked > looked; });
      if (ended) break;
      const std::uint64_t asked_now = asked;
      lock.unlock();
      {
        const nb::gil_scoped_acquire acquire;
        if (PyErr_CheckSignals() != 0) {
          nb::python_error error;
          if (!raised) {
            raised.emplace(std::move(error));
            interrupt();
          }
        }
      }
      lock.lock();
      looked = asked_now;
      changed.notify_all();
    }
    lock.unlock();
    thread.join();
  }
  if (raised) throw std::move(*raised);
  if (failure) std::rethrow_exception(failure);
}

void run_apart(const std::function<void()>& work, const std::function<void()>& interrupt) {
  run_apart_looking([&](const Look&) { work(); }, interrupt);
}

void run_apart(const std::function<void(const Progress&)>& work) {
  std::atomic<bool> ends = false;
  const Progress progress = [&](double, const std::string&) {
    if (ends) throw Interrupted{};
  };
  run_apart([&] { work(progress); }, [&] { ends = true; });
}

}  // namespace echelon::python

NB_MODULE(_core, m) {
  using namespace echelon::python;
  m.doc() = "Echelon's library, bound to Python. The package `echelon` is what to import.";
  m.attr("version") = ECHELON_VERSION;
  bind_errors(m);
  bind_spec(m);
  bind_schedule(m);
  bind_experts(m);
  bind_plan(m);
  bind_runs(m);
  bind_checkpoint(m);
  m.def(
      "_keywords_of",
      [](const std::string& verb) {
        nb::typed<nb::list, nb::any> all;
        for (const Keyword& one : keywords_of(verb))
          all.append(
              nb::make_tuple(one.name, one.type, one.help, one.shown_default, one.is_switch, one.is_list));
        return all;
      },
      "verb"_a,
      "Names, types, meanings and defaults of a verb's keyword arguments, from its table of flags.");
}

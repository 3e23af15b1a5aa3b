// A computation in pieces: a coroutine that pauses where it would wait for others, so that something else can
// run meanwhile. Its order of execution depends only on the calls of step().
#pragma once

#include <coroutine>
#include <exception>
#include <optional>
#include <utility>

namespace echelon {

// `co_await Pause{}` in a Work, or in one that it awaits, returns to the caller of step().
struct Pause {};

class WorkPromise {
 public:
  std::suspend_always initial_suspend() noexcept { return {}; }
  void unhandled_exception() noexcept { error_ = std::current_exception(); }
  std::suspend_always await_transform(Pause) noexcept {
    outermost_->pauses_ = true;
    return {};
  }
  template <class Other>
  Other&& await_transform(Other&& other) noexcept {
    return std::forward<Other>(other);
  }

  struct Final {
    bool await_ready() noexcept { return false; }
    template <class P>
    void await_suspend(std::coroutine_handle<P> ended) noexcept {
      WorkPromise& promise = ended.promise();
      if (promise.awaited_by_) promise.outermost_->innermost_ = promise.awaited_by_;
    }
    void await_resume() noexcept {}
  };
  Final final_suspend() noexcept { return {}; }

 protected:
  template <class T>
  friend class Work;
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

  std::coroutine_handle<> awaited_by_, innermost_;  // innermost_: used in the outermost one
  WorkPromise* outermost_ = this;
  bool pauses_ = false;  // used in the outermost one: the innermost one does
  std::exception_ptr error_;
};

template <class T>
struct WorkResult : WorkPromise {
  void return_value(T value) { value_ = std::move(value); }
  T take() { return std::move(*value_); }
  std::optional<T> value_;
};
template <>
struct WorkResult<void> : WorkPromise {
  void return_void() {}
  void take() {}
};

template <class T>
class [[nodiscard]] Work {
 public:
  struct promise_type : WorkResult<T> {
    Work get_return_object() {
      auto self = std::coroutine_handle<promise_type>::from_promise(*this);
      this->innermost_ = self;
      return Work(self);
    }
  };

  Work(Work&& other) noexcept : self_(std::exchange(other.self_, {})) {}
  Work& operator=(Work other) noexcept {
    std::swap(self_, other.self_);
    return *this;
  }
  ~Work() {
    if (self_) self_.destroy();
  }

  // Runs until it pauses (false) or ends (true). Rethrows what it threw.
  //
  // A Work that begins another or ends returns to here, where the next one is resumed. Resumed by each other
  // they would each lie on the stack, where the compiler makes no tail calls: thousands of layers fill it.
  bool step() {
    promise_type& promise = self_.promise();
    promise.pauses_ = false;
    while (!promise.pauses_ && !self_.done()) promise.innermost_.resume();
    if (!self_.done()) return false;
    promise.rethrow();
    return true;
  }
  // The result, once it has ended.
  T take() { return self_.promise().take(); }
  // Runs to the end without pauses.
  T finish() {
    while (!step()) {
    }
    return take();
  }

  // If another Work awaits this one, it runs as part of that.
  bool await_ready() const noexcept { return false; }
  template <class P>
  void await_suspend(std::coroutine_handle<P> awaiting) noexcept {
    WorkPromise& mine = self_.promise();
    mine.awaited_by_ = awaiting;
    mine.outermost_ = static_cast<WorkPromise&>(awaiting.promise()).outermost_;
    mine.outermost_->innermost_ = self_;
  }
  T await_resume() {
    self_.promise().rethrow();
    return take();
  }

 private:
  explicit Work(std::coroutine_handle<promise_type> self) : self_(self) {}
  std::coroutine_handle<promise_type> self_;
};

}  // namespace echelon

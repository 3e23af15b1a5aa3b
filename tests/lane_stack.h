// A stack on which a function runs and pauses: what a lane of an emulated block has. ucontext asks the kernel
// for the mask of signals at each switch, and AddressSanitizer then looks over the whole stack: 60% and more
// of what the tests of kernels took. Under ThreadSanitizer, which follows ucontext alone, and on other
// processors it is that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define ECHELON_SWITCHES_STACKS 1
#else
#define ECHELON_SWITCHES_STACKS 0
#include <ucontext.h>
#endif

namespace echelon::checks {

#if ECHELON_SWITCHES_STACKS
// Leaves what a call preserves on this stack, whose place goes to *from, and takes it from the other: System
// V ABI.
__attribute__((naked, noinline)) inline void switch_stacks(void** /*from*/, void* /*to*/) {
  asm("pushq %rbp\n\t"
      "pushq %rbx\n\t"
      "pushq %r12\n\t"
      "pushq %r13\n\t"
      "pushq %r14\n\t"
      "pushq %r15\n\t"
      "movq %rsp, (%rdi)\n\t"
      "movq %rsi, %rsp\n\t"
      "popq %r15\n\t"
      "popq %r14\n\t"
      "popq %r13\n\t"
      "popq %r12\n\t"
      "popq %rbx\n\t"
      "popq %rbp\n\t"
      "ret");
}
#endif

class LaneStack {
 public:
  LaneStack() : stack_(new std::byte[bytes]) {}

  // The next resume() calls `enter`, whose last word is pause().
  void begin(void (*enter)()) {
#if ECHELON_SWITCHES_STACKS
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack_.get(), bytes);  // of a lane that never returned
#endif
    // As if `enter` had been called with its stack aligned, and had paused before its first instruction.
    constexpr std::size_t registers = 6, alignment = 16;
    const auto end = reinterpret_cast<std::uintptr_t>(stack_.get() + bytes) / alignment * alignment;
    auto* place = reinterpret_cast<std::uintptr_t*>(end);
    *--place = 0;  // where it would return to
    *--place = reinterpret_cast<std::uintptr_t>(enter);
    for (std::size_t i = 0; i < registers; ++i) *--place = 0;
    lane_ = place;
#else
    getcontext(&lane_);
    lane_.uc_stack.ss_sp = stack_.get();
    lane_.uc_stack.ss_size = bytes;
    makecontext(&lane_, enter, 0);
#endif
  }

  // From outside: on to the next pause().
  void resume() {
#if ECHELON_SWITCHES_STACKS
    switch_stacks(&outside_, lane_);
#else
    swapcontext(&outside_, &lane_);
#endif
  }
  // From the lane: back to who resumed it.
  void pause() {
#if ECHELON_SWITCHES_STACKS
    switch_stacks(&lane_, outside_);
#else
    swapcontext(&lane_, &outside_);
#endif
  }

 private:
  static constexpr std::size_t bytes = 256 << 10;
  std::unique_ptr<std::byte[]> stack_;
#if ECHELON_SWITCHES_STACKS
  void *lane_ = nullptr, *outside_ = nullptr;
#else
  ucontext_t lane_ = {}, outside_ = {};
#endif
};

}  // namespace echelon::checks

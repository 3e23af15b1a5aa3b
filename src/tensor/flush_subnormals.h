// Subnormal numbers, below 2^-126 in f32, take a processor of Intel's some hundred cycles each, where others
// take one: attention whose scores differ by 88 is full of them, and so are moments of what is updated
// rarely.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace echelon {

// While one of a thread's lives, the thread reads and writes them as 0.
class FlushSubnormals {
 public:
  FlushSubnormals() {
    if (living++ == 0) before = flush();
  }
  ~FlushSubnormals() {
    if (--living == 0) restore(before);
  }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
#if defined(__x86_64__)
  static unsigned flush() {
    constexpr unsigned results = 0x8000, operands = 0x0040;  // of MXCSR
    const unsigned state = _mm_getcsr();
    _mm_setcsr(state | results | operands);
    return state;
  }
  static void restore(unsigned state) { _mm_setcsr(state); }
#else
  static unsigned flush() { return 0; }
  static void restore(unsigned) {}
#endif

  static inline thread_local int living = 0;
  static inline thread_local unsigned before = 0;
};

}  // namespace echelon

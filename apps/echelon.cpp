// echelon: one verb per thing a person wants. Exit status: 0 yes, 1 it ran and the answer is no, 2 the
// request is wrong, 3 it failed while running.
#include <execinfo.h>
#include <malloc.h>
#include <sys/resource.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>

#include "apps/launch_words.h"
#include "apps/program.h"
#include "base/error.h"

namespace {

constexpr const char* out_of_memory =
    "echelon: out of memory\n";  // printed as it is: formatting asks for some

// An exception that nothing can take, as where memory ends while another one is on its way. A bug leaves its
// core.
[[noreturn]] void end_without_handler() noexcept {
  try {
    std::rethrow_exception(std::current_exception());
  } catch (const std::bad_alloc&) {
    std::fputs(out_of_memory, stderr);
    std::_Exit(3);
  } catch (...) {
  }
  std::abort();
}

// Before main(): memory may be too little already for what libraries make there.
__attribute__((constructor(101))) void end_by_a_sentence() { std::set_terminate(end_without_handler); }

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file over the limit of its size is an error of write() like a full disk
  // A heap of each thread's own reserves 64 MiB of addresses, and where it gets none every allocation asks
  // for it again: where addresses are limited (ulimit -v) all threads share one.
  rlimit addresses{};
  if (::getrlimit(RLIMIT_AS, &addresses) == 0 && addresses.rlim_cur != RLIM_INFINITY)
    ::mallopt(M_ARENA_MAX, 1);
  // The C library looks for what unwinds the stack when it first needs it, and ends the process where memory
  // is at an end by then.
  void* frame = nullptr;
  (void)::backtrace(&frame, 1);
  int status = 3;
  try {
    status = echelon::run_program(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fputs(out_of_memory, stderr);
  } catch (const std::exception& error) {
    echelon::complain(echelon::message_of(error));
  }
  if (status != 0) echelon::tell_launch_end(status);  // a whole training has said it itself
  return status;
}

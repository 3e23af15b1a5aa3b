// echelon: one verb for each task. Exit status: 0 yes; 1 it ran, and the answer is no; 2 the request is
// wrong; 3 it failed while running.
#include <execinfo.h>
#include <fcntl.h>
#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

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
    "echelon: out of memory\n";  // printed unformatted: formatting needs memory

// For exceptions that cannot be caught, such as running out of memory while another exception is handled. A
// bug leaves a core dump.
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

// Before main(): libraries' static initialisers may already run out of memory.
__attribute__((constructor(101))) void end_by_a_sentence() { std::set_terminate(end_without_handler); }

// A stream that whoever started this has closed leaves its number to the next file that is opened, into which
// everything printed would go. Opened the wrong way round, it fails as one that is closed does.
void keep_numbers_of_closed_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(stream, F_GETFD) < 0) (void)::open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

}  // namespace

int main(int argc, char** argv) {
  keep_numbers_of_closed_streams();
  std::signal(SIGXFSZ, SIG_IGN);  // a file over its size limit is then a write() error, like a full disk
  // A separate heap for each thread reserves 64 MiB of addresses, and if that fails every allocation tries
  // again: if addresses are limited (ulimit -v), all threads share one heap.
  rlimit addresses{};
  if (::getrlimit(RLIMIT_AS, &addresses) == 0 && addresses.rlim_cur != RLIM_INFINITY)
    ::mallopt(M_ARENA_MAX, 1);
  // The C library loads the stack unwinder when it is first needed, and ends the process if there is no
  // memory for it then: so it is loaded now.
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
  if (status != 0) echelon::tell_launch_end(status);  // a training that ran to its end has reported it itself
  return status;
}

// All threads of the program are started here.
#pragma once

#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"

namespace echelon {

// RunError that begins with `what`, its purpose, if the system provides no thread. Thread: std::thread or
// std::jthread.
template <class Thread = std::thread, class Body>
Thread start_thread(const std::string& what, Body&& body) {
  try {
    return Thread(std::forward<Body>(body));
  } catch (const std::system_error&) {  // whose own text is not helpful
  } catch (const std::bad_alloc&) {
  }
  fail("{}: {}", what, no_thread);
}

}  // namespace echelon

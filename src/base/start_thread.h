// The one way that threads of the program are started.
#pragma once

#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"

namespace echelon {

// RunError that begins with `what` it is for, where the system gives no thread.
template <class Body>
std::thread start_thread(const std::string& what, Body&& body) {
  try {
    return std::thread(std::forward<Body>(body));
  } catch (const std::system_error&) {  // whose own words are of something that is unavailable
  } catch (const std::bad_alloc&) {
  }
  fail("{}: {}", what, no_thread);
}

}  // namespace echelon

// All threads of the program are started here.
#pragma once

#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"

namespace echelon {

// RunError that begins with `what`, its purpose, if the system provides no thread.
template <class Body>
std::thread start_thread(const std::string& what, Body&& body) {
  try {
    return std::thread(std::forward<Body>(body));
  } catch (const std::system_error&) {  // whose own text is not helpful
  } catch (const std::bad_alloc&) {
  }
  fail("{}: {}", what, no_thread);
}

}  // namespace echelon

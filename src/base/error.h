// How a run can fail. apps/ turns these errors into exit statuses; libraries only throw.
#pragma once

#include <fmt/core.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

namespace echelon {

// The request is wrong: the message names the field, the value and what would be legal. Exit status 2.
struct RequestError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// It failed while running: disk full, damaged file read half-way, out of memory. Exit status 3.
struct RunError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// It failed and would fail again, because of the request and the data, not of the machine.
struct LastingError : RunError {
  using RunError::RunError;
};

// A peer was lost, disagreed on a collective, or did not arrive in time. Thrown on every rank. Exit status 3.
struct CommError : RunError {
  using RunError::RunError;
};

// A violated internal invariant: a bug. Exit status 3.
struct InvariantError : std::logic_error {
  using std::logic_error::logic_error;
};

// Throws RequestError with a formatted message: refuse("--tp {}: {} heads do not divide; legal: {}", ...).
template <class... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> form, Args&&... args) {
  throw RequestError(fmt::format(form, std::forward<Args>(args)...));
}

// Throws RunError with a formatted message.
template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> form, Args&&... args) {
  throw RunError(fmt::format(form, std::forward<Args>(args)...));
}

template <class... Args>
[[noreturn]] void fail_for_good(fmt::format_string<Args...> form, Args&&... args) {
  throw LastingError(fmt::format(form, std::forward<Args>(args)...));
}
// An exception's message for users, without the internals that those of the standard library mention.
std::string message_of(const std::exception& error);

inline constexpr const char* no_thread =
    "no thread could be started: the limit of threads (ulimit -u) or of memory (ulimit -v) has been reached";

// A library's message without the bracketed name at its start.
std::string without_library_name(const std::string& message);

// InvariantError unless `holds`. Cheap enough to stay on in release builds.
inline void check(bool holds, const char* what) {
  if (!holds) throw InvariantError(std::string("internal error: ") + what);
}

}  // namespace echelon

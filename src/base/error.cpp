#include "base/error.h"

#include <filesystem>
#include <new>
#include <system_error>

namespace echelon {

std::string message_of(const std::exception& error) {
  // The paths of its own, not "filesystem error: cannot ...".
  if (const auto* file = dynamic_cast<const std::filesystem::filesystem_error*>(&error)) {
    const std::string path = file->path1().string();
    return (path.empty() ? "a file" : path) + ": " + file->code().message();
  }
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return "out of memory";
  // A text or a list beyond what can be addressed.
  if (dynamic_cast<const std::length_error*>(&error) != nullptr) return "out of memory";
  if (const auto* system = dynamic_cast<const std::system_error*>(&error);
      system != nullptr && system->code() == std::errc::resource_unavailable_try_again)
    return no_thread;
  return error.what();
}

std::string without_library_name(const std::string& message) {
  const std::size_t end = message.starts_with('[') ? message.find("] ") : std::string::npos;
  return end == std::string::npos ? message : message.substr(end + 2);
}

}  // namespace echelon

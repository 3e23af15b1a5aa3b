#pragma once

#include <cstddef>
#include <functional>
#include <string>

namespace echelon {

// Runs body(i) for i in [0, count) on several threads, this one included. Rethrows the exception of the
// lowest i; RunError beginning with `what` if the system provides no thread.
void in_parallel(const std::string& what, int threads, std::size_t count,
                 const std::function<void(std::size_t)>& body);

}  // namespace echelon

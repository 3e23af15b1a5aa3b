#pragma once

#include <cstddef>
#include <functional>
#include <string>

namespace echelon {

// body(i) for i in [0, count), by several threads, of which this is one. Throws what the first of them threw,
// by i; RunError that begins with `what` it is for, where the system gives no thread.
void in_parallel(const std::string& what, int threads, std::size_t count,
                 const std::function<void(std::size_t)>& body);

}  // namespace echelon

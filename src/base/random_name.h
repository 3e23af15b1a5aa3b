// Unique names.
#pragma once

#include <fmt/format.h>

#include <random>
#include <string>

namespace echelon {

// 64 random bits in hexadecimal. Not a secret.
inline std::string random_name() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

}  // namespace echelon

// What the compression tests share: buckets of made-up parameters.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "spec/compression.h"

namespace echelon::compression_tests {

using Shapes = std::vector<std::pair<std::int64_t, std::int64_t>>;

inline Compression method(const std::string& text) { return parse_compression(text, "--compress"); }

// Parameters p0, p1, ... of these shapes, numbered from `first`.
inline GradientBucket bucket_of(const Shapes& shapes, int first = 0) {
  GradientBucket bucket;
  std::int64_t end = 0;
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    const auto [rows, cols] = shapes[i];
    bucket.sections.push_back({.name = "p" + std::to_string(first + static_cast<int>(i)),
                               .range = {end, end + rows * cols},
                               .rows = rows,
                               .cols = cols});
    end += rows * cols;
  }
  return bucket;
}

}  // namespace echelon::compression_tests

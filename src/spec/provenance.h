// The sources of the numbers in a machine's or a program's file.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

namespace echelon {

// Which keys of a file have numbers that were measured on the user's own machine, published by a source, or
// fitted to measured times. All others are assumed.
struct Provenance {
  std::optional<std::vector<std::string>> measured{}, published{}, fitted{};

  bool operator==(const Provenance&) const = default;
  const char* of(const std::string& key) const {
    const auto has = [&](const std::optional<std::vector<std::string>>& list) {
      return list && std::find(list->begin(), list->end(), key) != list->end();
    };
    return has(measured) ? "measured" : has(fitted) ? "fitted" : has(published) ? "published" : "assumed";
  }
};

// Marks as fitted the keys whose numbers differ between `before` and `after`, two texts of one file.
void mark_fitted(Provenance& provenance, const std::string& before, const std::string& after);

}  // namespace echelon

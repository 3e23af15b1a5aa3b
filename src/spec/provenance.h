// Where the numbers of a machine's or a program's file come from.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

namespace echelon {

// Of a file's numbers which were measured on its user's own machine, which its source publishes, and which
// were fitted to measured times, each by its key; all others are assumed.
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

// Keys whose number is another one in `after` than in `before`, texts of one file, are fitted from now on.
void mark_fitted(Provenance& provenance, const std::string& before, const std::string& after);

}  // namespace echelon

// Tables of text.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

namespace echelon {

using TextRow = std::vector<std::string>;

// One line for each row, the first column left-aligned, the others right-aligned. In a row with fewer cells,
// the text after the first cell may have any width.
inline std::string aligned(const std::vector<TextRow>& rows) {
  const std::size_t columns = rows[0].size();
  std::vector<std::size_t> widths(columns);
  for (const TextRow& row : rows)
    for (std::size_t c = 0; c < (row.size() == columns ? columns : 1); ++c)
      widths[c] = std::max(widths[c], row[c].size());
  std::string text;
  for (const TextRow& row : rows) {
    text += fmt::format("{:<{}}", row[0], widths[0]);
    for (std::size_t c = 1; c < row.size(); ++c)
      text += fmt::format("  {:>{}}", row[c], row.size() == columns ? widths[c] : 0);
    text += '\n';
  }
  return text;
}

}  // namespace echelon

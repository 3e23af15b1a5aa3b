#include "base/edits.h"

#include <algorithm>
#include <cctype>
#include <iterator>

namespace echelon {

std::string in_small_letters(std::string_view text) {
  std::string small(text);
  for (char& c : small) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return small;
}

namespace {

std::size_t common_beginning(std::string_view a, std::string_view b) {
  const std::size_t most = std::min(a.size(), b.size());
  return static_cast<std::size_t>(
      std::mismatch(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(most), b.begin()).first - a.begin());
}

}  // namespace

int edits(std::string_view from, std::string_view to) {
  // Rows of the table of distances between beginnings: of the last letter but one, the last one, this one.
  std::vector<int> before, last(to.size() + 1), row(to.size() + 1);
  for (std::size_t j = 0; j <= to.size(); ++j) last[j] = static_cast<int>(j);
  for (std::size_t i = 1; i <= from.size(); ++i) {
    row[0] = static_cast<int>(i);
    for (std::size_t j = 1; j <= to.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (from[i - 1] == to[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1])
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before = last;
    std::swap(last, row);
  }
  return last[to.size()];
}

std::string nearest(std::string_view text, const std::vector<std::string>& names) {
  constexpr std::size_t longest = 64;  // what is longer is no name
  if (text.empty() || text.size() > longest) return "";
  const std::string asked = in_small_letters(text);
  int fewest = std::max(1, static_cast<int>(text.size()) / 3);
  std::size_t in_common = 0;
  std::string best;
  for (const std::string& name : names) {
    const std::string small = in_small_letters(name);
    const int count = edits(asked, small);
    const std::size_t common = common_beginning(asked, small);
    if (count > fewest || (count == fewest && !best.empty() && common <= in_common)) continue;
    fewest = count;
    in_common = common;
    best = name;
  }
  if (!best.empty()) return best;
  for (const std::string& name : names) {
    if (!in_small_letters(name).starts_with(asked)) continue;
    if (!best.empty()) return "";
    best = name;
  }
  if (!best.empty() || text.size() < 4) return best;
  bool is_alone = true;
  for (const std::string& name : names) {
    if (in_small_letters(name).find(asked) == std::string::npos) continue;
    if (!best.empty() && name.size() > best.size()) continue;
    is_alone = best.empty() || name.size() < best.size();
    best = name;
  }
  return is_alone ? best : "";
}

std::string did_you_mean(std::string_view text, const std::vector<std::string>& names) {
  constexpr std::size_t few = 6;
  std::vector<std::string> meant;
  if (const std::string best = nearest(text, names); !best.empty())
    meant = {best};
  else if (text.size() >= 3)
    std::copy_if(names.begin(), names.end(), std::back_inserter(meant), [&](const std::string& name) {
      return in_small_letters(name).starts_with(in_small_letters(text));
    });
  if (meant.empty() || meant.size() > few) return "";
  std::string all = meant.front();
  for (std::size_t i = 1; i < meant.size(); ++i) all += (i + 1 < meant.size() ? ", " : " or ") + meant[i];
  return " (did you mean " + all + "?)";
}

}  // namespace echelon

#include "spec/gather_window.h"

#include <algorithm>

#include "base/error.h"

namespace echelon {

GatherWindow::GatherWindow(std::vector<int> uses, int ahead)
    : uses_(std::move(uses)), ahead_(static_cast<std::size_t>(ahead)) {}

std::vector<int> GatherWindow::gather_up_to(std::size_t end) {
  std::vector<int> gathered;
  for (std::size_t i = next_; i < std::min(end, uses_.size()); ++i)
    if (there_.insert(uses_[i]).second) gathered.push_back(uses_[i]);
  return gathered;
}

std::vector<int> GatherWindow::begin() { return gather_up_to(ahead_); }

std::vector<int> GatherWindow::use(int unit) {
  check(next_ < uses_.size() && uses_[next_] == unit, "parameters are used in the order that was foreseen");
  return gather_up_to(next_ + 1 + ahead_);
}

std::vector<int> GatherWindow::done() {
  const int unit = uses_[next_++];
  const auto first = uses_.begin() + static_cast<std::ptrdiff_t>(next_);
  const auto last = uses_.begin() + static_cast<std::ptrdiff_t>(std::min(next_ + ahead_, uses_.size()));
  if (std::find(first, last, unit) != last) return {};
  there_.erase(unit);
  return {unit};
}

}  // namespace echelon

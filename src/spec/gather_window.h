// When ZeRO 3 gathers units of parameters and when it frees them, given the order in which they are used. The
// run and its predictions both follow this.
#pragma once

#include <cstddef>
#include <set>
#include <vector>

namespace echelon {

// While a unit is in use, the units of the next `ahead` uses are present or on their way. After its use a
// unit stays only if it is one of these.
class GatherWindow {
 public:
  GatherWindow() = default;
  GatherWindow(std::vector<int> uses, int ahead);

  // Each call returns the units to gather or to free, in order.
  std::vector<int> begin();        // before the first use
  std::vector<int> use(int unit);  // InvariantError unless `unit` is the next use
  std::vector<int> done();         // the current use is over
  bool finished() const { return next_ == uses_.size(); }

 private:
  std::vector<int> gather_up_to(std::size_t end);

  std::vector<int> uses_;
  std::size_t ahead_ = 0;
  std::size_t next_ = 0;  // the current use, or the next one
  std::set<int> there_;
};

}  // namespace echelon

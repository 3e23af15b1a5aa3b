// Which units of parameters ZeRO 3 gathers, and which it lets go of, as their uses follow one another. The
// run and its predictions both walk through this.
#pragma once

#include <cstddef>
#include <set>
#include <vector>

namespace echelon {

// While a unit is used, the units of the next `ahead` uses are there or on their way; a unit whose use is
// over stays if it is one of them.
class GatherWindow {
 public:
  GatherWindow() = default;
  GatherWindow(std::vector<int> uses, int ahead);

  // Each returns the units to gather, or to let go of, in order.
  std::vector<int> begin();        // before the first use
  std::vector<int> use(int unit);  // InvariantError unless it is the next one
  std::vector<int> done();         // that use is over
  bool finished() const { return next_ == uses_.size(); }

 private:
  std::vector<int> gather_up_to(std::size_t end);

  std::vector<int> uses_;
  std::size_t ahead_ = 0;
  std::size_t next_ = 0;  // the use that is under way, or comes next
  std::set<int> there_;
};

}  // namespace echelon

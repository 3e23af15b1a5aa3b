// Where there are no threads to keep a line fresh, as in a browser, and nobody sees standard error: nothing is said.
#include "apps/progress_line.h"

#include <utility>

namespace echelon {

ProgressLine::ProgressLine(std::string verb, bool /*terminal_only*/)
    : verb_(std::move(verb)), terminal_(false), quiet_(true), pace_(false) {}
ProgressLine::~ProgressLine() = default;
Progress ProgressLine::progress() { return {}; }
void ProgressLine::clear() {}

}  // namespace echelon

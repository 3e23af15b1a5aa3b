// For builds without threads to refresh a line, as in a browser, where nobody sees standard error: prints
// nothing.
#include "apps/progress_line.h"

#include <utility>

namespace echelon {

ProgressLine::ProgressLine(std::string verb, bool /*terminal_only*/)
    : verb_(std::move(verb)), terminal_(false), quiet_(true), pace_(false) {}
ProgressLine::~ProgressLine() = default;
Progress ProgressLine::progress() { return {}; }
void ProgressLine::clear() {}

}  // namespace echelon

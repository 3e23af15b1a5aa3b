#include "apps/plan_page.h"

namespace echelon {

bool surveys_later() { return false; }

}  // namespace echelon

// Counts what a communicator sends: calls and bytes per verb, added to a Traffic of the rank.
#pragma once

#include <memory>

#include "comm/communicator.h"

namespace echelon {

// Wraps `inner`. A group of one rank counts calls as zero: nothing travels. `traffic` outlives the result.
std::unique_ptr<Communicator> record_traffic(std::unique_ptr<Communicator> inner, Axis axis,
                                             Traffic& traffic);

}  // namespace echelon

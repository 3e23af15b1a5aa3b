// Reductions over thread ranks on one device.
#pragma once

#include "tensor/device_driver.h"

namespace echelon {

// Launches it; whoever calls asks whether that failed.
void launch_reduction(const Reduction& reduction, StreamHandle stream);

}  // namespace echelon

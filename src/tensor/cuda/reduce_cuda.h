// Reductions over thread ranks on one device.
#pragma once

#include "tensor/device_driver.h"

namespace echelon {

// Only launches it; the caller checks for errors.
void launch_reduction(const Reduction& reduction, StreamHandle stream);

}  // namespace echelon

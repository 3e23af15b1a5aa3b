// Where the memory of a rank's tensors is and what computes on it.
#pragma once

namespace echelon {

// cuda: an accelerator behind a driver (tensor/device_driver.h); the host requests copies.
// none: tensors have sizes but no bytes. What a rank would hold, send and call is counted; nothing is
// computed.
enum class Device { cpu, cuda, none };

}  // namespace echelon

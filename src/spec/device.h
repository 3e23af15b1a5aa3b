// Where the memory of a rank's tensors is, and what computes with it.
#pragma once

namespace echelon {

// cuda: an accelerator behind a driver (tensor/device_driver.h): the host asks for copies.
// none: sizes and no bytes. What a rank would hold, send and call is counted; nothing is computed.
enum class Device { cpu, cuda, none };

}  // namespace echelon

// Where the memory of a rank's tensors is, and what computes with it.
#pragma once

namespace echelon {

// none: sizes and no bytes. What a rank would hold, send and call is counted; nothing is computed.
enum class Device { cpu, none };

}  // namespace echelon

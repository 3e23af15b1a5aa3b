// Where the memory of a rank's tensors is, and what computes with it.
#pragma once

#include <string>

namespace echelon {

// none: sizes and no bytes. What a rank would hold, send and call is counted; nothing is computed.
enum class Device { cpu, none };

constexpr const char* device_name(Device device) { return device == Device::cpu ? "cpu" : "none"; }

// "cpu" or "none"; RequestError naming `field` and the legal values otherwise.
Device parse_device(const std::string& text, const std::string& field);

}  // namespace echelon

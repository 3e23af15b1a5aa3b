#pragma once

#include <cstdint>
#include <string>

namespace echelon {

enum class DType { f32, f64, i32 };

constexpr std::int64_t element_bytes(DType dtype) { return dtype == DType::f64 ? 8 : 4; }

constexpr const char* dtype_name(DType dtype) {
  return dtype == DType::f32 ? "f32" : dtype == DType::f64 ? "f64" : "i32";
}

// "f32" or "f64"; RequestError naming `field` and the legal values otherwise.
DType parse_dtype(const std::string& text, const std::string& field);

}  // namespace echelon

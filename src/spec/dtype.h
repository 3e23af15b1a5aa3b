#pragma once

#include <cstdint>
#include <string>

namespace echelon {

// u8: a packed payload, which is moved and never computed with.
enum class DType { f32, f64, i32, u8 };

constexpr std::int64_t element_bytes(DType dtype) {
  return dtype == DType::f64 ? 8 : dtype == DType::u8 ? 1 : 4;
}

constexpr const char* dtype_name(DType dtype) {
  return dtype == DType::f32 ? "f32" : dtype == DType::f64 ? "f64" : dtype == DType::i32 ? "i32" : "u8";
}

// "f32" or "f64"; RequestError naming `field` and the legal values otherwise.
DType parse_dtype(const std::string& text, const std::string& field);

}  // namespace echelon

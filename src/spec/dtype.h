#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "base/bf16.h"

namespace echelon {

// i16: the rounding errors of bf16 weights (base/split_weight.h). u8: packed payloads. Both are only stored
// and moved; no arithmetic uses them.
enum class DType { f32, f64, bf16, i32, i16, u8 };

constexpr std::int64_t element_bytes(DType dtype) {
  return dtype == DType::f64                           ? 8
         : dtype == DType::bf16 || dtype == DType::i16 ? 2
         : dtype == DType::u8                          ? 1
                                                       : 4;
}

constexpr const char* dtype_name(DType dtype) {
  return dtype == DType::f32    ? "f32"
         : dtype == DType::f64  ? "f64"
         : dtype == DType::bf16 ? "bf16"
         : dtype == DType::i32  ? "i32"
         : dtype == DType::i16  ? "i16"
                                : "u8";
}

// The dtype of Wide<T>: in which numbers of `dtype` are computed and summed, and their statistics kept.
constexpr DType wide(DType dtype) { return dtype == DType::bf16 ? DType::f32 : dtype; }

template <class T>
inline constexpr DType dtype_of = std::is_same_v<T, float>          ? DType::f32
                                  : std::is_same_v<T, double>       ? DType::f64
                                  : std::is_same_v<T, bf16>         ? DType::bf16
                                  : std::is_same_v<T, std::int32_t> ? DType::i32
                                  : std::is_same_v<T, std::int16_t> ? DType::i16
                                                                    : DType::u8;

// "f32" or "f64"; RequestError naming `field` and the legal values otherwise.
DType parse_dtype(const std::string& text, const std::string& field);

}  // namespace echelon

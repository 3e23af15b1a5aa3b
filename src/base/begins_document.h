// What samples of data say beside tokens.
#pragma once

#include <cstdint>

namespace echelon {

// A token's id has this bit too where a document begins, of samples that say so (model/microbatch.h).
inline constexpr std::int32_t begins_document = std::int32_t{1} << 30;

}  // namespace echelon

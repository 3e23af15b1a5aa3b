// What data samples say besides tokens.
#pragma once

#include <cstdint>

namespace echelon {

// This bit of a token's id is set where a document begins, in samples that mark documents
// (model/microbatch.h).
inline constexpr std::int32_t begins_document = std::int32_t{1} << 30;

}  // namespace echelon

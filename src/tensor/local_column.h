// Where an id lies in a rank's part of the vocabulary.
#pragma once

#include <cstdint>

namespace echelon {

// Its column of the `columns` that begin at `first_id`; -1 when the id is ignored (negative) or held
// elsewhere.
inline std::int64_t local_column(std::int32_t id, std::int64_t first_id, std::int64_t columns) {
  return id >= 0 && id >= first_id && id < first_id + columns ? id - first_id : -1;
}

}  // namespace echelon

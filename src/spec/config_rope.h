// What config.json says of rotary positions.
#pragma once

#include <optional>

#include "spec/config_json.h"
#include "spec/model_spec.h"

namespace echelon {

// Which of rope_scaling and rope_parameters says how positions are scaled: the former, where it says
// anything.
const char* rope_key(const Config& config);

// `rotary_part`: of a head that is turned, where none is named; without a value the type turns whole heads.
// `heeded`: not of rope_parameters alone, as Bamba's is.
void read_rope(const Config& config, double theta, std::optional<double> rotary_part, bool heeded,
               ModelSpec& m);

}  // namespace echelon

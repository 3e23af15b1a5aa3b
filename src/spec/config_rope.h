// Reads rotary positions from config.json.
#pragma once

#include <optional>

#include "spec/config_json.h"
#include "spec/model_spec.h"

namespace echelon {

// The key that says how positions are scaled: rope_scaling if it says anything, else rope_parameters.
const char* rope_key(const Config& config);

// `rotary_part`: the default part of a head that is rotated; empty: the type rotates whole heads. `heeded`:
// whether transformers reads the part at top level too, and not only in rope_parameters, as Bamba's.
void read_rope(const Config& config, double theta, std::optional<double> rotary_part, bool heeded,
               ModelSpec& m);

// What Ministral 3 and Mistral 4 have beside YaRN's positions: RopeSpec::query_growth.
double read_query_growth(const Config& config, const ModelSpec& m);

}  // namespace echelon

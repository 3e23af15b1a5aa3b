// Makes an expert artificially popular, to show what load balancing does about it (as --straggle makes a rank
// slow).
#pragma once

#include "model/parameters.h"

namespace echelon {

struct PlantedExpert {
  std::int64_t expert = 0;
  double strength = 0;
};

// Changes the initial weights, which training may unlearn: all embeddings get a common direction, and the
// expert's row of every router points along it, so that its logits start higher by `strength` for every
// token. After the first layers the effect is weaker, as these add to the embeddings. Every rank changes its
// own part.
void plant_expert(const ParameterStore& parameters, const ModelSpec& model, const PlantedExpert& planted);

}  // namespace echelon

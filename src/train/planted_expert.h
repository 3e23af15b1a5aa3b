// A popular expert made on purpose, to see what balancing does about it (as a straggler is made by
// --straggle).
#pragma once

#include "model/parameters.h"

namespace echelon {

struct PlantedExpert {
  std::int64_t expert = 0;
  double strength = 0;
};

// In the initial weights, which training is free to unlearn: all embeddings get a direction in common, and
// the expert's row of every router points there, so that its logits begin higher by `strength` for every
// token; after the first layers by less, as these add to the embeddings. By every rank, on its part.
void plant_expert(const ParameterStore& parameters, const ModelSpec& model, const PlantedExpert& planted);

}  // namespace echelon

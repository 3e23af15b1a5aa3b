// Blocks (spec/block.h) as a picture: ops from top to bottom, values on the edges between them with their
// width and where they lie along tp, the collectives where that changes, and what of them the backward pass
// finds kept or makes again.
#pragma once

#include <string>
#include <vector>

#include "spec/block.h"
#include "spec/recompute.h"

namespace echelon {

struct BlockDrawing {
  std::string title;
  BlockProgram program;
};

struct BlockSetting {
  int tp = 1;
  bool sequence_parallel = false;  // where tp > 1
  Recompute recompute;
};

// Side by side, as one self-contained SVG.
std::string block_svg(const std::vector<BlockDrawing>& blocks, const BlockSetting& setting);

// Of a model: the embedding, a layer of each kind that it has, the output layer.
std::vector<BlockDrawing> block_drawings(const ModelSpec& model);

}  // namespace echelon

// Bytes that a rank will send in one training step, by axis and verb. The measured twin is comm/recording.
#pragma once

#include "schedule/pipeline_layout.h"
#include "spec/traffic.h"

namespace echelon {

// One step (gradients, clipping and update; no evaluation). Per microbatch of N tokens and layer, tp moves 2
// all_reduces of N x C elements in each direction (or their reduce_scatter + all_gather halves); dp moves one
// all_reduce of the gradients for each optimizer step, over cp too; cp what attention exchanges. Where the
// schedule does not flush: of a step in the middle of the stream. `updates`: optimizer steps before this
// step, by which PowerSGD knows its uncompressed ones.
inline constexpr std::int64_t many_updates = std::int64_t{1} << 40;
Traffic predict_traffic(const Plan& plan, const PipelineLayout& pipeline, const Coordinates& at = {},
                        std::int64_t updates = many_updates);

}  // namespace echelon

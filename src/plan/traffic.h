// Bytes that a rank will send in one training step, by axis and verb. The measured twin is comm/recording.
#pragma once

#include <optional>
#include <vector>

#include "plan/assumptions.h"
#include "schedule/pipeline_layout.h"
#include "spec/traffic.h"

namespace echelon {

// What no plan says of a step's traffic, as the step recorded it.
struct DecidedByData {
  MovedCopies copies;
  bool passes_again = false;  // a guess of the optimizer's step was taken back
};

// One step (gradients, clipping and update; no evaluation). Per microbatch of N tokens and layer, tp moves 2
// all_reduces of N x C elements in each direction (or their reduce_scatter + all_gather halves); dp moves one
// all_reduce of the gradients for each optimizer step, over cp too; cp what attention exchanges. Where the
// schedule does not flush: of a step in the middle of the stream. `updates`: optimizer steps before this
// step, by which PowerSGD knows its uncompressed ones. Equal to what is measured once `decided` says what the
// data decided; without it, under traffic_assumptions().
inline constexpr std::int64_t many_updates = std::int64_t{1} << 40;
Traffic predict_traffic(const Plan& plan, const PipelineLayout& pipeline, const Coordinates& at = {},
                        std::int64_t updates = many_updates,
                        const std::optional<DecidedByData>& decided = {});

// Bytes of copies that were left out.
void add_copies(const Plan& plan, const MovedCopies& moved, Traffic& traffic);

}  // namespace echelon

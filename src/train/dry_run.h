// A dry run of one rank's training: the trainer itself, on tensors without storage, among imagined ranks.
// What it holds and sends is what the real one does, since it is the same code; no byte is allocated and none
// moves. Experts are assumed to be loaded evenly.
#pragma once

#include <optional>
#include <vector>

#include "comm/imagined.h"
#include "plan/memory.h"
#include "schedule/pipeline_layout.h"
#include "spec/memory.h"
#include "spec/traffic.h"

namespace echelon {

struct DryRun {
  // Of a step, without the kernels' scratch, which is the device's own.
  Memory peak;
  Traffic traffic;  // of a step; of a stream, of one in its middle
  // Copies of tokens, part of the traffic. Their number depends on the data.
  MovedCopies copies;
  std::vector<UnevenSum> uneven_sums;
  // Of a step, like the traffic.
  HostActivations host;
  // The peak of generating text after the last step; zero if there is none.
  Memory of_text;
};

// Text generated after the last step: `tokens` tokens after a prompt of `prompt` tokens.
struct SampledText {
  std::int64_t prompt = 0, tokens = 0;  // 0: none
};

inline constexpr std::int64_t many_steps = std::int64_t{1} << 40;

struct DryRunOptions {
  // For runs without a flush or an optimizer barrier: steps from one empty pipeline to the next.
  std::int64_t steps = many_steps;
  std::int64_t updates = 0;     // optimizer steps before: compression has a warm-up
  bool keeps_copy = false;      // of the state, to return to (state_copy.h)
  bool is_worker = false;       // of parameter servers, which hold the moments and step (asynchronous.h)
  bool passes_again = false;    // without a barrier: a speculative step was wrong
  bool graphs = false;          // passes are replayed (pass_graphs.h)
  Device device = Device::cpu;  // that computes
  SampledText text = {};
};
DryRun dry_run(const Plan& plan, const PipelineLayout& pipeline, const Coordinates& at,
               const DryRunOptions& options = {});

// Bytes that a rank will hold, by category, at the peak of a step: exactly what the trainer's arena measures,
// under memory_assumptions().
StepMemory predict_memory(const Plan& plan, const PipelineLayout& pipeline, const Coordinates& at = {},
                          const DryRunOptions& options = {});
// For the planner: the data- and tensor-parallel rank of a pipeline rank that holds most. Batches are equal
// in its plans, so it is the one with the largest shard.
Coordinates with_largest_shard(const Plan& plan, const PipelineLayout& pipeline, Coordinates at);
ExactMemory exact_memory();
// What a rank will send in a step, `updates` optimizer steps after the first, under traffic_assumptions() or
// as the data decided.
inline constexpr std::int64_t many_updates = std::int64_t{1} << 40;
Traffic predict_traffic(const Plan& plan, const PipelineLayout& pipeline, const Coordinates& at = {},
                        std::int64_t updates = many_updates,
                        const std::optional<DecidedByData>& decided = std::nullopt);
// Adds the bytes of copies that a rank sends to experts.
void add_copies(const Plan& plan, const Coordinates& at, const MovedCopies& moved, Traffic& traffic);

}  // namespace echelon

// One rank's part of a training run with nothing in it: the trainer itself, on storage of no device, among
// ranks that are imagined. What it holds and sends is what the real one does, since it is the same code; no
// byte is allocated and none moves. Where experts decide how much travels, they are taken to be loaded
// evenly.
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
  Memory peak;         // of a step, without the kernels' scratch, which is the device's own
  Traffic traffic;     // of a step; of a stream one in its middle
  MovedCopies copies;  // of tokens, whose number is the data's, and which are part of that
  std::vector<UnevenSum> uneven_sums;
  HostActivations host;  // of a step, as the traffic
  Memory of_text;        // peak of what comes after the last step, as that of a step; nothing without
};

// Text that is made after the last step, of so many tokens behind a prompt of so many.
struct SampledText {
  std::int64_t prompt = 0, tokens = 0;  // 0: none
};

inline constexpr std::int64_t many_steps = std::int64_t{1} << 40;

struct DryRunOptions {
  // Of a run that goes on from step to step (a schedule that does not flush, or no optimizer barrier): so
  // many from an empty pipeline to an empty one.
  std::int64_t steps = many_steps;
  std::int64_t updates = 0;     // optimizer steps before it: compression warms up
  bool keeps_copy = false;      // of the state, to go back to (state_copy.h)
  bool is_worker = false;       // of parameter servers, which have the moments and step (asynchronous.h)
  bool passes_again = false;    // without a barrier: a guess was wrong
  bool graphs = false;          // passes are replayed (pass_graphs.h)
  Device device = Device::cpu;  // which computes
  SampledText text = {};
};
DryRun dry_run(const Plan& plan, const PipelineLayout& pipeline, const Coordinates& at,
               const DryRunOptions& options = {});

// Bytes that a rank will hold, by category, at the peak of a step: to the byte what the trainer's arena
// measures, under memory_assumptions().
StepMemory predict_memory(const Plan& plan, const PipelineLayout& pipeline, const Coordinates& at = {},
                          const DryRunOptions& options = {});
// For the planner: of a pipeline rank at the data- and tensor-parallel rank that holds most of it. Those have
// equal batches in its plans, so it is the one with the largest shard. Passes that repeat are left out.
Coordinates with_largest_shard(const Plan& plan, const PipelineLayout& pipeline, Coordinates at);
ExactMemory exact_memory();
// What a rank will send in a step `updates` optimizer steps after the first, under traffic_assumptions(), or
// as the data decided.
inline constexpr std::int64_t many_updates = std::int64_t{1} << 40;
Traffic predict_traffic(const Plan& plan, const PipelineLayout& pipeline, const Coordinates& at = {},
                        std::int64_t updates = many_updates,
                        const std::optional<DecidedByData>& decided = std::nullopt);
// Adds the bytes of copies that travel to experts from a rank.
void add_copies(const Plan& plan, const Coordinates& at, const MovedCopies& moved, Traffic& traffic);

}  // namespace echelon

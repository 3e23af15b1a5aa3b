#include "model/microbatch.h"

#include <algorithm>
#include <vector>

#include "base/begins_document.h"
#include "tensor/host.h"

namespace echelon {
namespace {

using Ids = std::vector<std::int32_t>;

// The position at which each token's document begins, as the sample says, or after the last token that ends a
// document.
Ids document_starts(const Ids& tokens, std::int32_t end) {
  Ids starts(tokens.size());
  const bool is_said = (tokens.front() & begins_document) != 0;
  std::int32_t start = 0;
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    if (is_said && (tokens[t] & begins_document) != 0) start = static_cast<std::int32_t>(t);
    starts[t] = start;
    if (!is_said && tokens[t] == end) start = static_cast<std::int32_t>(t + 1);
  }
  return starts;
}

}  // namespace

std::int32_t first_in_window(std::int64_t position, std::int64_t window, std::int32_t start) {
  return std::max(start, static_cast<std::int32_t>(std::max<std::int64_t>(position - window + 1, 0)));
}

Microbatch load_microbatch(const Rank& rank, const Plan& plan, std::int64_t step, Range samples,
                           const SampleSource& source) {
  const ContextLayout layout(plan);
  const auto ids = [&](std::int64_t count) {
    return Tensor(rank.arena(), MemoryCategory::activations, DType::i32, {count});
  };
  const std::int64_t rows = samples.size() * layout.tokens_here();
  Microbatch microbatch{.tokens = ids(rows),
                        .targets = ids(rows),
                        .positions = ids(rows),
                        .sequences = {samples.size(), {}},
                        .step = step,
                        .first_sample = samples.begin};
  const std::int64_t window = plan.model.window.size;
  if (window > 0) microbatch.window_starts = ids(samples.size() * layout.core_tokens());
  const bool documents = plan.mask == AttentionMask::document;
  if (documents) microbatch.sequences.first_positions = ids(samples.size() * layout.core_tokens());

  const bool whole = documents && plan.model.mixes_channels() && layout.ring() > 1;
  if (whole) microbatch.whole_starts = ids(samples.size() * plan.seq_len);

  const bool looks_further = plan.model.num_mtp_layers > 0;
  if (looks_further) microbatch.next_tokens = ids(rows), microbatch.next_targets = ids(rows);

  microbatch.num_targets = rows;
  if (microbatch.tokens.device() == Device::none) return microbatch;  // none of them is ignored

  const int cp_rank = rank.coordinate(Axis::cp);
  const std::vector<std::int64_t> positions = layout.positions(cp_rank);
  const std::vector<PositionRun> runs = layout.runs(layout.ring_index(cp_rank));
  Ids tokens(static_cast<std::size_t>(plan.seq_len)), targets(tokens.size()), all_tokens, all_targets,
      all_positions, all_starts, whole_starts, all_windows, next_tokens, next_targets;
  for (Ids* all : {&all_tokens, &all_targets, &all_positions}) all->reserve(static_cast<std::size_t>(rows));
  const auto id_at = [&tokens](std::size_t t) { return tokens[t] & ~begins_document; };
  for (std::int64_t sample = samples.begin; sample < samples.end; ++sample) {
    source(step, sample, tokens.data(), targets.data());
    for (std::int64_t position : positions) {
      all_tokens.push_back(id_at(static_cast<std::size_t>(position)));
      all_targets.push_back(targets[static_cast<std::size_t>(position)]);
      all_positions.push_back(static_cast<std::int32_t>(position));
      if (!looks_further) continue;
      // Behind the last token there is its target, and nothing more.
      const auto next = static_cast<std::size_t>(position) + 1;
      next_tokens.push_back(next < tokens.size() ? id_at(next) : targets.back());
      next_targets.push_back(next < tokens.size() ? targets[next] : -1);
    }
    if (!documents && window == 0) continue;
    const Ids starts = documents ? document_starts(tokens, plan.end_of_document()) : Ids(tokens.size());
    if (whole) whole_starts.insert(whole_starts.end(), starts.begin(), starts.end());
    for (const PositionRun& run : runs)
      for (std::int64_t i = 0; i < run.size; ++i) {
        const std::int32_t start = starts[static_cast<std::size_t>(run.at(i))];
        if (documents) all_starts.push_back(start);
        if (window > 0) all_windows.push_back(first_in_window(run.at(i), window, start));
      }
  }
  copy_from_host(all_tokens, microbatch.tokens);
  copy_from_host(all_targets, microbatch.targets);
  copy_from_host(all_positions, microbatch.positions);
  if (looks_further) {
    copy_from_host(next_tokens, microbatch.next_tokens);
    copy_from_host(next_targets, microbatch.next_targets);
  }
  if (documents) copy_from_host(all_starts, microbatch.sequences.first_positions);
  if (whole) copy_from_host(whole_starts, microbatch.whole_starts);
  if (window > 0) copy_from_host(all_windows, microbatch.window_starts);
  microbatch.num_targets =
      std::count_if(all_targets.begin(), all_targets.end(), [](std::int32_t id) { return id >= 0; });
  return microbatch;
}

}  // namespace echelon

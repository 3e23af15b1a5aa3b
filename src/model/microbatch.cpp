#include "model/microbatch.h"

#include <algorithm>
#include <vector>

namespace echelon {
namespace {

using Ids = std::vector<std::int32_t>;

// The position at which the document of each token begins: after the last token that ends one.
Ids document_starts(const Ids& tokens, std::int32_t end) {
  Ids starts(tokens.size());
  std::int32_t start = 0;
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    starts[t] = start;
    if (tokens[t] == end) start = static_cast<std::int32_t>(t + 1);
  }
  return starts;
}

}  // namespace

Microbatch load_microbatch(const Rank& rank, const Plan& plan, std::int64_t step, Range samples,
                           const SampleSource& source) {
  const ContextLayout layout(plan);
  const int cp_rank = rank.coordinate(Axis::cp);
  const std::vector<std::int64_t> positions = layout.positions(cp_rank);
  const std::vector<PositionRun> runs = layout.runs(layout.ring_index(cp_rank));
  const auto ids = [&](std::int64_t count) {
    return Tensor(rank.arena(), MemoryCategory::activations, DType::i32, {count});
  };
  const std::int64_t rows = samples.size() * layout.tokens_here();
  Microbatch microbatch{ids(rows), ids(rows), ids(rows), {samples.size(), {}}, step, samples.begin};
  const bool documents = plan.mask == AttentionMask::document;
  if (documents) microbatch.sequences.document_starts = ids(samples.size() * layout.core_tokens());

  Ids tokens(static_cast<std::size_t>(plan.seq_len)), targets(tokens.size());
  std::int64_t row = 0, core = 0;
  for (std::int64_t sample = samples.begin; sample < samples.end; ++sample) {
    source(step, sample, tokens.data(), targets.data());
    for (std::int64_t position : positions) {
      microbatch.tokens.host<std::int32_t>()[row] = tokens[static_cast<std::size_t>(position)];
      microbatch.targets.host<std::int32_t>()[row] = targets[static_cast<std::size_t>(position)];
      microbatch.positions.host<std::int32_t>()[row++] = static_cast<std::int32_t>(position);
    }
    if (!documents) continue;
    const Ids starts = document_starts(tokens, plan.end_of_document());
    for (const PositionRun& run : runs)
      for (std::int64_t i = 0; i < run.size; ++i)
        microbatch.sequences.document_starts.host<std::int32_t>()[core++] =
            starts[static_cast<std::size_t>(run.at(i))];
  }
  return microbatch;
}

}  // namespace echelon

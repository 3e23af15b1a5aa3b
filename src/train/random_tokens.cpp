#include "train/random_tokens.h"

#include <algorithm>

#include "base/philox.h"

namespace echelon {

SampleSource random_tokens(const Plan& plan, std::uint64_t seed) {
  const std::int32_t document_end = plan.mask == AttentionMask::document ? plan.end_of_document() : -1;
  return [seed, document_end, vocab = static_cast<std::uint64_t>(plan.model.vocab), seq_len = plan.seq_len](
             std::int64_t step, std::int64_t sample, std::int32_t* tokens, std::int32_t* targets) {
    const Philox random(seed, Stream::test, static_cast<std::uint64_t>(step));
    const auto token = [&](std::int64_t t) {
      const auto place = static_cast<std::uint64_t>(sample) << 32 | static_cast<std::uint64_t>(t);
      const auto id = static_cast<std::int32_t>(random.below(place, vocab));
      return document_end >= 0 && random.below(place ^ (std::uint64_t{1} << 62), 16) == 0 ? document_end : id;
    };
    for (std::int64_t t = 0; t < seq_len; ++t) targets[t] = token(t + 1);
    tokens[0] = token(0);
    std::copy_n(targets, seq_len - 1, tokens + 1);
  };
}

}  // namespace echelon

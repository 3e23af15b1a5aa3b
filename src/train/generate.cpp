#include "train/generate.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "base/philox.h"
#include "base/units.h"
#include "checkpoint/finite.h"
#include "tensor/host.h"

namespace echelon {
namespace {

constexpr std::int32_t none_can_be_chosen = -1;

// `logits` are finite: NaN has no place in an order.
std::int32_t choose(const std::vector<double>& logits, const GenerateOptions& options, double uniform) {
  std::vector<std::int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto likelier = [&](std::int32_t a, std::int32_t b) {
    const double la = logits[static_cast<std::size_t>(a)], lb = logits[static_cast<std::size_t>(b)];
    return la != lb ? la > lb : a < b;
  };
  const auto vocab = static_cast<std::int64_t>(order.size());
  const std::int64_t kept = options.temperature == 0 ? 1
                            : options.top_k > 0      ? std::min(options.top_k, vocab)
                                                     : vocab;
  std::partial_sort(order.begin(), order.begin() + kept, order.end(), likelier);
  if (kept == 1) return order[0];
  const double best = logits[static_cast<std::size_t>(order[0])];
  std::vector<double> cumulative;
  double sum = 0;
  for (std::int64_t i = 0; i < kept; ++i) {
    sum += std::exp((logits[static_cast<std::size_t>(order[static_cast<std::size_t>(i)])] - best) /
                    options.temperature);
    cumulative.push_back(sum);
  }
  // The fewest of them, most likely first, that have the wanted part of what the kept ones have.
  const auto enough = std::lower_bound(cumulative.begin(), cumulative.end() - 1, options.top_p * sum);
  cumulative.erase(enough + 1, cumulative.end());
  sum = cumulative.back();
  const auto chosen = std::upper_bound(cumulative.begin(), cumulative.end() - 1, uniform * sum);
  return order[static_cast<std::size_t>(chosen - cumulative.begin())];
}

}  // namespace

void validate(const GenerateOptions& o) {
  if (o.max_tokens < 1) refuse("--max-tokens {}: must be at least 1", o.max_tokens);
  if (!(o.temperature >= 0) || !std::isfinite(o.temperature))
    refuse("--temperature {}: must be a number of at least 0 (0: always the most likely token)",
           o.temperature);
  if (!(o.top_p > 0 && o.top_p <= 1))
    refuse("--top-p {}: must be above 0 and at most 1 (1: all tokens)", o.top_p);
  if (o.top_k < 0) refuse("--top-k {}: must be at least 0 (0: all tokens)", o.top_k);
}

void validate(const GenerateOptions& o, const ModelSpec& model, const std::vector<std::int32_t>& prompt) {
  validate(o);
  check(!prompt.empty(), "generation starts from at least one token");
  const auto prompt_length = static_cast<std::int64_t>(prompt.size());
  if (o.max_tokens > model.max_seq - prompt_length)
    refuse("--max-tokens {}: with a prompt of {} that makes {}, and {} has positions for {}; legal: {}",
           o.max_tokens, counted(prompt_length, "token"),
           static_cast<std::uint64_t>(o.max_tokens) + prompt.size(), model.name, model.max_seq,
           prompt_length < model.max_seq ? fmt::format("up to {}", model.max_seq - prompt_length)
                                         : "a shorter prompt");
  for (std::int32_t token : prompt)
    if (token < 0 || token >= model.vocab)
      refuse("--prompt-tokens: token {} is outside the vocabulary of {}; legal: 0 to {}", token, model.name,
             model.vocab - 1);
}

Plan plan_of_text(const Plan& plan, std::int64_t positions) {
  // One token cannot be cut over the tp group, so the residual stream is whole here; nor over the cp group,
  // each of whose ranks makes all of the text.
  Plan whole_rows = plan;
  whole_rows.sequence_parallel = false;
  whole_rows.mesh.set(Axis::cp, 1);
  whole_rows.seq_len = positions;  // which may decide how they are turned
  return whole_rows;
}

std::vector<std::int32_t> generate(const Rank& rank, const Plan& plan, const ParameterStore& parameters,
                                   const RouterBiases& biases, const std::vector<std::int32_t>& prompt,
                                   const GenerateOptions& options,
                                   const std::function<void(std::int32_t)>& on_token) {
  validate(options, plan.model, prompt);
  const auto prompt_length = static_cast<std::int64_t>(prompt.size());
  const std::int64_t positions = prompt_length + options.max_tokens;
  const Plan whole_rows = plan_of_text(plan, positions);
  const PipelineLayout pipeline(plan);
  const HeldStages stages(rank, whole_rows, pipeline, parameters, {});
  stages.set_router_biases(biases);
  const HeldStages::Caches caches = stages.make_caches(positions);
  Communicator& along_pipeline = rank.along(Axis::pp);
  const Philox random(options.seed, Stream::sampling, 0);
  std::vector<std::int32_t> fresh = prompt, text;
  std::int64_t position = 0;
  while (static_cast<std::int64_t>(text.size()) < options.max_tokens) {
    const auto count = static_cast<std::int64_t>(fresh.size());
    const Tensor ids(rank.arena(), MemoryCategory::other, DType::i32, {count});
    copy_from_host(fresh, ids);
    const Tensor logits = stages.next_logits(ids, position, caches);
    position += count;
    // The pipeline rank that has the logits chooses for all.
    const Tensor chosen(rank.arena(), MemoryCategory::other, DType::i32, {1});
    if (logits.defined()) {
      const std::vector<double> numbers = copy_numbers_to_host(logits.flat());
      const bool finite =
          std::all_of(numbers.begin(), numbers.end(), [](double x) { return std::isfinite(x); });
      const std::int32_t one =
          finite ? choose(numbers, options, random.uniform(static_cast<std::uint64_t>(position)))
                 : none_can_be_chosen;
      copy_from_host(std::vector<std::int32_t>{one}, chosen);
    }
    along_pipeline.broadcast(chosen, stages.last_rank()).wait();
    const std::int32_t next = copy_to_host<std::int32_t>(chosen).front();
    if (next == none_can_be_chosen)
      throw NotFinite(
          fmt::format("position {}: no token can be chosen, since what {} says of them has NaN or infinite "
                      "values in {}",
                      position, plan.model.name, dtype_name(plan.precision.master)));
    if (std::find(options.stop_tokens.begin(), options.stop_tokens.end(), next) != options.stop_tokens.end())
      break;
    text.push_back(next);
    if (on_token) on_token(next);
    if (options.ends && options.ends(next)) break;
    fresh = {next};
  }
  return text;
}

}  // namespace echelon

#include "plan/packed_attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>

#include "base/error.h"
#include "base/philox.h"
#include "base/real.h"

namespace echelon {
namespace {

// How many sequences plans are priced with, whatever their batch: the result is an expectation, not one draw
// of a batch.
std::int64_t sampled_sequences(const Workload& work) {
  constexpr double most_documents = 300'000;
  constexpr std::int64_t least = 1, most = 4096;
  const double each = 1 + real(work.plan.seq_len) / work.documents.mean();
  const auto few = static_cast<std::int64_t>(most_documents / each);
  return std::clamp(few, least, most);
}

// How many samples the price of a mesh examines, each on all ranks of a ring; and how many if these are
// several batches, enough for each rank's sums to be near their expectation.
constexpr std::int64_t most_visits = 1 << 18, most_of_batches = 1 << 15;

// The part of a document that lies in one packed sequence.
struct DocumentPart {
  double tokens, pairs;
};

double pairs_of(std::int64_t tokens, std::int64_t window) {
  const double all = real(tokens), seen = real(window);
  if (window == 0 || window >= tokens) return all * (all + 1) / 2;
  return seen * (seen + 1) / 2 + (all - seen) * seen;
}

}  // namespace

int dynamic_degree(std::int64_t length, double most_tokens) {
  int ranks = 1;
  while (ranks * most_tokens < real(length)) ranks *= 2;
  return ranks;
}

std::string no_documents(const Workload& work) {
  if (!work.software.fused_attention)
    return fmt::format(
        "{} computes all scores of a sequence, whatever lies in it (fused_attention, in its file)",
        work.software.name);
  return {};
}

PackedDocuments::PackedDocuments(const Workload& work)
    : work_(work),
      sequences_(pack_documents(work.documents, work.plan.seq_len, sampled_sequences(work))),
      windowed_(work.plan.model.windowed_part()) {
  double squares = 0;
  const std::int64_t length = work.plan.seq_len;
  for (const DocumentStarts& starts : sequences_) {
    mean_documents_ += real(std::ssize(starts)) / real(std::ssize(sequences_));
    for (std::size_t i = 0; i < starts.size(); ++i) {
      const double tokens = real((i + 1 < starts.size() ? starts[i + 1] : length) - starts[i]);
      squares += tokens * tokens;
    }
  }
  mean_length_ = squares / (real(length) * real(std::ssize(sequences_)));
  constexpr std::int64_t several = 64;
  const std::int64_t batch = work.plan.global_batch,
                     samples = std::max({std::int64_t{std::ssize(sequences_)}, std::min(batch, most_visits),
                                         std::min(several * batch, most_of_batches)});
  const auto distinct = static_cast<std::uint64_t>(sequences_.size());
  const Philox draw(0, Stream::document_lengths, 1);
  for (std::uint64_t k = 0; k < static_cast<std::uint64_t>(samples); ++k)
    drawn_.push_back(static_cast<std::uint32_t>(k < distinct ? k : draw.below(k, distinct)));
  Plan whole = work.plan;
  whole.mesh.set(Axis::cp, 1);
  const ContextLayout layout(whole);
  for (const DocumentStarts& starts : sequences_) all_pairs_ += pairs(layout, 0, starts);
}

PackedDocuments::Key PackedDocuments::key(const Plan& c) const {
  return {c.mesh.dp(),  c.mesh.pp(), c.mesh.cp(), ulysses_size(c), static_cast<int>(c.context_balance),
          c.micro_batch};
}

// Averaged over layers with and without a window.
double PackedDocuments::pairs(const ContextLayout& layout, int ring_index,
                              const DocumentStarts& starts) const {
  const double all = windowed_ < 1 ? (1 - windowed_) * real(layout.document_pairs(ring_index, starts)) : 0;
  if (windowed_ == 0) return all;
  return all + windowed_ * real(layout.document_pairs(ring_index, starts, work_.plan.model.window.size));
}

// If the program cuts each document separately, all ranks have equal work, and one number stands for them.
const std::vector<double>& PackedDocuments::rank_pairs(const Plan& c) {
  Plan plan = c;
  if (work_.software.context_cuts_documents) plan.mesh.set(Axis::cp, 1);
  const ContextLayout layout(plan);
  const auto [found, is_new] =
      rank_pairs_.try_emplace({layout.ring(), static_cast<int>(plan.context_balance)});
  if (is_new)
    for (const DocumentStarts& starts : sequences_)
      for (int r = 0; r < layout.ring(); ++r) found->second.push_back(pairs(layout, r, starts));
  return found->second;
}

const PackedAttention& PackedDocuments::of(const Plan& c) {
  const auto [found, is_new] = known_.try_emplace(key(c));
  if (is_new) {
    PackedAttention& a = found->second;
    a = work_.dynamic_context ? dynamic(c) : fixed(c);
    a.keys = all_pairs_ / (real(work_.plan.seq_len) * real(std::ssize(sequences_))) - 0.5;
    a.length = mean_length_;
    a.documents = mean_documents_;
    if (!work_.dynamic_context) a.degrees = {{c.mesh.cp(), 1, a.keys}};
  }
  return found->second;
}

const PackedDocuments::Visits& PackedDocuments::visits(const Plan& c) {
  const std::vector<double>& of_ranks = rank_pairs(c);
  const std::size_t ring = of_ranks.size() / sequences_.size();
  const auto [found, is_new] =
      visits_.try_emplace({c.mesh.dp(), ring, static_cast<int>(c.context_balance), c.micro_batch});
  Visits& all = found->second;
  if (!is_new) return all;
  const std::int64_t batches = std::max<std::int64_t>(1, std::ssize(drawn_) / c.global_batch);
  const std::int64_t dp = c.mesh.dp(), each = (c.global_batch + dp - 1) / dp,
                     microbatches = (each + c.micro_batch - 1) / c.micro_batch;
  // If there are many microbatches, the first ones stand for all of a rank.
  constexpr std::int64_t least_visited = 16;
  const std::int64_t visited =
      std::min(microbatches,
               std::max(least_visited, most_visits / (dp * c.micro_batch * static_cast<std::int64_t>(ring))));
  const std::int64_t seen = std::min(each, visited * c.micro_batch);
  std::vector<double> held(ring);
  for (std::int64_t batch = 0; batch < batches; ++batch) {
    std::vector<Visits::Rank>& ranks = all.batches.emplace_back();
    for (std::int64_t d = 0; d < dp; ++d) {
      const std::int64_t samples = std::min(each, c.global_batch - d * each);
      if (samples <= 0) break;
      Visits::Rank& rank = ranks.emplace_back();
      const std::int64_t begin = batch * c.global_batch + d * seen, end = begin + std::min(seen, samples);
      for (std::int64_t first = begin; first < end; first += c.micro_batch) {
        std::fill(held.begin(), held.end(), 0);
        for (std::int64_t k = first; k < std::min(end, first + c.micro_batch); ++k) {
          const std::size_t sequence = drawn_[static_cast<std::size_t>(k % std::ssize(drawn_))];
          for (std::size_t r = 0; r < ring; ++r) held[r] += of_ranks[sequence * ring + r];
        }
        double waited = 0;
        for (double one : held)
          waited = std::max(waited, one * real(static_cast<std::int64_t>(ring))), all.mean += one;
        rank.busy += waited;
        rank.most = std::max(rank.most, waited);
        rank.visited += 1;
      }
      rank.microbatches = real((samples + c.micro_batch - 1) / c.micro_batch);
      all.total += rank.busy;
      all.all_visited += rank.visited;
    }
  }
  return all;
}

PackedAttention PackedDocuments::fixed(const Plan& c) {
  const auto& [batches, total, mean, all_visited] = visits(c);
  const double of_one = total / all_visited, pipeline = c.mesh.pp() - 1;
  PackedAttention a;
  a.in_group = total / mean;
  a.busiest = a.largest = 0;
  double waited = 0, most = 0, all = 0;  // of the slowest ranks, summed over batches; all microbatches
  for (const std::vector<Visits::Rank>& ranks : batches) {
    double longest = -1;
    Visits::Rank slowest;
    for (Visits::Rank rank : ranks) {
      all += rank.microbatches;
      // Extrapolates from the visited microbatches: the deviation of a sum of n times as many terms is
      // sqrt(n) times as large.
      if (rank.visited < rank.microbatches)
        rank.busy = of_one * rank.microbatches +
                    (rank.busy - of_one * rank.visited) * std::sqrt(rank.microbatches / rank.visited);
      // The largest microbatch passes through all stages, one after another.
      if (rank.busy + pipeline * rank.most <= longest) continue;
      longest = rank.busy + pipeline * rank.most;
      slowest = rank;
    }
    waited += slowest.busy;
    most += slowest.most * slowest.microbatches;
  }
  a.busiest = waited * real(std::int64_t{c.mesh.dp()}) / (mean * all / all_visited);
  a.largest = most / waited;
  return a;
}

// As in Megatron-Core's hybrid context parallelism: a rank takes at most as many tokens of a document as a
// microbatch has on a rank. A document of l tokens is on l divided by that number of ranks, rounded up to a
// power of two. Documents are distributed over all ranks of dp and cp by their work, the largest first, each
// to the group with the least load.
PackedAttention PackedDocuments::dynamic(const Plan& c) const {
  const ModelSpec& m = c.model;
  const double with = flops_per_token_seeing(m, 1), of_token = flops_per_token_seeing(m, 0),
               of_pair = with - of_token;
  const double most_tokens = real(c.micro_batch * c.seq_len) / c.mesh.cp();
  // If fewer sequences were sampled than a step has: with proportionally fewer ranks.
  const std::int64_t packed = std::ssize(sequences_), batch = std::min(packed, c.global_batch);
  const int cp = c.mesh.cp(),
            dp = std::max(1, static_cast<int>(std::lround(c.mesh.dp() * real(batch) / real(c.global_batch))));
  std::map<int, PackedAttention::Degree, std::greater<>> degrees;
  double busiest = 0, attention = 0, all = 0;
  const std::int64_t batches = packed / batch;
  for (std::int64_t b = 0; b < batches; ++b) {
    std::map<int, std::vector<DocumentPart>, std::greater<>> by_degree;
    for (std::int64_t k = b * batch; k < (b + 1) * batch; ++k) {
      const DocumentStarts& starts = sequences_[static_cast<std::size_t>(k)];
      for (std::size_t i = 0; i < starts.size(); ++i) {
        const std::int64_t tokens = (i + 1 < starts.size() ? starts[i + 1] : c.seq_len) - starts[i];
        double pairs = (1 - windowed_) * pairs_of(tokens, 0);
        if (windowed_ > 0) pairs += windowed_ * pairs_of(tokens, m.window.size);
        by_degree[std::min(cp, dynamic_degree(tokens, most_tokens))].push_back({real(tokens), pairs});
      }
    }
    std::vector<double> load(static_cast<std::size_t>(dp * cp));
    for (auto& [ranks, pieces] : by_degree) {
      const auto work = [&](const DocumentPart& p) { return of_token * p.tokens + of_pair * p.pairs; };
      std::sort(pieces.begin(), pieces.end(),
                [&](const DocumentPart& x, const DocumentPart& y) { return work(x) > work(y); });
      using Waiting = std::pair<double, std::size_t>;
      std::priority_queue<Waiting, std::vector<Waiting>, std::greater<>> groups;
      const auto size = static_cast<std::size_t>(ranks);
      for (std::size_t g = 0; g * size < load.size(); ++g)
        groups.emplace(*std::max_element(load.begin() + static_cast<std::ptrdiff_t>(g * size),
                                         load.begin() + static_cast<std::ptrdiff_t>((g + 1) * size)),
                       g);
      PackedAttention::Degree& degree =
          degrees.try_emplace(ranks, PackedAttention::Degree{ranks, 0, 0}).first->second;
      for (const DocumentPart& p : pieces) {
        auto [busy, g] = groups.top();
        groups.pop();
        groups.emplace(busy + work(p) / ranks, g);
        degree.share += p.tokens, degree.keys += p.pairs;
        all += work(p), attention += of_pair * p.pairs;
      }
      for (; !groups.empty(); groups.pop())
        std::fill_n(load.begin() + static_cast<std::ptrdiff_t>(groups.top().second * size), size,
                    groups.top().first);
    }
    busiest += *std::max_element(load.begin(), load.end());
  }
  PackedAttention a;
  const double tokens = real(batches * batch * c.seq_len), count = real(std::int64_t{dp} * cp);
  for (auto& [ranks, degree] : degrees)
    a.degrees.push_back({ranks, degree.share / tokens, degree.keys / degree.share - 0.5});
  a.busiest = 1 + (busiest - all / count) / (attention / count);
  return a;
}

}  // namespace echelon

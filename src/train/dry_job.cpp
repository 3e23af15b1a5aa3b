#include "train/dry_job.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "base/error.h"
#include "parallel/sequence_parallel.h"
#include "spec/rank_groups.h"
#include "spec/reduction_buckets.h"

namespace echelon {
namespace {

using Facts = std::vector<std::int64_t>;

// Equal lists of facts have equal numbers.
class Kinds {
 public:
  std::int64_t of(Facts facts) {
    return kinds_.emplace(std::move(facts), static_cast<std::int64_t>(kinds_.size())).first->second;
  }

 private:
  std::map<Facts, std::int64_t> kinds_;
};

// What of a rank decides which shapes its tensors have and which calls it makes, read from the declarations
// that the trainer reads: ranks with the same facts differ in nothing but their places in groups.
class Shapes {
 public:
  Shapes(const Plan& plan, const PipelineLayout& pipeline)
      : plan_(plan), pipeline_(pipeline), context_(plan), mesh_(plan.mesh) {
    for (int dp = 0; dp < mesh_.size(Axis::dp); ++dp) batches_.push_back(kinds_.of(batches_of(dp)));
    for (int cp = 0; cp < mesh_.size(Axis::cp); ++cp) contexts_.push_back(kinds_.of(contexts_of(cp)));
  }

  Facts of(const Coordinates& at) {
    const std::int64_t held = parameters(at.pp, mesh_.ep_index(at), at.tp);
    return {at.pp, held, state(at, held), batches_[static_cast<std::size_t>(at.dp)],
            contexts_[static_cast<std::size_t>(at.cp)]};
  }

 private:
  // The microbatches of a data-parallel rank; their number is that of its pipeline's programs too.
  Facts batches_of(int dp) const {
    Facts facts{1};
    for (const Range& samples : microbatches(plan_, dp)) facts.push_back(samples.size());
    return facts;
  }

  // The runs of positions that attention computes, and under a document mask the pairs of them in the order
  // in which they come: queries of each pair get room for their documents' first keys.
  Facts contexts_of(int cp) const {
    Facts facts{2};
    const int own = context_.ring_index(cp);
    for (const PositionRun& run : context_.runs(own)) facts.insert(facts.end(), {run.size, run.stride});
    if (plan_.mask != AttentionMask::document) return facts;
    for (int step = 0; step < context_.ring(); ++step) {
      facts.push_back(-1);
      for (const auto& pair : context_.pairs(own, (own + context_.ring() - step) % context_.ring()))
        facts.insert(facts.end(),
                     {static_cast<std::int64_t>(pair.queries), static_cast<std::int64_t>(pair.keys)});
    }
    return facts;
  }

  // What a tensor-parallel rank holds of each parameter, and its rows of the residual stream.
  std::int64_t parameters(int pp, int ep_index, int tp) {
    const auto [found, is_new] = parameters_.try_emplace({pp, ep_index, tp}, 0);
    if (!is_new) return found->second;
    const auto& groups = pipeline_.groups_of(pp, ep_index);
    const FlatLayout layout = flat_layout(groups, mesh_.size(Axis::tp), tp);
    Facts facts{3};
    for (const auto* ranges : {&layout.cut_ranges, &layout.expert_ranges})
      for (const Range& range : *ranges) facts.push_back(range.end);
    facts.insert(facts.end(), layout.sizes.begin(), layout.sizes.end());
    for (int dp : {0, mesh_.size(Axis::dp) - 1})  // which have all sizes that there are
      for (const Range& samples : microbatches(plan_, dp))
        facts.push_back(residual_rows(plan_.shards_sequence(), samples.size() * plan_.tokens_here(),
                                      mesh_.size(Axis::tp), tp)
                            .size());
    return found->second = kinds_.of(std::move(facts));
  }

  // What a rank has of the parameters' state where that is cut, and packs of their gradients.
  std::int64_t state(const Coordinates& at, std::int64_t held) {
    const CompressionKind kind = plan_.compression.kind;
    const bool cuts = plan_.zero_stage() > 0, packs = kind == CompressionKind::bf16 || has_scales(kind);
    if (!cuts && !packs) return 0;
    const int ranks = cuts ? plan_.shards() : mesh_.dp_cp_size();
    auto& states = states_[{at.pp, held}];
    if (states.empty()) {
      std::vector<Facts> facts(static_cast<std::size_t>(ranks), Facts{4});
      for (const GradientBucket& bucket :
           reduction_buckets(plan_, pipeline_.groups_of(at.pp, mesh_.ep_index(at)), at.tp)) {
        const int holders = bucket.experts ? mesh_.ep : 1;  // neighbours that hold experts of their own
        std::vector<std::int64_t> packed;
        if (packs)
          for (const Range& part : quantized_parts(kind, bucket, ranks / holders))
            packed.push_back(quantized_bytes(kind, bucket, part));
        for (std::size_t rank = 0; rank < facts.size(); ++rank)
          for (const auto* parts : std::array<const std::vector<std::int64_t>*, 2>{&bucket.shards, &packed})
            if (!parts->empty()) facts[rank].push_back((*parts)[rank / static_cast<std::size_t>(holders)]);
      }
      if (plan_.zero_stage() == 3)
        for (const ShardUnit& unit : frozen_units(
                 flat_layout(pipeline_.groups_of(at.pp, mesh_.ep_index(at)), mesh_.size(Axis::tp), at.tp),
                 plan_.all_shards())) {
          const std::vector<std::int64_t> counts = unit.counts();
          for (std::size_t rank = 0; rank < facts.size(); ++rank)
            facts[rank].push_back(counts[unit.experts ? rank / static_cast<std::size_t>(mesh_.ep) : rank]);
        }
      for (Facts& of_rank : facts) states.push_back(kinds_.of(std::move(of_rank)));
    }
    return states[static_cast<std::size_t>(mesh_.dp_cp_index(at) % ranks)];
  }

  const Plan& plan_;
  const PipelineLayout& pipeline_;
  const ContextLayout context_;
  const Mesh& mesh_;
  Kinds kinds_;
  std::vector<std::int64_t> batches_, contexts_;
  std::map<std::array<int, 3>, std::int64_t> parameters_;
  // By pipeline rank and kind of parameters: of each rank that they are cut over.
  std::map<std::pair<int, std::int64_t>, std::vector<std::int64_t>> states_;
};

// For each sum whether the rank has one of its larger parts.
std::vector<bool> larger_parts(const std::vector<UnevenSum>& sums, const Mesh& mesh, const Coordinates& at) {
  std::vector<bool> larger;
  for (const UnevenSum& sum : sums)
    larger.push_back(place_in(mesh, at, group_named(sum.group), sum.size) < sum.larger);
  return larger;
}

void check_same(const std::vector<UnevenSum>& sums, const std::vector<UnevenSum>& expected) {
  const auto same = [](const UnevenSum& a, const UnevenSum& b) {
    return a.group == b.group && a.size == b.size && a.larger == b.larger;
  };
  check(std::equal(sums.begin(), sums.end(), expected.begin(), expected.end(), same),
        "ranks of the same shapes call the same sums");
}

}  // namespace

// Ranks of the same shapes make the same calls. Of those one is run, which says what sums are uneven; by its
// parts of these the others differ.
DryJob dry_job(const Plan& plan, const PipelineLayout& pipeline, const Progress& progress,
               const DryRunOptions& options) {
  const Mesh& mesh = plan.mesh;
  Shapes shapes(plan, pipeline);
  std::map<Facts, std::vector<int>> alike;
  for (int rank = 0; rank < mesh.num_ranks(); ++rank)
    alike[shapes.of(mesh.coordinates(rank))].push_back(rank);

  DryJob job;
  job.device = options.device;
  job.class_of.resize(static_cast<std::size_t>(mesh.num_ranks()));
  std::size_t done = 0;
  for (const auto& [facts, ranks] : alike) {
    report(progress, static_cast<double>(done) / static_cast<double>(alike.size()),
           fmt::format("shape {} of {}", done + 1, alike.size()));
    ++done;
    std::map<std::vector<bool>, std::size_t> classes;
    std::vector<UnevenSum> sums;
    for (int rank : ranks) {
      const Coordinates at = mesh.coordinates(rank);
      if (rank != ranks.front())
        if (const auto found = classes.find(larger_parts(sums, mesh, at)); found != classes.end()) {
          ++job.classes[found->second].ranks;
          job.class_of[static_cast<std::size_t>(rank)] = static_cast<int>(found->second);
          continue;
        }
      RankClass next{1, rank, dry_run(plan, pipeline, at, options)};
      if (rank == ranks.front()) sums = next.run.uneven_sums;
      check_same(next.run.uneven_sums, sums);
      job.class_of[static_cast<std::size_t>(rank)] = static_cast<int>(job.classes.size());
      classes.emplace(larger_parts(sums, mesh, at), job.classes.size());
      job.classes.push_back(std::move(next));
    }
  }
  return job;
}

}  // namespace echelon

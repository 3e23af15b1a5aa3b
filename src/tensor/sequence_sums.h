// Gradients of weights under invariant numerics (docs/invariance.md): each is a sum over the sequences of the
// global batch, by the tree of base/halving_tree.h. A data-parallel rank has one of its nodes, a microbatch
// has one of that, and here the sequences of a microbatch are added up, and microbatches as they come, which
// is in order. Sums that wait for a neighbour lie beside the gradient: those of a microbatch in scratch,
// those of earlier ones where the ParameterStore keeps them.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/halving_tree.h"
#include "base/split.h"
#include "tensor/kernels.h"
#include "tensor/weight.h"

namespace echelon {

// Of one rank; scratch that all its sums share.
class SequenceTree {
 public:
  SequenceTree(Arena& arena, int microbatches) : arena_(arena), microbatches_(microbatches) {}
  int microbatches() const { return microbatches_; }
  // Sums that wait beside a gradient whose rows come from so many ranks (SequenceSums::of_ranks).
  int most_beside(int ranks = 1) const;
  // As `tensor`, for sums of this level that wait, `taken` elements of the level being used.
  Tensor scratch(int level, std::int64_t taken, const Tensor& tensor) const;
  // There is room on each of so many levels for so many elements.
  void reserve(int levels, std::int64_t elements, DType dtype) const;

 private:
  Arena& arena_;
  int microbatches_;
  mutable std::vector<Tensor> levels_;  // flat
};

// Where the rows of sequences lie on several ranks, all `rows` of them on the one that adds up a weight's
// gradient, in order; undefined on the others (parallel/whole_rows.h).
using BringRows = std::function<Tensor(const Tensor& here, std::int64_t rows, const Weight& weight)>;

// Of one microbatch of `sequences`, of `rows` rows in all.
class SequenceSums {
 public:
  // Without a tree (ordinary numerics) all rows are one. `bring` outlives this; nullptr: all rows are here.
  SequenceSums(const SequenceTree* tree, Kernels& kernels, int microbatch, std::int64_t sequences,
               std::int64_t rows, const BringRows* bring = nullptr)
      : tree_(tree),
        kernels_(&kernels),
        microbatch_(microbatch),
        sequences_(sequences),
        rows_(rows),
        bring_(bring) {}

  // The same of rows that come from so many ranks, those of one after another: of each a microbatch with as
  // many sequences, and its microbatches are a node of the tree (expert parallelism).
  SequenceSums of_ranks(int ranks) const;

  bool by_sequence() const { return tree_ != nullptr; }
  std::int64_t sequences() const { return sequences_; }
  // The rows that belong together, in order.
  std::vector<Range> runs() const;

  // take(rows, gradients, onto) for each of runs(): makes the gradients of all these weights from the rows,
  // and adds them to what is there, or, not `onto`, writes over it. All weights have a gradient.
  template <class Take>
  void add(std::span<const Weight* const> weights, const Take& take) const {
    add_in(sequences_, weights, take);
  }
  // The same by kernels that add what they make of the rows of these tensors, which are matrices, or vectors
  // with an element of each row: take(rows of each, gradients).
  template <class Take>
  void accumulate(std::span<const Weight* const> weights, std::vector<Tensor> tensors,
                  const Take& take) const {
    if (!bring(weights, tensors)) return;
    add(weights, [&](Range rows, std::span<const Tensor> gradients, bool onto) {
      if (!onto)
        for (const Tensor& gradient : gradients) kernels_->fill(gradient, 0.0);
      std::vector<Tensor> parts;
      for (const Tensor& x : tensors) parts.push_back(part(x, rows));
      take(std::span<const Tensor>(parts), gradients);
    });
  }
  // The tensors have all rows where these gradients are this rank's to add up. Elsewhere (false) they become
  // what is nothing to a sum of any number, zeros below zero.
  bool bring(std::span<const Weight* const> weights, std::vector<Tensor>& tensors) const;
  // Of a product: gradient (M, K) = a (N, M)^T b (N, K).
  void add_product(const Weight& weight, const Tensor& a, const Tensor& b) const;
  // Column sums of dy (N, C).
  void add_bias(const Weight& bias, const Tensor& dy) const;

 private:
  // Rows of a tensor that has all of them: without a tree those that it has.
  Tensor part(const Tensor& x, Range rows) const {
    if (!by_sequence()) return x;
    return x.shape().size() == 1 ? x.flat_range(rows.begin, rows.end) : x.row_range(rows.begin, rows.end);
  }
  // The same for `runs` of the sequences, equal and nodes of their tree, each of which is taken at once.
  // Microbatches of several ranks come in turns, so each rank's are added up apart until all are there.
  template <class Take>
  void add_in(std::int64_t runs, std::span<const Weight* const> weights, const Take& take) const {
    std::vector<Tensor> gradients;
    if (tree_ == nullptr) {
      for (const Weight* w : weights) gradients.push_back(w->gradient);
      return take(Range{0, rows_}, std::span<const Tensor>(gradients), true);
    }
    const std::int64_t of_rank = runs / ranks_;
    reserve(of_rank, weights);
    for (std::int64_t run = 0; run < runs; ++run) {
      const auto rank = static_cast<int>(run / of_rank);
      const TreePlace place = tree_place(of_rank, run % of_rank);
      take(Range{run * rows_ / runs, (run + 1) * rows_ / runs},
           std::span<const Tensor>(places(weights, rank, place.waiting)), false);
      for (int m = 0; m < place.merges; ++m) merge(weights, rank, place.waiting - m);
      if ((run + 1) % of_rank == 0) merge_microbatches(weights, rank);
    }
    if (microbatch_ + 1 == tree_->microbatches()) merge_ranks(weights);
  }
  // Where sums of a rank are with so many of the microbatch waiting before them, and with so many of its
  // microbatches.
  std::vector<Tensor> places(std::span<const Weight* const> weights, int rank, int waiting) const;
  const Tensor& place_of(const Weight& weight, int rank, int waiting) const;
  void reserve(std::int64_t runs, std::span<const Weight* const> weights) const;
  void merge(std::span<const Weight* const> weights, int rank, int second) const;
  void merge_microbatches(std::span<const Weight* const> weights, int rank) const;
  void merge_ranks(std::span<const Weight* const> weights) const;

  const SequenceTree* tree_;
  Kernels* kernels_;
  int microbatch_;
  std::int64_t sequences_, rows_;
  const BringRows* bring_;
  int ranks_ = 1;  // whose microbatches are added up apart
};

}  // namespace echelon

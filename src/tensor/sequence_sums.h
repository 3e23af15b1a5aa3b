// Gradients of weights under invariant numerics (docs/invariance.md). Each is a sum over the sequences of the
// global batch, by the tree of base/halving_tree.h. A data-parallel rank computes one node of that tree, and
// a microbatch one node of the rank's; here the sequences of a microbatch are summed, and microbatches in the
// order in which they come. Partial sums that wait for a neighbour lie beside the gradient: those of a
// microbatch in scratch, those of earlier microbatches where the ParameterStore keeps them.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/halving_tree.h"
#include "base/split.h"
#include "spec/fp8.h"
#include "tensor/kernels.h"
#include "tensor/weight.h"

namespace echelon {

// Of one rank; holds the scratch that all its sums share.
class SequenceTree {
 public:
  // `has_copy`: another rank has equally many microbatches (more than one) of the same parameters (DualPipe),
  // before or after those here, and the two ranks combine their sums (add_copy).
  SequenceTree(Arena& arena, int microbatches, bool has_copy = false);
  int microbatches() const { return microbatches_; }
  bool has_copy() const { return has_copy_; }
  // The most sums that wait beside a gradient whose rows come from `ranks` ranks (SequenceSums::of_ranks).
  int most_beside(int ranks = 1) const;
  // The sums of each rank for one gradient, whose waiting sums are `waiting`: the first is the gradient
  // itself.
  std::vector<Tensor> sums_of_ranks(const Tensor& gradient, const std::vector<Tensor>& waiting) const;
  // Adds the other copy's sums (add(sum) adds each to its counterpart here), and then combines those of the
  // ranks.
  void add_copy(Kernels& kernels, const Tensor& gradient, const std::vector<Tensor>& waiting,
                const std::function<void(const Tensor& sum)>& add) const;
  // Scratch shaped like `tensor` for waiting sums of this level, after `taken` elements of the level that are
  // in use.
  Tensor scratch(int level, std::int64_t taken, const Tensor& tensor) const;
  // Allocates `elements` on each of `levels` levels.
  void reserve(int levels, std::int64_t elements, DType dtype) const;
  // Frees the scratch after the passes of a step, so that each step holds what the first one held.
  void end_passes() const { levels_.clear(); }

 private:
  Arena& arena_;
  int microbatches_;
  bool has_copy_;
  mutable std::vector<Tensor> levels_;  // flat
};

// If rows of sequences lie on several ranks, each rank sums a part of every weight's gradient, over all rows
// in order (parallel/whole_rows.h). `all_rows`: see Weight.
class SpreadRows {
 public:
  virtual ~SpreadRows() = default;
  // From this rank's rows of a matrix, or of a vector with an element for each row, to all `rows` in order:
  // all columns, or this rank's part of them.
  virtual Tensor gather(const Tensor& here, std::int64_t rows, bool all_rows) const = 0;
  virtual Tensor gather_part(const Tensor& here, std::int64_t rows, bool all_rows) const = 0;
  // This rank's part of `columns`.
  virtual Range part(std::int64_t columns, bool all_rows) const = 0;
};

// part_of(): rows (dimension 0) or columns (1) of a weight, or elements of a vector. fill_others(): fills the
// rest of the gradient with -0.0, which changes no sum.
Weight part_of(const Weight& weight, int dim, Range range);
void fill_others(Kernels& kernels, const Weight& weight, int dim, Range range);

// An input of a gradient: a matrix, or a vector with an element for each row. Either each column of the
// gradient comes from one of its columns, or from all of it.
struct RowsOfGradient {
  Tensor tensor;
  bool by_column = true;
};

// For one microbatch of `sequences` sequences, with `rows` rows in all.
class SequenceSums {
 public:
  // Without a tree (ordinary numerics) all rows are one run. `spread` outlives this; nullptr: all rows are
  // here.
  SequenceSums(const SequenceTree* tree, Kernels& kernels, int microbatch, std::int64_t sequences,
               std::int64_t rows, const SpreadRows* spread = nullptr)
      : tree_(tree),
        kernels_(&kernels),
        microbatch_(microbatch),
        sequences_(sequences),
        rows_(rows),
        spread_(spread) {}

  // The same for rows from several ranks, in rank order: a microbatch of each, with equally many sequences;
  // each rank's microbatches are a node of the tree (expert parallelism).
  SequenceSums of_ranks(int ranks) const;

  bool by_sequence() const { return tree_ != nullptr; }
  std::int64_t sequences() const { return sequences_; }
  // The runs of rows that are summed as one, in order.
  std::vector<Range> runs() const;

  // Calls take(rows, gradients, onto) for each of runs(). It computes the gradients of all these weights from
  // the rows, and adds them or, if not `onto`, overwrites. All weights must have gradients.
  template <class Take>
  void add(std::span<const Weight* const> weights, const Take& take) const {
    add_in(sequences_, weights, take);
  }
  // The same with kernels that accumulate: take(rows of each tensor, gradients). The weights must have
  // equally many columns.
  template <class Take>
  void accumulate(std::span<const Weight* const> weights, std::vector<RowsOfGradient> tensors,
                  const Take& take) const {
    const std::vector<Weight> own = gather(weights, tensors);
    if (own.empty()) return;
    std::vector<const Weight*> here;
    for (const Weight& w : own) here.push_back(&w);
    add(here, [&](Range rows, std::span<const Tensor> gradients, bool onto) {
      if (!onto)
        for (const Tensor& gradient : gradients) kernels_->fill(gradient, 0.0);
      std::vector<Tensor> parts;
      for (const RowsOfGradient& x : tensors) parts.push_back(part(x.tensor, rows));
      take(std::span<const Tensor>(parts), gradients);
    });
  }
  // For a product: gradient (M, K) = a (N, M)^T b (N, K).
  void add_product(const Weight& weight, const Tensor& a, const Tensor& b,
                   const OperandFormats& formats = {}) const;
  // Column sums of dy (N, C).
  void add_bias(const Weight& bias, const Tensor& dy) const;
  // Both, for a weight and its bias; dy is b if dy_is_b, else a.
  void add_product_and_bias(const Weight& weight, const Weight& bias, const Tensor& a, const Tensor& b,
                            bool dy_is_b, const OperandFormats& formats = {}) const;

 private:
  // This rank's part of the weights' gradients; replaces the tensors by all their rows. Empty if it has no
  // part.
  std::vector<Weight> gather(std::span<const Weight* const> weights,
                             std::vector<RowsOfGradient>& tensors) const;
  void add_whole_product(const Weight& weight, const Tensor& a, const Tensor& b) const;
  // A range of rows of a tensor; without a tree, all rows that it has.
  Tensor part(const Tensor& x, Range rows) const {
    if (!by_sequence()) return x;
    return x.shape().size() == 1 ? x.flat_range(rows.begin, rows.end) : x.row_range(rows.begin, rows.end);
  }
  // The same for `runs` equal runs of the sequences, each a node of the tree that take() handles at once.
  // Microbatches of several ranks alternate, so each rank's are summed separately until all are there, and so
  // are the other copy's.
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
    if (microbatch_ + 1 == tree_->microbatches() && !tree_->has_copy()) merge_ranks(weights);
  }
  // Where a rank's sum goes, given how many sums of the microbatch, and how many of the rank's microbatches,
  // wait before it.
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
  const SpreadRows* spread_;
  int ranks_ = 1;  // whose microbatches are summed separately
};

}  // namespace echelon

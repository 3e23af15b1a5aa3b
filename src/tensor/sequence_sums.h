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
#include "spec/fp8.h"
#include "tensor/kernels.h"
#include "tensor/weight.h"

namespace echelon {

// Of one rank; scratch that all its sums share.
class SequenceTree {
 public:
  // `has_copy`: another rank has as many microbatches of the same parameters (DualPipe), several, before or
  // behind those here, and both add their sums up (add_copy).
  SequenceTree(Arena& arena, int microbatches, bool has_copy = false);
  int microbatches() const { return microbatches_; }
  bool has_copy() const { return has_copy_; }
  // Sums that wait beside a gradient whose rows come from so many ranks (SequenceSums::of_ranks).
  int most_beside(int ranks = 1) const;
  // The sums of these ranks of one gradient, beside which `waiting` are: the first is the gradient.
  std::vector<Tensor> sums_of_ranks(const Tensor& gradient, const std::vector<Tensor>& waiting) const;
  // Adds the other copy's sums, each of which add(sum) adds to the same one here, and then the ranks'.
  void add_copy(Kernels& kernels, const Tensor& gradient, const std::vector<Tensor>& waiting,
                const std::function<void(const Tensor& sum)>& add) const;
  // As `tensor`, for sums of this level that wait, `taken` elements of the level being used.
  Tensor scratch(int level, std::int64_t taken, const Tensor& tensor) const;
  // There is room on each of so many levels for so many elements.
  void reserve(int levels, std::int64_t elements, DType dtype) const;
  // The passes of a step are over: their scratch goes, so that each step holds what the first one held.
  void end_passes() const { levels_.clear(); }

 private:
  Arena& arena_;
  int microbatches_;
  bool has_copy_;
  mutable std::vector<Tensor> levels_;  // flat
};

// Where the rows of sequences lie on several ranks, each of them adds up a part of every weight's gradient,
// of all rows in order (parallel/whole_rows.h). `all_rows`: see Weight.
class SpreadRows {
 public:
  virtual ~SpreadRows() = default;
  // Of what is here of a matrix, or of a vector with an element of each row, all `rows` in order: all
  // columns, or this rank's part of them.
  virtual Tensor gather(const Tensor& here, std::int64_t rows, bool all_rows) const = 0;
  virtual Tensor gather_part(const Tensor& here, std::int64_t rows, bool all_rows) const = 0;
  // Of so many columns this rank's.
  virtual Range part(std::int64_t columns, bool all_rows) const = 0;
};

// Rows (dimension 0) or columns (1) of a weight, or elements of a vector; and in the gradient's others what
// is nothing to a sum of any number, zeros below zero.
Weight part_of(const Weight& weight, int dim, Range range);
void fill_others(Kernels& kernels, const Weight& weight, int dim, Range range);

// What a gradient is made of: a matrix, or a vector with an element of each row. The gradient has its
// columns, one by one, or each of them is made of all of it.
struct RowsOfGradient {
  Tensor tensor;
  bool by_column = true;
};

// Of one microbatch of `sequences`, of `rows` rows in all.
class SequenceSums {
 public:
  // Without a tree (ordinary numerics) all rows are one. `spread` outlives this; nullptr: all rows are here.
  SequenceSums(const SequenceTree* tree, Kernels& kernels, int microbatch, std::int64_t sequences,
               std::int64_t rows, const SpreadRows* spread = nullptr)
      : tree_(tree),
        kernels_(&kernels),
        microbatch_(microbatch),
        sequences_(sequences),
        rows_(rows),
        spread_(spread) {}

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
  // The same by kernels that add what they make of some rows: take(rows of each tensor, gradients). Of
  // weights with as many columns.
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
  // Of a product: gradient (M, K) = a (N, M)^T b (N, K).
  void add_product(const Weight& weight, const Tensor& a, const Tensor& b,
                   const OperandFormats& formats = {}) const;
  // Column sums of dy (N, C).
  void add_bias(const Weight& bias, const Tensor& dy) const;
  // Both, of a weight and its bias, where dy is b, or else a.
  void add_product_and_bias(const Weight& weight, const Weight& bias, const Tensor& a, const Tensor& b,
                            bool dy_is_b, const OperandFormats& formats = {}) const;

 private:
  // What is this rank's to add up of the weights' gradients, with all rows of the tensors; none where it has
  // no part of them.
  std::vector<Weight> gather(std::span<const Weight* const> weights,
                             std::vector<RowsOfGradient>& tensors) const;
  void add_whole_product(const Weight& weight, const Tensor& a, const Tensor& b) const;
  // Rows of a tensor that has all of them: without a tree those that it has.
  Tensor part(const Tensor& x, Range rows) const {
    if (!by_sequence()) return x;
    return x.shape().size() == 1 ? x.flat_range(rows.begin, rows.end) : x.row_range(rows.begin, rows.end);
  }
  // The same for `runs` of the sequences, equal and nodes of their tree, each of which is taken at once.
  // Microbatches of several ranks come in turns, so each rank's are added up apart until all are there, the
  // other copy's too.
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
  const SpreadRows* spread_;
  int ranks_ = 1;  // whose microbatches are added up apart
};

}  // namespace echelon

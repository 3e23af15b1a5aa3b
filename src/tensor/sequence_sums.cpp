#include "tensor/sequence_sums.h"

#include <algorithm>

#include "base/error.h"

namespace echelon {

int SequenceTree::most_beside(int ranks) const {
  // Of one microbatch all sequences of all ranks are there at once.
  return microbatches_ == 1 ? 0 : ranks * (most_waiting(microbatches_) + 1) - 1;
}

void SequenceTree::reserve(int levels, std::int64_t elements, DType dtype) const {
  if (std::ssize(levels_) < levels) levels_.resize(static_cast<std::size_t>(levels));
  for (int i = 0; i < levels; ++i) {
    Tensor& level = levels_[static_cast<std::size_t>(i)];
    if (level.defined() && level.numel() >= elements && level.dtype() == dtype) continue;
    level = Tensor();  // gone before there is a larger one
    level = Tensor(arena_, MemoryCategory::gradients, dtype, {elements});
  }
}

Tensor SequenceTree::scratch(int level, std::int64_t taken, const Tensor& tensor) const {
  return levels_[static_cast<std::size_t>(level)]
      .flat_range(taken, taken + tensor.numel())
      .reshape(tensor.shape());
}

SequenceSums SequenceSums::of_ranks(int ranks) const {
  SequenceSums all = *this;
  all.sequences_ *= ranks;
  all.rows_ *= ranks;
  if (tree_ != nullptr && tree_->microbatches() > 1) all.ranks_ = ranks;
  return all;
}

std::vector<Range> SequenceSums::runs() const {
  if (tree_ == nullptr || sequences_ == 0) return {{0, rows_}};
  const std::int64_t each = rows_ / sequences_;
  check(each * sequences_ == rows_, "sequences are equally long");
  std::vector<Range> all;
  for (std::int64_t s = 0; s < sequences_; ++s) all.push_back({s * each, (s + 1) * each});
  return all;
}

void SequenceSums::reserve(std::int64_t runs, std::span<const Weight* const> weights) const {
  std::int64_t elements = 0;
  for (const Weight* w : weights) elements += w->gradient.numel();
  if (runs > 1) tree_->reserve(most_waiting(runs), elements, weights.front()->gradient.dtype());
}

const Tensor& SequenceSums::place_of(const Weight& weight, int rank, int waiting) const {
  const int at = rank * (most_waiting(tree_->microbatches()) + 1) + waiting;
  return at == 0 ? weight.gradient : weight.waiting.at(static_cast<std::size_t>(at - 1));
}

std::vector<Tensor> SequenceSums::places(std::span<const Weight* const> weights, int rank,
                                         int waiting) const {
  const int before = tree_place(tree_->microbatches(), microbatch_).waiting;
  std::vector<Tensor> all;
  std::int64_t taken = 0;
  for (const Weight* w : weights) {
    if (waiting > 0)
      all.push_back(tree_->scratch(waiting - 1, taken, w->gradient));
    else
      all.push_back(place_of(*w, rank, before));
    taken += w->gradient.numel();
  }
  return all;
}

void SequenceSums::merge(std::span<const Weight* const> weights, int rank, int second) const {
  const std::vector<Tensor> from = places(weights, rank, second), to = places(weights, rank, second - 1);
  for (std::size_t i = 0; i < from.size(); ++i) kernels_->add(from[i], to[i]);
}

void SequenceSums::merge_microbatches(std::span<const Weight* const> weights, int rank) const {
  const TreePlace place = tree_place(tree_->microbatches(), microbatch_);
  for (int m = 0; m < place.merges; ++m) {
    const int second = place.waiting - m;
    for (const Weight* w : weights) kernels_->add(place_of(*w, rank, second), place_of(*w, rank, second - 1));
  }
}

void SequenceSums::merge_ranks(std::span<const Weight* const> weights) const {
  std::vector<int> first;  // of the ranks whose sum waits
  for (int rank = 0; rank < ranks_; ++rank) {
    first.push_back(rank);
    for (int m = tree_place(ranks_, rank).merges; m > 0; --m) {
      const int second = first.back();
      first.pop_back();
      for (const Weight* w : weights) kernels_->add(place_of(*w, second, 0), place_of(*w, first.back(), 0));
    }
  }
}

bool SequenceSums::bring(std::span<const Weight* const> weights, std::vector<Tensor>& tensors) const {
  if (bring_ == nullptr) return true;
  for (Tensor& x : tensors) x = (*bring_)(x, rows_, *weights.front());
  if (tensors.front().defined()) return true;
  for (const Weight* w : weights) kernels_->fill(w->gradient, -0.0);
  return false;
}

void SequenceSums::add_product(const Weight& weight, const Tensor& a, const Tensor& b) const {
  const Weight* const one[] = {&weight};
  if (!by_sequence())
    return kernels_->matmul(a, Transpose::yes, b, Transpose::no, weight.gradient, true);
  std::vector<Tensor> both{a, b};
  if (!bring(one, both)) return;
  // As many sequences at once as a product packs: their sums then wait in the cache.
  constexpr std::int64_t most_rows = 2048;
  std::int64_t runs = 1;
  while (runs < sequences_ && (rows_ > runs * most_rows || !cuts_halving_tree(sequences_, runs))) ++runs;
  add_in(runs, one, [&](Range rows, std::span<const Tensor> gradients, bool onto) {
    kernels_->matmul(part(both[0], rows), Transpose::yes, part(both[1], rows), Transpose::no, gradients[0],
                     onto, equal_blocks(rows.size(), sequences_ / runs));
  });
}

void SequenceSums::add_bias(const Weight& bias, const Tensor& dy) const {
  const Weight* const one[] = {&bias};
  accumulate(one, {dy}, [&](std::span<const Tensor> parts, std::span<const Tensor> gradients) {
    kernels_->bias_gradient(parts[0], gradients[0]);
  });
}

}  // namespace echelon

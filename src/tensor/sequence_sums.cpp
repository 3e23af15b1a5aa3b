#include "tensor/sequence_sums.h"

#include <algorithm>

#include "base/error.h"

namespace echelon {

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

std::vector<Tensor> SequenceSums::places(std::span<const Weight* const> weights, int waiting) const {
  const int before = tree_place(tree_->microbatches(), microbatch_).waiting;
  std::vector<Tensor> all;
  std::int64_t taken = 0;
  for (const Weight* w : weights) {
    if (waiting > 0)
      all.push_back(tree_->scratch(waiting - 1, taken, w->gradient));
    else
      all.push_back(before == 0 ? w->gradient : w->waiting.at(static_cast<std::size_t>(before - 1)));
    taken += w->gradient.numel();
  }
  return all;
}

void SequenceSums::merge(std::span<const Weight* const> weights, int second) const {
  const std::vector<Tensor> from = places(weights, second), to = places(weights, second - 1);
  for (std::size_t i = 0; i < from.size(); ++i) kernels_->add(from[i], to[i]);
}

void SequenceSums::merge_microbatches(std::span<const Weight* const> weights) const {
  const TreePlace place = tree_place(tree_->microbatches(), microbatch_);
  for (int m = 0; m < place.merges; ++m) {
    const auto second = static_cast<std::size_t>(place.waiting - m);
    for (const Weight* w : weights)
      kernels_->add(w->waiting.at(second - 1), second == 1 ? w->gradient : w->waiting.at(second - 2));
  }
}

void SequenceSums::add_product(const Weight& weight, const Tensor& a, const Tensor& b) const {
  const Weight* const one[] = {&weight};
  if (!by_sequence())
    return kernels_->matmul(a, Transpose::yes, b, Transpose::no, weight.gradient, true);
  // As many sequences at once as a product packs: their sums then wait in the cache.
  constexpr std::int64_t most_rows = 2048;
  std::int64_t runs = 1;
  while (runs < sequences_ && (rows_ > runs * most_rows || !cuts_halving_tree(sequences_, runs))) ++runs;
  add_in(runs, one, [&](Range rows, std::span<const Tensor> gradients, bool onto) {
    kernels_->matmul(rows_of(a, rows), Transpose::yes, rows_of(b, rows), Transpose::no, gradients[0], onto,
                     equal_blocks(rows.size(), sequences_ / runs));
  });
}

void SequenceSums::add_bias(const Weight& bias, const Tensor& dy) const {
  accumulate(bias, [&](Range rows, const Tensor& gradient) {
    kernels_->bias_gradient(rows_of(dy, rows), gradient);
  });
}

}  // namespace echelon

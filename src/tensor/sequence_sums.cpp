#include "tensor/sequence_sums.h"

#include <algorithm>

#include "base/error.h"
#include "tensor/layer_products.h"

namespace echelon {

// Adds the ranks' sums by the tree, one after another, into the first.
static void add_by_tree(Kernels& kernels, const std::vector<Tensor>& sums) {
  std::vector<std::size_t> first;  // the first rank of each waiting sum
  for (std::size_t rank = 0; rank < sums.size(); ++rank) {
    first.push_back(rank);
    for (int m = tree_place(std::ssize(sums), static_cast<std::int64_t>(rank)).merges; m > 0; --m) {
      const std::size_t second = first.back();
      first.pop_back();
      kernels.add(sums[second], sums[first.back()]);
    }
  }
}

SequenceTree::SequenceTree(Arena& arena, int microbatches, bool has_copy)
    : arena_(arena), microbatches_(microbatches), has_copy_(has_copy) {
  check(!has_copy || microbatches > 1, "of a stage that two ranks have each has several microbatches");
}

int SequenceTree::most_beside(int ranks) const {
  // With one microbatch, all sequences of all ranks are there at once.
  return microbatches_ == 1 ? 0 : ranks * (most_waiting(microbatches_) + 1) - 1;
}

std::vector<Tensor> SequenceTree::sums_of_ranks(const Tensor& gradient,
                                                const std::vector<Tensor>& waiting) const {
  const auto each = static_cast<std::size_t>(most_waiting(microbatches_) + 1);
  std::vector<Tensor> sums{gradient};
  for (std::size_t at = each; at <= waiting.size(); at += each) sums.push_back(waiting[at - 1]);
  return sums;
}

void SequenceTree::add_copy(Kernels& kernels, const Tensor& gradient, const std::vector<Tensor>& waiting,
                            const std::function<void(const Tensor& sum)>& add) const {
  const std::vector<Tensor> sums = sums_of_ranks(gradient, waiting);
  for (const Tensor& sum : sums) add(sum);
  add_by_tree(kernels, sums);
}

void SequenceTree::reserve(int levels, std::int64_t elements, DType dtype) const {
  if (std::ssize(levels_) < levels) levels_.resize(static_cast<std::size_t>(levels));
  for (int i = 0; i < levels; ++i) {
    Tensor& level = levels_[static_cast<std::size_t>(i)];
    if (level.defined() && level.numel() >= elements && level.dtype() == dtype) continue;
    level = Tensor();  // freed before a larger one is allocated
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
  if (ranks_ == 1) return;
  for (const Weight* w : weights) add_by_tree(*kernels_, tree_->sums_of_ranks(w->gradient, w->waiting));
}

static Tensor part_of(const Tensor& x, int dim, Range range) {
  if (x.shape().size() == 1) return x.flat_range(range.begin, range.end);
  return dim == 0 ? x.row_range(range.begin, range.end) : x.column_range(range.begin, range.end);
}

Weight part_of(const Weight& weight, int dim, Range range) {
  Weight part = weight;
  part.value = part_of(weight.value, dim, range);
  if (!weight.gradient.defined()) return part;
  part.gradient = part_of(weight.gradient, dim, range);
  for (Tensor& level : part.waiting) level = part_of(level, dim, range);
  return part;
}

void fill_others(Kernels& kernels, const Weight& weight, int dim, Range range) {
  const std::int64_t size =
      weight.gradient.shape().size() == 1 ? weight.gradient.numel() : weight.gradient.dim(dim);
  for (const Range& other : {Range{0, range.begin}, Range{range.end, size}})
    if (other.size() > 0) kernels.fill(part_of(weight.gradient, dim, other), -0.0);
}

std::vector<Weight> SequenceSums::gather(std::span<const Weight* const> weights,
                                         std::vector<RowsOfGradient>& tensors) const {
  std::vector<Weight> own;
  const Weight& first = *weights.front();
  Range mine{0, first.gradient.cols()};
  if (spread_ != nullptr) {
    mine = spread_->part(mine.end, first.all_rows);
    for (RowsOfGradient& x : tensors)
      x.tensor = x.by_column ? spread_->gather_part(x.tensor, rows_, first.all_rows)
                             : spread_->gather(x.tensor, rows_, first.all_rows);
    for (const Weight* w : weights) fill_others(*kernels_, *w, 1, mine);
  }
  if (mine.size() > 0)
    for (const Weight* w : weights) own.push_back(spread_ == nullptr ? *w : part_of(*w, 1, mine));
  return own;
}

// Of the wider operand, each rank takes a part of the columns; the other operand is gathered whole.
void SequenceSums::add_product(const Weight& weight, const Tensor& a, const Tensor& b,
                               const OperandFormats& formats) const {
  if (!by_sequence())
    return multiply(*kernels_, {a, Transpose::yes, b, Transpose::no, weight.gradient, true}, formats);
  check(!formats.in_fp8, "under invariant numerics nothing is rounded to fp8");
  if (spread_ == nullptr) return add_whole_product(weight, a, b);
  const int dim = a.cols() >= b.cols() ? 0 : 1;
  const Range mine = spread_->part(weight.gradient.dim(dim), weight.all_rows);
  const auto gathered = [&](const Tensor& x, bool in_parts) {
    return in_parts ? spread_->gather_part(x, rows_, weight.all_rows)
                    : spread_->gather(x, rows_, weight.all_rows);
  };
  const Tensor all_a = gathered(a, dim == 0), all_b = gathered(b, dim == 1);
  fill_others(*kernels_, weight, dim, mine);
  if (mine.size() > 0) add_whole_product(part_of(weight, dim, mine), all_a, all_b);
}

void SequenceSums::add_whole_product(const Weight& weight, const Tensor& a, const Tensor& b) const {
  const Weight* const one[] = {&weight};
  // As many sequences at once as a product packs: their sums then stay in the cache.
  constexpr std::int64_t most_rows = 2048;
  std::int64_t runs = 1;
  while (runs < sequences_ && (rows_ > runs * most_rows || !cuts_halving_tree(sequences_, runs))) ++runs;
  add_in(runs, one, [&](Range rows, std::span<const Tensor> gradients, bool onto) {
    kernels_->matmul(part(a, rows), Transpose::yes, part(b, rows), Transpose::no, gradients[0], onto,
                     equal_blocks(rows.size(), sequences_ / runs));
  });
}

void SequenceSums::add_product_and_bias(const Weight& weight, const Weight& bias, const Tensor& a,
                                        const Tensor& b, bool dy_is_b, const OperandFormats& formats) const {
  if (!by_sequence())
    return multiply(*kernels_, {a, Transpose::yes, b, Transpose::no, weight.gradient, true}, formats,
                    {.column_sums = bias.gradient, .sums_of_b = dy_is_b});
  add_product(weight, a, b, formats);
  add_bias(bias, dy_is_b ? b : a);
}

void SequenceSums::add_bias(const Weight& bias, const Tensor& dy) const {
  const Weight* const one[] = {&bias};
  accumulate(one, {{dy}}, [&](std::span<const Tensor> parts, std::span<const Tensor> gradients) {
    kernels_->bias_gradient(parts[0], gradients[0]);
  });
}

}  // namespace echelon

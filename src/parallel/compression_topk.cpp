// Top-k sparsification with error feedback: Aji & Heafield 2017, Sparse Communication for Distributed
// Gradient Descent, https://arxiv.org/abs/1704.05021; Stich et al. 2018, Sparsified SGD with Memory,
// https://arxiv.org/abs/1809.07599.
//
// Each rank adds its gradient to its residual, sends the largest R of each parameter with their indices, and
// keeps the rest: what was sent and what is kept always add up to the gradients so far. The sum over ranks
// has up to n R elements, so packed pairs cannot be added on the way; every rank gathers all pairs and adds
// them in rank order. Bytes sent per rank: (n-1) R of the bucket, in values and indices.
#include <algorithm>

#include "base/error.h"
#include "parallel/compression_methods.h"

namespace echelon {

TopKReduction::TopKReduction(const ReductionContext& context, const GradientBucket& bucket)
    : context_(context), bucket_(bucket), residual_(context.carried_over(bucket.numel())) {
  for (const GradientSection& s : bucket.sections) kept_ += elements_kept(context.compression, s);
  values_ = context.payload(context.dtype, context.group.size() * kept_);
  indices_ = context.payload(DType::i32, context.group.size() * kept_);
}

void TopKReduction::start(const BucketReduction& of) {
  context_.kernels.add(of.gradient, residual_);
  const std::int64_t begin = context_.group.rank() * kept_;
  const Tensor values = values_.flat_range(begin, begin + kept_),
               indices = indices_.flat_range(begin, begin + kept_);
  std::int64_t taken = 0;
  for (const GradientSection& s : bucket_.sections) {
    const std::int64_t end = taken + elements_kept(context_.compression, s);
    context_.kernels.take_largest(residual_.flat_range(s.range.begin, s.range.end), s.range.begin,
                                  values.flat_range(taken, end), indices.flat_range(taken, end));
    taken = end;
  }
  const std::vector<std::int64_t> counts(static_cast<std::size_t>(context_.group.size()), kept_);
  values_pending_ = context_.group.all_gather(values, values_, counts);
  indices_pending_ = context_.group.all_gather(indices, indices_, counts);
}

void TopKReduction::progress() {
  values_pending_.progress();
  indices_pending_.progress();
}

void TopKReduction::finish(const BucketReduction& of) {
  values_pending_.wait();
  indices_pending_.wait();
  context_.kernels.fill(of.gradient, 0);
  for (int rank = 0; rank < context_.group.size(); ++rank) {  // which may all have sent the same element
    const std::int64_t begin = rank * kept_, end = begin + kept_;
    context_.kernels.add_at(values_.flat_range(begin, end), indices_.flat_range(begin, end),
                            of.gradient.flat());
  }
  context_.keep_shard(bucket_, of);
}

void TopKReduction::list_carried(std::vector<CarriedTensor>& list) const {
  for (const GradientSection& s : bucket_.sections)
    list.push_back({s.name, s.slice, "residual", matrix_of(residual_, s)});
}

}  // namespace echelon

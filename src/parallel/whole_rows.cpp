#include "parallel/whole_rows.h"

#include <algorithm>
#include <numeric>

#include "base/split.h"
#include "tensor/host.h"

namespace echelon {
namespace {

std::int64_t width_of(const Tensor& x) { return x.shape().size() == 1 ? 1 : x.cols(); }

// Of a vector or a matrix, the same with so many rows.
std::vector<std::int64_t> shape_like(const Tensor& x, std::int64_t rows) {
  return x.shape().size() == 1 ? std::vector{rows} : std::vector{rows, x.cols()};
}

}  // namespace

WholeRows::WholeRows(const Rank& rank, const Plan& plan)
    : rank_(&rank),
      sequence_parallel_(plan.shards_sequence()),
      cp_(rank.size(Axis::cp)),
      tokens_(ContextLayout(plan).tokens_here()) {}

Tensor WholeRows::bring(const Tensor& here, std::int64_t rows, const Weight& weight) const {
  const std::int64_t of_rank = rows / cp_;
  Tensor x = here;
  if (sequence_parallel_ && !weight.is_cut) {
    std::vector<std::int64_t> counts;
    const int tp = rank_->size(Axis::tp);
    for (int i = 0; i < tp; ++i) counts.push_back(split_range(of_rank, tp, i).size());
    x = to_one(rank_->along(Axis::tp), x, counts, weight);
  }
  if (cp_ == 1 || !x.defined()) return x;
  x = to_one(rank_->along(Axis::cp), x, std::vector(static_cast<std::size_t>(cp_), of_rank), weight);
  return x.defined() ? in_order(x) : x;
}

Tensor WholeRows::to_one(Communicator& group, const Tensor& here, const std::vector<std::int64_t>& rows,
                         const Weight& weight) const {
  const int size = group.size(), owner = std::min(static_cast<int>(weight.place * size), size - 1);
  Tensor packed = here;
  if (!here.contiguous()) {
    packed = Tensor(rank_->arena(), MemoryCategory::activations, here.dtype(), here.shape());
    rank_->kernels().copy(here, packed);
  }
  std::vector<std::int64_t> sent(rows.size(), 0), received(rows.size(), 0);
  sent[static_cast<std::size_t>(owner)] = packed.numel();
  const bool mine = group.rank() == owner;
  Tensor all;
  if (mine) {
    const std::int64_t width = width_of(here);
    std::transform(rows.begin(), rows.end(), received.begin(), [width](std::int64_t n) { return n * width; });
    all = Tensor(rank_->arena(), MemoryCategory::activations, here.dtype(),
                 shape_like(here, std::accumulate(rows.begin(), rows.end(), std::int64_t{0})));
  }
  group.all_to_all(packed.flat(), sent, mine ? all.flat() : packed.flat_range(0, 0), received).wait();
  return all;
}

// From rank by rank to sequence by sequence.
Tensor WholeRows::in_order(const Tensor& by_rank) const {
  const std::int64_t width = width_of(by_rank), rows = by_rank.numel() / std::max<std::int64_t>(width, 1),
                     batch = rows / (cp_ * tokens_);
  if (batch <= 1) return by_rank;
  const Tensor whole(rank_->arena(), MemoryCategory::activations, by_rank.dtype(), by_rank.shape());
  const auto each = [&](const auto& move) {
    for (std::int64_t v = 0; v < cp_; ++v)
      for (std::int64_t b = 0; b < batch; ++b) move((v * batch + b) * tokens_, (b * cp_ + v) * tokens_);
  };
  if (by_rank.dtype() == DType::i32) {
    const std::vector<std::int32_t> from = copy_to_host<std::int32_t>(by_rank, 0);
    std::vector<std::int32_t> to(from.size());
    each([&](std::int64_t begin, std::int64_t place) {
      std::copy_n(from.begin() + begin, tokens_, to.begin() + place);
    });
    copy_from_host(to, whole);
    return whole;
  }
  const Tensor from = by_rank.reshape({rows, width}), to = whole.reshape({rows, width});
  each([&](std::int64_t begin, std::int64_t place) {
    rank_->kernels().copy(from.row_range(begin, begin + tokens_), to.row_range(place, place + tokens_));
  });
  return whole;
}

Tensor WholeRows::here(const Tensor& whole) const {
  const std::int64_t batch = whole.rows() / (cp_ * tokens_), place = rank_->coordinate(Axis::cp);
  const Tensor own(rank_->arena(), MemoryCategory::activations, whole.dtype(),
                   {batch * tokens_, whole.cols()});
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t begin = (b * cp_ + place) * tokens_;
    rank_->kernels().copy(whole.row_range(begin, begin + tokens_),
                          own.row_range(b * tokens_, (b + 1) * tokens_));
  }
  return own;
}

}  // namespace echelon

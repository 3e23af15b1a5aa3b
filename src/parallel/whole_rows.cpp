#include "parallel/whole_rows.h"

#include <algorithm>

#include "base/split.h"
#include "tensor/host.h"

namespace echelon {
namespace {

bool is_vector(const Tensor& x) { return x.shape().size() == 1; }
std::int64_t width_of(const Tensor& x) { return is_vector(x) ? 1 : x.cols(); }
// Of so many rows on each rank.
std::vector<std::int64_t> elements_of(std::vector<std::int64_t> rows, std::int64_t width) {
  for (std::int64_t& count : rows) count *= width;
  return rows;
}

}  // namespace

Tensor rows_at(const Tensor& sequence, const PositionRun& run) {
  if (run.stride == 1) return sequence.row_range(run.begin, run.end());
  const std::int64_t width = sequence.cols(), first = run.begin / run.stride,
                     column = run.begin % run.stride * width;
  return sequence.reshape({sequence.rows() / run.stride, run.stride * width})
      .row_range(first, first + run.size)
      .column_range(column, column + width);
}

WholeRows::WholeRows(const Rank& rank, const Plan& plan)
    : rank_(&rank),
      sequence_parallel_(plan.shards_sequence()),
      cp_(rank.size(Axis::cp)),
      tokens_(ContextLayout(plan).tokens_here()),
      seq_len_(plan.seq_len) {
  if (cp_ == 1) return;
  const ContextLayout layout(plan);
  const std::int64_t stride = layout.runs(0).front().stride;
  for (int r = 0; r < cp_; ++r) {
    const std::vector<std::int64_t> positions = layout.positions(r);
    for (std::int64_t i = 0; i < std::ssize(positions); ++i) {
      const std::int64_t position = positions[static_cast<std::size_t>(i)];
      follow_ = follow_ && position == r * tokens_ + i;
      if (i > 0 && runs_.back().at.at(runs_.back().at.size) == position)
        ++runs_.back().at.size;
      else
        runs_.push_back({r, i, {position, stride, 1}});
    }
  }
}

// A vector, or a matrix, as x is.
Tensor WholeRows::like(const Tensor& x, std::int64_t rows, std::int64_t columns) const {
  return {rank_->arena(), MemoryCategory::activations, x.dtype(),
          is_vector(x) ? std::vector{rows} : std::vector{rows, columns}};
}

std::vector<std::int64_t> WholeRows::tp_rows(std::int64_t rows) const {
  std::vector<std::int64_t> counts;
  const int tp = rank_->size(Axis::tp);
  for (int i = 0; i < tp; ++i) counts.push_back(split_range(rows / cp_, tp, i).size());
  return counts;
}

std::vector<std::int64_t> WholeRows::cp_rows(std::int64_t rows) const {
  return std::vector<std::int64_t>(static_cast<std::size_t>(cp_), rows / cp_);
}

Tensor WholeRows::gather(const Tensor& here, std::int64_t rows, bool all_rows) const {
  Tensor x = here;
  if (crosses_tp(all_rows)) x = all_of(rank_->along(Axis::tp), x, tp_rows(rows));
  return cp_ == 1 ? x : in_order(all_of(rank_->along(Axis::cp), x, cp_rows(rows)));
}

Tensor WholeRows::gather_part(const Tensor& here, std::int64_t rows, bool all_rows) const {
  Tensor x = here;
  if (crosses_tp(all_rows)) x = part_of_all(rank_->along(Axis::tp), x, tp_rows(rows));
  return cp_ == 1 ? x : in_order(part_of_all(rank_->along(Axis::cp), x, cp_rows(rows)));
}

Range WholeRows::part(std::int64_t columns, bool all_rows) const {
  Range range{0, columns};
  const auto cut = [&](Axis axis) {
    const Range inside = split_range(range.size(), rank_->size(axis), rank_->coordinate(axis));
    range = {range.begin + inside.begin, range.begin + inside.end};
  };
  if (crosses_tp(all_rows)) cut(Axis::tp);
  cut(Axis::cp);
  return range;
}

Tensor WholeRows::all_of(Communicator& group, const Tensor& here,
                         const std::vector<std::int64_t>& rows) const {
  Tensor packed = here;
  if (!here.contiguous()) {
    packed = like(here, here.rows(), here.cols());
    rank_->kernels().copy(here, packed);
  }
  const Tensor all = like(here, sum_of(rows), width_of(here));
  group.all_gather(packed.flat(), all.flat(), elements_of(rows, width_of(here))).wait();
  return all;
}

Tensor WholeRows::part_of_all(Communicator& group, const Tensor& here,
                              const std::vector<std::int64_t>& rows) const {
  const int size = group.size();
  const std::int64_t own = here.rows();
  const auto columns = [&](int r) { return split_range(here.cols(), size, r); };
  const Tensor packed = like(here, own, here.cols()),
               all = like(here, sum_of(rows), columns(group.rank()).size());
  std::vector<std::int64_t> sent;
  for (int r = 0; r < size; ++r) {
    const Range part = columns(r);
    sent.push_back(own * part.size());
    if (sent.back() > 0)
      rank_->kernels().copy(here.column_range(part.begin, part.end),
                            packed.flat_range(own * part.begin, own * part.end).reshape({own, part.size()}));
  }
  group.all_to_all(packed.flat(), sent, all.flat(), elements_of(rows, all.cols())).wait();
  return all;
}

// move(rows among those of one rank after another, sequence, its positions)
template <class Move>
void WholeRows::each_run(std::int64_t batch, const Move& move) const {
  for (const Run& run : runs_)
    for (std::int64_t b = 0; b < batch; ++b) {
      const std::int64_t from = (run.rank * batch + b) * tokens_ + run.begin;
      move(Range{from, from + run.at.size}, b, run.at);
    }
}

Tensor WholeRows::in_order(const Tensor& by_rank) const {
  const std::int64_t width = width_of(by_rank), rows = is_vector(by_rank) ? by_rank.numel() : by_rank.rows(),
                     batch = rows / seq_len_;
  if (width == 0 || rows == 0 || (batch == 1 && follow_)) return by_rank;
  const Tensor whole = like(by_rank, rows, width);
  if (by_rank.dtype() == DType::i32) {
    const std::vector<std::int32_t> from = copy_to_host<std::int32_t>(by_rank, 0);
    std::vector<std::int32_t> to(from.size());
    each_run(batch, [&](Range of_rank, std::int64_t b, const PositionRun& run) {
      for (std::int64_t i = 0; i < run.size; ++i)
        to[static_cast<std::size_t>(b * seq_len_ + run.at(i))] =
            from[static_cast<std::size_t>(of_rank.begin + i)];
    });
    copy_from_host(to, whole);
    return whole;
  }
  const Tensor from = by_rank.reshape({rows, width}), to = whole.reshape({rows, width});
  each_run(batch, [&](Range of_rank, std::int64_t b, const PositionRun& run) {
    rank_->kernels().copy(from.row_range(of_rank.begin, of_rank.end),
                          rows_at(to.row_range(b * seq_len_, (b + 1) * seq_len_), run));
  });
  return whole;
}

Tensor WholeRows::by_rank(const Tensor& in_order) const {
  const std::int64_t rows = in_order.rows(), batch = rows / seq_len_;
  if (rows == 0 || (batch == 1 && follow_)) return in_order;
  const Tensor by_rank = like(in_order, rows, in_order.cols());
  each_run(batch, [&](Range of_rank, std::int64_t b, const PositionRun& run) {
    rank_->kernels().copy(rows_at(in_order.row_range(b * seq_len_, (b + 1) * seq_len_), run),
                          by_rank.row_range(of_rank.begin, of_rank.end));
  });
  return by_rank;
}

Tensor WholeRows::sum_here(const Tensor& term) const {
  const std::int64_t rows = term.rows(), width = term.cols();
  const Tensor here = like(term, rows / cp_, width);
  rank_->along(Axis::cp)
      .reduce_scatter(by_rank(term).flat(), here.flat(), elements_of(cp_rows(rows), width))
      .wait();
  return here;
}

}  // namespace echelon

#include "parallel/context_parallel_ulysses.h"

#include <algorithm>
#include <vector>

#include "base/split.h"

namespace echelon {

// The columns of a matrix of heads that each rank of the group gets.
struct UlyssesExchange::Columns {
  std::vector<Range> of_rank;
  std::int64_t total() const {
    std::int64_t sum = 0;
    for (const Range& range : of_rank) sum += range.size();
    return sum;
  }
};

UlyssesExchange::UlyssesExchange(const Rank& rank, Communicator& group, const ContextLayout& layout,
                                 const Heads& heads, std::int64_t batch)
    : rank_(rank),
      group_(group),
      layout_(layout),
      heads_(heads),
      here_(heads.part(group.rank(), group.size())),
      batch_(batch),
      tokens_(layout.tokens_here()) {}

UlyssesExchange::Columns UlyssesExchange::columns(std::int64_t heads) const {
  Columns columns;
  const std::int64_t size = group_.size();
  for (std::int64_t u = 0; u < size; ++u) {
    const std::int64_t first = u * heads / size, count = std::max<std::int64_t>(heads / size, 1);
    columns.of_rank.push_back({first * heads_.head_dim(), (first + count) * heads_.head_dim()});
  }
  return columns;
}

// Rows of rank v's tokens of sequence b among the tokens of all.
static Range rows_of(std::int64_t b, std::int64_t v, std::int64_t size, std::int64_t tokens) {
  const std::int64_t begin = (b * size + v) * tokens;
  return {begin, begin + tokens};
}

void UlyssesExchange::to_heads(const Tensor& x, std::int64_t heads, const Tensor& core) const {
  const Columns cut = columns(heads);
  const std::int64_t rows = batch_ * tokens_, size = group_.size(), width = core.cols();
  const Tensor packed = rank_.activation({rows * cut.total()}),
               arrived = rank_.activation({rows * size * width});
  std::vector<std::int64_t> sends, receives(static_cast<std::size_t>(size), rows * width);
  std::int64_t begin = 0;
  for (const Range& range : cut.of_rank) {
    sends.push_back(rows * range.size());
    rank_.kernels().copy(x.column_range(range.begin, range.end),
                         packed.flat_range(begin, begin + sends.back()).reshape({rows, range.size()}));
    begin += sends.back();
  }
  group_.all_to_all(packed, sends, arrived, receives).wait();
  const Tensor matrix = arrived.reshape({size * rows, width});
  for (std::int64_t v = 0; v < size; ++v)
    for (std::int64_t b = 0; b < batch_; ++b) {
      const Range to = rows_of(b, v, size, tokens_);
      rank_.kernels().copy(matrix.row_range(v * rows + b * tokens_, v * rows + (b + 1) * tokens_),
                           core.row_range(to.begin, to.end));
    }
}

void UlyssesExchange::to_tokens(const Tensor& core, std::int64_t heads, const Tensor& x) const {
  const Columns cut = columns(heads);
  const std::int64_t rows = batch_ * tokens_, size = group_.size(), width = core.cols();
  const Tensor packed = rank_.activation({rows * size * width}),
               arrived = rank_.activation({rows * cut.total()});
  const Tensor matrix = packed.reshape({size * rows, width});
  for (std::int64_t v = 0; v < size; ++v)
    for (std::int64_t b = 0; b < batch_; ++b) {
      const Range from = rows_of(b, v, size, tokens_);
      rank_.kernels().copy(core.row_range(from.begin, from.end),
                           matrix.row_range(v * rows + b * tokens_, v * rows + (b + 1) * tokens_));
    }
  std::vector<std::int64_t> sends(static_cast<std::size_t>(size), rows * width), receives;
  for (const Range& range : cut.of_rank) receives.push_back(rows * range.size());
  group_.all_to_all(packed, sends, arrived, receives).wait();
  std::int64_t begin = 0, written = 0;  // columns of x
  for (const Range& range : cut.of_rank) {
    const Tensor part = arrived.flat_range(begin, begin + rows * range.size()).reshape({rows, range.size()});
    const Tensor to = x.column_range(range.begin, range.end);
    if (range.begin < written)  // a head that an earlier rank had too
      rank_.kernels().add(part, to);
    else
      rank_.kernels().copy(part, to);
    written = range.end;
    begin += rows * range.size();
  }
}

Tensor UlyssesExchange::to_heads(const Tensor& qkv) const {
  const Tensor core = rank_.activation({batch_ * layout_.core_tokens(), here_.qkv_width()});
  to_heads(heads_.q(qkv), heads_.num_heads(), here_.q(core));
  to_heads(heads_.k(qkv), heads_.num_kv_heads(), here_.k(core));
  to_heads(heads_.v(qkv), heads_.num_kv_heads(), here_.v(core));
  return core;
}

void UlyssesExchange::gradient_to_tokens(const Tensor& dcore, const Tensor& dqkv) const {
  to_tokens(here_.q(dcore), heads_.num_heads(), heads_.q(dqkv));
  to_tokens(here_.k(dcore), heads_.num_kv_heads(), heads_.k(dqkv));
  to_tokens(here_.v(dcore), heads_.num_kv_heads(), heads_.v(dqkv));
}

void UlyssesExchange::output_to_tokens(const Tensor& core, const Tensor& out) const {
  to_tokens(core, heads_.num_heads(), out);
}

Tensor UlyssesExchange::output_gradient_to_heads(const Tensor& dout) const {
  const Tensor core = rank_.activation({batch_ * layout_.core_tokens(), here_.width()});
  to_heads(dout, heads_.num_heads(), core);
  return core;
}

Tensor UlyssesExchange::delta_to_heads(const Tensor& delta) const {
  const std::int64_t size = group_.size(), all = heads_.num_heads(), here = here_.num_heads();
  const std::int64_t part = batch_ * here * tokens_;  // to and from each rank
  const std::vector<std::int64_t> counts(static_cast<std::size_t>(size), part);
  const Tensor packed = rank_.statistic({size * batch_ * here, tokens_});
  const Tensor arrived = rank_.statistic({size * batch_ * here, tokens_});
  const Tensor rows = delta.reshape({batch_ * all, tokens_});
  for (std::int64_t u = 0; u < size; ++u)
    for (std::int64_t b = 0; b < batch_; ++b) {
      const std::int64_t from = b * all + u * here, to = (u * batch_ + b) * here;
      rank_.kernels().copy(rows.row_range(from, from + here), packed.row_range(to, to + here));
    }
  group_.all_to_all(packed.flat(), counts, arrived.flat(), counts).wait();
  const std::int64_t core_tokens = layout_.core_tokens();
  const Tensor core = rank_.statistic({batch_ * core_tokens * here});
  const auto runs = layout_.runs(layout_.ring_index(rank_.coordinate(Axis::cp)));
  for (std::int64_t b = 0; b < batch_; ++b) {
    std::int64_t begin = 0;  // of the run among the core tokens
    for (const PositionRun& run : runs) {
      const std::int64_t first = (b * core_tokens + begin) * here;
      const Tensor matrix = core.flat_range(first, first + run.size * here).reshape({here, run.size});
      for (std::int64_t v = 0; v < size; ++v) {
        const std::int64_t left = std::max(begin, v * tokens_),
                           right = std::min(begin + run.size, (v + 1) * tokens_);
        if (left >= right) continue;
        const std::int64_t from = (v * batch_ + b) * here;
        rank_.kernels().copy(
            arrived.row_range(from, from + here).column_range(left - v * tokens_, right - v * tokens_),
            matrix.column_range(left - begin, right - begin));
      }
      begin += run.size;
    }
  }
  return core;
}

}  // namespace echelon

#include "parallel/context_parallel_allgather.h"

#include <utility>
#include <vector>

#include "comm/exchange.h"

namespace echelon {
namespace {

std::vector<std::int64_t> counts_of(const Communicator& group, const Tensor& kv) {
  return std::vector<std::int64_t>(static_cast<std::size_t>(group.size()), kv.numel());
}

Tensor gather(const ContextBlocks& blocks, Communicator& group, const Tensor& kv) {
  const Tensor all = blocks.rank().activation({group.size() * kv.rows(), kv.cols()});
  group.all_gather(kv, all, counts_of(group, kv)).wait();
  return all;
}

Tensor block_of(const Tensor& all, const Communicator& group, int source) {
  const std::int64_t rows = all.rows() / group.size();
  return all.row_range(source * rows, (source + 1) * rows);
}

}  // namespace

void gathered_attention_forward(const ContextBlocks& blocks, Communicator& group, const Tensor& q, Tensor kv,
                                const Tensor& out, const Tensor& lse) {
  const Tensor all = gather(blocks, group, std::exchange(kv, {}));
  for (int step = 0; step < group.size(); ++step) {
    const int source = around(group.rank() - step, group.size());
    blocks.forward(q, block_of(all, group, source), source, out, lse);
  }
}

void gathered_attention_backward(const ContextBlocks& blocks, Communicator& group, const Tensor& q, Tensor kv,
                                 const Tensor& dout, const Tensor& lse, const Tensor& delta, const Tensor& dq,
                                 const Tensor& dkv) {
  Kernels& kernels = blocks.rank().kernels();
  Tensor all = gather(blocks, group, kv);
  const Tensor gradient = blocks.rank().activation({all.rows(), all.cols()});
  kernels.fill(gradient, 0);
  kernels.fill(dq, 0);
  for (int source = 0; source < group.size(); ++source)
    blocks.backward(q, block_of(all, group, source), source, dout, lse, delta, dq,
                    block_of(gradient, group, source));
  all = {};
  group.reduce_scatter(gradient, kv, counts_of(group, kv)).wait();
  kernels.copy(kv, dkv);
}

}  // namespace echelon

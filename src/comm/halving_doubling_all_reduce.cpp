// Rabenseifner's all-reduce, by recursive halving and doubling. In step k = 0 ... log2(n)-1 the ranks r and r
// xor 2^k exchange halves of what they have left, and each adds the half that it keeps: 1/2, 1/4, ... of the
// buffer. In the end each rank has the whole sum of 1/n of the buffer. The same steps in reverse gather the
// sums.
//
// Steps: 2 log2(n). Sent by each rank: 2(n-1)/n of the buffer: the bytes of a ring in far fewer steps, but
// with distant partners. For other n, p = 2^k ranks, the largest power of two below n, do this; the other n-p
// first send their buffer to a neighbour, which adds it (fold.h), and receive the result at the end. That
// takes 2 log2(p) + 2 steps, and a rank of such a pair sends the buffer once more. Order: by halves, as
// communicator.h says. (Rabenseifner: Optimization of collective reduction operations, 2004; Thakur,
// Rabenseifner, Gropp: Optimization of collective communication operations in MPICH, 2005.)
#include "base/split.h"
#include "comm/call.h"
#include "comm/collectives.h"
#include "comm/exchange.h"
#include "comm/fold.h"

namespace echelon {
namespace {

// x is cut into one part for each block.
class HalvingDoubling {
 public:
  HalvingDoubling(Communicator& group, const Fold& at, const Tensor& x, ReduceOp op, Scratch& scratch)
      : group_(group), at_(at), x_(x), op_(op), scratch_(scratch) {}

  // Parts [begin, end) hold sums over the blocks that differ from this one in the bits below `bit`;
  // afterwards, over all.
  void run(int bit, int begin, int end) const {
    if (bit == at_.blocks) return;
    const int middle = (begin + end) / 2, peer = Fold::first_of(group_.size(), at_.index ^ bit);
    const bool lower = (at_.index & bit) == 0;
    const Tensor left = parts(begin, middle), right = parts(middle, end);
    const Tensor &mine = lower ? left : right, &theirs = lower ? right : left;
    const Tensor received = scratch_.first(x_, mine.numel());
    send_receive(group_, theirs, peer, received, peer);
    reduce_two(op_, lower ? mine : received, lower ? received : mine, mine);
    lower ? run(2 * bit, begin, middle) : run(2 * bit, middle, end);
    send_receive(group_, mine, peer, theirs, peer);
  }

 private:
  Tensor parts(int begin, int end) const {
    return x_.flat_range(split_range(x_.numel(), at_.blocks, begin).begin,
                         split_range(x_.numel(), at_.blocks, end).begin);
  }

  Communicator& group_;
  const Fold& at_;
  const Tensor& x_;
  const ReduceOp op_;
  Scratch& scratch_;
};

}  // namespace

void halving_doubling_all_reduce(Communicator& group, const Tensor& x, ReduceOp op, Scratch& scratch) {
  check_arguments({.verb = Verb::all_reduce, .op = op, .counts = {x.numel()}}, group, x, x);
  const Fold at(group.size(), group.rank());
  if (fold(group, at, x, op, scratch)) HalvingDoubling(group, at, x, op, scratch).run(1, 0, at.blocks);
  unfold(group, at, x);
}

Cost halving_doubling_all_reduce_cost(int n, int rank, std::int64_t count) {
  const Fold at(n, rank);
  Cost cost = fold_cost(n, rank, count);
  int begin = 0, end = at.blocks;
  for (int bit = 1; bit < at.blocks; bit *= 2) {
    cost.steps += 2;
    if (!at.acts) continue;
    const std::int64_t before =
        split_range(count, at.blocks, end).begin - split_range(count, at.blocks, begin).begin;
    ((at.index & bit) == 0 ? end : begin) = (begin + end) / 2;
    const std::int64_t mine =
        split_range(count, at.blocks, end).begin - split_range(count, at.blocks, begin).begin;
    cost += {0, 2, before, mine};  // sent: the other half on the way down, mine on the way up
  }
  return cost;
}

}  // namespace echelon

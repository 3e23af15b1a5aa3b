#include "parallel/context_parallel_ring.h"

#include <utility>

#include "parallel/ring_travel.h"

namespace echelon {

void ring_attention_forward(const ContextBlocks& blocks, Communicator& ring, const Tensor& q, Tensor kv,
                            const Tensor& out, const Tensor& lse) {
  RingTravel block(blocks.rank(), ring, std::move(kv));
  for (int step = 0; step < ring.size(); ++step) {
    const bool goes_on = step + 1 < ring.size();
    if (goes_on) block.start();
    blocks.forward(q, block.here(), block.source(step), out, lse);
    if (goes_on) block.finish();
  }
}

void ring_attention_backward(const ContextBlocks& blocks, Communicator& ring, const Tensor& q, Tensor kv,
                             const Tensor& dout, const Tensor& lse, const Tensor& delta, const Tensor& dq,
                             const Tensor& dkv) {
  Kernels& kernels = blocks.rank().kernels();
  RingTravel block(blocks.rank(), ring, std::move(kv));
  kernels.fill(dq, 0);
  kernels.fill(dkv, 0);
  Tensor leaving;  // the gradient of the step before, on its way
  Pending sent;
  for (int step = 0; step < ring.size(); ++step) {
    // What the ranks before this one have accumulated for the current block: they send it at the end of their
    // step, and it is needed at the end of this one.
    Tensor earlier;
    Pending arrived;
    if (step > 1) {
      earlier = blocks.make_kv();
      arrived = ring.recv(earlier, block.previous());
    }
    const bool goes_on = step + 1 < ring.size();
    if (goes_on) block.start();
    Tensor part = dkv;
    if (step > 0) {
      part = blocks.make_kv();
      kernels.fill(part, 0);
    }
    blocks.backward(q, block.here(), block.source(step), dout, lse, delta, dq, part);
    if (step > 0) {
      arrived.wait();
      if (earlier.defined()) kernels.add(std::exchange(earlier, {}), part);
      sent.wait();
      leaving = std::move(part);
      sent = ring.send(leaving, block.next());
    }
    if (goes_on) block.finish();
  }
  if (ring.size() == 1) return;
  const Tensor others = blocks.make_kv();
  ring.recv(others, block.previous()).wait();
  kernels.add(others, dkv);
  sent.wait();
}

}  // namespace echelon

// A call of a communicator as data, to describe it, to check its arguments, and to compare the calls of
// different ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace echelon {

// Holds raw pointers: the calling rank keeps the tensors alive and frees them itself.
struct Call {
  Verb verb = Verb::barrier;
  ReduceOp op = ReduceOp::sum;
  DType dtype = DType::f32;
  int root = 0;                        // broadcast; send and recv: the other rank
  std::vector<std::int64_t> counts{};  // one per rank; all_reduce and broadcast: one in total; barrier: none
  std::vector<std::int64_t> recv_counts{};  // all_to_all
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  Device device = Device::cpu;
};

// "all_gather of [64, 64] f32"
std::string describe(const Call& call);

// What is wrong with the arguments of group rank `rank` of `size` ranks; empty if nothing is. `in` and `out`
// are the same tensor for verbs that have one tensor.
std::string wrong_arguments(const Call& call, int rank, int size, const Tensor& in, const Tensor& out);

// CommError if they are wrong. `call` needs no dtype.
void check_arguments(Call call, const Communicator& group, const Tensor& in, const Tensor& out);

// Whether calls of group ranks a_rank and b_rank can belong to the same collective.
bool agree(const Call& a, int a_rank, const Call& b, int b_rank);

}  // namespace echelon

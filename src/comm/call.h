// What a rank asks of a collective, as data: to describe it, to check its arguments, to compare the ranks'
// calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace echelon {

// Raw pointers: the views are kept alive, and given back, by the rank itself.
struct Call {
  Verb verb = Verb::barrier;
  ReduceOp op = ReduceOp::sum;
  DType dtype = DType::f32;
  int root = 0;                        // broadcast; send and recv: the other rank
  std::vector<std::int64_t> counts{};  // one per rank; all_reduce and broadcast: one in all; barrier: none
  std::vector<std::int64_t> recv_counts{};  // all_to_all
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  Device device = Device::cpu;
};

// "all_gather of [64, 64] f32"
std::string describe(const Call& call);

// What is wrong with the arguments of group rank `rank` of `size` ranks; empty when nothing is. `in` and
// `out` are the same tensor for the verbs that have one.
std::string wrong_arguments(const Call& call, int rank, int size, const Tensor& in, const Tensor& out);

// Throws CommError when they are wrong. `call` needs no dtype.
void check_arguments(Call call, const Communicator& group, const Tensor& in, const Tensor& out);

// Whether the calls of group ranks a_rank and b_rank can belong to one collective.
bool agree(const Call& a, int a_rank, const Call& b, int b_rank);

}  // namespace echelon

// The token exchange of expert parallelism (GShard, Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668).
// The E experts of a layer are spread over the ep ranks of an expert group in equal runs. Copies of tokens
// travel to the ranks of their experts and back, by an uneven all_to_all each way. Only the router knows how
// many, so ranks first exchange counts: E numbers.
//
//   copies, sorted by expert --dispatch--> the copies of all ranks, sorted by the experts of this rank
//   rows of these            --combine-->  the rows of this rank's copies, in their places
//
// Each is the adjoint of the other, so the backward pass sends gradients of rows out by dispatch and
// gradients of copies back by combine. Bytes that a rank sends each way: its copies except those for its own
// experts, as whole rows (N k C elements, less a share of 1/ep if the load is even).
#pragma once

#include <cstdint>
#include <vector>

#include "comm/rank.h"
#include "parallel/redistribute.h"
#include "parallel/whole_copies.h"
#include "tensor/expert_products.h"

namespace echelon {

class ExpertExchange {
 public:
  // How the copies of one microbatch travel.
  struct Route {
    ExpertBounds bounds;  // of this rank's experts, among the rows
    // The same for each sequence's rows of an expert, rank by rank (or cp group by cp group); empty if not
    // requested.
    ExpertBounds of_sequences;
    std::vector<std::int64_t> sent, received;  // copies to and from each rank of the group
    std::int64_t away = 0, from_others = 0;    // copies sent to other ranks; copies received from them
    std::int64_t room = 0;                     // capacity of a tensor of rows
    // (rows, i32): for each row, the place where it arrived, in the order of source ranks; and for each
    // place, its row.
    Tensor arrived, rows;
  };

  ExpertExchange(const Rank& rank, std::int64_t num_experts) : rank_(&rank), num_experts_(num_experts) {}

  // With all experts on every rank there is no communication: rows are the copies themselves.
  bool is_local() const { return rank_->size(Axis::ep) == 1; }

  // Collective over the group, as are the calls below. `bounds`: of all experts, among this rank's copies.
  // `copies`: capacity for these. `room`: capacity for rows; 0: as many as arrive. `by_run`: bounds of the
  // copies for each expert, sequence and run of positions, with equally many sequences on every rank. If it
  // is not empty, ranks exchange that many counts, and an expert's rows of a sequence come in the order of
  // its tokens; the group must then contain whole cp groups or, with one run, cp must not cut sequences.
  Route route(const ExpertBounds& bounds, std::int64_t copies, std::int64_t room,
              const ExpertBounds& by_run = {}, const PositionRuns& runs = {}) const;
  // dispatch() in two steps: begin_dispatch() sends (copies, W), and arrange() sorts what arrives into (room,
  // W).
  InFlight begin_dispatch(const Tensor& copies, const Route& route) const;
  Tensor arrange(InFlight arriving, const Route& route) const;
  Tensor dispatch(Tensor copies, const Route& route) const;
  // From (room, W) to (copies, W).
  InFlight begin_combine(Tensor rows, const Route& route, std::int64_t copies) const;
  Tensor combine(Tensor rows, const Route& route, std::int64_t copies) const {
    return begin_combine(std::move(rows), route, copies).get();
  }

 private:
  Tensor integers(std::int64_t count) const {
    return {rank_->arena(), MemoryCategory::activations, DType::i32, {count}};
  }

  // A tensor like x, with `rows` rows.
  Tensor like(const Tensor& x, std::int64_t rows) const {
    return {rank_->arena(), MemoryCategory::activations, x.dtype(), {rows, x.cols()}};
  }

  const Rank* rank_;
  std::int64_t num_experts_;
};

}  // namespace echelon

// Expert parallelism's exchange (GShard, Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668): the E
// experts of a layer are spread over the ep ranks of an expert group in equal runs, and copies of tokens
// travel to the ranks of their experts and back, by an all_to_all of uneven parts each way. How many go where
// the router decides, so ranks tell each other first: E numbers.
//
//   copies, sorted by expert --dispatch--> the copies of all ranks, sorted by the experts here
//   rows of these            --combine-->  the rows of the copies here, where they stood
//
// Each is the other's adjoint, so the backward pass sends gradients of rows out by dispatch and gradients of
// copies back by combine. Bytes that a rank sends each way: its copies but those of its own experts, whole
// rows (N k C elements, a share of 1/ep less where the load is even).
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
  // Where the copies of one microbatch go.
  struct Route {
    ExpertBounds bounds;                       // of the experts here, among the rows
    // The same of each sequence's rows of an expert, those of one rank (or cp group) after another; empty
    // where not asked.
    ExpertBounds of_sequences;
    std::vector<std::int64_t> sent, received;  // copies, to and from each rank of the group
    std::int64_t away = 0, from_others = 0;    // of those sent, to other ranks; of those received
    std::int64_t room = 0;                     // rows of a tensor of rows, used or not
    // (rows, i32): of each row the place where it arrived, in the order of source ranks; and of each place
    // the row.
    Tensor arrived, rows;
  };

  ExpertExchange(const Rank& rank, std::int64_t num_experts) : rank_(&rank), num_experts_(num_experts) {}

  // All experts are here: nothing travels, and rows are the copies themselves.
  bool is_local() const { return rank_->size(Axis::ep) == 1; }

  // All ranks of the group call each of these alike. `bounds`: of all experts, among the copies here;
  // `copies`: room for them; `room`: for rows, 0 where there is as much as comes. `by_run`: the bounds of
  // each run of positions of each sequence's copies of each expert, as many sequences on every rank; where it
  // is not empty ranks tell each other as many counts, and an expert's rows of a sequence are in the order of
  // its tokens: the group has whole cp groups, or, with one run, none.
  Route route(const ExpertBounds& bounds, std::int64_t copies, std::int64_t room,
              const ExpertBounds& by_run = {}, const PositionRuns& runs = {}) const;
  // (copies, W) to where they arrive, which is under way; arrange() makes (room, W) of that.
  InFlight begin_dispatch(const Tensor& copies, const Route& route) const;
  Tensor arrange(InFlight arriving, const Route& route) const;
  Tensor dispatch(Tensor copies, const Route& route) const;
  // (room, W) -> (copies, W).
  InFlight begin_combine(Tensor rows, const Route& route, std::int64_t copies) const;
  Tensor combine(Tensor rows, const Route& route, std::int64_t copies) const {
    return begin_combine(std::move(rows), route, copies).get();
  }

 private:
  Tensor integers(std::int64_t count) const {
    return {rank_->arena(), MemoryCategory::activations, DType::i32, {count}};
  }

  // So many rows as those of x.
  Tensor like(const Tensor& x, std::int64_t rows) const {
    return {rank_->arena(), MemoryCategory::activations, x.dtype(), {rows, x.cols()}};
  }

  const Rank* rank_;
  std::int64_t num_experts_;
};

}  // namespace echelon

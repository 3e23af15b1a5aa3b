// What one parameter is: its name, logical shape, how each mesh axis lays it out, how it starts. Declared
// once; initial values, gradient reductions, checkpoints, verify's gather and the memory prediction all read
// this declaration.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/split.h"

namespace echelon {

// The last two are of a state space's heads (Mamba-2): the logarithm of a rate between 1 and 16, and what
// softplus makes a step between 0.001 and 0.1 of, as likely in each decade.
enum class Init { zeros, ones, normal, uniform, constant, rate, step };

// One of the pieces that a dimension is made of (q, k and v of GPT-2's fused c_attn, say). A piece is cut
// over a tensor parallel group in whole units (a head; one row of the vocabulary). With fewer units than
// ranks each unit is held by ranks/units neighbouring ranks, where it repeats: key/value heads when tp >
// kv_heads, which every rank uses for query heads of its own. What no rank uses so would be counted twice.
struct Piece {
  std::int64_t length = 0;
  std::int64_t unit = 1;
  bool repeats = false;
};

struct ParamSpec {
  std::string name;                 // the Hugging Face name
  std::vector<std::int64_t> shape;  // logical
  int shard_dim = -1;               // dimension cut over tp; -1: whole on every rank
  std::vector<Piece> pieces;        // of shard_dim, in order; their lengths add up to shape[shard_dim]
  Init init = Init::normal;
  double init_std = 0.02;  // for Init::normal, and for Init::uniform around zero; the value of Init::constant
  bool decay = true;       // weight decay applies
  bool multiplies = true;  // multiplies activations in a matrix product (counts in the model FLOPs)
  // Every rank of the tp group uses the whole parameter on its own rows of the sequence when sequence
  // parallelism is on (norms, learned positions, row-parallel biases), so its gradient is partial there.
  bool rows_are_sequence_sharded = false;
  // Every rank of the tp group uses the whole parameter on heads of its own, so its gradient is partial
  // there, with sequence parallelism and without.
  bool tp_partial = false;
  int expert = -1;       // of a routed expert: which one
  bool frozen = false;   // training leaves it as it is: see fine_tuning.h
  bool adapter = false;  // beside what the model has: a part of a low-rank adaptation
  // Of a parameter whose shard_dim is cut over the ranks of the pipeline first, and each part over tp: how
  // many parts there are, and which one this is (vocabulary parallelism).
  int parts = 1, part = 0;

  std::int64_t numel() const;
};

// Ranges of shard_dim (in the logical tensor) that rank `index` of a tp group of `tp` ranks holds, in local
// order. The whole dimension (dimension 0) as one range when the parameter is not cut.
std::vector<Range> local_ranges(const ParamSpec& spec, int tp, int index);

// Shape of what rank `index` of `tp` holds.
std::vector<std::int64_t> local_shape(const ParamSpec& spec, int tp, int index);

// How many neighbouring ranks of the tp group hold the same data: tp when not cut, tp/units when there are
// fewer units than ranks, else 1. Pieces of one parameter must agree, and those with fewer repeat
// (InvariantError).
int tp_replicas(const ParamSpec& spec, int tp);

// Calls visit(logical_begin, local_begin, count) for each run of elements that is contiguous both in the
// logical tensor and in what rank `index` of `tp` holds, in local order. Initial values, gathers and
// checkpoints walk these runs.
void for_each_run(const ParamSpec& spec, int tp, int index,
                  const std::function<void(std::int64_t logical_begin, std::int64_t local_begin,
                                           std::int64_t count)>& visit);

// Elements that lie side by side in the logical tensor too.
struct LogicalRun {
  std::int64_t begin = 0;  // of the first, in the logical tensor
  std::int64_t count = 0;
};

// What elements [part.begin, part.end) of those that rank `index` of `tp` holds are, in local order.
std::vector<LogicalRun> logical_runs(const ParamSpec& spec, int tp, int index, Range part);

}  // namespace echelon

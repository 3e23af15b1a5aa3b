// One parameter as data: its name, its logical shape, its layout over each mesh axis, its initial values. It
// is declared once, and initialization, gradient reductions, checkpoints, verify's gather and the memory
// prediction all read the declaration.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/split.h"

namespace echelon {

// rate and step belong to a state space's heads (Mamba-2). rate: the logarithm of a rate between 1 and 16.
// step: the number whose softplus is a step between 0.001 and 0.1, log-uniformly distributed.
enum class Init { zeros, ones, normal, uniform, constant, rate, step };

// A piece of a dimension, such as q, k or v in GPT-2's fused c_attn. Each piece is cut over the tp group in
// whole units (a head, or a row of the vocabulary). If there are fewer units than ranks, ranks/units
// neighbouring ranks hold each unit. That needs `repeats`: every holder must use it for different work, as tp
// ranks use a key/value head for different query heads. Otherwise it would be counted twice.
struct Piece {
  std::int64_t length = 0;
  std::int64_t unit = 1;
  bool repeats = false;
};

struct ParamSpec {
  std::string name;                 // the Hugging Face name
  std::vector<std::int64_t> shape;  // logical
  int shard_dim = -1;               // the dimension that is cut over tp; -1: whole on every rank
  std::vector<Piece> pieces;        // of shard_dim, in order; their lengths add up to shape[shard_dim]
  Init init = Init::normal;
  double init_std = 0.02;  // for Init::normal, and for Init::uniform around zero; the value of Init::constant
  bool decay = true;       // weight decay applies
  bool multiplies = true;  // used in a matrix product (counts in the model FLOPs)
  bool is_vocabulary = false;  // a row for each token: the embedding, and the output layer's matrix
  // Under sequence parallelism every tp rank applies the whole parameter to its own rows of the sequence
  // (norms, learned positions, row-parallel biases), so its gradient is partial.
  bool rows_are_sequence_sharded = false;
  // Every tp rank applies the whole parameter to its own heads, so its gradient is partial, with or without
  // sequence parallelism.
  bool tp_partial = false;
  int expert = -1;       // index of its routed expert; -1: not of one
  bool frozen = false;   // not trained (fine_tuning.h)
  bool adapter = false;  // part of a LoRA adapter
  // Vocabulary parallelism: shard_dim is cut over the pipeline ranks first and each part over tp. The number
  // of parts, and which one this is.
  int parts = 1, part = 0;

  std::int64_t numel() const;
};

// The ranges of shard_dim, in the logical tensor, that rank `index` of `tp` holds, in local order. For a
// parameter that is not cut, all of dimension 0 as one range.
std::vector<Range> local_ranges(const ParamSpec& spec, int tp, int index);

// The shape of what rank `index` of `tp` holds.
std::vector<std::int64_t> local_shape(const ParamSpec& spec, int tp, int index);

// How many neighbouring tp ranks hold the same data: tp if the parameter is not cut, tp/units if there are
// fewer units than ranks, else 1. InvariantError if the pieces of a parameter disagree, or pieces with fewer
// units do not repeat.
int tp_replicas(const ParamSpec& spec, int tp);

// Calls visit(logical_begin, local_begin, count) for each run of elements that is contiguous both in the
// logical tensor and in what rank `index` of `tp` holds, in local order. Initialization, gathers and
// checkpoints walk these runs.
void for_each_run(const ParamSpec& spec, int tp, int index,
                  const std::function<void(std::int64_t logical_begin, std::int64_t local_begin,
                                           std::int64_t count)>& visit);

// A run of elements that are contiguous in the logical tensor.
struct LogicalRun {
  std::int64_t begin = 0;  // index of the first one in the logical tensor
  std::int64_t count = 0;
};

// The logical runs of elements [part.begin, part.end) of what rank `index` of `tp` holds, in local order.
std::vector<LogicalRun> logical_runs(const ParamSpec& spec, int tp, int index, Range part);

}  // namespace echelon

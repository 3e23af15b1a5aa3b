// A block of the model as data: a list of ops over the named values of one microbatch, in the order in which
// they run. A block is a transformer layer, the embedding or the output layer. What a block consists of is
// stated here only. Each reader walks this list: parameters (model_spec.h), what is kept and what is
// recomputed (block_passes.h), execution (model/block_runner.h), FLOPs and seconds (plan/layer_seconds.h),
// drawings (draw/block.h).
#pragma once

#include <array>
#include <string>
#include <vector>

#include "spec/activation.h"
#include "spec/choices.h"
#include "spec/param_spec.h"

namespace echelon {

struct ModelSpec;

// How a value is placed over the tp group, and so which of its rows and columns this rank holds (layout.h).
enum class Home {
  residual,     // like the residual stream: I, or S(0) under sequence parallelism
  whole,        // R: all rows, all columns
  cut,          // S(1): all rows, the columns of this rank's heads or hidden units
  partial_sum,  // P: all rows, all columns; the sum over the ranks is the value
  experts,      // copies of tokens, sorted by expert, on the ranks that hold the experts
  same,         // I: the same on every rank
};

// When the backward pass recomputes a value that it reads, instead of finding it saved.
enum class Again {
  asked,          // if the plan asks to recompute its op (recompute.h)
  always,         // always: recomputing costs less than saving
  with_backward,  // always, and free: the backward pass of its own op produces it beside the gradient
  with_input,     // if its op's first input is recomputed: it overwrites that input's memory
};

struct BlockValue {
  std::string name;
  Home home = Home::residual;
  std::int64_t width = 0;  // columns over all tp ranks together
  Again again = Again::asked;
};

// A function of BlockBuilder appends each kind; a file in src/model/ runs it.
enum class OpKind {
  embedding,  // tokens -> rows of a table
  positions,  // x + rows of a table of positions
  norm,       // x -> y, statistics. LayerNorm if `centered`, else RMSNorm; over whole rows or over each head
  linear,     // x -> x W (+ b): column-parallel (whole -> cut), row-parallel (cut -> partial sum), or W whole
  rope,       // [q | k | v] -> the same with rotary positions
  attention,  // [q | k | v] -> the operands of the core, its output, its log-sum-exp. Weights: sinks
  latent,     // compressed forms (, q) -> [q | k | v], with v as wide as k (DeepSeek-V2)
  narrow,     // heads -> the first columns of each head
  // [z | x | B | C | dt] -> those that this rank scans, and the state space's output for x times SiLU(z)
  // (Mamba-2). Weights: of the convolutions of x, B and C. Biases: those of these three, if any, then of dt,
  // log A, D. With the gated delta rule the input is [z | values | keys | queries | dt | beta], and the
  // weight of a per-head norm stands in place of D.
  state_space,
  // [B | C | x] -> those that this rank convolves, and C times a causal depthwise convolution of B x over a
  // few positions (LFM2). Weight: the convolution's.
  short_conv,
  scale,  // x -> x with the columns that certain weights produce multiplied by a factor (BlockOp::scaled)
  gate,   // x, g -> x sigmoid(g)
  join,   // x, y -> [x | y]
  activation,   // h -> h, activation(h) (activation.h)
  residual,     // x, y -> x + y (+ b)
  sum,          // x -> its sum over the ranks times a number
  experts_in,   // x (, y) -> hidden values of the experts that x routes to; with y, they get y's rows
  experts_out,  // those hidden values -> the weighted sum of the experts' outputs
  loss,         // x -> the summed cross-entropy of the logits
};
template <>
inline constexpr std::array choice_names<OpKind>{
    "embedding", "positions",   "norm",       "linear",      "rope", "attention", "latent",
    "narrow",    "state_space", "short_conv", "scale",       "gate", "join",      "activation",
    "residual",  "sum",         "experts_in", "experts_out", "loss"};

enum class WeightOrder { in_out, out_in };  // how a matrix is stored: (in, out) in GPT-2, (out, in) in Llama

// A LoRA adapter of one matrix of a linear op (fine_tuning.h).
struct Adapter {
  std::size_t weight = 0;  // index into the op's weights
  ParamSpec a, b;          // (rank, in), (out, rank)
};

// The columns of a value that one weight produces, and the factor that they are multiplied by.
struct ScaledColumns {
  ParamSpec made_by;
  double factor = 1;
};

struct BlockOp {
  OpKind kind = OpKind::norm;
  std::string name;                  // within the block: "attention_in"
  std::vector<int> inputs, outputs;  // indices into BlockProgram::values
  std::vector<int> backward_reads;   // which of these the backward pass reads
  // For each input, the placement in which the op takes it. If the value has another one, a collective
  // converts it, and another converts the gradient back (the conjugate table, layout.h).
  std::vector<Home> wants;
  std::vector<ParamSpec> weights, biases;  // of a linear op: side by side, as one matrix
  bool tied = false;                       // an op of another block declares the weights, but not the biases
  WeightOrder order = WeightOrder::out_in;
  // of a linear op, whose last output is then x A^T, what their first factors produce
  std::vector<Adapter> adapters;
  double adapter_scale = 1;
  std::vector<ScaledColumns> scaled;  // of `scale`: in the order of the columns
  Activation activation = Activation::gelu;
  double scale = 1;  // multiplies an embedding's rows, a sum, or a loss
  // Shifted by one token: an embedding looks up each row's next token, and a loss predicts the token after
  // that.
  bool next = false;
  // Of a loss: its backward pass runs inside that of the next-token loss (join_losses).
  bool joined = false;
  bool centered = false;  // of a norm: subtracts the mean (LayerNorm)
  bool windowed = false;  // of attention: this layer has the model's window
  // Of `positions`: the table's row for position 0.
  std::int64_t first_position = 0;
  // Of a per-head norm: how many consecutive heads each weight normalises, from the first column on; without
  // weights, how many heads of each kind. Of a weight that is cut over tp, each head has its own part.
  std::vector<std::int64_t> heads;
};

// Which ops can run in a matrix product's epilogue (Epilogue) instead of in a pass over memory of their own.
// Forward: an activation without a gate, or the addition to the residual stream, after the linear op
// `product`. Backward: the gradient of such an activation, after the product that computes the gradient of
// the input of the linear op `product`.
bool takes_product(const BlockOp& next, const BlockOp& product);
bool gives_input(const BlockOp& activation, const BlockOp& product);

struct BlockProgram {
  std::vector<BlockValue> values;
  std::vector<BlockOp> ops;
  int input = -1, output = -1;  // indices into `values`; the embedding has no input

  std::vector<ParamSpec> parameters() const;
  const BlockValue& value(int number) const { return values[static_cast<std::size_t>(number)]; }
  // Index of the op that produces a value; -1 if it comes from outside.
  int producer(int value) const;
  Home output_home() const;                // the placement in which the output leaves the block
  const BlockOp* find(OpKind kind) const;  // the first one, or nullptr
  // Whether the backward pass may read the values of weights. It does not in a block that only adds up rows
  // of tables: a norm after them either has weights or is recomputed from the table.
  bool reads_values_backward() const { return input >= 0 || find(OpKind::norm) != nullptr; }
  // Whether the backward pass runs the whole block: logits exist only for a moment.
  bool ends_in_loss() const { return find(OpKind::loss) != nullptr; }
};

// A matrix with a LoRA adapter. Merging adds scale * B A to it.
struct AdaptedMatrix {
  ParamSpec weight, a, b;
  WeightOrder order = WeightOrder::out_in;
  double scale = 1;
};
std::vector<AdaptedMatrix> adapted_matrices(const ModelSpec& model);

// The blocks of a model, as its family builds them (family_*.cpp).
BlockProgram embedding_program(const ModelSpec& model);
BlockProgram layer_program(const ModelSpec& model, std::int64_t layer);
BlockProgram head_program(const ModelSpec& model);
// The head without its output layer, which under vocabulary parallelism all pipeline ranks share.
BlockProgram final_norm_program(const ModelSpec& model);

// In a head with multi-token prediction, the backward pass of the second loss takes over that of the first:
// it reads the first one's input after its own. A microbatch then adds both gradients to the output matrix at
// once.
void join_losses(BlockProgram& program);

}  // namespace echelon

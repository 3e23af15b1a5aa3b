// A part of a model as data: ops over named values of a microbatch, in order. A transformer layer, the
// embedding, the output layer. What is told here is told nowhere else; its readers make one pass over the
// list each: the parameters (model_spec.h), what is kept and what is made again (block_passes.h), the run
// (model/block_runner.h), FLOPs and seconds (plan/layer_seconds.h), the drawing (draw/block.h).
#pragma once

#include <array>
#include <string>
#include <vector>

#include "spec/activation.h"
#include "spec/choices.h"
#include "spec/param_spec.h"

namespace echelon {

struct ModelSpec;

// Where a value lies along tp, and with it which rows and columns of it are here.
enum class Home {
  residual,     // as the residual stream: I, or S(0) under sequence parallelism
  whole,        // R: all rows, all columns
  cut,          // S(1): all rows, the columns of this rank's heads or hidden units
  partial_sum,  // P: all rows, all columns, and the sum over the ranks is the value
  experts,      // with the experts: copies of tokens, sorted
  same,         // I: one thing, known to every rank
};

// When the backward pass makes a value that it reads instead of finding it kept.
enum class Again {
  asked,          // where a plan wants its op made again (recompute.h)
  always,         // it costs less to make than to keep
  with_backward,  // always: its op's own backward pass makes it, beside the gradient
  with_input,     // where the op's first input is, which it is of the memory of
};

struct BlockValue {
  std::string name;
  Home home = Home::residual;
  std::int64_t width = 0;  // columns, all of them
  Again again = Again::asked;
};

// Each is written down by a function of BlockBuilder, and run by a file in src/model/.
enum class OpKind {
  embedding,    // tokens -> rows of a table
  positions,    // x + rows of a table of positions
  norm,         // x -> y, stats. LayerNorm where it is centered, or RMSNorm; of rows, or of heads
  linear,       // x -> x W (+ b). By columns (whole -> cut), by rows (cut -> partial sum), or W whole
  rope,         // [q | k | v] -> the same, turned by position
  attention,    // [q | k | v] -> what attention computes with, its output, its log-sum-exp; weights: sinks
  latent,       // compressed forms (, q) -> [q | k | v], values as wide as keys (DeepSeek-V2)
  narrow,       // heads -> the first columns of each
  state_space,  // [z | x | B | C | dt] -> those that are scanned here, and what a state space makes of x,
                // times SiLU(z) (Mamba-2). Weights: of the convolution of x, of B and of C; biases: the same
                // three where it has them, then dt's, A's logarithm, D. By the gated delta rule [z | values |
                // keys | queries | dt | beta], and in place of D the weight of a norm of each head
  short_conv,   // [B | C | x] -> those that are convolved here, and C times a causal convolution of B x, each
                // channel by itself over a few positions (LFM2). Weight: the convolution's
  scale,        // x -> x, the columns that some weights make each times a number (BlockOp::scaled)
  gate,         // x, g -> x times the sigmoid of g
  join,         // x, y -> [x | y]
  activation,   // h -> h, its activation (activation.h)
  residual,     // x, y -> x + y (+ b)
  sum,          // x -> the sum over the ranks, times a number
  experts_in,   // x -> the hidden values of the experts that its tokens are routed to. x, y: of y's rows
  experts_out,  // these -> their sum
  loss,         // x -> the summed loss of its logits
};
template <>
inline constexpr std::array choice_names<OpKind>{
    "embedding", "positions",   "norm",       "linear",      "rope", "attention", "latent",
    "narrow",    "state_space", "short_conv", "scale",       "gate", "join",      "activation",
    "residual",  "sum",         "experts_in", "experts_out", "loss"};

enum class WeightOrder { in_out, out_in };  // how a matrix is stored: GPT-2's (in, out), Llama's (out, in)

// A low-rank adaptation of one of a linear op's matrices (fine_tuning.h).
struct Adapter {
  std::size_t weight = 0;  // which one
  ParamSpec a, b;          // (rank, in), (out, rank)
};

// Columns of a value that a weight makes, and what they are multiplied by.
struct ScaledColumns {
  ParamSpec made_by;
  double factor = 1;
};

struct BlockOp {
  OpKind kind = OpKind::norm;
  std::string name;                  // within the block: "attention_in"
  std::vector<int> inputs, outputs;  // values
  std::vector<int> backward_reads;   // those of them that the backward pass reads
  // Of each input the home that it is taken in: where its own is another one, a collective brings it there,
  // and its gradient back (the conjugate table, layout.h).
  std::vector<Home> wants;
  std::vector<ParamSpec> weights, biases;  // of a linear op side by side: one matrix
  bool tied = false;                       // the weights are declared by an op of another block
  WeightOrder order = WeightOrder::out_in;
  std::vector<Adapter> adapters;  // of a linear op; its last output is then what their first factors make
  double adapter_scale = 1;
  std::vector<ScaledColumns> scaled;  // of a scale: side by side
  Activation activation = Activation::gelu;
  double scale = 1;   // of a row of the embedding, of what a sum adds up to, of a loss
  bool next = false;  // of a row's next token: the embedding is its, and the loss that of the one behind it
  bool joined = false;    // of a loss: its backward pass is in that of the next token's (join_losses)
  bool centered = false;  // of a norm: by the mean too
  bool windowed = false;  // of attention: the model's window is this layer's
  std::int64_t first_position = 0;  // of positions: the row of the table that position 0 has
  // Of a norm of heads: how many each weight is for, from the first column on, or of each kind where there
  // are no weights; of a weight that tp cuts each has a part of its own.
  std::vector<std::int64_t> heads;
};

// What can be of the pass over memory that makes a product (Epilogue): of what a linear op makes, an
// activation without a gate, and the residual stream that it is added to; and backward the gradient of such
// an activation, of the product that makes that of what it gave a linear op.
bool takes_product(const BlockOp& next, const BlockOp& product);
bool gives_input(const BlockOp& activation, const BlockOp& product);

struct BlockProgram {
  std::vector<BlockValue> values;
  std::vector<BlockOp> ops;
  int input = -1, output = -1;  // values; no input before the embedding

  std::vector<ParamSpec> parameters() const;
  const BlockValue& value(int number) const { return values[static_cast<std::size_t>(number)]; }
  // The op that makes a value; -1: it comes from outside.
  int producer(int value) const;
  Home output_home() const;                // in which the output is handed on
  const BlockOp* find(OpKind kind) const;  // the first one, or nullptr
  // Whether its backward pass may read weights: not where it adds up rows of tables alone. A norm behind them
  // has weights, or is made again of the table.
  bool reads_values_backward() const { return input >= 0 || find(OpKind::norm) != nullptr; }
  // Whether it is run as a whole in its backward pass: logits are there for a moment only.
  bool ends_in_loss() const { return find(OpKind::loss) != nullptr; }
};

// A matrix that has an adapter; the product of its factors times the scale can be added to it.
struct AdaptedMatrix {
  ParamSpec weight, a, b;
  WeightOrder order = WeightOrder::out_in;
  double scale = 1;
};
std::vector<AdaptedMatrix> adapted_matrices(const ModelSpec& model);

// The parts of a model, by its family (family_*.cpp).
BlockProgram embedding_program(const ModelSpec& model);
BlockProgram layer_program(const ModelSpec& model, std::int64_t layer);
BlockProgram head_program(const ModelSpec& model);
// The head without its output layer, where the pipeline's ranks have that together.
BlockProgram final_norm_program(const ModelSpec& model);

// Where a head predicts one more token the backward pass of that loss becomes that of both: it reads what the
// first one does behind its own input. Of a microbatch the output matrix then has its gradients at once.
void join_losses(BlockProgram& program);

}  // namespace echelon

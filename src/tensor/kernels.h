// The math of one rank on one device: what layers call. Each call is checked here, whichever backend computes
// it (kernel_backend.h): a wrong shape or dtype, or a missing tensor, is an InvariantError that names the
// kernel and its tensors.
//
// Every float tensor of a call has the same dtype, f32 or f64; or the call is in bf16: then activations,
// their gradients and weights are bf16, and "wide" tensors are f32: statistics (of norms and of softmaxes:
// stats, lse, delta, max, sum), logits of tokens and of routers, gradients of weights, and the weights of
// rows. All arithmetic and all sums are then in f32, and each element of a bf16 output is rounded once, when
// it is stored; a call that adds to an earlier result rounds once more. CPU kernels take numbers below 2^-126
// for 0 (flush_subnormals.h).
//
// Shapes: rows N = B*T (tokens of a microbatch in (B, T) order), columns as named. "+=" means accumulates
// into the output. The caller allocates outputs.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/alibi.h"
#include "base/fp8.h"
#include "base/philox.h"
#include "base/split.h"
#include "spec/activation.h"
#include "spec/compression.h"
#include "spec/fp8.h"
#include "spec/numerics.h"
#include "spec/param_spec.h"
#include "spec/precision.h"
#include "spec/rope.h"
#include "spec/token_router.h"
#include "tensor/causal.h"
#include "tensor/tensor.h"

namespace echelon {

enum class Transpose : bool { no, yes };

// Causal attention of H query heads over H_kv key/value heads (H % H_kv == 0; query head h reads kv head h /
// (H/H_kv)). q is (B*Tq, H*D), k and v are (B*Tk, Hkv*D), each possibly a column range of a wider matrix.
// Query t of a sequence is at position q_offset + t q_step, key j at j k_step; a query sees the keys up to
// its own position. The offset may be negative: a query that sees no key has out = 0 and lse = -inf.
//
// Keys may come in blocks, one call for each (Liu 2023, Ring Attention). With `accumulate`, out and lse hold
// the results for earlier keys and become those for all keys together, and gradients are added to.
struct AttentionShape {
  std::int64_t batch = 1, q_len = 0, kv_len = 0;
  std::int64_t num_heads = 1, num_kv_heads = 1, head_dim = 0;
  std::int64_t q_offset = 0;
  std::int64_t q_step = 1, k_step = 1;  // R if both are every R-th token
  // Rows between the first keys of two sequences of the batch; 0: kv_len. (A key/value cache has more.)
  std::int64_t kv_batch_stride = 0;
  double scale = 1.0;  // multiplies q.k before the softmax
  // Soft cap: scores s become cap tanh(s / cap) (Gemma 2, https://arxiv.org/abs/2408.00118); 0: none.
  double cap = 0;
  Alibi alibi = {};  // not beside a cap
  bool accumulate = false;
  // (B*Tq, i32): the first key that each query sees; with packed documents, the first key of its own.
  // Undefined: key 0.
  Tensor first_keys = {};

  // One past the last key that query t sees.
  std::int64_t end_key(std::int64_t t) const { return causal_keys(q_offset + t * q_step, k_step, kv_len); }
  // Positions from query t back to key j.
  std::int64_t distance(std::int64_t t, std::int64_t j) const { return q_offset + t * q_step - j * k_step; }
};

// Consecutive sequences of `length` rows. first_positions (N, i32): where each row's document begins in its
// sequence; undefined: at 0.
struct SequenceRows {
  std::int64_t batch = 1, length = 0;
  Tensor first_positions = {};
};

// H heads of P channels; each channel has a state of N numbers (Dao & Gu 2024,
// https://arxiv.org/abs/2405.21060). A group of H/G heads shares B and C. `chunk`: positions of a chunk of
// the scan; it changes results only by rounding. `delta`: the gated delta rule (Yang et al. 2024,
// https://arxiv.org/abs/2412.06464), with x as values, B as keys and C as queries.
struct StateSpaceShape {
  SequenceRows rows = {};
  std::int64_t heads = 1, head_dim = 0, groups = 1, state = 0;
  std::int64_t chunk = 64;
  bool delta = false;
  double norm_eps = 0;  // of the delta rule's norm

  std::int64_t width() const { return heads * head_dim; }
  std::int64_t mixed_width() const { return width() + 2 * groups * state; }  // [x | B | C]
  std::int64_t chunk_rows() const { return chunk < rows.length ? chunk : rows.length; }
  std::int64_t chunks() const { return rows.length == 0 ? 0 : (rows.length + chunk - 1) / chunk; }
  // Columns of each row's contribution to the gradients of dt_bias, a_log, and d or the norm's weight.
  std::int64_t terms() const { return 2 * heads + (delta ? head_dim : heads); }
  // Size of the kernels' work space, in wide elements.
  std::int64_t workspace(bool backward) const;
};
struct StateSpaceTensors {
  // z (N, H P). xbc (N, mixed_width(), wide), the output of convolve(), of which the delta rule normalises
  // keys and queries to length 1. dt (N, H), before softplus.
  Tensor z, xbc, dt;
  Tensor dt_bias, a_log;  // (H)
  Tensor d;               // (H); with the delta rule the norm's weight (P)
  Tensor beta = {};       // (N, H), before the sigmoid; only with the delta rule
};
// xbc is wide; terms is (N, terms(), wide).
struct StateSpaceGradients {
  Tensor z, xbc, dt, terms, beta = {};
};

// How to update weights that exist only in bf16: with stochastic rounding, since rounding to nearest would
// lose updates below half a unit. The direction depends only on the parameter, the step and the logical
// element, and so not on the mesh. The mean of squares is rounded the same way: to nearest it would stop
// falling if beta2 is 0.998 or more.
struct StochasticRounding {
  Philox random;                     // weight_rounding(): word i is for logical element i
  std::span<const LogicalRun> runs;  // the logical elements of p, in order (logical_runs)
};
// For one step of one parameter.
Philox weight_rounding(std::uint64_t seed, const std::string& parameter, std::int64_t step);

struct AdamWStep {
  double lr = 0, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0;
  std::int64_t step = 1;                         // 1 for the first: bias corrections are 1 - beta^step
  double gradient_scale = 1;                     // for clipping: the gradient used is gradient_scale * g
  const StochasticRounding* rounding = nullptr;  // required if p is bf16 without a remainder, else unused
};

// Nesterov's momentum, with `gradient_scale` as above: m = momentum m + g, and the update is g + momentum m.
struct MomentumStep {
  double momentum = 0, gradient_scale = 1;
};
// p = (1 - lr weight_decay) p - lr scale update.
struct WeightStep {
  double lr = 0, weight_decay = 0, scale = 1;
  const StochasticRounding* rounding = nullptr;  // as in AdamWStep
};

// The arguments of adamw() for one of several parameters.
struct AdamWUpdate {
  Tensor p, g, m, v, remainder;
  AdamWStep step;
};
// The arguments of sum_squares() or sum_in_order() for one of several tensors.
struct SumsOf {
  Tensor x, sums;
};

class ThreadTeam;

// How many choices each expert may keep of a scope, which is a run of rows of a microbatch.
struct ExpertCapacity {
  std::int64_t scopes = 1, experts = 0, each = 0;
  DropPolicy policy = DropPolicy::probability;
};

// The soft cap that was applied to logits before their maximum was computed; 0: none.
struct LogitsCap {
  double cap = 0;
  Tensor max = {};  // (N): the maxima used to compute p
};

// How the sum of a product is grouped: indices of k in blocks; each block is one or more ranges that are
// added one after another, and blocks are added by the tree of base/halving_tree.h. Empty: all of k is one
// block.
using SumBlocks = std::vector<std::vector<Range>>;
// Equal blocks; their number must divide k.
SumBlocks equal_blocks(std::int64_t k, std::int64_t blocks);

// A product, with the arguments of Kernels::matmul.
struct MatrixProduct {
  Tensor a;
  Transpose ta = Transpose::no;
  Tensor b;
  Transpose tb = Transpose::no;
  Tensor c;
  bool accumulate = false;
  SumBlocks blocks = {};
};

// What follows a product: in the same pass over memory if the backend can, otherwise in separate passes. In
// bf16, c is then rounded once, or before each of these; what is computed from c uses c as stored, or as it
// was before.
struct Epilogue {
  Tensor bias = {};   // (N): added to each row
  Tensor added = {};  // (M, N): added too, if nothing but a bias follows
  Activation activation = Activation::gelu;
  // (M, N) = the activation of c, with its bias.
  Tensor activated = {};
  // (M, N), the input of an activation, if c is the gradient of its output: as in activate_backward(), c
  // becomes the gradient of `hidden`, and `hidden` the activation's output.
  Tensor hidden = {};
  // (wide) += the column sums of op(a)^T or, with `sums_of_b`, of b: if the product is the gradient of a
  // weight, this is that of its bias.
  Tensor column_sums = {};
  bool sums_of_b = false;

  bool is_any() const {
    return bias.defined() || added.defined() || activated.defined() || hidden.defined() ||
           column_sums.defined();
  }
};

// A product whose bf16 operands are rounded to fp8, each with its own scale (base/fp8.h): c is the product of
// the rounded operands. `room_a` and `room_b`, shaped like a and b, are work space for these. There are no
// blocks.
struct Fp8Product {
  MatrixProduct product;
  OperandFormats formats;
  Tensor room_a, room_b;
};

// A sum of numbers from 0 to 1, in units of 2^-32 and 2^-64.
struct ExactSum {
  std::uint64_t high = 0, low = 0;
};

class KernelBackend;

class Kernels {
 public:
  // Without a backend nothing is computed: every call is checked and returns at once, and all_finite() is
  // true. `scratch`: memory that a backend would have taken.
  explicit Kernels(std::shared_ptr<KernelBackend> backend, Tensor scratch = {})
      : backend_(std::move(backend)), scratch_(std::move(scratch)) {}

  // The rank's compute threads on the host, for other work; only the calling thread if kernels do not run on
  // the host. Needs a backend.
  const ThreadTeam& team() const;

  // c = op(a) op(b), or c += with `accumulate`. op(a) is (M, K), op(b) is (K, N), c is (M, N). Row strides
  // allowed. Each of a, b and c may be bf16 while others are f32: gradients of weights, and logits, are f32.
  // Each element is rounded to c's dtype once, whatever the blocks.
  void matmul(const Tensor& a, Transpose ta, const Tensor& b, Transpose tb, Out c, bool accumulate,
              const SumBlocks& blocks = {});
  // The same with an epilogue; after a product that is added to c, only column sums may follow.
  void matmul(const MatrixProduct& product, const Epilogue& epilogue);
  // Runs the epilogue alone, on a finished product.
  void finish(const MatrixProduct& product, const Epilogue& epilogue);
  // Several products of any shapes, empty ones too, none of which reads what another writes, such as those of
  // a mixture's experts. On the host, and on any device under invariant numerics, each has the bits of
  // matmul().
  void grouped_matmul(std::span<const MatrixProduct> products);
  // As grouped_matmul().
  void fp8_matmul(std::span<const Fp8Product> products);
  // y = x (both bf16), rounded to fp8 with its own scale and scaled back: the operands of products in fp8.
  void round_to_fp8(const Tensor& x, Fp8 format, Out y);

  void fill(Out x, double value);
  // copy and add: same rows and cols; row strides allowed on both. One may be bf16 and the other f32; copy
  // also takes i16.
  void copy(const Tensor& from, Out to);
  void add(const Tensor& x, InOut y);  // y += x
  void scale(InOut x, double factor);
  // x is contiguous. sums (f64) has an element for each block of `block` elements of x, the last of which may
  // be shorter: the sum of squares in double precision, the same on any number of threads.
  void sum_squares(const Tensor& x, std::int64_t block, Out sums);
  void sum_squares_of_all(std::span<const SumsOf> all, std::int64_t block);
  // The same sums of x itself, which is f64, element by element in order.
  void sum_in_order(const Tensor& x, std::int64_t block, Out sums);
  void sum_in_order_of_all(std::span<const SumsOf> all, std::int64_t block);
  bool all_finite(const Tensor& x);
  // The largest |x|; NaN if any element is NaN.
  double largest(const Tensor& x);
  // The exact sum of the squares of x times `scale`, a power of two with which none exceeds 1; each square is
  // truncated only at 2^-64. The result does not depend on how elements are spread over tensors. At most 2^31
  // elements.
  ExactSum sum_squares_exactly(const Tensor& x, double scale);

  // y (N, C) += bias (C), on every row.
  void add_bias(const Tensor& bias, InOut y);
  // out = x + y + bias (C; may be undefined: none). out may be x or y.
  void residual(const Tensor& x, const Tensor& y, const Tensor& bias, Out out);
  // dbias (C, wide) += column sums of dy (N, C).
  void bias_gradient(const Tensor& dy, InOut dbias);

  // LayerNorm (Ba 2016): y = (x - mean) rstd w + b. stats (N, 2, wide) = mean, rstd of each row, kept
  // for the backward pass. Without w (undefined) ones stand for it, without b zeros; no b without w.
  void layer_norm(const Tensor& x, const Tensor& w, const Tensor& b, double eps, Out y, Out stats);
  // The same y again from saved stats.
  void layer_norm_again(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& stats, Out y);
  // dx, dw and db (wide) += (dx already holds the residual branch's gradient).
  void layer_norm_backward_input(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& stats,
                                 InOut dx);
  void layer_norm_backward_weight(const Tensor& dy, const Tensor& x, const Tensor& stats, InOut dw, InOut db);

  // RMSNorm (Zhang & Sennrich 2019): y = x rstd w. stats (N, 1, wide) = rstd. dx and dw += as above; without
  // w ones stand for it.
  void rms_norm(const Tensor& x, const Tensor& w, double eps, Out y, Out stats);
  void rms_norm_again(const Tensor& x, const Tensor& w, const Tensor& stats, Out y);
  void rms_norm_backward_input(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& stats,
                               InOut dx);
  void rms_norm_backward_weight(const Tensor& dy, const Tensor& x, const Tensor& stats, InOut dw);

  // RMSNorm of rows whose columns are cut over ranks: x has some of `columns`, and the caller sums over the
  // ranks what each has of a row's sums.
  // squares (N, wide) = sums of squares of each row of x.
  void row_squares(const Tensor& x, Out squares);
  // stats: on entry the squares of whole rows, on exit rstd.
  void rms_norm_of_squares(const Tensor& x, const Tensor& w, double eps, double columns, Out y, InOut stats);
  // sums (N, wide) = sums of dy w x rstd over each row of x; after summing over ranks they are the input of
  // dx +=.
  void rms_norm_backward_sums(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& stats,
                              Out sums);
  void rms_norm_backward_input_of_sums(const Tensor& dy, const Tensor& x, const Tensor& w,
                                       const Tensor& stats, const Tensor& sums, double columns, InOut dx);

  // An activation a without a gate. h += bias (when defined), y = a(h). y may be h when the biased h is not
  // needed again.
  void activate(Activation a, InOut h, const Tensor& bias, Out y);
  // In place, for the backward pass: on entry h (biased) and dy; on exit h holds y = a(h) and dy holds dh.
  void activate_backward(Activation a, InOut h, InOut dy);

  // xIELU (activation.h) with alphas (2) = [alpha_p | alpha_n]. Backward, in place: on entry h and dy; on
  // exit h holds y, dy holds dh, and dalphas (N, 2, wide) each row's contribution to the gradients of alphas.
  void xielu(const Tensor& h, const Tensor& alphas, Out y);
  void xielu_backward(InOut h, const Tensor& alphas, InOut dy, Out dalphas);

  // An activation with a gate: gate_up (N, 2F) = [gate | up], y (N, F) = a(gate) * up. `clamp` is for
  // clamped_swiglu.
  void gated(Activation a, const Tensor& gate_up, Out y, const SwigluClamp& clamp = {});
  // In place: on entry gate_up and dy (N, F); on exit gate_up holds its gradient and dy holds y.
  void gated_backward(Activation a, InOut gate_up, InOut dy, const SwigluClamp& clamp = {});
  // y = x times the sigmoid of gate, of one shape. Backward, in place: on exit gate and dy hold the gradients
  // of gate and of x, and y is as before.
  void sigmoid_gate(const Tensor& x, const Tensor& gate, Out y);
  void sigmoid_gate_backward(const Tensor& x, InOut gate, InOut dy, Out y);
  // For experts (swiglu, clamped_swiglu, or relu2, whose hidden (N, F) has no gate), where y was multiplied
  // row by row by weights (N, 1, wide): dy is the gradient of the weighted y. On exit dy holds the weighted
  // y, and dweights (N, 1, wide) the gradient of the weights.
  void weighted_activation_backward(Activation a, InOut gate_up, InOut dy, const Tensor& weights,
                                    Out dweights, const SwigluClamp& clamp = {});

  // RoPE (Su 2021), the half-split form of Llama: x (N, heads*D), row stride allowed. With P pairs, element i
  // of a head is paired with i + P, and elements after the pairs are unchanged, but for turns.growth, by
  // which whole heads grow. positions (N, i32): of each row. inverse = the backward pass.
  void rope(InOut x, std::int64_t head_dim, const Tensor& positions, const RopeTurns& turns, bool inverse);

  // out (B*Tq, H*D); lse (B*H*Tq, wide): natural log of the sum of exponentials of each row. No T x T matrix
  // is stored.
  void attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape, Out out,
                 Out lse);
  // delta (B*H*Tq, wide) = out . dout, head by head: all that the backward pass needs of out, the same for
  // every block of keys (FlashAttention, Dao 2022, appendix B).
  void attention_delta(const Tensor& out, const Tensor& dout, const AttentionShape& shape, Out delta);
  // lse and delta are of all keys, of which this call may have only some. dq, dk, dv are overwritten, or
  // added to with `accumulate`, and must not alias dout. dq, or dk and dv, may be undefined: only the
  // products that the others need are then computed.
  void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout,
                          const Tensor& lse, const Tensor& delta, const AttentionShape& shape, Out dq, Out dk,
                          Out dv);

  // Attention sinks (gpt-oss, https://arxiv.org/abs/2508.10925): each head has one more key, which every
  // query sees, with a score from sinks (H) and the value 0. On entry out and lse are of all keys; on exit
  // they include the sinks, as the backward pass of attention needs them.
  void attention_sink(const Tensor& sinks, const AttentionShape& shape, InOut out, InOut lse);
  // dsinks (H, wide) +=. lse includes the sinks, and delta is that of the output with sinks.
  void attention_sink_backward(const Tensor& sinks, const Tensor& lse, const Tensor& delta,
                               const AttentionShape& shape, InOut dsinks);

  // y (N, C, wide) = SiLU of a causal depthwise convolution of x within documents: w (C, K) holds the weights
  // of the K - 1 rows before and of the row itself; bias (C) or undefined.
  void convolve(const Tensor& x, const Tensor& w, const Tensor& bias, const SequenceRows& rows, Out y);
  // dy becomes the gradient of SiLU's input, whose column sums are the bias's gradient.
  void convolve_backward(const Tensor& x, const Tensor& w, const Tensor& bias, const SequenceRows& rows,
                         InOut dy, Out dx);
  // dw (C, K, wide) +=; dy as left by convolve_backward().
  void convolve_backward_weight(const Tensor& x, const Tensor& dy, const SequenceRows& rows, InOut dw);

  // bcx (N, 3 C) = [B | C | x]; y (N, C) = C times a causal depthwise convolution of B x with w (C, K), as in
  // convolve() (tensor/rows/short_convolution.h).
  void short_convolution(const Tensor& bcx, const Tensor& w, const SequenceRows& rows, Out y);
  // dbcx from dy, and y once more; neither may alias an input.
  void short_convolution_backward(const Tensor& bcx, const Tensor& w, const Tensor& dy,
                                  const SequenceRows& rows, Out dbcx, Out y);
  // dw (C, K, wide) += .
  void short_convolution_backward_weight(const Tensor& bcx, const Tensor& dy, const SequenceRows& rows,
                                         InOut dw);

  // y (N, H P) = the scan of a state space (tensor/state_space_scan.h) times SiLU(z); with the delta rule,
  // each head passes an RMSNorm before that. `state` (H P, N, wide), for a single sequence: the state before
  // its first row, which becomes the one after its last; undefined: starts from zeros. workspace (wide) has
  // the size that the shape says.
  void state_space(const StateSpaceTensors& in, const StateSpaceShape& shape, const Tensor& workspace,
                   InOut state, Out y);
  void state_space_backward(const StateSpaceTensors& in, const StateSpaceShape& shape, const Tensor& dy,
                            const Tensor& workspace, const StateSpaceGradients& out);

  // y (N, C) = rows of table (V_local, C) for ids (N, i32) in [first_id, first_id + V_local), zero for other
  // ids.
  void embedding(const Tensor& ids, const Tensor& table, std::int64_t first_id, Out y);
  // dtable (wide) += ; rows whose ids lie elsewhere are skipped. Added in row order.
  void embedding_backward(const Tensor& ids, const Tensor& dy, std::int64_t first_id, InOut dtable);

  // first (N, i32) = index of the first key of a block that each query sees. starts (N, i32): the position at
  // which the query's document begins. Key i < count of the block is at first_position + i * stride. `count`
  // if it sees none.
  void first_keys(const Tensor& starts, std::int64_t first_position, std::int64_t stride, std::int64_t count,
                  Out first);

  // y (N, C) = sum over j of weights[n, j] * x[places[n, j]]. places (N, k, i32) are rows of x (M, C),
  // negative for none; weights (N, k, wide), undefined for ones. Summed in order of j, whatever the threads.
  void combine_rows(const Tensor& x, const Tensor& places, const Tensor& weights, Out y);

  // x (wide) becomes cap tanh(x / cap).
  void soft_cap(InOut x, double cap);

  // Cross-entropy over vocabulary columns [first_id, first_id + V_local), in steps, so that only N-sized
  // vectors need to travel between ranks. Everything is wide except dlogits. Targets (N, i32) below zero are
  // ignored. Step 1: max (N) = row maxima of logits (N, V_local).
  void row_max(const Tensor& logits, Out max);
  // Step 2: logits become exp(logits - max); sum (N) = their row sums; target (N) = logit - max at the
  // target, 0 if the target is ignored or on another rank.
  void exp_sum(InOut logits, const Tensor& max, const Tensor& targets, std::int64_t first_id, Out sum,
               Out target);
  // Step 3: from p = exp(logits - max) of step 2 and the *global* sum (N) for the same max, dlogits (N,
  // V_local) = loss_scale * (p / sum - [column is target]), the gradient of the loss; zero for ignored rows.
  // dlogits may be p, unless it is bf16. With a cap it is the gradient of soft_cap()'s input, which can be
  // recovered from p and max as long as exp(-2 cap) is no subnormal.
  void cross_entropy_backward(const Tensor& p, const Tensor& sum, const Tensor& targets,
                              std::int64_t first_id, double loss_scale, Out dlogits,
                              const LogitsCap& cap = {});
  // All three steps at once, row by row, if all columns are here: max, sum and target (N) as in steps 1 and
  // 2, dlogits as in step 3, with a cap of `cap` (0: none). The logits are destroyed.
  void cross_entropy(InOut logits, const Tensor& targets, double loss_scale, double cap, Out max, Out sum,
                     Out target, Out dlogits);

  // loss (1, f64) += the sum of log(sum) - target over targets (N, i32) that are not ignored, in row order
  // and double precision, and summed separately before it is added. sum and target (N each): from exp_sum(),
  // over all ranks.
  void add_losses(const Tensor& sum, const Tensor& target, const Tensor& targets, InOut loss);
  // Merges a softmax whose columns are cut into parts. parts (P, 3, N): what row_max() and exp_sum() computed
  // for each (maxima, sums, targets' logits); part r has columns [bounds[r], bounds[r + 1]). sum and target
  // (N): as exp_sum() would give them for all columns. scales (P, N): the divisor that turns a part's
  // exp(logits - maximum) into probabilities. shares (P, N): the part's total probability.
  void merge_softmax(const Tensor& parts, const Tensor& targets, std::span<const std::int64_t> bounds,
                     Out sum, Out target, Out scales, Out shares);
  // The gradient of the input of that softmax's product: y (N, C) = factor times the sum over the parts of
  // shares[p] (N, wide) * means[p] (N, C) - of_targets[p] (N, C); zero for ignored targets. Summed wide, in
  // order.
  void merge_gradients(std::span<const Tensor> means, std::span<const Tensor> shares,
                       std::span<const Tensor> of_targets, const Tensor& targets, double factor, Out y);
  // y (1, f64) += x (1, f64).
  void add_number(const Tensor& x, InOut y);

  // Chooses experts (spec/token_router), in double precision whatever the dtype: logits (N, E) -> ids (N, k,
  // i32), the best first, and weights (N, k). `bias` (E, or empty) is added to the scores for the choice
  // only.
  void route(const TokenRouter& router, const Tensor& logits, std::span<const double> bias, Out ids,
             Out weights);
  // The weights of given choices.
  void weigh_routes(const TokenRouter& router, const Tensor& logits, const Tensor& ids, Out weights);
  // d_logits (N, E) = the gradient through the weights, given d_weights (N, k), plus loss_scale times that of
  // the losses. The choice itself has no gradient.
  void route_backward(const TokenRouter& router, const Tensor& logits, const Tensor& ids,
                      const Tensor& d_weights, const RouterLosses& losses, double loss_scale, Out d_logits);
  // loss (1, f64) += the losses summed over the tokens.
  void add_router_losses(const TokenRouter& router, const Tensor& logits, const RouterLosses& losses,
                         InOut loss);
  // counts (scopes, E + groups, i32): num_routing_counts() for each of `scopes` equal runs of rows of ids (N,
  // k).
  void count_routed(const TokenRouter& router, const Tensor& ids, std::int64_t scopes, Out counts);
  // kept (N, k) = choices ids (N, k) with those beyond an expert's capacity replaced by -1
  // (spec/routing_balance), in scopes of equally many rows. Weights (N, k) count as equal if they agree in
  // half the digits of their type.
  void drop_over_capacity(const Tensor& ids, const Tensor& weights, const ExpertCapacity& capacity, Out kept);
  // Sorts copies of tokens by expert, and by token within an expert. places (N, k, i32): where each choice
  // kept (N, k) went, -1 if dropped. tokens (M, i32): the token at each place, -1 after the last; M is large
  // enough for all. counts (E, i32): copies for each expert.
  void sort_by_expert(const Tensor& kept, Out places, Out tokens, Out counts);
  // Packs choices and their weights into rows of 2 k numbers, so that they travel together: expert indices
  // are exact as floats. Row i is unpacked to row rows[i]; empty: to row i.
  void pack_choices(const Tensor& ids, const Tensor& weights, Out packed);
  void unpack_choices(const Tensor& packed, std::span<const std::int64_t> rows, Out ids, Out weights);
  // to = the given rows of `from` (N, k, i32).
  void take_ids(const Tensor& from, std::span<const std::int64_t> rows, Out to);
  // placed (M, 1): writes weights (N, k) to the places of their copies; the rest is unchanged.
  void place_weights(const Tensor& weights, const Tensor& places, InOut placed);

  // Packs elements `part` of a gradient bucket into bytes (spec/compression.h), and unpacks them to a tensor
  // of that part. int8 rounds with each section's generator.
  void pack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part,
                     std::span<const Philox> rounding, const Tensor& gradient, Out packed);
  void unpack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part, const Tensor& packed,
                       bool accumulate, Out part_of_gradient);
  // Moves the elements of x with the largest magnitudes, as many as `values` holds, to `values`, leaving
  // zeros. indices (i32), ascending: where they were, counted from first_index.
  void take_largest(InOut x, std::int64_t first_index, Out values, Out indices);
  // sum[indices[i]] += values[i]; no index comes twice.
  void add_at(const Tensor& values, const Tensor& indices, InOut sum);
  // Orthonormalizes the rows of x (rows <= cols) in order; a row that depends on those before it is replaced
  // by a random one.
  void orthonormalize_rows(InOut x, const Philox& fresh);

  // AdamW with decoupled weight decay (Loshchilov & Hutter 2019): updates p, m, v in place from g (wide), in
  // one pass. With `remainder` (i16), p is bf16 and the two are the f32 weights (base/split_weight.h); m and
  // v are f32. Without it, p, m and v have one dtype. If that is bf16, they are updated in f32 and rounded: m
  // to nearest, p and v as step.rounding says.
  void adamw(InOut p, const Tensor& g, InOut m, InOut v, const AdamWStep& step, InOut remainder = Tensor());
  void adamw_of_all(std::span<const AdamWUpdate> updates);
  // Two halves of a step whose update is made of whole matrices (Muon): m in place and `update` (bf16, or m's
  // wide type) from g (wide); then p from an update. All are vectors of one length, p with `remainder` as in
  // adamw().
  void momentum(const Tensor& g, InOut m, Out update, const MomentumStep& step);
  void step_weights(InOut p, const Tensor& update, const WeightStep& step, InOut remainder = Tensor());

 private:
  std::shared_ptr<KernelBackend> backend_;
  Tensor scratch_;
};

// Reference kernels: plain loops in f32, f64 and bf16, in one thread.
std::unique_ptr<Kernels> make_reference_kernels();
// CPU kernels: oneDNN and SIMD, with `threads` compute threads for the calling rank. `dtype` is f32, or bf16,
// which includes f32. Scratch memory comes from the arena (category other). Must be created, used and
// destroyed by one thread. With invariant numerics all products use the kernels of matmul_simd.h, whose
// grouping of sums does not depend on shapes.
std::unique_ptr<Kernels> make_cpu_kernels(Arena& arena, DType dtype, int threads,
                                          Numerics numerics = Numerics::ordinary);
// What multiplies matrices of this dtype here, and the instruction set of other passes; null in a build
// without CPU kernels.
const char* cpu_products(DType dtype);
const char* cpu_instruction_set();
// What multiplies op(a) (m, k) and op(b) (k, n) of type `factors` here, on so many threads; null likewise.
struct ProductShape {
  Transpose ta = Transpose::no, tb = Transpose::no;
  std::int64_t m = 0, n = 0, k = 0;
  DType factors = DType::f32, result = DType::f32;
};
const char* cpu_product(const ProductShape& shape, int threads);
inline bool has_cpu_kernels() { return cpu_products(DType::f32) != nullptr; }
// What these take from the arena for `threads` threads.
std::int64_t cpu_kernels_scratch_bytes(DType dtype, int threads);

// The kernels for the arena's device and a precision. On the CPU: CPU kernels for f32 and bf16; reference
// kernels for f64, and for bf16 in a build without the others. On an accelerator: those of its driver. On no
// device: none, taking from the arena what the CPU's would (with 0 threads, nothing).
std::unique_ptr<Kernels> make_kernels(Arena& arena, const PrecisionRecipe& precision, int threads,
                                      Numerics numerics = Numerics::ordinary);
bool has_fast_kernels(const PrecisionRecipe& precision);  // otherwise reference kernels compute in it
// What multiplies matrices: "oneDNN", "our FMA kernel", "AVX-512 in bf16", "AMX in bf16", "AMX in three
// bf16", "our FMA kernel, bf16 widened", "the reference kernels".
const char* products_by(const PrecisionRecipe& precision);
// What decides the bits of this processor's kernels: that, and the instruction set of other passes.
std::string kernels_by(const PrecisionRecipe& precision);
std::int64_t kernel_scratch_bytes(const PrecisionRecipe& precision, int threads);

}  // namespace echelon

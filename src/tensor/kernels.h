// The mathematics of one rank on one device: what layers call. Each call is checked here, whatever computes
// it (kernel_backend.h): a broken shape, a wrong dtype or a tensor that is not there is an InvariantError
// that names the kernel and its tensors.
//
// Every float tensor of one call has the same dtype, f32 or f64; or the call is one in bf16: activations,
// their gradients and weights are bf16, and what is wide is f32: statistics (of norms and of softmaxes:
// stats, lse, delta, max, sum), logits of tokens and of routers, gradients of weights, and the weights of
// rows. All arithmetic and all sums are f32 then, and each element of a bf16 output is rounded once, when it
// is stored: a call that adds to what others left rounds once more. Numbers below 2^-126 may be taken for 0
// where a processor's own products in bf16 (VDPBF16PS, AMX) read them or make them.
//
// Shapes: rows N = B*T (tokens of a microbatch in (B, T) order), columns as named. "+=" means accumulates
// into the output. Outputs are allocated by the caller.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

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
// Query t of a sequence stands at position q_offset + t q_step, key j at j k_step; a query sees the keys up
// to its own position. The offset may be negative: a query that sees no key has out = 0 and lse = -inf.
//
// Keys may come in blocks, one call each (Liu 2023, RingAttention): with `accumulate` out and lse are those
// of earlier calls with other keys and become those of all keys together, and gradients are added to.
struct AttentionShape {
  std::int64_t batch = 1, q_len = 0, kv_len = 0;
  std::int64_t num_heads = 1, num_kv_heads = 1, head_dim = 0;
  std::int64_t q_offset = 0;
  std::int64_t q_step = 1, k_step = 1;  // of every R-th token one of both is R
  // Rows between the first keys of two sequences of the batch; 0 means kv_len (a key/value cache has more).
  std::int64_t kv_batch_stride = 0;
  double scale = 1.0;  // of q.k before the softmax
  double cap = 0;  // scores s become cap tanh(s / cap) (Gemma 2, https://arxiv.org/abs/2408.00118); 0: not
  bool accumulate = false;
  // (B*Tq, i32): the first key that a query sees, at least 0; undefined: key 0. Where documents lie one
  // after the other, the first key of the query's own.
  Tensor first_keys = {};

  // Query t sees keys up to this one, and not itself.
  std::int64_t end_key(std::int64_t t) const { return causal_keys(q_offset + t * q_step, k_step, kv_len); }
};

// Sequences of `length` rows, one behind the other; first_positions (N, i32): where the document of each row
// begins in its sequence; undefined: at 0.
struct SequenceRows {
  std::int64_t batch = 1, length = 0;
  Tensor first_positions = {};
};

// H heads of P channels, each with a state of N numbers for every channel (Dao & Gu 2024,
// https://arxiv.org/abs/2405.21060); B and C are those of a group of H/G heads. `chunk`: positions whose
// weights for each other are computed at once, which changes no result but by rounding. `delta`: by the gated
// delta rule (Yang et al. 2024, https://arxiv.org/abs/2412.06464), whose values are x, keys B and queries C.
struct StateSpaceShape {
  SequenceRows rows = {};
  std::int64_t heads = 1, head_dim = 0, groups = 1, state = 0;
  std::int64_t chunk = 64;
  bool delta = false;
  double norm_eps = 0;  // of its norm

  std::int64_t width() const { return heads * head_dim; }
  std::int64_t mixed_width() const { return width() + 2 * groups * state; }  // [x | B | C]
  std::int64_t chunk_rows() const { return chunk < rows.length ? chunk : rows.length; }
  std::int64_t chunks() const { return rows.length == 0 ? 0 : (rows.length + chunk - 1) / chunk; }
  // Columns of what each row adds to the gradients of dt_bias, a_log, and d or the norm's weight.
  std::int64_t terms() const { return 2 * heads + (delta ? head_dim : heads); }
  // Wide elements that its kernels work in.
  std::int64_t workspace(bool backward) const;
};
struct StateSpaceTensors {
  // (N, H P); (N, mixed_width(), wide) as convolve() left it, of which the delta rule makes keys and queries
  // of length 1; (N, H) before softplus
  Tensor z, xbc, dt;
  Tensor dt_bias, a_log;  // (H)
  Tensor d;               // (H); of the delta rule the norm's weight (P)
  Tensor beta = {};       // (N, H) before the sigmoid: of the delta rule
};
// xbc is wide; terms (N, terms(), wide).
struct StateSpaceGradients {
  Tensor z, xbc, dt, terms, beta = {};
};

// How weights that are bf16 alone are updated: rounded up or down at random, as to nearest an
// update below half a unit would never be seen. Which way depends on the parameter, the step and the logical
// element alone, and so not on the mesh. So is the mean of squares, which to nearest would no longer fall
// where beta2 is 0.998 or more.
struct StochasticRounding {
  Philox random;                     // weight_rounding(): word i for logical element i
  std::span<const LogicalRun> runs;  // what the elements of p are, in order (logical_runs)
};
// For one step of one parameter.
Philox weight_rounding(std::uint64_t seed, const std::string& parameter, std::int64_t step);

struct AdamWStep {
  double lr = 0, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0;
  std::int64_t step = 1;                         // 1 for the first: bias corrections are 1 - beta^step
  double gradient_scale = 1;                     // clipping: the gradient used is gradient_scale * g
  const StochasticRounding* rounding = nullptr;  // of p that is bf16 alone; needed there, and nowhere else
};

// What adamw() is given, of one of several parameters.
struct AdamWUpdate {
  Tensor p, g, m, v, remainder;
  AdamWStep step;
};
// What sum_squares() or sum_in_order() is given, of one of several tensors.
struct SumsOf {
  Tensor x, sums;
};

class ThreadTeam;

// What each expert may keep of the choices of a scope, a run of rows of a microbatch.
struct ExpertCapacity {
  std::int64_t scopes = 1, experts = 0, each = 0;
  DropPolicy policy = DropPolicy::probability;
};

// What became of logits before their maximum was taken: soft_cap() with this cap. 0: nothing.
struct LogitsCap {
  double cap = 0;
  Tensor max = {};  // (N): those that p was made with
};

// How the sum of a product is grouped: indices of k in blocks, each of one or more ranges that are added up
// one after another, and the blocks by the tree of base/halving_tree.h. Empty: all of k is one block.
using SumBlocks = std::vector<std::vector<Range>>;
// So many equal blocks, which divide k.
SumBlocks equal_blocks(std::int64_t k, std::int64_t blocks);

// One product of a group: as the arguments of Kernels::matmul.
struct MatrixProduct {
  Tensor a;
  Transpose ta = Transpose::no;
  Tensor b;
  Transpose tb = Transpose::no;
  Tensor c;
  bool accumulate = false;
  SumBlocks blocks = {};
};

// What becomes of a product in the same pass over memory, where the backend has one for it, and else in
// passes behind it. In bf16 c is then rounded once or before each of them; what is made of c is so of c as
// stored, or as it was before.
struct Epilogue {
  Tensor bias = {};   // (N): added to each row
  Tensor added = {};  // (M, N): added too, where nothing else follows than a bias
  Activation activation = Activation::gelu;
  // (M, N) = the activation of c, with its bias.
  Tensor activated = {};
  // (M, N), what an activation was given, where c is the gradient of what it gave: as activate_backward(), c
  // becomes the gradient of `hidden`, and `hidden` what it gave.
  Tensor hidden = {};
  // (wide) += the column sums of a turned a, or with `sums_of_b` of b: where the product is the gradient of a
  // weight, that of its bias.
  Tensor column_sums = {};
  bool sums_of_b = false;

  bool is_any() const {
    return bias.defined() || added.defined() || activated.defined() || hidden.defined() ||
           column_sums.defined();
  }
};

// One whose operands, in bf16, are rounded to fp8, each with a scale of its own (base/fp8.h): c is then as of
// a product of the rounded ones. `room_a` and `room_b` are like a and b, for these, and come to hold what
// the backend makes of them. There are no blocks.
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
  // Without a backend nothing is computed: every call is checked and done at once, and numbers are finite.
  // `scratch`: memory that a backend would have taken.
  explicit Kernels(std::shared_ptr<KernelBackend> backend, Tensor scratch = {})
      : backend_(std::move(backend)), scratch_(std::move(scratch)) {}

  // The host's threads that compute for the rank, for what else there is to share out: alone the calling one
  // where they are not the host's. Not without a backend.
  const ThreadTeam& team() const;

  // c = op(a) op(b), or c += when accumulate. op(a) is (M, K), op(b) is (K, N), c is (M, N). Row strides
  // allowed. Of a, b and c any may be bf16 and the others f32: gradients of weights, and logits, are f32.
  // Each element is rounded to c's dtype once, whatever the blocks.
  void matmul(const Tensor& a, Transpose ta, const Tensor& b, Transpose tb, Out c, bool accumulate,
              const SumBlocks& blocks = {});
  // The same with what follows it; behind a product that is added to c these are column sums alone.
  void matmul(const MatrixProduct& product, const Epilogue& epilogue);
  // What follows by itself, of a product that is made.
  void finish(const MatrixProduct& product, const Epilogue& epilogue);
  // Products of any shapes, empty ones too, none of which reads what another writes: on the host, and of any
  // device under invariant numerics, each has the bits of matmul(). The products of a mixture's experts.
  void grouped_matmul(std::span<const MatrixProduct> products);
  // As grouped_matmul().
  void fp8_matmul(std::span<const Fp8Product> products);
  // y = x (both bf16) rounded to fp8 with a scale of its own, in its own size: what products in fp8 multiply.
  void round_to_fp8(const Tensor& x, Fp8 format, Out y);

  void fill(Out x, double value);
  // Same rows and cols; row strides allowed on both. One may be bf16 and the other f32, here and in add; here
  // both may be i16.
  void copy(const Tensor& from, Out to);
  void add(const Tensor& x, InOut y);  // y += x
  void scale(InOut x, double factor);
  // x is contiguous; sums (f64) has one element for each block of `block` elements of x, the last of which
  // may be shorter: the sum of their squares, taken in double precision, the same on any number of threads.
  void sum_squares(const Tensor& x, std::int64_t block, Out sums);
  void sum_squares_of_all(std::span<const SumsOf> all, std::int64_t block);
  // The same of x itself, which is f64, one element after another.
  void sum_in_order(const Tensor& x, std::int64_t block, Out sums);
  void sum_in_order_of_all(std::span<const SumsOf> all, std::int64_t block);
  bool all_finite(const Tensor& x);
  // The largest |x|; not a number where one is not.
  double largest(const Tensor& x);
  // The sum of the squares of x times `scale`, a power of two with which none is above 1, without rounding
  // but at 2^-64 of each: the same however elements are spread over tensors. At most 2^31 elements.
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

  // The same of rows whose columns are cut over ranks: x has some of `columns`, and the caller adds up over
  // the ranks what each has of a row's sums.
  // squares (N, wide) = sums of squares of each row of x.
  void row_squares(const Tensor& x, Out squares);
  // stats: on entry the squares of whole rows, on exit rstd.
  void rms_norm_of_squares(const Tensor& x, const Tensor& w, double eps, double columns, Out y, InOut stats);
  // sums (N, wide) = sums of dy w x rstd over each row of x; those of whole rows are what dx += takes.
  void rms_norm_backward_sums(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& stats,
                              Out sums);
  void rms_norm_backward_input_of_sums(const Tensor& dy, const Tensor& x, const Tensor& w,
                                       const Tensor& stats, const Tensor& sums, double columns, InOut dx);

  // An activation a without a gate. h += bias (when defined), y = a(h). y may be h when the biased h is not
  // needed again.
  void activate(Activation a, InOut h, const Tensor& bias, Out y);
  // In place, for the backward pass: on entry h (biased) and dy; on exit h holds y = a(h) and dy holds dh.
  void activate_backward(Activation a, InOut h, InOut dy);

  // xielu (activation.h), of alphas (2) = [alpha_p | alpha_n]. Backward, in place: on entry h and dy; on exit
  // h holds y, dy holds dh, and dalphas (N, 2, wide) what each row adds to the gradients of the two.
  void xielu(const Tensor& h, const Tensor& alphas, Out y);
  void xielu_backward(InOut h, const Tensor& alphas, InOut dy, Out dalphas);

  // An activation a with a gate: gate_up (N, 2F) = [gate | up], y (N, F) = a(gate) * up. Of clamped_swiglu
  // `clamp` has the numbers.
  void gated(Activation a, const Tensor& gate_up, Out y, const SwigluClamp& clamp = {});
  // In place: on entry gate_up and dy (N, F); on exit gate_up holds its gradient and dy holds y.
  void gated_backward(Activation a, InOut gate_up, InOut dy, const SwigluClamp& clamp = {});
  // y = x times the sigmoid of gate, of one shape. Backward, in place: on exit gate and dy hold the gradients
  // of gate and of x, and y is as before.
  void sigmoid_gate(const Tensor& x, const Tensor& gate, Out y);
  void sigmoid_gate_backward(const Tensor& x, InOut gate, InOut dy, Out y);
  // The same of an expert's, swiglu, clamped_swiglu or relu2 (of hidden (N, F), which has no gate), where y
  // was multiplied by weights (N, 1, wide) row by row: dy is the gradient of the weighted y. On exit dy holds
  // the weighted y, and dweights (N, 1, wide) the gradient of the weights.
  void weighted_activation_backward(Activation a, InOut gate_up, InOut dy, const Tensor& weights,
                                    Out dweights, const SwigluClamp& clamp = {});

  // RoPE (Su 2021), the half-split form of Llama: x (N, heads*D), row stride allowed; of P pairs element i of
  // a head goes with i + P, and what lies behind the pairs stays. positions (N, i32): where each row stands.
  // inverse = the backward pass.
  void rope(InOut x, std::int64_t head_dim, const Tensor& positions, const RopeTurns& turns, bool inverse);

  // out (B*Tq, H*D); lse (B*H*Tq, wide): natural log of the sum of exponentials of each row. No T x T matrix
  // is stored.
  void attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape, Out out,
                 Out lse);
  // delta (B*H*Tq, wide) = out . dout, head by head: all that the backward pass needs of out, and the same
  // for every block of keys (FlashAttention, Dao 2022, appendix B).
  void attention_delta(const Tensor& out, const Tensor& dout, const AttentionShape& shape, Out delta);
  // lse and delta are those of all keys, of which these may be some. dq, dk, dv are overwritten, or added to
  // with `accumulate`. dout may have no aliasing with them. dq, or dk and dv, may be undefined: of the five
  // products those are made that the others need.
  void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout,
                          const Tensor& lse, const Tensor& delta, const AttentionShape& shape, Out dq, Out dk,
                          Out dv);

  // A sink of each head (gpt-oss, https://arxiv.org/abs/2508.10925): one key more, which every query sees,
  // whose score is the head's number of sinks (H) and whose value is 0. out and lse are those of all keys
  // and become those with it, which the backward pass of attention then takes.
  void attention_sink(const Tensor& sinks, const AttentionShape& shape, InOut out, InOut lse);
  // dsinks (H, wide) +=: lse is that with the sinks, and delta of the output that they have left.
  void attention_sink_backward(const Tensor& sinks, const Tensor& lse, const Tensor& delta,
                               const AttentionShape& shape, InOut dsinks);

  // y (N, C, wide) = SiLU of a causal convolution of each column of x, in whose sum w (C, K) has the weights
  // of the K - 1 rows before and of its own, and of no other document's; bias (C) or undefined.
  void convolve(const Tensor& x, const Tensor& w, const Tensor& bias, const SequenceRows& rows, Out y);
  // dy becomes the gradient of what SiLU was given, whose column sums are the bias's.
  void convolve_backward(const Tensor& x, const Tensor& w, const Tensor& bias, const SequenceRows& rows,
                         InOut dy, Out dx);
  // dw (C, K, wide) += ; dy as convolve_backward() left it.
  void convolve_backward_weight(const Tensor& x, const Tensor& dy, const SequenceRows& rows, InOut dw);

  // Of bcx (N, 3 C), [B | C | x]: y (N, C) = C times a causal convolution of B x, column by column, by w (C,
  // K) as in convolve(), within documents (tensor/rows/short_convolution.h).
  void short_convolution(const Tensor& bcx, const Tensor& w, const SequenceRows& rows, Out y);
  // dbcx of dy, and y once more; both lie elsewhere than what is given.
  void short_convolution_backward(const Tensor& bcx, const Tensor& w, const Tensor& dy,
                                  const SequenceRows& rows, Out dbcx, Out y);
  // dw (C, K, wide) += .
  void short_convolution_backward_weight(const Tensor& bcx, const Tensor& dy, const SequenceRows& rows,
                                         InOut dw);

  // y (N, H P) = the scan of a state space (tensor/state_space_scan.h) times SiLU(z), behind the delta rule
  // with an RMSNorm of each head before that. `state` (H P, N, wide):
  // of one sequence the state before its first row, which becomes the one behind its last; undefined: zeros.
  // workspace (wide) has as many elements as the shape says.
  void state_space(const StateSpaceTensors& in, const StateSpaceShape& shape, const Tensor& workspace,
                   InOut state, Out y);
  void state_space_backward(const StateSpaceTensors& in, const StateSpaceShape& shape, const Tensor& dy,
                            const Tensor& workspace, const StateSpaceGradients& out);

  // y (N, C) = rows of table (V_local, C) for ids (N, i32) in [first_id, first_id + V_local), zero for other
  // ids.
  void embedding(const Tensor& ids, const Tensor& table, std::int64_t first_id, Out y);
  // dtable (wide) += ; rows whose ids lie elsewhere are skipped. Added in row order.
  void embedding_backward(const Tensor& ids, const Tensor& dy, std::int64_t first_id, InOut dtable);

  // first (N, i32) = the first of a block's keys that each query sees, where starts (N, i32) are the
  // positions that its document begins at: the keys stand at first_position + i * stride, i < count; count:
  // none.
  void first_keys(const Tensor& starts, std::int64_t first_position, std::int64_t stride, std::int64_t count,
                  Out first);

  // y (N, C) = sum over j of weights[n, j] * x[places[n, j]]: places (N, k, i32) are rows of x (M, C), below
  // zero for none; weights (N, k, wide), undefined for ones. Added in order of j, whatever the threads.
  void combine_rows(const Tensor& x, const Tensor& places, const Tensor& weights, Out y);

  // x (wide) becomes cap tanh(x / cap).
  void soft_cap(InOut x, double cap);

  // Cross-entropy over vocabulary columns [first_id, first_id + V_local), in two steps so that only N-sized
  // vectors need to travel between ranks. All is wide but the gradient that comes out. Targets (N, i32) below
  // zero are ignored. Step 1: max (N) = row maxima of logits (N, V_local).
  void row_max(const Tensor& logits, Out max);
  // Step 2: logits become exp(logits - max); sum (N) = their row sums; target (N) = logit - max at the
  // target, 0 when the target is ignored or another rank holds it.
  void exp_sum(InOut logits, const Tensor& max, const Tensor& targets, std::int64_t first_id, Out sum,
               Out target);
  // Step 3: p = exp(logits - max) of step 2 and the *global* sum (N) for the same max; dlogits (N, V_local)
  // = the gradient of the loss with respect to the logits: loss_scale * (p / sum - [column is target]), zero
  // for ignored rows. dlogits may be p; as bf16 it is a tensor of its own. With a cap it is the gradient of
  // what soft_cap() was given, which p and max still tell as long as exp(-2 cap) is no subnormal.
  void cross_entropy_backward(const Tensor& p, const Tensor& sum, const Tensor& targets,
                              std::int64_t first_id, double loss_scale, Out dlogits,
                              const LogitsCap& cap = {});
  // The three steps at once, a row after another, where all columns are here: max, sum and target (N) as
  // steps 1 and 2 give them, dlogits as step 3 does, with a cap of `cap` (0: none). Of the logits nothing is
  // left.
  void cross_entropy(InOut logits, const Tensor& targets, double loss_scale, double cap, Out max, Out sum,
                     Out target, Out dlogits);

  // The loss of rows whose sum and target logit exp_sum() gave, over the ranks (N each): loss (1, f64) += the
  // sum of log(sum) - target over the targets (N, i32) that are not ignored, in row order, in double
  // precision and by itself before it is added.
  void add_losses(const Tensor& sum, const Tensor& target, const Tensor& targets, InOut loss);
  // Of a softmax whose columns are cut into parts, what row_max() and exp_sum() made of each, (P, 3, N):
  // maxima, sums, targets' logits; part r has the columns from bounds[r] to bounds[r + 1]. sum and target (N)
  // are as exp_sum() gives them for all columns at once. scales (P, N): what exp(logits - maximum) of a part
  // is to be divided by to be probabilities; shares (P, N): the part's share of these.
  void merge_softmax(const Tensor& parts, const Tensor& targets, std::span<const std::int64_t> bounds,
                     Out sum, Out target, Out scales, Out shares);
  // The gradient of the input of that softmax's product: y (N, C) = factor times the sum over the parts of
  // shares[p] (N, wide) * means[p] (N, C) - of_targets[p] (N, C), zero for ignored targets. Added wide, in
  // order.
  void merge_gradients(std::span<const Tensor> means, std::span<const Tensor> shares,
                       std::span<const Tensor> of_targets, const Tensor& targets, double factor, Out y);
  // y (1, f64) += x (1, f64).
  void add_number(const Tensor& x, InOut y);

  // Which experts the tokens go to (spec/token_router): in double precision whatever the dtype. logits (N, E)
  // -> ids (N, k, i32), the best first, and weights (N, k). `bias` (E, or empty) is added to the scores for
  // the choice alone.
  void route(const TokenRouter& router, const Tensor& logits, std::span<const double> bias, Out ids,
             Out weights);
  // The weights of choices that someone else made.
  void weigh_routes(const TokenRouter& router, const Tensor& logits, const Tensor& ids, Out weights);
  // d_logits (N, E) = the gradient through the weights, whose gradient is d_weights (N, k), plus loss_scale
  // times that of the losses. The choice itself has none.
  void route_backward(const TokenRouter& router, const Tensor& logits, const Tensor& ids,
                      const Tensor& d_weights, const RouterLosses& losses, double loss_scale, Out d_logits);
  // loss (1, f64) += the losses summed over the tokens.
  void add_router_losses(const TokenRouter& router, const Tensor& logits, const RouterLosses& losses,
                         InOut loss);
  // counts (scopes, E + groups, i32): num_routing_counts() of each run of as many rows of ids (N, k).
  void count_routed(const TokenRouter& router, const Tensor& ids, std::int64_t scopes, Out counts);
  // kept (N, k) = the choices ids (N, k) that each expert has room for, -1 for the others
  // (spec/routing_balance), in scopes of as many rows. Weights (N, k) count as equal where they agree in half
  // the digits of their type.
  void drop_over_capacity(const Tensor& ids, const Tensor& weights, const ExpertCapacity& capacity, Out kept);
  // Tokens' copies sorted by expert, and by token for each: places (N, k, i32) is where each choice kept (N,
  // k) went, -1 where it was dropped; tokens (M, i32) is whose copy stands at each place, -1 after the last;
  // M is room for all. counts (E, i32): copies of each expert.
  void sort_by_expert(const Tensor& kept, Out places, Out tokens, Out counts);
  // Choices and their weights as rows of 2 k numbers, so that they travel together: numbers of experts are
  // exact as floats. Row i goes back to row rows[i]; empty: to row i.
  void pack_choices(const Tensor& ids, const Tensor& weights, Out packed);
  void unpack_choices(const Tensor& packed, std::span<const std::int64_t> rows, Out ids, Out weights);
  // to = the rows of `from` (N, k, i32) that are named.
  void take_ids(const Tensor& from, std::span<const std::int64_t> rows, Out to);
  // placed (M, 1): weights (N, k) where their copies stand; the rest stays.
  void place_weights(const Tensor& weights, const Tensor& places, InOut placed);

  // Gradients on their way (spec/compression.h): elements `part` of the bucket to bytes, and back to a tensor
  // of that part. int8 rounds by the generator of each section.
  void pack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part,
                     std::span<const Philox> rounding, const Tensor& gradient, Out packed);
  void unpack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part, const Tensor& packed,
                       bool accumulate, Out part_of_gradient);
  // Moves the elements of x that are largest in magnitude, as many as values holds, there, and leaves zeros;
  // indices (i32): where they were, from first_index on. Indices ascend.
  void take_largest(InOut x, std::int64_t first_index, Out values, Out indices);
  // sum[indices[i]] += values[i]; no index comes twice.
  void add_at(const Tensor& values, const Tensor& indices, InOut sum);
  // The rows of x (rows <= cols) made orthonormal in their order; one without a direction of its own is
  // drawn.
  void orthonormalize_rows(InOut x, const Philox& fresh);

  // Decoupled weight decay (Loshchilov & Hutter 2019): p, m, v updated in place from g (wide), one pass.
  // `remainder`, where defined (i16): p is bf16, and with it the weights in f32 (base/split_weight.h); m and
  // v are f32. Else p, m and v are of one dtype, and bf16 is all there is of the weights: widened, updated in
  // f32 and rounded, m to nearest, p and v as step.rounding says.
  void adamw(InOut p, const Tensor& g, InOut m, InOut v, const AdamWStep& step, InOut remainder = Tensor());
  void adamw_of_all(std::span<const AdamWUpdate> updates);

 private:
  std::shared_ptr<KernelBackend> backend_;
  Tensor scratch_;
};

// Plain loops, f32, f64 and bf16: the yardstick. One thread.
std::unique_ptr<Kernels> make_reference_kernels();
// oneDNN and SIMD; `threads` compute threads for the calling rank. `dtype` is f32, or bf16: then
// they compute both. Scratch memory comes from the arena (category other). Must be made, used and destroyed
// by one thread.
// With invariant numerics every product is made by the kernels of matmul_simd.h, whose sums show no shape.
std::unique_ptr<Kernels> make_cpu_kernels(Arena& arena, DType dtype, int threads,
                                          Numerics numerics = Numerics::ordinary);
// What multiplies matrices in it here; null where this build was made without CPU kernels.
const char* cpu_products(DType dtype);
inline bool has_cpu_kernels() { return cpu_products(DType::f32) != nullptr; }
// What it takes from the arena for `threads` threads.
std::int64_t cpu_kernels_scratch_bytes(DType dtype, int threads, Numerics numerics);

// The kernels for the arena's device and a precision: on the cpu f32 and bf16 have the CPU kernels, f64 the
// reference kernels, and so has bf16 in a build without the others; on an accelerator those of its driver; on
// no device, none, which take from the arena what those of the cpu would.
// Of those of no device 0 threads have no scratch.
std::unique_ptr<Kernels> make_kernels(Arena& arena, const PrecisionRecipe& precision, int threads,
                                      Numerics numerics = Numerics::ordinary);
bool has_fast_kernels(const PrecisionRecipe& precision);  // or the reference kernels compute in it
// What multiplies matrices: "oneDNN", "our FMA kernel", "AVX-512 in bf16", "AMX in bf16", "our FMA kernel,
// bf16 widened", "the reference kernels".
const char* products_by(const PrecisionRecipe& precision);
std::int64_t kernel_scratch_bytes(const PrecisionRecipe& precision, int threads,
                                  Numerics numerics = Numerics::ordinary);

}  // namespace echelon

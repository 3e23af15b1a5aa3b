#include "plan/layer_seconds.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/real.h"
#include "plan/every_second_product.h"
#include "plan/expert_reach.h"
#include "plan/expert_rows.h"
#include "plan/state_seconds.h"
#include "spec/block_passes.h"

namespace echelon {
namespace {

// Prices a block op by op. Each op adds the seconds of its forward pass and of both halves of its backward
// pass.
class Pricer {
 public:
  // `wide`: for products in at least 16 bits, even if those of layers are in fewer.
  Pricer(const Workload& work, const Plan& c, const Recompute& recompute, const OpSeconds& ops,
         const OpSeconds& wide, const ModelPrograms& programs, const PackedAttention* packed)
      : programs_(programs),
        packed_(packed),
        w_(work),
        c_(c),
        mesh_(c.mesh),
        recompute_(recompute),
        ops_(ops),
        wide_(wide),
        m_(c.model),
        tp_(c.mesh.tp()),
        tokens_(real(c.micro_batch * c.seq_len) / c.mesh.cp()),
        here_(c.shards_sequence() ? tokens_ / c.mesh.tp() : tokens_),
        width_(work.precision == Precision::f32 ? 4 : 2),
        narrow_(ops.operand_bytes() < 2) {}

  LayerSeconds layer(const BlockProgram& program) {
    begin();
    std::vector<PassSeconds> forward;  // by op
    std::vector<LayerBytes> bytes;
    for (const BlockOp& op : program.ops) {
      const PassSeconds seconds = t_.forward;
      sent_forward_ = {};
      price(program, op);
      forward.push_back(difference(t_.forward, seconds));
      bytes.push_back(sent_forward_);
    }
    PassSeconds again;
    const auto make_again = [&](int op, double part = 1) {
      again += forward[static_cast<std::size_t>(op)] * part;
      t_.sent += bytes[static_cast<std::size_t>(op)] * part;
    };
    if (w_.software.keeps_every_second_product && recompute_ == Recompute::selective) {
      std::vector<double> part(program.ops.size(), 1);
      for (const SplitProduct& product : every_second_product(program, mesh_.tp()))
        part[product.op] = product.again;
      for (std::size_t op = 0; op < program.ops.size(); ++op) {
        const OpKind kind = program.ops[op].kind;
        // A layer's last residual sum is the next layer's input, and sums over tp are kept: neither is
        // recomputed.
        if (kind == OpKind::residual && static_cast<std::size_t>(op) + 1 == program.ops.size()) part[op] = 0;
        if (kind == OpKind::attention) part[op] = 0;
        if (kind == OpKind::residual) forward[op].tensor = bytes[op].tensor = 0;
        make_again(static_cast<int>(op), part[op]);
      }
    } else if (recompute_.everything() && !w_.software.is_this_trainer) {
      // Other programs recompute the last product too.
      for (std::size_t op = 0; op < program.ops.size(); ++op) make_again(static_cast<int>(op));
    } else {
      const std::vector<int>& ops = programs_.again(program, recompute_);
      for (int op : ops) {
        make_again(op);
        const BlockOp& one = program.ops[static_cast<std::size_t>(op)];
        if (w_.software.is_this_trainer) {
          // Exchanged heads are kept, unless their inputs are recomputed.
          if (one.kind != OpKind::attention ||
              std::find(ops.begin(), ops.end(), program.producer(one.inputs[0])) != ops.end())
            continue;
          again.context -= heads_there_.first;
          t_.sent.context -= heads_there_.second;
        } else if (one.kind == OpKind::experts_in) {  // others recompute a mixture as a whole
          make_again(static_cast<int>(program.find(OpKind::experts_out) - program.ops.data()));
        }
      }
    }
    const double forward_tensor = t_.forward.tensor, shown = show_what_nothing_hides();
    if (forward_tensor > 0) again.tensor += shown * again.tensor / forward_tensor;
    if (w_.software.overlaps_experts) hide_exchanges();
    hosted(again, program.find(OpKind::experts_in) != nullptr);
    return t_;
  }

  // For the embedding, or for final norm and output matrix.
  LayerSeconds end(const BlockProgram& program) {
    begin();
    for (const BlockOp& op : program.ops) price(program, op);
    show_what_nothing_hides();
    wait_for_launches(0);
    return t_;
  }

  // Cross-entropy: casts logits to f32, finds the maximum, exponentials and their sum; writes the gradient in
  // place.
  LayerSeconds loss() {
    begin();
    kernels_ = 7;  // maximum, difference, the target's logit, exponentials, sum, logarithm, quotient
    const double losses = real(1 + m_.num_mtp_layers);
    const double logits = losses * tokens_ * real(m_.vocab) / tp_ * w_.software.loss_passes;
    t_.forward.compute += ops_.elementwise(logits * 14);
    t_.backward_input.compute += ops_.elementwise(logits * 8);
    if (tp_ > 1) t_.forward.tensor += 3 * losses * ops_.collective(Verb::all_reduce, tokens_ * 4, along_tp());
    wait_for_launches(0);
    return t_;
  }

  // The parts of an output layer that is cut over the pipeline ranks (parallel/vocabulary_parallel.h). V
  // computes logits, exponentials and, for the input's gradient, the mean weighted by probabilities and the
  // targets' rows, each summed over tp; VW computes the logits' gradient from the exponentials that were
  // kept.
  LayerSeconds vocabulary_part() {
    begin();
    const double columns = real(m_.vocab) / tp_ / mesh_.pp();
    enter(true);
    reduce_rows(t_.backward_input);
    product(tokens_, real(m_.hidden), columns);
    const double logits = tokens_ * columns * w_.software.loss_passes;
    t_.forward.compute += ops_.elementwise(logits * (14 + 8) + 2 * tokens_ * real(m_.hidden) * width_);
    t_.backward_weight.compute += ops_.elementwise(logits * 8);
    if (tp_ > 1) t_.forward.tensor += 3 * ops_.collective(Verb::all_reduce, tokens_ * 4, along_tp());
    t_.forward += t_.backward_input;
    t_.backward_input = {};
    return t_;
  }

  // Merges the results of the parts: reads two gradients for each, and writes one.
  LayerSeconds merge() {
    begin();
    t_.backward_input.compute += ops_.elementwise((2.0 * mesh_.pp() + 1) * here_ * real(m_.hidden) * width_);
    return t_;
  }

 private:
  void begin() {
    t_ = {};
    kernels_ = collectives_ = waits_ = 0;
    beside_ = {};
    heads_there_ = {};
  }

  static bool is_of_experts(const BlockProgram& program, int value) {
    return program.ops[static_cast<std::size_t>(program.producer(value))].kind == OpKind::experts_out;
  }
  static PassSeconds difference(const PassSeconds& a, const PassSeconds& b) {
    return {a.compute - b.compute, a.tensor - b.tensor, a.context - b.context, a.expert - b.expert};
  }

  void price(const BlockProgram& program, const BlockOp& op) {
    const auto width_here = [&](int value) {
      const BlockValue& v = program.value(value);
      return real(v.width) / (v.home == Home::cut ? tp_ : 1);
    };
    switch (op.kind) {
      case OpKind::norm:
        norm(program.value(op.outputs[0]));
        // If a weight has fewer norms than there are ranks, several ranks hold columns of one norm.
        if (!op.weights.empty() && op.weights.front().shard_dim >= 0)
          add_up(real(std::ssize(op.weights)),
                 mesh_.tp() / std::min<std::int64_t>(op.heads.front(), mesh_.tp()));
        return;
      case OpKind::linear:
        if (op.wants[0] == Home::residual)
          return linear(op, here_, width_here(op.inputs[0]), width_here(op.outputs[0]));
        if (program.value(op.inputs[0]).home == Home::residual) enter();
        linear(op, tokens_, width_here(op.inputs[0]), width_here(op.outputs[0]));
        if (op.name == "attention_in") gather_heads();
        return;
      case OpKind::latent:
        enter(w_.software.regathers_sequence, real(program.value(op.inputs[0]).width));
        return latent_heads();
      case OpKind::narrow:
        // Values as wide as keys are only this trainer's: other programs' kernels take both widths.
        if (!w_.software.is_this_trainer) return;
        return passes(2 * tokens_ * width_here(op.outputs[0]) * width_,
                      2 * tokens_ * width_here(op.inputs[0]) * width_);
      case OpKind::state_space:
        return state_space();
      case OpKind::short_conv:
        return short_conv();
      case OpKind::scale: {
        const double bytes = tokens_ * width_here(op.outputs[0]) * width_;
        return passes(2 * bytes, 2 * bytes);
      }
      case OpKind::gate: {  // backward also reads the output, and writes both gradients
        const double bytes = tokens_ * width_here(op.outputs[0]) * width_;
        return passes(3 * bytes, 6 * bytes);
      }
      case OpKind::join: {
        const double bytes = here_ * width_here(op.outputs[0]) * width_;
        return passes(2 * bytes, 2 * bytes);
      }
      case OpKind::rope:
        return rope();
      case OpKind::attention:
        // Other programs' attention kernels handle sinks; this trainer scales attention's output afterwards.
        if (!op.weights.empty() && w_.software.is_this_trainer)
          passes(2 * tokens_ * width_here(op.outputs[1]) * width_, 0);
        return attention();
      case OpKind::activation:
        return activation(tokens_, width_here(op.outputs[1]), op.activation);
      case OpKind::residual:
        // Communication of a mixture is priced with the mixture.
        if (program.value(op.inputs[1]).home == Home::partial_sum && !is_of_experts(program, op.inputs[1]))
          leave();
        return residual();
      case OpKind::sum:
        if (!is_of_experts(program, op.inputs[0])) leave();
        return norm(program.value(op.outputs[0]));
      case OpKind::experts_in:
        experts_in();
        if (!op.biases.empty()) expert_biases();
        return;
      case OpKind::experts_out:
        return experts_out();
      case OpKind::loss:  // only its product; see loss()
        // This trainer runs both passes of the output layer at once, on one gathered input.
        enter(w_.software.regathers_sequence && !w_.software.is_this_trainer);
        return product(tokens_, width_here(op.inputs[0]),
                       columns_of_logits(real(op.weights.front().shape[0]) / tp_));
      case OpKind::embedding:
        return lookup();
      case OpKind::positions:
        kernels_ += 2;  // for their rows and the sum; their bytes are in lookup()
        return;
    }
  }

  void lookup() {
    const double bytes = tokens_ * real(m_.hidden) * width_;
    t_.forward.compute += ops_.elementwise(2 * bytes);
    t_.backward_weight.compute += ops_.elementwise(3 * bytes);
    kernels_ += 1;
    if (w_.software.dropout) {
      kernels_ += 1;
      t_.forward.compute += ops_.elementwise(2.5 * here_ * real(m_.hidden) * width_);
      t_.backward_input.compute += ops_.elementwise(2.5 * here_ * real(m_.hidden) * width_);
    }
    reduce_rows(t_.forward);
    if (c_.shards_sequence()) gather_rows(t_.backward_weight);
  }

  double columns_of_logits(double columns) const {
    return w_.software.pads_vocabulary
               ? padded_vocabulary_multiple * std::ceil(columns / padded_vocabulary_multiple)
               : columns;
  }

  void product(double rows, double depth, double cols, double count = 1) {
    t_.backward_weight.compute += ops_.memory_pass(w_.software.accumulation_bytes * count * depth * cols);
    // Each of the three products reads or writes rows of both lengths.
    const double slower = std::max(ops_.unaligned(depth), ops_.unaligned(cols));
    t_.forward.compute += slower * ops_.product(rows, depth, cols, count);
    t_.backward_input.compute += slower * ops_.product(rows, cols, depth, count);
    t_.backward_weight.compute += slower * ops_.product(depth, rows, cols, count);
    kernels_ += 1;
    if (narrow_ && w_.software.is_this_trainer) {
      // Each product rounds both of its operands: it reads them twice in 16 bits, first for the scale and
      // then to write codes.
      const double bytes = (2 * width_ + ops_.operand_bytes()) * count;
      t_.forward.compute += ops_.elementwise(bytes * (rows * depth + depth * cols));
      t_.backward_input.compute += ops_.elementwise(bytes * (rows * cols + depth * cols));
      t_.backward_weight.compute += ops_.elementwise(bytes * (rows * cols + rows * depth));
    } else if (narrow_) {  // operands are read in 16 bits and written in fewer
      const double bytes = (width_ + ops_.operand_bytes()) * count;
      const double weights = w_.software.narrow_parameters ? 0 : depth * cols;
      t_.forward.compute += ops_.elementwise(bytes * (rows * depth + weights));
      t_.backward_input.compute += ops_.elementwise(bytes * rows * cols);
    }
  }

  void linear(const BlockOp& op, double rows, double depth, double cols) {
    const bool stays_wide = std::find(w_.wide_ops.begin(), w_.wide_ops.end(), op.name) != w_.wide_ops.end();
    stays_wide ? wide_product(rows, depth, cols) : product(rows, depth, cols);
  }

  // Products of few columns with much influence: routers and the shared expert's gate, whose operands are not
  // rounded (torch.nn.functional.linear in Megatron-Core's router.py and shared_experts.py;
  // docs/precision.md).
  void wide_product(double rows, double depth, double cols) {
    t_.backward_weight.compute += ops_.memory_pass(w_.software.accumulation_bytes * depth * cols);
    t_.forward.compute += wide_.product(rows, depth, cols);
    t_.backward_input.compute += wide_.product(rows, cols, depth);
    t_.backward_weight.compute += wide_.product(depth, rows, cols);
    kernels_ += 1;
  }

  void passes(double forward_bytes, double backward_bytes) {
    t_.forward.compute += ops_.elementwise(forward_bytes);
    t_.backward_input.compute += ops_.elementwise(backward_bytes);
    kernels_ += 1;
  }

  // In the residual stream, or over this rank's heads.
  void norm(const BlockValue& y) {
    const double bytes = (y.home == Home::cut ? tokens_ / tp_ : here_) * real(y.width) * width_;
    passes(2 * bytes, 3 * bytes);
  }
  void residual() {
    const double bytes = here_ * real(m_.hidden) * width_;
    const double mask = w_.software.dropout ? 0.5 : 0;
    passes((3 + mask) * bytes, (1 + mask) * bytes);
  }
  void rope() {
    // Latent attention rotates a part of each head, for queries and for keys.
    const double turned = m_.latent_attention() && !w_.software.is_this_trainer
                              ? 2 * real(m_.num_heads * m_.rotary_dim)
                              : real(m_.attention_width() + m_.kv_width());
    const double bytes = tokens_ * turned / tp_ * width_;
    passes(2 * bytes, 2 * bytes);
  }

  // Gathered rows are operands, with as many bits as products read; this trainer rounds them after gathering.
  double rows_bytes(Verb verb, double columns) const {
    const bool rounded = verb == Verb::all_gather && !w_.software.is_this_trainer;
    const double width = rounded ? std::min(width_, ops_.operand_bytes()) : width_;
    return tokens_ * columns * width;
  }
  void send(double LayerBytes::*axis, double forward, double backward) {
    t_.sent.*axis += forward + backward;
    sent_forward_.*axis += forward;
  }
  void communicate(PassSeconds& pass, Verb verb, double columns, double bytes) {
    const bool is_forward = &pass == &t_.forward;
    send(&LayerBytes::tensor, is_forward ? bytes : 0, is_forward ? 0 : bytes);
    collectives_ += 1;
    const double seconds = ops_.collective(verb, rows_bytes(verb, columns), along_tp()),
                 wait = ops_.ring_wait(verb, along_tp());
    pass.tensor += wait + (seconds - wait) * (1 - w_.software.tensor_overlap);
    waits_ += wait;
    beside_.of(t_, pass) += seconds - wait;
  }
  // Adds the time by which collectives take longer than the computation that hides them. Returns that of the
  // forward pass, in seconds.
  double show_what_nothing_hides() {
    const auto show = [&](PassSeconds& pass, double beside) {
      const double more = w_.software.tensor_overlap * std::max(0.0, beside - pass.compute);
      pass.tensor += more;
      return more;
    };
    show(t_.backward_input, beside_.backward_input);
    show(t_.backward_weight, beside_.backward_weight);
    return show(t_.forward, beside_.forward);
  }
  // All-reduces `sums` sums of each row over `ranks` neighbours in tp, in f32, in both passes.
  void add_up(double sums, std::int64_t ranks) {
    if (ranks == 1) return;
    const double bytes = tokens_ * sums * 4, sent = 2 * (real(ranks) - 1) / real(ranks) * bytes;
    send(&LayerBytes::tensor, sent, sent);
    collectives_ += 2;
    const double seconds = ops_.collective(Verb::all_reduce, bytes, groups_of(ranks, 1));
    t_.forward.tensor += seconds;
    t_.backward_input.tensor += seconds;
  }
  // With fewer key/value heads than tp ranks, Megatron-Core cuts the product's columns evenly, gathers all of
  // them and takes each rank's heads (get_query_key_value_tensors() in attention.py), with a pass to join the
  // gathered columns.
  void gather_heads() {
    const Software& s = w_.software;
    if (s.is_this_trainer || !s.tensor_repeats_heads || real(m_.num_kv_heads) >= tp_) return;
    const double bytes = tokens_ * real(m_.attention_width() + 2 * m_.kv_width()) * width_,
                 sent = (tp_ - 1) / tp_ * bytes;
    send(&LayerBytes::tensor, sent, sent);
    collectives_ += 2;
    t_.forward.tensor += ops_.collective(Verb::all_gather, bytes, along_tp());
    t_.backward_input.tensor += ops_.collective(Verb::reduce_scatter, bytes, along_tp());
    passes(2 * bytes, 2 * bytes);
  }
  void gather_rows(PassSeconds& pass, double columns) {
    if (tp_ == 1) return;
    communicate(pass, Verb::all_gather, columns, (tp_ - 1) / tp_ * rows_bytes(Verb::all_gather, columns));
  }
  void gather_rows(PassSeconds& pass) { gather_rows(pass, real(m_.hidden)); }
  // P -> S or P -> I.
  void reduce_rows(PassSeconds& pass, double columns) {
    if (tp_ == 1) return;
    const Verb verb = c_.shards_sequence() ? Verb::reduce_scatter : Verb::all_reduce;
    communicate(pass, verb, columns,
                (c_.shards_sequence() ? 1 : 2) * (tp_ - 1) / tp_ * rows_bytes(verb, columns));
  }
  void reduce_rows(PassSeconds& pass) { reduce_rows(pass, real(m_.hidden)); }
  void enter() { enter(w_.software.regathers_sequence); }
  void enter(bool gathers_again) { enter(gathers_again, real(m_.hidden)); }
  void enter(bool gathers_again, double columns) {
    if (c_.shards_sequence()) {
      gather_rows(t_.forward, columns);
      // The second gather overlaps with the input's gradient, but both share the links.
      if (gathers_again) gather_rows(t_.backward_weight, columns);
    }
    reduce_rows(t_.backward_input, columns);
  }
  void leave() {
    reduce_rows(t_.forward);
    if (c_.shards_sequence()) gather_rows(t_.backward_input);
  }

  // Queries, keys and values from their compressed forms.
  void latent_heads() {
    const double queries = real(m_.num_heads * m_.head_dim) / tp_;
    const double keys = real(m_.num_heads * (m_.head_dim - m_.rotary_dim + m_.value_head_dim)) / tp_;
    if (m_.q_rank > 0) product(tokens_, real(m_.q_rank), queries);
    product(tokens_, real(m_.kv_rank), keys);
    passes(2 * tokens_ * queries * width_, 3 * tokens_ * queries * width_);
  }

  // The products of each chunk: C B for each group; and for each head the contribution of the chunk's own
  // rows (`within`), that of the state before (`given`), and what the chunk adds to the state (`added`). Then
  // the passes over wide tensors.
  void state_space() {
    const StateSpaceSpec& s = m_.state_space;
    const double rows = real(std::min(s.chunk, c_.seq_len)), chunks = tokens_ / rows,
                 heads = real(s.heads) / tp_, groups = std::max(1.0, real(s.groups) / tp_),
                 width = heads * real(s.head_dim), state = real(s.state), mixed = width + 2 * groups * state,
                 states = width * state / rows;  // elements for each token
    const bool is_ours = w_.software.is_this_trainer;
    const OpSeconds of_scan(w_.machine, w_.software, is_ours ? Precision::f32 : Precision::bf16);
    const auto product = [&](double m, double k, double n, double count) {
      return is_ours ? of_scan.product(m, k, n, count) : of_scan.multiplying(m, k, n, count);
    };
    const double pairs = product(rows, state, rows, chunks * groups),
                 // In other programs one kernel computes all heads side by side.
        within = is_ours ? product(rows, rows, real(s.head_dim), chunks * heads)
                         : product(rows, rows, width, chunks),
                 given = product(rows, state, width / groups, chunks * groups),
                 added = product(width / groups, rows, state, chunks * groups);
    // The delta rule also multiplies keys by keys and by the state, and by the square matrices with which it
    // solves, at half the cost of a product. Other programs' kernels are assumed to equal those of Mamba-2 in
    // everything else.
    const double delta = s.is_delta() ? pairs + given + within / 2 : 0;
    exchange_heads(heads, groups);
    if (is_ours) {  // in f32: the convolution, dt x twice, both sums' results, and the weights of rows
      const double wide = 4;
      const double products = pairs + within + given + added + delta;
      const double passes = ops_.elementwise(tokens_ * (mixed * (width_ + wide) + 7 * width * wide +
                                                        2 * width * width_ + 3 * heads * rows * wide));
      // The backward pass repeats all that, with two products for each product, and as many passes; the
      // decays' gradients read the weights and their gradients, sum them up and read the sums, and read two
      // states.
      const double decays = ops_.elementwise(tokens_ * (4 * heads * rows + 2 * states) * wide);
      t_.forward.compute += products + passes;
      t_.backward_input.compute += 3.5 * products + 3 * passes + decays;
      kernels_ += chunks * (heads + 3 * groups + 4);
      return;
    }
    // Kernel by kernel as in mamba_ssm 2.2 (mamba_split_conv1d_scan_combined), in 16 bits except for states
    // and C B. Forward: the convolution; the chunks' states; the passing of states from chunk to chunk; C B;
    // the outputs. The gate is priced with the norm. Backward: the convolution, states and C B again; the
    // gradients of the states from chunk to chunk; of x; of B; of C; of C B; of decays; both products of C B;
    // of the convolution; of the gate.
    const double wide = 4, group = groups * state, of_pairs = groups * rows;
    const double slower = 1 / w_.software.scan_efficiency;
    t_.forward.compute += slower * (pairs + within + given + added + delta +
                                    ops_.memory_pass(tokens_ * (width_ * (2 * mixed + 4 * width + 4 * group) +
                                                                wide * (4 * states + 2 * of_pairs))));
    t_.backward_input.compute +=
        slower * (3 * pairs + 3 * within + 2 * given + 3 * added + 3 * delta +
                  ops_.memory_pass(tokens_ * (width_ * (5 * mixed + 14 * width + 10 * group) +
                                              wide * (10 * states + 6 * of_pairs + 2 * group))));
    kernels_ += 8;  // and twice as many in the backward pass
  }

  // Passes over rows of channels. This trainer's kernel reads [B | C | x] and writes one output; its backward
  // pass reads them with the gradient, and writes their gradients and the output; for the weight's gradient
  // it reads all four. Other programs run both products and the convolution separately.
  void short_conv() {
    const double bytes = tokens_ * real(m_.hidden) / tp_ * width_;
    if (w_.software.is_this_trainer) {
      exchange_channels(3 * bytes, bytes);
      passes(4 * bytes, 8 * bytes);
      t_.backward_weight.compute += ops_.elementwise(4 * bytes);
      return;
    }
    exchange_channels(bytes, bytes);  // only of B x
    passes(3 * bytes, 5 * bytes);
    passes(2 * bytes, 2 * bytes);
    t_.backward_weight.compute += ops_.elementwise(2 * bytes);
    passes(3 * bytes, 5 * bytes);
  }

  // Exchanges a convolution's channels over the cp group, there and back. The backward pass does the same;
  // this trainer sends the convolution's output once more there, since it does not keep it.
  void exchange_channels(double in, double out) {
    if (mesh_.cp() == 1) return;
    const double cp = mesh_.cp(), again = w_.software.is_this_trainer ? out : 0;
    send(&LayerBytes::context, (cp - 1) / cp * (in + out), (cp - 1) / cp * (in + out + again));
    const auto seconds = [&](double bytes) {
      return ops_.collective(Verb::all_to_all, bytes, along_cp(mesh_.cp()));
    };
    const double once = seconds(in) + seconds(out);
    t_.forward.context += once;
    t_.backward_input.context += once + (again > 0 ? seconds(again) : 0);
    passes(2 * (in + out), 2 * (in + out + again));  // packing, and restoring the order of positions
  }

  // Exchanges a state space's heads over the cp group: [z | x | B | C | dt] there and the output back, and
  // the same in the backward pass. With fewer groups than ranks, each rank is sent B and C.
  void exchange_heads(double heads, double groups) {
    if (mesh_.cp() == 1) return;
    const StateSpaceSpec& s = m_.state_space;
    const double cp = mesh_.cp(), width = heads * real(s.head_dim), out = tokens_ * width * width_,
                 in =
                     tokens_ *
                     (2 * width + 2 * std::max(groups, cp) * real(s.state) + (s.is_delta() ? 2 : 1) * heads) *
                     width_;
    send(&LayerBytes::context, (cp - 1) / cp * (in + out), (cp - 1) / cp * (in + out));
    const double seconds = ops_.collective(Verb::all_to_all, in, along_cp(mesh_.cp())) +
                           ops_.collective(Verb::all_to_all, out, along_cp(mesh_.cp()));
    t_.forward.context += seconds;
    t_.backward_input.context += seconds;
    passes(2 * (in + out), 2 * (in + out));  // packing, and restoring the order of positions
  }

  void attention() {
    const double batch = real(c_.micro_batch), length = real(c_.seq_len), heads = real(m_.num_heads) / tp_;
    // In this trainer, the values of latent attention are as wide as its keys.
    const double values =
        m_.latent_attention() && !w_.software.is_this_trainer ? real(m_.value_head_dim) : real(m_.head_dim);
    const double per_rank = batch * heads * length * length / mesh_.cp();
    double forward = 0, backward = 0;
    if (w_.software.fused_attention) {
      const std::vector<PackedAttention::Degree> one{{mesh_.cp(), 1, m_.mean_keys(c_.seq_len)}};
      for (const PackedAttention::Degree& degree : packed_ != nullptr ? packed_->degrees : one) {
        // Two products, over the visible keys: half of them, or fewer in a window.
        const double flops = 2 * batch * heads * length * degree.share * degree.keys / mesh_.cp() *
                             (real(m_.head_dim) + values);
        // In a ring, keys come in blocks, whose results are rescaled and summed.
        const bool in_blocks = degree.ranks > 1 && c_.context_kind == ContextKind::ring;
        double block = in_blocks ? length / degree.ranks : length;
        if (packed_ != nullptr) {
          const double document = std::min(length, 2 * degree.keys);
          block = in_blocks && cuts_documents() ? document / degree.ranks : std::min(block, document);
        }
        double there = ops_.attention_forward(flops, block),
               back = ops_.attention_backward(2.5 * flops, block);
        if (in_blocks) {
          const double merged = (degree.ranks - 1) * 3 * 4 * tokens_ * degree.share * heads * values;
          there += ops_.elementwise(merged);
          back += ops_.elementwise(merged);
        }
        forward += there;
        backward += back;
        context(degree, there, back, values);
      }
      if (packed_ != nullptr) {
        // All ranks wait for the busiest.
        forward *= packed_->busiest;
        backward *= packed_->busiest;
      }
    } else {
      const double rows = length / mesh_.cp(), d = real(m_.head_dim), count = batch * heads;
      const double each = ops_.product(rows, d, length, count), back = ops_.product(rows, length, d, count);
      // Softmax, and then dropout, over scores in 16 bits and masks in 8.
      const double mask = w_.software.dropout ? 1 : 0;
      forward = each + back + ops_.elementwise(per_rank * (4 + 5 * mask));
      backward = 2 * (each + back) + ops_.elementwise(per_rank * (6 + 5 * mask));
      kernels_ += 3;
    }
    kernels_ += 1;
    t_.forward.compute += forward;
    t_.backward_input.compute += backward;
    t_.attention += forward + backward;
    if (!w_.software.fused_attention) context({mesh_.cp(), 1, 0}, forward, backward, values);
  }
  bool cuts_documents() const { return w_.software.context_cuts_documents || w_.dynamic_context; }

  // Ring: key and value blocks travel while the block before is attended to, cp - 1 times; their gradients
  // return the same way. Ulysses: heads for tokens and back, four all_to_alls over both passes. All-gather:
  // before attention.
  void context(const PackedAttention::Degree& degree, double forward, double backward, double values) {
    if (degree.ranks == 1) return;
    const double cp = degree.ranks, tokens = tokens_ * degree.share;
    const bool by_heads = c_.context_kind == ContextKind::ulysses;
    const double kv_heads = std::max(by_heads ? cp : 1.0, real(m_.num_kv_heads) / tp_);
    const double kv = tokens * kv_heads * (real(m_.head_dim) + values) * width_;
    const double queries = tokens * real(m_.num_heads) / tp_ * real(m_.head_dim) * width_;
    const double sent = by_heads ? (cp - 1) / cp * (2 * queries + kv) : (cp - 1) * kv;
    send(&LayerBytes::context, sent, (by_heads ? 1 : 2) * sent);
    switch (c_.context_kind) {
      case ContextKind::ring: {
        const double hop = ops_.message(kv, along_cp(degree.ranks)) + w_.machine.launch_seconds * 4;
        const double backward_hop = 2 * hop;
        t_.forward.context += (cp - 1) * std::max(0.0, hop - forward / cp);
        t_.backward_input.context += (cp - 1) * std::max(0.0, backward_hop - backward / cp);
        break;
      }
      case ContextKind::ulysses: {
        const double there = ops_.collective(Verb::all_to_all, queries + kv, along_cp(degree.ranks));
        const double back = ops_.collective(Verb::all_to_all, queries, along_cp(degree.ranks));
        t_.forward.context += there + back;
        t_.backward_input.context += there + back;
        heads_there_.first += there;
        heads_there_.second += (cp - 1) / cp * (queries + kv);
        break;
      }
      case ContextKind::hybrid:
        fail("a ring of groups that exchange heads is not priced");
      case ContextKind::allgather:
        t_.forward.context += ops_.collective(Verb::all_gather, kv * cp, along_cp(degree.ranks));
        t_.backward_input.context += 2 * ops_.collective(Verb::all_gather, kv * cp, along_cp(degree.ranks));
        break;
    }
  }

  void activation(double tokens, double hidden, Activation of) {
    const double bytes = tokens * hidden * width_;
    if (is_gated(of))
      passes(3 * bytes, 5 * bytes);
    else
      passes(2 * bytes, 3 * bytes);
  }

  // Matrices of an expert before its activation.
  double first_matrices() const { return is_gated(m_.expert_activation()) ? 2 : 1; }

  double shared_hidden() const { return real(m_.shared_width()) / tp_; }
  void shared_in() { product(tokens_, real(m_.hidden), first_matrices() * shared_hidden()); }
  void shared_out() {
    activation(tokens_, shared_hidden(), m_.expert_activation());
    product(tokens_, shared_hidden(), real(m_.hidden));
    if (!m_.shared_gate) return;
    wide_product(tokens_, real(m_.hidden), 1);
    passes(2 * tokens_ * real(m_.hidden) * width_, 0);  // rows are scaled one by one
  }
  // If experts take narrower tokens, the shared expert is a separate MLP beside them.
  bool has_shared_expert() const { return m_.num_shared_experts > 0 && m_.expert_latent == 0; }

  // Sends copies to experts, or back. Each rank sends its own; all wait for the rank that receives most.
  void exchange_copies(const ExpertRows& count) {
    const double skew = busiest_rank(w_.expert_load, mesh_, w_.machine), sent = real(m_.expert_width()),
                 bytes = count.copies * sent * width_,
                 rows = count.copies / skew / real(m_.experts_per_token) * sent * width_;
    const int ep = mesh_.ep;
    const RankGroups groups = expert_groups(mesh_);
    if (ep > 1) {
      double seconds = 0, away = 0;
      if (w_.software.sends_tokens_once) {
        const double ranks = reached_parts(m_, ep),
                     of_fewest = reached_parts(m_, ops_.nodes_of_fewest(groups)),
                     nodes = reached_parts(m_, real(ops_.nodes_of(groups)));
        seconds = ops_.dispatch(skew * rows, ranks, of_fewest, groups);
        away = ops_.dispatched_bytes(rows, ranks, nodes, groups);
      } else {
        seconds = ops_.collective(Verb::all_to_all, bytes, groups);
        away = (ep - 1.0) / ep * bytes / skew;
      }
      send(&LayerBytes::expert, away, away);
      t_.forward.expert += seconds;
      t_.backward_input.expert += seconds;
    }
    if (!count.gathers_copies) return;
    const int cut = mesh_.expert_cut();
    const double seconds = ops_.collective(Verb::all_gather, bytes * cut, groups_of(cut, 1));
    t_.forward.expert += seconds;
    t_.backward_input.expert += seconds;
  }

  // Copies are sorted by expert, and later weighted and summed: half of this cost in each direction. Programs
  // that send each token once do it as part of the exchange.
  void sort_copies(const ExpertRows& count) {
    if (w_.software.sends_tokens_once && mesh_.ep > 1) return;
    const double bytes = count.copies * real(m_.expert_width()) * width_,
                 seconds = w_.software.expert_passes * ops_.memory_pass(2 * bytes);
    t_.forward.compute += seconds;
    t_.backward_input.compute += seconds;
  }

  // A product for each of a rank's E/ep experts. Each product is a separate call, one after another or on a
  // few streams.
  void expert_product(const ExpertRows& count, double depth, double cols) {
    const double local = real(m_.num_experts) / mesh_.ep * kept_experts(w_.expert_load, mesh_),
                 hidden = real(m_.expert_hidden) / mesh_.expert_cut(),
                 calls = local * w_.software.expert_call_seconds;
    const LayerSeconds before = t_;
    product(count.computed / local, depth, cols, local);
    const double seen = w_.software.expert_width > 0 ? std::min(1.0, w_.software.expert_width / hidden) : 1;
    const double slower = seen * (1 / w_.software.expert_efficiency - 1);
    for (PassSeconds LayerSeconds::*pass :
         {&LayerSeconds::forward, &LayerSeconds::backward_input, &LayerSeconds::backward_weight}) {
      (t_.*pass).compute += calls;
      (t_.*pass).compute += slower * ((t_.*pass).compute - (before.*pass).compute);
    }
  }

  void experts_in() {
    const ExpertRows count = expert_rows(w_, c_);
    wide_product(count.routed, real(m_.hidden), real(m_.num_experts));
    sort_copies(count);
    // Copies are gathered again for the gradients of weights, unless they were kept.
    if (count.adds_up_over_tp) enter(!w_.software.is_this_trainer || mesh_.ep == 1 || has_shared_expert());
    exchange_copies(count);
    expert_product(count, real(m_.expert_width()),
                   first_matrices() * real(m_.expert_hidden) / mesh_.expert_cut());
    if (!has_shared_expert()) return;
    if (!count.adds_up_over_tp) enter();
    shared_in();
  }
  void experts_out() {
    const ExpertRows count = expert_rows(w_, c_);
    const double hidden = real(m_.expert_hidden) / mesh_.expert_cut();
    activation(count.computed, hidden, m_.expert_activation());
    expert_product(count, hidden, real(m_.expert_width()));
    exchange_copies(count);
    sort_copies(count);
    if (has_shared_expert()) shared_out();
    if (count.adds_up_over_tp || has_shared_expert()) leave();
  }
  // Biases are added to the results of both products; their gradients are column sums, and those of the
  // routing weights get a share from each bias.
  void expert_biases() {
    const double bytes = expert_rows(w_, c_).computed * (2 * real(m_.expert_hidden) + real(m_.hidden)) /
                         mesh_.expert_cut() * width_;
    passes(2 * bytes, 2 * bytes);
  }
  RankGroups groups_of(std::int64_t size, std::int64_t stride) const {
    return {size, stride, mesh_.num_ranks()};
  }
  RankGroups along_tp() const { return groups_of(mesh_.tp(), 1); }
  RankGroups along_cp(std::int64_t ranks) const { return groups_of(ranks, mesh_.tp()); }

  // Hides the all-to-alls of both passes behind the computation of other microbatches: leaves what takes
  // longer, and by how much computation slows down.
  void hide_exchanges() {
    const double exchanged = t_.forward.expert + t_.backward_input.expert;
    if (exchanged <= 0) return;
    const double computed = t_.forward.compute + t_.backward_input.compute + t_.backward_weight.compute;
    const double left = added_seconds(computed, exchanged, w_.software.overlap_slowdown) / exchanged;
    t_.forward.expert *= left;
    t_.backward_input.expert *= left;
  }

  // A pass takes at least as long as the host needs to launch its kernels; the backward pass has twice as
  // many. Recomputation launches its kernels again.
  void hosted(const PassSeconds& again, bool with_experts) {
    const Software& s = w_.software;
    const double launch = wait_for_launches(!with_experts        ? 0
                                            : s.overlaps_experts ? s.expert_pair_seconds
                                                                 : s.expert_launch_seconds);
    t_.backward_input += again;
    const double least = recompute_.everything() ? launch : 0;
    t_.backward_input.compute += std::max(0.0, least - again.total());
    t_.hideable += shorter_by(again.expert, again.total(), least);
  }

  // Seconds for which the host launches a forward pass; `more` of them for what is not counted in kernels.
  double wait_for_launches(double more) {
    const double launch =
        w_.software.launch_seconds * kernels_ + more +
        (w_.software.collective_launch_seconds + ops_.call_seconds(mesh_.tp())) * collectives_ / 3 +
        waits_ / 3;
    const double forward = t_.forward.total(), backward = t_.backward();
    t_.forward.compute += std::max(0.0, launch - forward);
    t_.backward_input.compute += std::max(0.0, 2 * launch - backward);
    t_.hideable = shorter_by(t_.forward.expert, forward, launch) +
                  shorter_by(t_.backward_input.expert, backward, 2 * launch);
    return launch;
  }
  // A part of `seconds` hidden, of a pass that takes at least `least`.
  static double shorter_by(double part, double seconds, double least) {
    return std::max(least, seconds) - std::max(least, seconds - part);
  }

  const ModelPrograms& programs_;
  const PackedAttention* packed_;
  const Workload& w_;
  const Plan& c_;
  const Mesh& mesh_;
  const Recompute& recompute_;
  const OpSeconds &ops_, &wide_;
  const ModelSpec& m_;
  double tp_, tokens_, here_, width_;
  bool narrow_;
  double kernels_ = 0, collectives_ = 0;   // kernels of the forward pass; collectives of both passes
  double waits_ = 0;                       // of both passes, for rings over nodes
  LayerBytes sent_forward_;                // by the op being priced
  std::pair<double, double> heads_there_;  // seconds and bytes of Ulysses' first exchange in a forward pass
  struct Beside {                          // seconds of tp's collectives that may overlap with computation
    double forward = 0, backward_input = 0, backward_weight = 0;
    double& of(const LayerSeconds& t, const PassSeconds& pass) {
      return &pass == &t.forward ? forward : &pass == &t.backward_input ? backward_input : backward_weight;
    }
  } beside_;
  LayerSeconds t_;
};

}  // namespace

PassSeconds& PassSeconds::operator+=(const PassSeconds& more) {
  compute += more.compute;
  tensor += more.tensor;
  context += more.context;
  expert += more.expert;
  return *this;
}

PassSeconds PassSeconds::operator*(double factor) const {
  return {compute * factor, tensor * factor, context * factor, expert * factor};
}

LayerBytes& LayerBytes::operator+=(const LayerBytes& more) {
  tensor += more.tensor;
  context += more.context;
  expert += more.expert;
  return *this;
}

LayerBytes LayerBytes::operator*(double factor) const {
  return {tensor * factor, context * factor, expert * factor};
}

LayerSeconds& LayerSeconds::operator+=(const LayerSeconds& more) {
  forward += more.forward;
  backward_input += more.backward_input;
  backward_weight += more.backward_weight;
  sent += more.sent;
  attention += more.attention;
  hideable += more.hideable;
  return *this;
}

LayerSeconds LayerSeconds::operator*(double factor) const {
  return {forward * factor, backward_input * factor, backward_weight * factor,
          sent * factor,    attention * factor,      hideable * factor};
}

static std::vector<BlockProgram> programs_of(const ModelSpec& m) {
  std::vector<BlockProgram> programs;
  for (const LayerKind& kind : layer_kinds(m)) programs.push_back(layer_program(m, kind.layer));
  return programs;
}

ModelPrograms::ModelPrograms(const ModelSpec& m)
    : by_kind(m),
      layer(programs_of(m)),
      embedding(embedding_program(m)),
      head(head_program(m)),
      norm(final_norm_program(m)) {}

const std::vector<int>& ModelPrograms::again(const BlockProgram& program, const Recompute& recompute) const {
  const auto [found, is_new] = again_.try_emplace({&program, recompute_name(recompute)});
  if (is_new)
    for (const OpSequence& sequence : block_passes(program, recompute).again)
      if (!is_cheap(program, sequence))
        found->second.insert(found->second.end(), sequence.ops.begin(), sequence.ops.end());
  return found->second;
}

ModelSeconds model_seconds(const Workload& work, const Plan& c, const Recompute& recompute,
                           const OpSeconds& ops, const OpSeconds& wide_ops, const ModelPrograms& programs,
                           const PackedAttention* packed) {
  const bool narrow = wide_precision(work.precision) != work.precision;
  Pricer pricer(work, c, recompute, ops, wide_ops, programs, packed);
  Pricer wide(work, c, recompute, wide_ops, wide_ops, programs, packed);
  const ModelSpec& m = c.model;
  ModelSeconds seconds;
  const PerKind all = programs.by_kind.all(),
                last = programs.by_kind.among(std::max<std::int64_t>(0, m.num_layers - work.wide_layers),
                                              m.num_layers);
  for (std::size_t k = 0; k < programs.layer.size(); ++k) {
    seconds.layer[k] = pricer.layer(programs.layer[k]);
    if (const double part = last[k] / all[k]; narrow && work.wide_layers > 0 && part > 0) {
      seconds.layer[k] = seconds.layer[k] * (1 - part);
      seconds.layer[k] += wide.layer(programs.layer[k]) * part;
    }
  }
  seconds.embedding = wide.end(programs.embedding);
  seconds.head = wide.end(programs.head) * work.output_passes;
  seconds.loss = wide.loss() * work.output_passes;
  if (c.cuts_vocabulary()) {
    seconds.norm = wide.end(programs.norm);
    seconds.norm += wide.merge();
    seconds.part = wide.vocabulary_part();
  }
  return seconds;
}

}  // namespace echelon

#include "plan/saved_bytes.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/real.h"
#include "plan/every_second_product.h"
#include "plan/expert_rows.h"
#include "plan/op_seconds.h"

namespace echelon {
namespace {

// Of a part of a layer, or of all of them.
struct PartBytes {
  double kept = 0;     // from the forward to the backward pass, with the part's norm
  double dropped = 0;  // of these, what is recomputed
  double waits = 0;    // from B to W, in this trainer: the input of each product and its output's gradient

  PartBytes& operator+=(const PartBytes& more) {
    kept += more.kept;
    dropped += more.dropped;
    waits += more.waits;
    return *this;
  }
};

class KeptInLayers {
 public:
  KeptInLayers(const Workload& work, const Plan& c, const Recompute& recompute)
      : m_(c.model),
        s_(work.software),
        c_(c),
        recompute_(recompute),
        width_(work.precision == Precision::f32 ? 4 : 2),
        operand_(s_.keeps_operands ? width_ : std::min(width_, operand_bytes(work.precision))),
        routed_(expert_rows(work, c)) {}

  double width() const { return width_; }
  double tokens() const { return tokens_; }
  double whole() const { return whole_; }
  double cut() const { return cut_; }

  // All of a layer that has these parts.
  PartBytes layer(const LayerParts& has) const {
    PartBytes all;
    if (has.attention) all += attention();
    if (has.state_space) all += state_space();
    if (has.short_conv) all += short_conv();
    if (has.mlp) all += mlp();
    if (has.experts) all += experts();
    if (has.attention && has.state_space) {  // their shared norm
      all.kept -= cut_ + normed_ + mask_;
      all.waits -= cut_;
    }
    if (drops("residual") || drops("residual1")) all.dropped += cut_;
    return all;
  }

  // Under Megatron's selective recomputation, with the outputs of every second product.
  bool keeps_by_product() const {
    return s_.keeps_every_second_product && recompute_ == Recompute::selective;
  }

  double kept(std::int64_t layer, const LayerParts& has, const PartBytes& all) const {
    if (recompute_.everything()) return cut_;
    if (!keeps_by_product()) return s_.saved_factor * (all.kept - all.dropped);
    double outputs = 0;
    for (const SplitProduct& product : every_second_product(layer_program(m_, layer), c_.mesh.tp()))
      outputs += product.kept_columns * tokens_ * width_;
    return s_.saved_factor * (cut_ + (has.attention ? core() : 0) + outputs);
  }

  double working(const LayerParts& has, const PartBytes& all) const {
    const double hidden = has.experts ? routed_.computed * expert_hidden_
                          : has.mlp   ? tokens_ * mlp_hidden_
                                      : 0;
    double sum = 2 * whole_ + hidden * width_ * first_ +
                 (recompute_.everything() || keeps_by_product() ? all.kept - cut_ : all.dropped);
    if (has.experts) sum += 2 * taken() * width_;
    return has.state_space ? std::max(sum, working_of_scan()) : sum;
  }

 private:
  bool drops(const char* op) const {
    return std::binary_search(recompute_.ops().begin(), recompute_.ops().end(), op);
  }
  bool drops_products() const { return drops("linear"); }

  // Of one token on a rank.
  double keys() const { return m_.latent_attention() ? heads_ : std::max(1.0, real(m_.num_kv_heads) / tp_); }
  double values() const {  // in this trainer, those of latent attention are as wide as its keys
    return m_.latent_attention() && !s_.is_this_trainer ? real(m_.value_head_dim) : real(m_.head_dim);
  }

  double qkv() const {
    return tokens_ * (heads_ * real(m_.head_dim) + keys() * (real(m_.head_dim) + values())) * width_;
  }
  double attended() const { return tokens_ * heads_ * values() * width_; }
  // What the softmax keeps.
  double core() const {
    if (s_.fused_attention) return attended() + tokens_ * heads_ * 4;
    return tokens_ * heads_ * real(c_.seq_len) * (s_.dropout ? 2 * width_ + 1 : width_);
  }
  // A norm behind a part reads the part's output.
  double behind() const { return m_.norm_place == NormPlace::before ? 0 : cut_; }
  double output() const { return tokens_ * real(m_.hidden) * width_; }

  PartBytes attention() const {
    const double compressed =
        m_.latent_attention() ? 2 * tokens_ * real(m_.q_rank + m_.kv_rank + m_.rotary_dim) * width_ : 0;
    const double cast = operand_ < width_ ? attended() * operand_ / width_ : 0;  // read by the next product
    PartBytes part;
    // Programs other than this trainer also keep a gate's output.
    part.kept = cut_ + normed_ + behind() + qkv() + compressed + core() +
                (s_.fused_attention ? cast : attended()) + mask_ +
                (m_.attention_gate ? (s_.is_this_trainer ? 1 : 2) * attended() : 0) +
                (s_.is_this_trainer && (m_.qk_norm || m_.qk_norm_whole) ? qkv() : 0);  // the input too
    part.dropped = (drops("attention") ? core() : 0) +
                   (drops_products() || drops("attention_in") || drops("latent") ? qkv() : 0);
    const double queries = tokens_ * heads_ * real(m_.head_dim) * width_;
    part.waits = m_.latent_attention()
                     ? cut_ + 2 * queries + compressed +
                           tokens_ * heads_ * real(2 * m_.value_head_dim - m_.rotary_dim) * width_ + output()
                     : cut_ + qkv() + (m_.attention_gate ? 2 : 1) * attended() + output();
    return part;
  }

  // A state space keeps the inputs of its convolution, of its scan and of its norm. There a cp rank has all
  // tokens for a part of the heads and of their groups.
  double groups() const { return std::max(1.0, real(m_.state_space.groups) / tp_ / real(c_.mesh.cp())); }
  double channels() const { return real(m_.state_space.width()) / tp_; }
  double mixed() const { return channels() + 2 * groups() * real(c_.mesh.cp()) * real(m_.state_space.state); }
  double scan_heads() const { return real(m_.state_space.heads) / tp_; }

  PartBytes state_space() const {
    const StateSpaceSpec& scan = m_.state_space;
    // For the delta rule, other programs also keep the inputs of its kernel (a key and a query for each head
    // of values), the matrix of each chunk with which it solves, and the input of its norm
    // (flash-linear-attention's chunk_gated_delta_rule); the kernel of Mamba-2 recomputes all of this.
    const double of_kernel =
        scan.is_delta() && !s_.is_this_trainer
            ? 2 * channels() + scan_heads() * real(2 * scan.state + std::min(scan.chunk, c_.seq_len))
            : 0;
    PartBytes part;
    part.kept =
        cut_ + normed_ + mask_ +
        tokens_ * (2 * channels() + mixed() + (scan.is_delta() ? 2 : 1) * scan_heads() + of_kernel) * width_;
    // Gradients of a scan's outputs are in 32 bits.
    const double scanned = channels() + mixed() + scan_heads();
    part.waits = cut_ + tokens_ * ((2 * scanned + channels()) * width_ + 4 * mixed()) + output();
    return part;
  }

  // For one sequence at a time: the states of its chunks, and the operands of their products.
  double working_of_scan() const {
    const StateSpaceSpec& scan = m_.state_space;
    const double cp = c_.mesh.cp(), rows = real(std::min(scan.chunk, c_.seq_len)), length = real(c_.seq_len);
    const double scratch = (length / rows + 2) * channels() / cp * real(scan.state) +
                           (scan.is_delta() ? 4 : 2) * (scan_heads() / cp + groups()) * rows * rows +
                           (scan.is_delta() ? 7 : 6) * rows * channels() / cp;
    return 2 * whole_ + tokens_ * (2 * channels() + mixed()) * width_ + 4 * (2 * tokens_ * mixed() + scratch);
  }

  // A short convolution keeps [B | C | x]; other programs also keep B x, the convolution's output, and the
  // input of the projection after it.
  PartBytes short_conv() const {
    const double convolved = tokens_ * real(m_.hidden) / tp_ * width_,
                 own = (s_.is_this_trainer ? 3 : 6) * convolved;
    return {cut_ + normed_ + mask_ + own, drops_products() || drops("conv_in") ? own : 0,
            cut_ + 8 * convolved + output()};
  }

  double of_mlp(double rows, double hidden) const {
    return rows * hidden *
           (width_ / 2 * s_.activation_input_bytes * first_ + (s_.keeps_activated ? operand_ : 0));
  }
  double waits_of_mlp(double rows, double hidden) const { return rows * hidden * (first_ + 1) * width_; }
  double before_mlp() const { return cut_ + normed_ + behind() + mask_; }

  PartBytes mlp() const {
    const double own = of_mlp(tokens_, mlp_hidden_);
    return {before_mlp() + own, drops_products() || drops("mlp_in") ? own : 0,
            cut_ + waits_of_mlp(tokens_, mlp_hidden_) + output()};
  }

  // If all experts are on each rank, this trainer takes copies from the rows again.
  double taken() const {
    return s_.is_this_trainer && c_.mesh.ep == 1 ? 0 : routed_.copies * real(m_.expert_width());
  }

  // If tokens are projected to a smaller width before they go to experts, the sum of experts' outputs is kept
  // to be projected back.
  PartBytes experts() const {
    const double results = routed_.copies * real(m_.expert_width()), shared = real(m_.shared_width()) / tp_;
    const double own = taken() * operand_ + results * (s_.keeps_expert_outputs ? width_ : 0) +
                       routed_.routed * real(m_.expert_latent) * operand_ +
                       of_mlp(routed_.computed, expert_hidden_) + of_mlp(tokens_, shared);
    return {before_mlp() + own, drops("experts_in") ? own : 0,
            (taken() + results) * width_ + waits_of_mlp(routed_.computed, expert_hidden_) +
                (m_.shared_width() > 0 ? cut_ + output() : 0) + waits_of_mlp(tokens_, shared)};
  }

  const ModelSpec& m_;
  const Software& s_;
  const Plan& c_;
  const Recompute& recompute_;
  double width_, operand_;  // bytes of an element, and of one that is kept for a product
  ExpertRows routed_;
  double tp_ = c_.mesh.tp(), tokens_ = real(c_.micro_batch * c_.seq_len) / c_.mesh.cp(),
         heads_ = real(m_.num_heads) / tp_, mlp_hidden_ = real(m_.mlp_hidden) / tp_,
         expert_hidden_ = real(m_.expert_hidden) / c_.mesh.expert_cut(),
         first_ = m_.family == Family::llama && is_gated(m_.activation) ? 2 : 1;  // widths of an MLP's first
  // The residual stream of a microbatch, and a rank's part of it; what its norm keeps, and dropout's mask.
  double whole_ = tokens_ * real(m_.hidden) * width_, cut_ = c_.shards_sequence() ? whole_ / tp_ : whole_,
         normed_ = operand_ / width_ *
                   (!s_.keeps_norm_outputs                          ? 0
                    : c_.shards_sequence() && s_.regathers_sequence ? cut_
                                                                    : whole_),
         mask_ = s_.dropout ? cut_ / width_ : 0;
};

// Of the output layer while it runs. This trainer computes the logits of a limited number of tokens at a
// time, unless each pipeline rank has a part of all logits.
double head_bytes(const Workload& work, const Plan& c, const KeptInLayers& of) {
  double rows = of.tokens();
  if (work.software.is_this_trainer && !c.cuts_vocabulary()) {
    rows = std::min(rows, real(logits_chunk_rows(work.machine.device(), std::llround(of.width()))));
    if (of.width() < 4 && c.mesh.tp() == 1) rows = real(wide_logits_rows(std::llround(rows)));
  }
  return work.output_passes * rows * real(c.model.vocab) / c.mesh.tp() * work.software.logit_bytes +
         2 * of.whole();
}

}  // namespace

SavedBytes saved_bytes(const Workload& work, const Plan& c, const Recompute& recompute) {
  const ModelSpec& m = c.model;
  const KeptInLayers of(work, c, recompute);
  SavedBytes saved;
  double of_prediction = 0;
  std::size_t k = 0;
  for (const LayerKind& kind : layer_kinds(m)) {
    const LayerParts has = layer_parts(m, kind.layer);
    const PartBytes all = of.layer(has);
    saved.layer[k] = of.kept(kind.layer, has, all);
    saved.waiting[k] = work.software.is_this_trainer ? all.waits : saved.layer[k];
    saved.working[k] = of.working(has, all);
    if (k == 0 || has.experts == m.has_experts(m.num_layers)) of_prediction = all.kept + saved.working[k];
    ++k;
  }
  saved.head = head_bytes(work, c, of);
  // The module that predicts one more token runs its forward and backward passes beside it.
  if (m.num_mtp_layers > 0) saved.head += of_prediction;
  saved.boundary = of.cut();
  saved.logits = of.tokens() * real(m.vocab) / c.mesh.tp() * of.width();
  return saved;
}

}  // namespace echelon

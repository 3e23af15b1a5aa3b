#include "model/op.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace echelon {

Weight OpSetting::stacked(const std::vector<ParamSpec>& list) const {
  if (list.empty()) return {};
  std::vector<std::string> names;
  for (const ParamSpec& spec : list) names.push_back(spec.name);
  return list.size() == 1 ? parameters.weight(names.front()) : parameters.stacked(names);
}

std::vector<Weight> OpSetting::runs(const std::vector<ParamSpec>& list) const {
  std::vector<Weight> all;
  for (auto begin = list.begin(); begin != list.end();) {
    const auto end =
        std::find_if(begin, list.end(), [&](const ParamSpec& spec) { return spec.frozen != begin->frozen; });
    all.push_back(stacked({begin, end}));
    begin = end;
  }
  return all;
}

std::unique_ptr<OpRunner> make_op(const BlockOp& op, const OpSetting& s) {
  static constexpr std::pair<OpKind, MakeOp*> makers[]{{OpKind::embedding, make_embedding_op},
                                                       {OpKind::positions, make_positions_op},
                                                       {OpKind::norm, make_norm_op},
                                                       {OpKind::linear, make_linear_op},
                                                       {OpKind::rope, make_rope_op},
                                                       {OpKind::attention, make_attention_op},
                                                       {OpKind::activation, make_activation_op},
                                                       {OpKind::residual, make_residual_op},
                                                       {OpKind::sum, make_sum_op},
                                                       {OpKind::experts_in, make_experts_in_op},
                                                       {OpKind::experts_out, make_experts_out_op},
                                                       {OpKind::loss, make_loss_op},
                                                       {OpKind::latent, make_latent_op},
                                                       {OpKind::narrow, make_narrow_op},
                                                       {OpKind::state_space, make_state_space_op},
                                                       {OpKind::short_conv, make_short_conv_op},
                                                       {OpKind::scale, make_scale_op},
                                                       {OpKind::gate, make_gate_op},
                                                       {OpKind::join, make_join_op}};
  for (const auto& [kind, make] : makers)
    if (kind == op.kind) return make(op, s);
  throw InvariantError(std::string("no block runs an op of the kind ") + name_of(op.kind));
}

}  // namespace echelon

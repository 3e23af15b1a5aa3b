#include "model/op.h"

#include "base/error.h"

namespace echelon {

Weight OpSetting::stacked(const std::vector<ParamSpec>& list) const {
  if (list.empty()) return {};
  std::vector<std::string> names;
  for (const ParamSpec& spec : list) names.push_back(spec.name);
  return list.size() == 1 ? parameters.weight(names.front()) : parameters.stacked(names);
}

std::unique_ptr<OpRunner> make_op(const BlockOp& op, const OpSetting& s) {
  switch (op.kind) {
    case OpKind::embedding:
      return make_embedding_op(op, s);
    case OpKind::positions:
      return make_positions_op(op, s);
    case OpKind::norm:
      return make_norm_op(op, s);
    case OpKind::linear:
      return make_linear_op(op, s);
    case OpKind::rope:
      return make_rope_op(op, s);
    case OpKind::attention:
      return make_attention_op(op, s);
    case OpKind::activation:
      return make_activation_op(op, s);
    case OpKind::residual:
      return make_residual_op(op, s);
    case OpKind::experts_in:
      return make_experts_in_op(op, s);
    case OpKind::experts_out:
      return make_experts_out_op(op, s);
    case OpKind::loss:
      return make_loss_op(op, s);
    case OpKind::latent:
      break;
  }
  throw InvariantError(std::string("no block runs an op of the kind ") + name_of(op.kind));
}

}  // namespace echelon

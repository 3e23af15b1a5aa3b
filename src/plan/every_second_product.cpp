#include "plan/every_second_product.h"

#include "base/real.h"

namespace echelon {

std::vector<SplitProduct> every_second_product(const BlockProgram& layer, int tp) {
  std::vector<SplitProduct> list;
  int product = 0;
  for (std::size_t i = 0; i < layer.ops.size(); ++i) {
    const BlockOp& op = layer.ops[i];
    if (op.kind != OpKind::linear && op.kind != OpKind::latent) continue;
    double all = 0, kept = 0;
    for (const ParamSpec& weight : op.weights) {
      const double columns = real(weight.shape[op.order == WeightOrder::out_in ? 0 : 1]);
      all += columns;
      if (product++ % 2 == 0) kept += columns;
    }
    const bool is_cut = layer.value(op.outputs.front()).home == Home::cut;
    list.push_back({i, kept / (is_cut ? tp : 1), 1 - kept / all});
  }
  return list;
}

}  // namespace echelon

// Prices one microbatch's passes through one layer of a plan, in seconds: every product by its shape, every
// pass over memory, and every collective by the links that it crosses.
#pragma once

#include <array>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "plan/layers_by_kind.h"
#include "plan/op_seconds.h"
#include "plan/packed_attention.h"
#include "plan/workload.h"
#include "spec/block.h"

namespace echelon {

// Where the time of a pass goes. Communication counts only as far as computation does not hide it.
struct PassSeconds {
  double compute = 0, tensor = 0, context = 0, expert = 0;
  double total() const { return compute + tensor + context + expert; }
  PassSeconds& operator+=(const PassSeconds& more);
  PassSeconds operator*(double factor) const;
};

// Bytes that a rank sends along the axes that a layer's passes use.
struct LayerBytes {
  double tensor = 0, context = 0, expert = 0;
  LayerBytes& operator+=(const LayerBytes& more);
  LayerBytes operator*(double factor) const;
};

struct LayerSeconds {
  PassSeconds forward, backward_input, backward_weight;
  LayerBytes sent;       // in all passes
  double attention = 0;  // of the compute of all passes, without recomputation
  // By how much shorter all passes would be without the experts' exchanges: not below what the host takes.
  double hideable = 0;
  double backward() const { return backward_input.total() + backward_weight.total(); }
  LayerSeconds& operator+=(const LayerSeconds& more);
  LayerSeconds operator*(double factor) const;
};

// The prices of a plan's parts: a layer of each kind (layer_kinds()), the embedding, final norm and output
// matrix, and the loss.
struct ModelSeconds {
  std::array<LayerSeconds, most_layer_kinds> layer;
  LayerSeconds embedding, head, loss;
  // If the output layer is cut over the pipeline: the final norm with the merging of the parts' gradients on
  // the last stage (`norm`); and one part, with V as its forward pass and VW as its gradient of weights
  // (`part`).
  LayerSeconds norm, part;
};

// The programs of a model's layers. Kept, because listing the parameters of hundreds of experts, and what is
// recomputed, takes longer than pricing them.
class ModelPrograms {
 public:
  explicit ModelPrograms(const ModelSpec& model);
  ModelPrograms(const ModelPrograms&) = delete;
  ModelPrograms& operator=(const ModelPrograms&) = delete;

  const LayersByKind by_kind;
  const std::vector<BlockProgram> layer;  // one of each kind
  const BlockProgram embedding, head, norm;
  // The ops of one of these programs that a recomputation runs again, as often as it does, without those of
  // negligible time.
  const std::vector<int>& again(const BlockProgram& program, const Recompute& recompute) const;

 private:
  mutable std::map<std::pair<const BlockProgram*, std::string>, std::vector<int>> again_;
};

// Recomputation counts as part of backward_input. Under sequence parallelism the backward pass gathers a
// column-parallel product's input again if the software keeps it cut (Korthikanti et al. 2022). `wide_ops`
// price products that stay in 16 bits. `packed`: for sequences packed from documents; null: each sequence is
// one document.
ModelSeconds model_seconds(const Workload& work, const Plan& c, const Recompute& recompute,
                           const OpSeconds& ops, const OpSeconds& wide_ops, const ModelPrograms& programs,
                           const PackedAttention* packed = nullptr);

// In which embedding, output matrix and routers stay beside products in 8 and 4 bits.
inline Precision wide_precision(Precision precision) {
  const bool narrow = precision == Precision::fp8 || precision == Precision::fp4;
  return narrow ? Precision::bf16 : precision;
}

}  // namespace echelon

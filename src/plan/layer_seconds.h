// Seconds of one microbatch's passes through one layer of a plan: every product by its shape, every
// pass over memory, every collective by the links that it crosses.
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

// Where the time of a pass goes. Communication: what is not hidden behind computation.
struct PassSeconds {
  double compute = 0, tensor = 0, context = 0, expert = 0;
  double total() const { return compute + tensor + context + expert; }
  PassSeconds& operator+=(const PassSeconds& more);
  PassSeconds operator*(double factor) const;
};

// That a rank sends along the axes that a layer's passes use.
struct LayerBytes {
  double tensor = 0, context = 0, expert = 0;
  LayerBytes& operator+=(const LayerBytes& more);
  LayerBytes operator*(double factor) const;
};

struct LayerSeconds {
  PassSeconds forward, backward_input, backward_weight;
  LayerBytes sent;       // in all passes
  double attention = 0;  // of the compute of all passes, without what is made again
  double backward() const { return backward_input.total() + backward_weight.total(); }
  LayerSeconds& operator+=(const LayerSeconds& more);
  LayerSeconds operator*(double factor) const;
};

// All of a plan: of a layer of each kind (layer_kinds()), of the embedding, of final norm and output matrix,
// and of the loss.
struct ModelSeconds {
  std::array<LayerSeconds, most_layer_kinds> layer;
  LayerSeconds embedding, head, loss;
  // Where the output layer is cut over the pipeline: the final norm alone with what the last stage makes of
  // the parts' gradients, and a part, V forwards and VW as the gradient of its weights.
  LayerSeconds norm, part;
};

// Of a model. To list the parameters of hundreds of experts, and what is made again, takes longer than to
// price them.
class ModelPrograms {
 public:
  explicit ModelPrograms(const ModelSpec& model);
  ModelPrograms(const ModelPrograms&) = delete;
  ModelPrograms& operator=(const ModelPrograms&) = delete;

  const LayersByKind by_kind;
  const std::vector<BlockProgram> layer;  // one of each kind
  const BlockProgram embedding, head, norm;
  // Of one of these the ops that a recomputation runs again, as often as they stand here, without those that
  // take no time worth counting.
  const std::vector<int>& again(const BlockProgram& program, const Recompute& recompute) const;

 private:
  mutable std::map<std::pair<const BlockProgram*, std::string>, std::vector<int>> again_;
};

// Recomputation counts as part of backward_input. Under sequence parallelism the backward pass gathers a
// column-parallel product's input again where the software keeps it cut (Korthikanti et al. 2022).
// `packed`: where sequences are packed of documents; null: each is one.
ModelSeconds model_seconds(const Workload& work, const Plan& c, const Recompute& recompute,
                           const OpSeconds& ops, const ModelPrograms& programs,
                           const PackedAttention* packed = nullptr);

}  // namespace echelon

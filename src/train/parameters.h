// The parameters that one rank holds: four flat buffers (value, gradient, first and second moment) and views
// into them.
#pragma once

#include <string>
#include <vector>

#include "comm/rank.h"
#include "layer/weight.h"
#include "spec/flat_layout.h"

namespace echelon {

struct Parameter {
  ParamSpec spec;
  int group = 0;
  Tensor value, gradient, exp_avg, exp_avg_sq;  // local shapes
};

// A tensor of a parameter that is saved, compared and restored.
enum class ParameterTensor { value, gradient, exp_avg, exp_avg_sq };

class ParameterStore {
 public:
  // groups[i]: the parameters of layer group i, in model order. Values start from (seed, name, logical
  // element) alone.
  ParameterStore(const Rank& rank, const std::vector<std::vector<ParamSpec>>& groups, std::uint64_t seed);

  const std::vector<Parameter>& all() const { return parameters_; }  // model order
  const Parameter& find(const std::string& name) const;
  Weight weight(const std::string& name) const;
  // Adjacent (out, in) parameters used as one matrix, rows stacked: q, k, v; gate, up.
  Weight stacked(const std::vector<std::string>& names) const;

  const Tensor& gradients() const { return gradients_; }  // flat, everything
  const FlatLayout& layout() const { return layout_; }

 private:
  Tensor stacked_view(const Tensor& flat, const std::vector<std::string>& names) const;

  Tensor values_, gradients_, exp_avg_, exp_avg_sq_;
  std::vector<Parameter> parameters_;
  FlatLayout layout_;
};

const Tensor& tensor_of(const Parameter& parameter, ParameterTensor which);

// The logical tensor, gathered over tp: every rank of the tp group gets it (category other).
Tensor gather_logical(const Rank& rank, const Parameter& parameter, ParameterTensor which);
// Fills what this rank holds from the logical tensor.
void scatter_logical(const Rank& rank, const Tensor& logical, const Parameter& parameter,
                     ParameterTensor which);

}  // namespace echelon

// The parameters that one rank holds: four flat buffers (value, gradient, first and second moment) and views
// into them.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "comm/rank.h"
#include "layer/weight.h"
#include "schedule/pipeline_layout.h"
#include "spec/flat_layout.h"

namespace echelon {

struct Parameter {
  ParamSpec spec;
  int group = 0;
  std::vector<int> holders;  // pipeline ranks that hold it; the first one counts and saves it
  Tensor value, gradient, exp_avg, exp_avg_sq;  // local shapes
};

// A tensor of a parameter that is saved, compared and restored.
enum class ParameterTensor { value, gradient, exp_avg, exp_avg_sq };

class ParameterStore {
 public:
  // What the layout gives this rank. Values start from (seed, name, logical element) alone.
  ParameterStore(const Rank& rank, const Plan& plan, const PipelineLayout& pipeline, std::uint64_t seed);

  const std::vector<Parameter>& all() const { return parameters_; }  // of this rank, group by group
  // Of the whole model, in the same order on every rank: what collectives over parameters walk.
  const std::vector<ParamSpec>& model() const { return model_; }
  const Parameter* find_here(const std::string& name) const;  // nullptr on a rank that does not hold it
  const Parameter& find(const std::string& name) const;
  // The pipeline rank that counts and saves a parameter of the model.
  int owner_of(const std::string& name) const;
  Weight weight(const std::string& name) const;
  // Adjacent (out, in) parameters used as one matrix, rows stacked: q, k, v; gate, up.
  Weight stacked(const std::vector<std::string>& names) const;
  // The matrix of the output layer. Where a tied table is looked up on the same rank and there are several
  // microbatches, its gradient is kept apart until add_tied_gradient(), so that the sum is grouped as on two
  // pipeline ranks: the same bits.
  Weight output_weight() const;

  const Tensor& values() const { return values_; }        // flat, everything
  const Tensor& gradients() const { return gradients_; }  // the same
  void clear_gradients(Kernels& kernels) const;
  void add_tied_gradient(Kernels& kernels) const;
  const FlatLayout& layout() const { return layout_; }

 private:
  Tensor stacked_view(const Tensor& flat, const std::vector<std::string>& names) const;

  Tensor values_, gradients_, exp_avg_, exp_avg_sq_;
  Tensor tied_gradient_;  // defined where it is kept apart
  std::string output_name_;
  std::vector<Parameter> parameters_;
  std::vector<ParamSpec> model_;
  std::map<std::string, std::size_t> here_;  // index in parameters_
  std::map<std::string, int> owners_;        // of model_
  FlatLayout layout_;
};

const Tensor& tensor_of(const Parameter& parameter, ParameterTensor which);

// The logical tensor, gathered over tp: every rank of the tp group gets it (category other).
Tensor gather_logical(const Rank& rank, const Parameter& parameter, ParameterTensor which);
// Fills what this rank holds from the logical tensor.
void scatter_logical(const Rank& rank, const Tensor& logical, const Parameter& parameter,
                     ParameterTensor which);

}  // namespace echelon

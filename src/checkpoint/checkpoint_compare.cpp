#include "checkpoint/checkpoint_compare.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <set>

#include "base/bf16.h"
#include "base/error.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/finite.h"
#include "checkpoint/router_biases.h"

namespace echelon {
namespace {

// The model's tensors and their moments by name, with how tp cuts them.
std::map<std::string, ParamSpec> model_tensors(const CheckpointInfo& info) {
  std::map<std::string, ParamSpec> tensors;
  for (const ParamSpec& spec : all_parameters(info.model)) {
    tensors[spec.name] = spec;
    if (spec.frozen) continue;
    tensors[spec.name + ".exp_avg"] = spec;
    if (!is_updated_whole(info.optimizer, spec)) tensors[spec.name + ".exp_avg_sq"] = spec;
  }
  return tensors;
}

// What compression carries over is stored in the width of gradients.
bool is_carried(const std::string& name) {
  return name.find(".residual.") != std::string::npos || name.find(".factor.") != std::string::npos;
}

template <class T>
std::vector<double> numbers(const std::vector<std::byte>& bytes) {
  std::vector<T> stored(bytes.size() / sizeof(T));
  std::memcpy(stored.data(), bytes.data(), bytes.size());
  return {stored.begin(), stored.end()};
}

// Reads a model tensor, or a carried one with the layout of its parameter.
std::vector<double> read(CheckpointReader& reader, const std::string& name,
                         const std::map<std::string, ParamSpec>& tensors) {
  const DType kept = reader.info().dtype, dtype = is_router_bias(name) ? DType::f64
                                                  : is_carried(name)   ? wide(kept)
                                                                       : kept;
  std::vector<std::byte> bytes;
  if (const auto found = tensors.find(name); found != tensors.end())
    bytes = reader.read(name, found->second, dtype);
  else if (const std::size_t at = name.find(".residual.");
           at != std::string::npos && tensors.contains(name.substr(0, at)))
    bytes = reader.read(name, tensors.at(name.substr(0, at)), dtype);
  else if (const auto shape = reader.whole_shape(name))
    bytes = reader.read_whole(name, *shape, dtype);
  else
    refuse("{}: {} is no tensor of its model", reader.info().path, name);
  return dtype == DType::f64    ? numbers<double>(bytes)
         : dtype == DType::bf16 ? numbers<bf16>(bytes)
                                : numbers<float>(bytes);
}

double relative_difference(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double difference = 0, magnitude = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isfinite(a[i])) magnitude = std::max(magnitude, std::abs(a[i]));
    if (a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]))) continue;  // infinite ones too
    const double d = std::abs(a[i] - b[i]);
    if (!std::isfinite(d)) return std::numeric_limits<double>::infinity();
    difference = std::max(difference, d);
  }
  return difference == 0 ? 0 : difference / magnitude;
}

}  // namespace

CheckpointContents check_checkpoint(const std::string& path, const Progress& progress) {
  CheckpointReader reader(read_checkpoint_info(path).path);
  const auto tensors = model_tensors(reader.info());
  CheckpointContents contents = reader.contents();
  std::set<std::string> names;
  for (const auto& [name, spec] : tensors) names.insert(name);
  for (const std::string& name : reader.names()) names.insert(name);
  double done = 0;
  for (const std::string& name : names) {
    report(progress, done++ / static_cast<double>(names.size()), name);
    refuse_nonfinite<double>(reader.info().path, name, read(reader, name, tensors));
  }
  contents.tensors = static_cast<std::int64_t>(names.size());
  return contents;
}

std::vector<TensorDifference> diff_checkpoints(const std::string& a, const std::string& b,
                                               const Progress& progress) {
  CheckpointReader first(read_checkpoint_info(a).path), second(read_checkpoint_info(b).path);
  ModelSpec other = second.info().model;
  // Neither the model's name matters nor what was trained of it: adapters are tensors of their own.
  other.name = first.info().model.name;
  other.tuning = first.info().model.tuning;
  if (const auto fields = differences(first.info().model, other); !fields.empty())
    refuse("{} holds the model {} and {} another one, {}: {} is {} and {}", a, first.info().model.name, b,
           second.info().model.name, fields.front().field,
           fields.front().first.empty() ? "nothing" : fields.front().first,
           fields.front().second.empty() ? "nothing" : fields.front().second);
  const auto of_first = model_tensors(first.info()), of_second = model_tensors(second.info());
  std::set<std::string> names;
  for (CheckpointReader* reader : {&first, &second})
    for (const std::string& name : reader->names()) names.insert(name);
  std::vector<TensorDifference> differences;
  double done = 0;
  for (const std::string& name : names) {
    report(progress, done++ / static_cast<double>(names.size()), name);
    if (!first.has(name) || !second.has(name)) {
      const auto holder =
          first.has(name) ? TensorDifference::Holder::first : TensorDifference::Holder::second;
      differences.push_back({name, std::numeric_limits<double>::infinity(), holder});
      continue;
    }
    const double diff = relative_difference(read(first, name, of_first), read(second, name, of_second));
    if (diff != 0) differences.push_back({name, diff});
  }
  return differences;
}

}  // namespace echelon

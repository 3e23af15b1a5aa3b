// Reads weights from the files of a model in Hugging Face's layout.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/json_text.h"
#include "base/open_file.h"
#include "checkpoint/finite.h"
#include "checkpoint/hugging_face.h"
#include "checkpoint/hugging_face_places.h"
#include "checkpoint/hugging_face_tensors.h"
#include "checkpoint/router_biases.h"
#include "checkpoint/stored_model.h"
#include "spec/model_types.h"
#include "tensor/thread_team.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

void refuse_other_layout(const std::string& directory) {
  std::error_code none;
  const auto has = [&](const char* name) { return fs::exists(fs::path(directory) / name, none); };
  const bool has_model = has("config.json");
  if (has("adapter_config.json"))  // transformers would add them to the weights
    refuse(
        "{}: holds adapters (adapter_config.json) {} model; legal: both as one, as PEFT writes them with "
        "merge_and_unload() and save_pretrained{}",
        directory, has_model ? "beside their" : "without their", has_model ? ", or the model alone" : "");
  if (!has_model) refuse("{}: there is no config.json: not a model in Hugging Face's layout", directory);
}

void refuse_other_weights(const std::string& directory) {
  std::error_code none;
  const auto has = [&](const char* name) { return fs::exists(fs::path(directory) / name, none); };
  if (has(single_file) || has(index_file)) return;
  const bool pickled = has("pytorch_model.bin") || has("pytorch_model.bin.index.json");
  refuse("{}: there is neither {} nor {}{}", directory, single_file, index_file,
         pickled
             ? ", and pytorch_model.bin is not read; legal: safetensors, as transformers writes them with "
               "save_pretrained"
             : "");
}

// Refuses weights in 8 or 4 bits with scales beside them. The configuration describes the model even then.
void refuse_quantized(const std::string& directory) {
  const std::string path = (fs::path(directory) / "config.json").string();
  const json config = parse_python_json(read_text(path), path);
  if (!config.is_object() || !config.contains("quantization_config")) return;
  const json& object = config["quantization_config"];
  if (object.is_null()) return;
  const bool named =
      object.is_object() && object.contains("quant_method") && object["quant_method"].is_string();
  const std::string method = named ? object["quant_method"].get<std::string>()
                                   : object.dump(-1, ' ', false, json::error_handler_t::replace);
  refuse(
      "{}: quantization_config = {} is not supported: weights are read as F64, F32, F16 or BF16; legal: an "
      "export that is not quantized{}",
      path, method,
      method == "mxfp4" ? ", as transformers writes it with save_pretrained behind from_pretrained(..., "
                          "quantization_config=Mxfp4Config(dequantize=True))"
                        : "");
}

// A parameter that a rank fills; reads the elements of it that a piece needs.
class FilledParameter {
 public:
  FilledParameter(const Rank& rank, const ParamSpec& spec, StoredParameter stored)
      : stored_(std::move(stored)),
        spec_(&spec),
        tp_(rank.size(Axis::tp)),
        index_(rank.coordinate(Axis::tp)) {}

  template <class F>
  std::vector<F> whole() const {
    std::vector<F> logical(static_cast<std::size_t>(stored_.numel()));
    stored_.read(0, std::span(logical));
    return logical;
  }
  template <class F>
  std::vector<F> read(Range part) const {
    const std::vector<F> all = stored_.is_scattered() ? whole<F>() : std::vector<F>();
    std::vector<F> values(static_cast<std::size_t>(part.size()));
    std::span<F> left(values);
    for (const LogicalRun& run : logical_runs(*spec_, tp_, index_, part)) {
      const std::span<F> here = left.first(static_cast<std::size_t>(run.count));
      if (stored_.is_scattered())
        std::copy_n(all.begin() + run.begin, run.count, here.begin());
      else
        stored_.read(run.begin, here);
      left = left.subspan(here.size());
    }
    return values;
  }

 private:
  StoredParameter stored_;
  const ParamSpec* spec_;
  int tp_, index_;
};

// Calls body(F()) for the type that the optimizer updates.
template <class Body>
void with_master_type(const PrecisionRecipe& precision, const Body& body) {
  if (precision.master == DType::f64) return body(double());
  if (precision.master == DType::f32) return body(float());
  return body(bf16());
}

// The inverse permutation, for reading.
std::vector<std::int64_t> inverse(const std::vector<std::int64_t>& rows) {
  std::vector<std::int64_t> places(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i)
    places[static_cast<std::size_t>(rows[i])] = static_cast<std::int64_t>(i);
  return places;
}

}  // namespace

bool has_weights(const std::string& directory) {
  std::error_code none;
  for (const char* name : {single_file, index_file, "pytorch_model.bin", "pytorch_model.bin.index.json"})
    if (fs::is_regular_file(fs::path(directory) / name, none)) return true;
  return false;
}

HuggingFaceWeights::HuggingFaceWeights(const std::string& directory) {
  refuse_other_layout(directory);
  refuse_quantized(directory);
  model_ = load_model(directory);
  const std::string config = (fs::path(directory) / "config.json").string();
  type_ = &transformers_type_of(read_text(config), config);
  refuse_other_weights(directory);
  stored_ = std::make_unique<const StoredModel>(directory);
  // transformers' configuration claims the module, but leaves its weights out.
  const std::set<std::string> names = stored_->names();
  if (std::none_of(names.begin(), names.end(),
                   [&](const std::string& name) { return predicts_more(model_, *type_, name); }))
    model_.num_mtp_layers = 0;
  num_for_images_ = std::count_if(names.begin(), names.end(), is_for_images);
  places_ = stored_places(*stored_, model_, *type_);
}
HuggingFaceWeights::~HuggingFaceWeights() = default;
HuggingFaceWeights::HuggingFaceWeights(HuggingFaceWeights&&) noexcept = default;

void HuggingFaceWeights::load(const Rank& rank, const ParameterStore& parameters) const {
  std::vector<FilledParameter> filled;
  struct FilledPiece {
    ParameterPiece of;
    std::size_t filled;
  };
  std::vector<FilledPiece> pieces;
  for (const Parameter& p : parameters.all()) {
    if (p.spec.adapter) continue;  // keeps its initial values
    const StoredPlace& place = places_.at(p.spec.name);
    StoredParameter stored(stored_->numbers(place.name, place.shape), place, p.spec.shape,
                           inverse(rows_in_files(model_, p.spec)), less_in_files(model_, p.spec));
    std::vector<ParameterPiece> of_parameter;
    add_pieces(p, of_parameter);
    if (stored.is_scattered() && !of_parameter.empty())
      of_parameter = {{&p, {of_parameter.front().part.begin, of_parameter.back().part.end}}};
    for (const ParameterPiece& piece : of_parameter) pieces.push_back({piece, filled.size()});
    filled.emplace_back(rank, p.spec, std::move(stored));
  }
  with_master_type(rank.precision(), [&]<class F>(F) {
    rank.kernels().team().each_task_that_may_throw(std::ssize(pieces), [&](std::int64_t i, int) {
      const FilledPiece& piece = pieces[static_cast<std::size_t>(i)];
      const FilledParameter& from = filled[piece.filled];
      const Parameter& p = *piece.of.parameter;
      const std::vector<F> values = from.read<F>(piece.of.part);
      // Checks the converted weights: a large F64 is infinite in f32.
      if (!std::all_of(values.begin(), values.end(), [](F x) { return std::isfinite(x); }))
        refuse_nonfinite<F>(stored_->directory(), places_.at(p.spec.name).name,
                            std::span<const F>(from.whole<F>()));
      store_values(std::span<const F>(values), piece.of.part, p);
    });
  });
}

RouterBiases HuggingFaceWeights::router_biases() const {
  RouterBiases biases;
  for (const std::int64_t layer : biased_layers(model_, *type_)) {
    const StoredPlace& place = places_.at(router_bias_name(model_, layer));
    biases[layer] = stored_->numbers(place.name, place.shape).all();
    refuse_nonfinite<double>(stored_->directory(), place.name, {biases[layer].data(), biases[layer].size()});
  }
  return biases;
}

bool HuggingFaceWeights::have_f64() const { return stored_->has(StoredType::f64); }

}  // namespace echelon

#include "checkpoint/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "checkpoint/checkpoint_carried.h"
#include "checkpoint/checkpoint_manifest.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/finite.h"
#include "checkpoint/logical_tensors.h"
#include "checkpoint/router_biases.h"
#include "tensor/host.h"
#include "tensor/reference_view.h"

namespace echelon {

namespace fs = std::filesystem;

std::optional<std::int64_t> checkpoint_step(const std::string& path) {
  const std::string name = fs::path(path).filename().string();
  const bool digits = name.size() >= 13 && name.size() <= 5 + 18 && name.starts_with("step-") &&
                      std::all_of(name.begin() + 5, name.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!digits) return {};
  return std::stoll(name.substr(5));
}

bool is_checkpoint(const std::string& directory) {
  std::error_code none;
  return fs::exists(fs::path(directory) / manifest_name, none);
}

bool reads_bytes(const CheckpointInfo& info) {
  if (info.tokenizer != nullptr && have_tokenizer(*info.tokenizer)) return false;
  return info.model.vocab == bytes_vocab ||
         (info.model.vocab > bytes_vocab && info.trained_on == TokenData::Kind::text);
}

std::shared_ptr<const Tokenizer> tokenizer_of(const CheckpointInfo& info) {
  if (reads_bytes(info)) return bytes_tokenizer();
  if (info.tokenizer == nullptr || !have_tokenizer(*info.tokenizer)) return nullptr;
  auto tokenizer = read_tokenizer(info.path);
  if (tokenizer->vocab() > info.model.vocab)
    refuse(
        "{}: its tokenizer has ids up to {} and {} a vocabulary of {}; legal: a tokenizer with ids below "
        "that",
        info.path, tokenizer->vocab() - 1, info.model.name, info.model.vocab);
  return tokenizer;
}

std::vector<std::string> named_as_checkpoints(const std::string& directory) {
  std::vector<std::pair<std::int64_t, std::string>> found;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(directory, none))
    if (const auto step = checkpoint_step(entry.path().string()))
      found.emplace_back(*step, entry.path().string());
  std::sort(found.begin(), found.end());
  std::vector<std::string> paths;
  for (auto& [step, path] : found) paths.push_back(std::move(path));
  return paths;
}

std::vector<std::string> list_checkpoints(const std::string& directory) {
  std::vector<std::string> paths = named_as_checkpoints(directory);
  std::erase_if(paths, [](const std::string& path) { return !is_checkpoint(path); });
  return paths;
}

void refuse_absent(const std::string& path, const std::string& field) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) refuse("{} {}: no such directory", field, path);
  if (status.type() == fs::file_type::none) refuse("{} {}: {}", field, path, error.message());
}

std::string find_checkpoint(const std::string& path, const std::string& field) {
  refuse_absent(path, field);
  if (is_checkpoint(path)) return path;
  const std::vector<std::string> steps = list_checkpoints(path);
  if (steps.empty()) refuse_without_checkpoint(field, path);
  return steps.back();
}

CheckpointInfo read_checkpoint_info(const std::string& path, const std::string& field) {
  return read_manifest(find_checkpoint(path, field)).info;
}

// The same numbers in another type, each rounded once.
static Tensor in_dtype(const Rank& rank, const Tensor& tensor, DType dtype) {
  if (tensor.dtype() == dtype) return tensor;
  const Tensor other(rank.arena(), MemoryCategory::other, dtype, tensor.shape());
  copy_numbers_from_host(copy_numbers_to_host(tensor), other);
  return other;
}

std::string save_checkpoint(const Rank& rank, const ParameterStore& parameters, const std::string& directory,
                            const CheckpointInfo& info, const std::vector<CarriedTensor>& carried,
                            const RouterBiases& biases, std::int64_t keep) {
  const auto meet = [&] {
    for (Axis axis : all_axes) rank.along(axis).barrier().wait();
  };
  CheckpointWriter writer(rank, directory);
  writer.start(parameters, info, carried, biases);
  writer.wait();
  meet();
  const std::string path = writer.commit(keep);
  meet();
  return path;
}

RouterBiases load_checkpoint(const Rank& rank, const ParameterStore& parameters, const CheckpointInfo& info,
                             bool values_only, const std::vector<CarriedTensor>& carried) {
  CheckpointReader reader(info.path);
  const std::vector<std::pair<const char*, ParameterTensor>> stored{
      {"", ParameterTensor::value},
      {".exp_avg", ParameterTensor::exp_avg},
      {".exp_avg_sq", ParameterTensor::exp_avg_sq}};
  for (const Parameter& p : parameters.all())
    for (const auto& [suffix, which] : stored) {
      // Adapters that the checkpoint lacks keep their initial values.
      if (values_only && p.spec.adapter && info.model.tuning.lora.rank == 0) continue;
      if ((values_only || p.spec.frozen) && which != ParameterTensor::value) continue;
      const auto bytes = reader.read(p.spec.name + suffix, p.spec, info.dtype);
      Tensor logical(rank.arena(), MemoryCategory::other, info.dtype, p.spec.shape);
      copy_bytes_from_host(std::as_bytes(std::span(bytes)), logical);
      if (which == ParameterTensor::value)
        with_stored_type(logical, [&]<class F>(F) {
          refuse_nonfinite<F>(info.path, p.spec.name, std::span<const F>(copy_to_host<F>(logical)));
        });
      const bool is_value = which == ParameterTensor::value;
      scatter_logical(rank, is_value ? in_dtype(rank, logical, rank.precision().master) : logical, p, which);
    }
  if (!values_only && info.residual_ranks > 0) load_carried(rank, parameters, reader, info, carried);
  return read_router_biases(reader);
}

}  // namespace echelon

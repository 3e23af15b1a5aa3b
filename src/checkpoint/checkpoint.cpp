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

// Calls use(numbers), of their type.
template <class Use>
static void with_numbers(std::span<const std::byte> bytes, DType type, const Use& use) {
  const auto of_type = [&]<class F>(F) {
    use(std::span(reinterpret_cast<const F*>(bytes.data()), bytes.size() / sizeof(F)));
  };
  if (type == DType::f64) return of_type(double());
  if (type == DType::f32) return of_type(float());
  check(type == DType::bf16, "checkpoints hold f64, f32 and bf16");
  of_type(bf16());
}

// Stored numbers as a tensor of `dtype`, each rounded at most once.
static Tensor tensor_of(const Rank& rank, std::span<const std::byte> bytes, DType stored,
                        const std::vector<std::int64_t>& shape, DType dtype) {
  Tensor tensor(rank.arena(), MemoryCategory::other, dtype, shape);
  if (stored == dtype) {
    copy_bytes_from_host(bytes, tensor);
    return tensor;
  }
  // Piece by piece, since the numbers take eight bytes each on the way.
  constexpr std::int64_t piece = 1 << 20;
  with_numbers(bytes, stored, [&](auto numbers) {
    for (std::int64_t begin = 0; begin < tensor.numel(); begin += piece) {
      const std::int64_t end = std::min(begin + piece, tensor.numel());
      const std::vector<double> wide(numbers.begin() + begin, numbers.begin() + end);
      copy_numbers_from_host(wide, tensor.flat_range(begin, end));
    }
  });
  return tensor;
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
      if (p.is_updated_whole && which == ParameterTensor::exp_avg_sq) continue;
      std::vector<std::byte> bytes = reader.read(p.spec.name + suffix, p.spec, info.dtype);
      const bool is_value = which == ParameterTensor::value;
      const DType type = is_value ? rank.precision().master : info.dtype;
      const Tensor logical = tensor_of(rank, bytes, info.dtype, p.spec.shape, type);
      // Weights are checked as they are used: a large f32 is infinite in bf16.
      if (is_value && type == info.dtype)
        with_numbers(bytes, type, [&]<class F>(std::span<const F> numbers) {
          refuse_nonfinite<F>(info.path, p.spec.name, numbers);
        });
      else if (is_value)
        with_stored_type(logical, [&]<class F>(F) {
          refuse_nonfinite<F>(info.path, fmt::format("{} in {}", p.spec.name, dtype_name(type)),
                              std::span<const F>(copy_to_host<F>(logical)));
        });
      bytes = {};
      scatter_logical(rank, logical, p, which);
    }
  if (!values_only && info.residual_ranks > 0) load_carried(rank, parameters, reader, info, carried);
  return read_router_biases(reader);
}

}  // namespace echelon

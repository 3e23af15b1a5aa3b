#include "train/checkpoint.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <type_traits>

#include "base/error.h"
#include "train/checkpoint_carried.h"
#include "train/checkpoint_file.h"
#include "train/logical_tensors.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* format_name = "echelon-checkpoint-1";
constexpr const char* manifest_name = "checkpoint.json";

struct StoredFile {
  const char* name;
  std::vector<std::pair<const char*, ParameterTensor>> tensors;  // suffix of the parameter's name
};
const std::vector<StoredFile>& stored_files() {
  static const std::vector<StoredFile> files{
      {"model.safetensors", {{"", ParameterTensor::value}}},
      {"optimizer.safetensors",
       {{".exp_avg", ParameterTensor::exp_avg}, {".exp_avg_sq", ParameterTensor::exp_avg_sq}}}};
  return files;
}

std::string step_name(std::int64_t step) { return fmt::format("step-{:08}", step); }

void sync_directory(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY);
  const bool synced = fd >= 0 && ::fsync(fd) == 0;
  const int error = errno;
  if (fd >= 0) ::close(fd);
  if (!synced) fail("{}: cannot be flushed to disk: {}", path.string(), std::strerror(error));
}

std::string hex(std::uint64_t value) { return fmt::format("{:016x}", value); }

std::string read_text(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in) refuse("{}: cannot be read", path.string());
  return text.str();
}

// The logical tensor, on pipeline rank 0 of the first data-parallel rank; undefined elsewhere. Collective
// over tp, pp and the ranks over which ZeRO cuts it.
Tensor hand_to_first_rank(const Rank& rank, const ParameterStore& parameters, const ParamSpec& spec,
                          ParameterTensor which) {
  Communicator& group = rank.along(Axis::pp);
  const Parameter* here = parameters.find_here(spec.name);
  const bool owns = here != nullptr && here->holders.front() == group.rank();
  if (rank.mesh().dp_cp_index(rank.coordinates()) > 0) {  // gives its part to the first one
    if (owns) (void)local_tensor(rank, *here, which);
    return {};
  }
  if (owns) {
    Tensor logical = gather_logical(rank, *here, which);
    if (group.rank() == 0) return logical;
    group.send(logical, 0).wait();
  } else if (group.rank() == 0) {
    const Tensor logical(rank.arena(), MemoryCategory::other, rank.dtype(), spec.shape);
    group.recv(logical, parameters.owner_of(spec.name)).wait();
    return logical;
  }
  return {};
}

// Ends the file; its checksums.
json finished(SafetensorsWriter& writer) {
  writer.finish();
  json checksums = json::object();
  for (std::size_t i = 0; i < writer.tensors().size(); ++i)
    checksums[writer.tensors()[i].name] = hex(writer.checksums()[i]);
  return checksums;
}

// Writes one file of the checkpoint; on rank 0 only `writer` is made, the gathers are collective.
json write_tensors(const Rank& rank, const ParameterStore& parameters, const StoredFile& file,
                   const fs::path& directory) {
  std::unique_ptr<SafetensorsWriter> writer;
  if (rank.index() == 0) {
    std::vector<StoredTensor> declared;
    for (const ParamSpec& spec : parameters.model())
      for (const auto& [suffix, which] : file.tensors)
        declared.push_back({spec.name + suffix, stored_type(rank.dtype()), spec.shape});
    writer = std::make_unique<SafetensorsWriter>((directory / file.name).string(), declared,
                                                 std::map<std::string, std::string>{{"format", "pt"}});
  }
  for (const ParamSpec& spec : parameters.model())
    for (const auto& [suffix, which] : file.tensors) {
      const Tensor logical = hand_to_first_rank(rank, parameters, spec, which);
      if (writer) writer->write(spec.name + suffix, logical.raw(), static_cast<std::size_t>(logical.bytes()));
    }
  return writer ? finished(*writer) : json::object();
}

json write_carried(const Rank& rank, const ParameterStore& parameters, const Compression& compression,
                   const std::vector<CarriedTensor>& carried, const fs::path& directory) {
  const std::vector<StoredTensor> declared = carried_declarations(rank, parameters, compression);
  if (declared.empty()) return nullptr;
  std::unique_ptr<SafetensorsWriter> writer;
  if (rank.index() == 0)
    writer = std::make_unique<SafetensorsWriter>((directory / carried_file_name).string(), declared);
  gather_carried(rank, parameters, compression, carried, [&](const std::string& name, const Tensor& tensor) {
    writer->write(name, tensor.raw(), static_cast<std::size_t>(tensor.bytes()));
  });
  return writer ? finished(*writer) : json(nullptr);
}

template <class T>
T field(const json& manifest, const char* name, const std::string& where) {
  try {
    const json& value = manifest.at(name);
    // The library itself would make 2 of 2.5, 1 of true and a huge seed of -1.
    const bool exact = std::is_unsigned_v<T>   ? value.is_number_unsigned()
                       : std::is_integral_v<T> ? value.is_number_integer()
                                               : true;
    if (exact) return value.get<T>();
  } catch (const json::exception&) {
  }
  refuse("{}: damaged: \"{}\" is missing or of the wrong type", where, name);
}

json read_manifest(const fs::path& path) {
  const std::string where = (path / manifest_name).string();
  std::error_code error;
  if (!fs::is_regular_file(path / manifest_name, error))
    refuse("{}: there is no checkpoint here ({} is missing)", path.string(), manifest_name);
  const json manifest = json::parse(read_text(path / manifest_name), nullptr, false);
  if (!manifest.is_object()) refuse("{}: damaged: not a JSON object", where);
  if (field<std::string>(manifest, "format", where) != format_name)
    refuse("{}: format \"{}\" is not one that this version reads; legal: \"{}\"", where,
           field<std::string>(manifest, "format", where), format_name);
  return manifest;
}

}  // namespace

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

std::vector<std::string> list_checkpoints(const std::string& directory) {
  std::vector<std::pair<std::int64_t, std::string>> found;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(directory, none)) {
    const std::optional<std::int64_t> step = checkpoint_step(entry.path().string());
    if (step && is_checkpoint(entry.path().string())) found.emplace_back(*step, entry.path().string());
  }
  std::sort(found.begin(), found.end());
  std::vector<std::string> paths;
  for (auto& [step, path] : found) paths.push_back(std::move(path));
  return paths;
}

CheckpointInfo read_checkpoint_info(const std::string& path) {
  fs::path at = path;
  std::error_code error;
  const fs::file_status status = fs::status(at, error);
  if (status.type() == fs::file_type::not_found) refuse("--checkpoint {}: no such directory", path);
  if (status.type() == fs::file_type::none) refuse("--checkpoint {}: {}", path, error.message());
  if (!fs::exists(at / manifest_name, error)) {
    const std::vector<std::string> steps = list_checkpoints(path);
    if (steps.empty())
      refuse("--checkpoint {}: holds no checkpoint (no step-... directory with a {})", path, manifest_name);
    at = steps.back();
  }
  const json manifest = read_manifest(at);
  const std::string where = (at / manifest_name).string();
  CheckpointInfo info;
  info.path = at.string();
  info.step = field<std::int64_t>(manifest, "step", where);
  // Where it is not said, a step was one update.
  info.updates = manifest.contains("updates") ? field<std::int64_t>(manifest, "updates", where) : info.step;
  info.seed = field<std::uint64_t>(manifest, "seed", where);
  info.tokens = field<std::int64_t>(manifest, "tokens", where);
  info.dtype = parse_dtype(field<std::string>(manifest, "dtype", where), where + ": dtype");
  info.model = model_from_toml(field<std::string>(manifest, "model", where), where + ": model");
  if (info.step < 0) refuse("{}: damaged: step {}", where, info.step);
  if (manifest.contains("compress")) {
    info.compression =
        parse_compression(field<std::string>(manifest, "compress", where), where + ": compress");
    info.residual_ranks = field<int>(manifest, "residual-ranks", where);
    if (info.residual_ranks < 1) refuse("{}: damaged: residual-ranks {}", where, info.residual_ranks);
  }
  return info;
}

std::string save_checkpoint(const Rank& rank, const ParameterStore& parameters, const std::string& directory,
                            const CheckpointInfo& info, const std::vector<CarriedTensor>& carried) {
  const fs::path whole = fs::path(directory) / step_name(info.step);
  const fs::path unfinished =
      fs::path(directory) / fmt::format(".{}.unfinished-{}", step_name(info.step), ::getpid());
  const bool writes = rank.index() == 0;
  std::error_code error;
  try {
    if (writes) {
      fs::create_directories(unfinished, error);
      if (error) fail("{}: cannot be made: {}", unfinished.string(), error.message());
    }
    json checksums = json::object();
    // The ranks of the first block hold all of it together, but for what each dp rank carries over.
    if (rank.mesh().dp_cp_index(rank.coordinates()) < parameters.shards())
      for (const StoredFile& file : stored_files())
        checksums[file.name] = write_tensors(rank, parameters, file, unfinished);
    const json carried_checksums = write_carried(rank, parameters, info.compression, carried, unfinished);
    if (!writes) return whole.string();
    json manifest{{"format", format_name},        {"step", info.step},
                  {"updates", info.updates},      {"seed", info.seed},
                  {"tokens", info.tokens},        {"dtype", dtype_name(rank.dtype())},
                  {"model", to_toml(info.model)}, {"checksums", checksums}};
    if (!carried_checksums.is_null()) {
      manifest["checksums"][carried_file_name] = carried_checksums;
      manifest["compress"] = compression_text(info.compression);
      manifest["residual-ranks"] = rank.mesh().dp_cp_size();
    }
    write_file_atomically((unfinished / manifest_name).string(), manifest.dump(1) + "\n");
    sync_directory(unfinished);
    if (fs::exists(whole)) refuse("{}: exists already and is left as it is", whole.string());
    fs::rename(unfinished, whole, error);
    if (error) fail("{}: cannot be given its name: {}", whole.string(), error.message());
    sync_directory(directory);
  } catch (...) {
    if (writes) fs::remove_all(unfinished, error);
    throw;
  }
  return whole.string();
}

void load_checkpoint(const Rank& rank, const ParameterStore& parameters, const CheckpointInfo& info,
                     bool values_only, const std::vector<CarriedTensor>& carried) {
  const json manifest = read_manifest(info.path);
  const std::string where = (fs::path(info.path) / manifest_name).string();
  const auto checksums = field<Checksums>(manifest, "checksums", where);
  for (const StoredFile& file : stored_files()) {
    if (values_only && &file != &stored_files().front()) continue;
    const CheckpointFile stored(info.path, file.name, checksums, where);
    for (const Parameter& p : parameters.all())
      for (const auto& [suffix, which] : file.tensors) {
        const auto bytes = stored.read(p.spec.name + suffix, p.spec.shape, rank.dtype());
        Tensor logical(rank.arena(), MemoryCategory::other, rank.dtype(), p.spec.shape);
        std::memcpy(logical.raw(), bytes.data(), bytes.size());
        scatter_logical(rank, logical, p, which);
      }
  }
  if (values_only || info.residual_ranks == 0) return;
  load_carried(rank, parameters, CheckpointFile(info.path, carried_file_name, checksums, where), info,
               carried);
}

}  // namespace echelon

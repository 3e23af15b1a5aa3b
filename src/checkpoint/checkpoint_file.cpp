#include "checkpoint/checkpoint_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdlib>
#include <filesystem>
#include <utility>

#include "base/error.h"

namespace echelon {

StoredType stored_type(DType dtype) {
  return dtype == DType::f64 ? StoredType::f64 : dtype == DType::bf16 ? StoredType::bf16 : StoredType::f32;
}

CheckpointFile::CheckpointFile(const std::string& directory, const std::string& name,
                               const Checksums& checksums, std::string manifest)
    : file_((std::filesystem::path(directory) / name).string()), manifest_(std::move(manifest)) {
  if (const auto found = checksums.find(name); found != checksums.end()) checksums_ = found->second;
  file_.close();  // there may be many: one for each rank that wrote
}

void CheckpointFile::read(const std::string& name, const std::vector<std::int64_t>& shape, DType dtype,
                          std::span<std::byte> out) const {
  const StoredTensor& tensor = file_.at(name);
  if (tensor.shape != shape)
    refuse("{}: {} has shape ({}) where the model has ({})", file_.path(), name,
           fmt::join(tensor.shape, ", "), fmt::join(shape, ", "));
  if (tensor.type != stored_type(dtype))
    refuse("{}: {} is {}; this run needs {}", file_.path(), name, stored_type_name(tensor.type),
           dtype_name(dtype));
  file_.read_checked(tensor, expected(name), out);
}

std::uint64_t CheckpointFile::expected(const std::string& name) const {
  const auto found = checksums_.find(name);
  if (found == checksums_.end()) refuse("{}: damaged: no checksum of {}", manifest_, name);
  char* end = nullptr;
  const std::uint64_t sum = std::strtoull(found->second.c_str(), &end, 16);
  if (found->second.size() != 16 || *end != '\0')
    refuse("{}: damaged: the checksum of {} is \"{}\"", manifest_, name, found->second);
  return sum;
}

}  // namespace echelon

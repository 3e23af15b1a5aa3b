// One safetensors file of a checkpoint, read with verification of its checksums.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "spec/dtype.h"

namespace echelon {

StoredType stored_type(DType dtype);

// As in checkpoint.json: hexadecimal XXH3-64 by file and tensor.
using Checksums = std::map<std::string, std::map<std::string, std::string>>;

class CheckpointFile {
 public:
  // `manifest`: where the checksums are from. RequestError if the file is missing or damaged.
  CheckpointFile(const std::string& directory, const std::string& name, const Checksums& checksums,
                 std::string manifest);

  const StoredTensor* find(const std::string& name) const { return file_.find(name); }
  // Reads into `out`, which has the right size. RequestError naming the tensor if it is missing, damaged, or
  // of another shape or type.
  void read(const std::string& name, const std::vector<std::int64_t>& shape, DType dtype,
            std::span<std::byte> out) const;

 private:
  std::uint64_t expected(const std::string& name) const;

  SafetensorsFile file_;
  std::map<std::string, std::string> checksums_;
  std::string manifest_;
};

}  // namespace echelon

// Logical tensors of a checkpoint, put together from the parts that ranks of any mesh wrote.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_compare.h"
#include "checkpoint/checkpoint_file.h"
#include "checkpoint/checkpoint_manifest.h"
#include "checkpoint/checkpoint_parts.h"

namespace echelon {

class CheckpointReader {
 public:
  // `path`: a step directory. RequestError where its manifest is missing or damaged, here, and in read()
  // where a tensor is missing, damaged, of another shape or type, or its parts are not all there; it names
  // the tensor.
  explicit CheckpointReader(const std::string& path);

  const CheckpointInfo& info() const { return manifest_.info; }
  std::vector<std::string> names() const;  // of the logical tensors, sorted
  CheckpointContents contents() const;     // but for the number of tensors
  bool has(const std::string& name) const { return parts_.contains(name); }

  // The bytes of the tensor in logical order; `spec` has its shape and how tp cuts it, whatever its own name.
  std::vector<std::byte> read(const std::string& name, const ParamSpec& spec, DType dtype);
  // Reads one that is stored whole, in this shape.
  std::vector<std::byte> read_whole(const std::string& name, const std::vector<std::int64_t>& shape,
                                    DType dtype);
  // The shape of one that is stored whole; nothing of another.
  std::optional<std::vector<std::int64_t>> whole_shape(const std::string& name);

 private:
  struct StoredPart {
    std::string file;
    TensorPart part;
  };
  const CheckpointFile& file(const std::string& name);
  const std::vector<StoredPart>& parts(const std::string& name) const;
  void read_part(const StoredPart& stored, const ParamSpec& spec, DType dtype, std::span<std::byte> logical);

  Manifest manifest_;
  std::string where_;
  std::map<std::string, std::vector<StoredPart>> parts_;  // by logical name
  std::map<std::string, std::unique_ptr<CheckpointFile>> files_;
};

}  // namespace echelon

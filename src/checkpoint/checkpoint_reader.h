// Logical tensors of a checkpoint, assembled from the parts that ranks of any mesh wrote.
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
  // `path`: a step directory. RequestError if its manifest is missing or damaged. read() throws RequestError
  // naming the tensor if it is missing, damaged, of another shape or type, or incomplete; RunError if the
  // checkpoint was removed meanwhile.
  explicit CheckpointReader(const std::string& path);

  const CheckpointInfo& info() const { return manifest_.info; }
  std::vector<std::string> names() const;  // of the logical tensors, sorted
  CheckpointContents contents() const;     // except the number of tensors
  bool has(const std::string& name) const { return parts_.contains(name); }

  // The tensor's bytes in logical order; `spec` gives its shape and how tp cuts it (spec's name is not used).
  std::vector<std::byte> read(const std::string& name, const ParamSpec& spec, DType dtype);
  // Reads a tensor that is stored whole, in this shape.
  std::vector<std::byte> read_whole(const std::string& name, const std::vector<std::int64_t>& shape,
                                    DType dtype);
  // The shape of a tensor that is stored whole; no value for others.
  std::optional<std::vector<std::int64_t>> whole_shape(const std::string& name);

 private:
  struct StoredPart {
    std::string file;
    TensorPart part;
  };
  // What `read` returns. RunError if it throws because the checkpoint is gone.
  template <class Read>
  auto while_it_is_there(const Read& read) const;
  const CheckpointFile& file(const std::string& name);
  const std::vector<StoredPart>& parts(const std::string& name) const;
  void read_part(const StoredPart& stored, const ParamSpec& spec, DType dtype, std::span<std::byte> logical);

  Manifest manifest_;
  std::string where_;
  std::map<std::string, std::vector<StoredPart>> parts_;  // by logical name
  std::map<std::string, std::unique_ptr<CheckpointFile>> files_;
};

}  // namespace echelon

// The safetensors format (https://huggingface.co/docs/safetensors): a little-endian uint64 header length, a
// JSON header {"name": {"dtype", "shape", "data_offsets": [begin, end]}, ..., "__metadata__": {...}}, then
// the tensors' bytes, row-major and little-endian, without gaps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/atomic_file.h"
#include "base/open_file.h"
#include "data/checksum.h"

namespace echelon {

enum class StoredType {
  boolean,
  u8,
  i8,
  u16,
  i16,
  f16,
  bf16,
  u32,
  i32,
  f32,
  u64,
  i64,
  f64,
  f8_e4m3,
  f8_e5m2
};
const char* stored_type_name(StoredType type);  // "F32"
std::int64_t stored_type_bytes(StoredType type);

struct StoredTensor {
  std::string name;
  StoredType type = StoredType::f32;
  std::vector<std::int64_t> shape;
  std::int64_t offset = 0;  // of its first byte after the header; filled in by the reader and the writer

  std::int64_t numel() const;
  std::int64_t bytes() const { return numel() * stored_type_bytes(type); }
};

// Declare every tensor, then write the bytes of each in the order of declaration, in any number of pieces.
// finish() gives the file its name, complete and synced; before that, or after any error, there is no such
// file (AtomicFile).
class SafetensorsWriter {
 public:
  // The names must be distinct (InvariantError). RunError if the file cannot be written, here and below.
  SafetensorsWriter(const std::string& path, std::vector<StoredTensor> tensors,
                    const std::map<std::string, std::string>& metadata = {});

  // The next bytes of tensor `name`; InvariantError if it is not this tensor's turn or they are too many.
  void write(std::string_view name, const void* data, std::size_t bytes);
  void finish();  // InvariantError if bytes are missing

  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  // XXH3-64 of each tensor's bytes, in the order of declaration; complete after finish().
  const std::vector<std::uint64_t>& checksums() const { return checksums_; }

 private:
  void close_full_tensors();

  AtomicFile file_;
  std::vector<StoredTensor> tensors_;
  std::vector<std::uint64_t> checksums_;
  RunningChecksum checksum_;  // of the tensor being written
  std::size_t current_ = 0;   // tensor being written
  std::int64_t written_ = 0;  // bytes of it
};

// A file opened for reading; its header is validated completely. RequestError naming the file and the tensor;
// RunError if the file becomes shorter while it is read.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);

  const OpenFile& file() const { return file_; }
  const std::string& path() const { return file_.path(); }
  const std::vector<StoredTensor>& tensors() const { return tensors_; }  // in the order of their bytes
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  std::int64_t data_begin() const { return data_begin_; }  // in the file: where tensors' offsets start
  const StoredTensor* find(std::string_view name) const;   // nullptr if there is none
  const StoredTensor& at(std::string_view name) const;     // RequestError if there is none

  // From now on the file is open only while it is read (OpenFile).
  void close() { file_.close(); }

  // The tensor's bytes from `begin` on.
  void read(const StoredTensor& tensor, std::int64_t begin, std::span<std::byte> out) const;
  std::vector<std::byte> bytes(const StoredTensor& tensor) const;
  // Reads the whole tensor into `out`; RequestError if its XXH3-64 is not `expected`.
  void read_checked(const StoredTensor& tensor, std::uint64_t expected, std::span<std::byte> out) const;

 private:
  OpenFile file_;
  std::vector<StoredTensor> tensors_;
  std::map<std::string, std::size_t, std::less<>> by_name_;
  std::map<std::string, std::string> metadata_;
  std::int64_t data_begin_ = 0;
};

}  // namespace echelon

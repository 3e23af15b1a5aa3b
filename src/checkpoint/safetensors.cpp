#include "checkpoint/safetensors.h"

#include <bit>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "base/error.h"

namespace echelon {

namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

struct TypeRow {
  StoredType type;
  const char* name;
  std::int64_t bytes;
};
// In the order of the enumeration.
constexpr TypeRow types[] = {{StoredType::boolean, "BOOL", 1},   {StoredType::u8, "U8", 1},
                             {StoredType::i8, "I8", 1},          {StoredType::u16, "U16", 2},
                             {StoredType::i16, "I16", 2},        {StoredType::f16, "F16", 2},
                             {StoredType::bf16, "BF16", 2},      {StoredType::u32, "U32", 4},
                             {StoredType::i32, "I32", 4},        {StoredType::f32, "F32", 4},
                             {StoredType::u64, "U64", 8},        {StoredType::i64, "I64", 8},
                             {StoredType::f64, "F64", 8},        {StoredType::f8_e4m3, "F8_E4M3", 1},
                             {StoredType::f8_e5m2, "F8_E5M2", 1}};

const TypeRow& row(StoredType type) { return types[static_cast<std::size_t>(type)]; }

std::string header_text(const std::vector<StoredTensor>& tensors,
                        const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  for (const StoredTensor& t : tensors) {
    header[t.name] = {{"dtype", stored_type_name(t.type)},
                      {"shape", t.shape},
                      {"data_offsets", {t.offset, t.offset + t.bytes()}}};
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // aligns the data
  return text;
}

}  // namespace

const char* stored_type_name(StoredType type) { return row(type).name; }
std::int64_t stored_type_bytes(StoredType type) { return row(type).bytes; }

std::int64_t StoredTensor::numel() const {
  std::int64_t product = 1;
  for (const std::int64_t size : shape) product *= size;
  return product;
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<StoredTensor> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : file_(path), tensors_(std::move(tensors)) {
  std::set<std::string> names{"__metadata__"};
  std::int64_t offset = 0;
  for (StoredTensor& t : tensors_) {
    check(names.insert(t.name).second, "a stored tensor's name is taken");
    for (const std::int64_t size : t.shape) check(size >= 0, "a stored tensor has a negative size");
    t.offset = offset;
    offset += t.bytes();
  }
  const std::string header = header_text(tensors_, metadata);
  const std::uint64_t length = header.size();
  file_.write(&length, sizeof length);
  file_.write(header.data(), header.size());
  close_full_tensors();
}

void SafetensorsWriter::write(std::string_view name, const void* data, std::size_t bytes) {
  if (bytes == 0) return;  // an empty tensor, too, is completed at once
  check(current_ < tensors_.size() && tensors_[current_].name == name,
        "a stored tensor is written out of turn");
  check(static_cast<std::int64_t>(bytes) <= tensors_[current_].bytes() - written_,
        "a stored tensor is given more bytes than it has");
  file_.write(data, bytes);
  checksum_.add({static_cast<const std::byte*>(data), bytes});
  written_ += static_cast<std::int64_t>(bytes);
  close_full_tensors();
}

void SafetensorsWriter::close_full_tensors() {
  while (current_ < tensors_.size() && written_ == tensors_[current_].bytes()) {
    checksums_.push_back(checksum_.take());
    written_ = 0;
    ++current_;
  }
}

void SafetensorsWriter::finish() {
  check(current_ == tensors_.size(), "a stored tensor lacks bytes");
  file_.commit();
}

}  // namespace echelon

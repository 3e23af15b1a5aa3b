// Reading: everything in the file is checked before it is used.
#include <fmt/format.h>
#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "base/error.h"
#include "checkpoint/safetensors.h"
#include "data/checksum.h"

namespace echelon {

namespace {

using Json = nlohmann::json;

constexpr std::uint64_t largest_header = 100'000'000;  // as in the reference implementation
constexpr const char* metadata_key = "__metadata__";

// JSON without duplicate keys in an object. A header has three levels; deeper text is not a header.
Json parse_header(std::string_view text, const std::string& path) {
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto watch = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth > 3) refuse("{}: the safetensors header is nested too deeply", path);
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second) {
      refuse("{}: the safetensors header has the key {} twice", path, value.get<std::string>());
    }
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), watch);
  } catch (const Json::exception& error) {
    refuse("{}: the safetensors header is not JSON: {}", path, without_library_name(error.what()));
  }
}

std::optional<StoredType> stored_type(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(StoredType::f8_e5m2); ++i) {
    if (name == stored_type_name(static_cast<StoredType>(i))) return static_cast<StoredType>(i);
  }
  return {};
}

// Sizes and offsets of any valid file fit well in 63 bits.
std::int64_t size_value(const Json& value, const std::string& where, const char* what) {
  constexpr std::uint64_t largest = std::uint64_t{1} << 62;
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > largest) {
    refuse("{}: {} is {}, not a whole number from 0 to 2^62", where, what, value.dump());
  }
  return static_cast<std::int64_t>(value.get<std::uint64_t>());
}

// numel() x bytes of an element, or no value on overflow. Sizes after a zero are multiplied too, so that
// numel() cannot overflow in any order.
std::optional<std::int64_t> checked_bytes(const StoredTensor& tensor) {
  std::int64_t product = stored_type_bytes(tensor.type);
  for (const std::int64_t size : tensor.shape) {
    if (__builtin_mul_overflow(product, std::max<std::int64_t>(size, 1), &product)) return {};
  }
  return tensor.bytes();
}

StoredTensor read_tensor(const std::string& name, const Json& entry, std::int64_t data_bytes,
                         const std::string& path) {
  const std::string where = path + ": tensor " + name;
  if (!entry.is_object()) refuse("{}: its entry is not an object", where);
  for (const auto& [key, value] : entry.items()) {
    if (key != "dtype" && key != "shape" && key != "data_offsets") refuse("{}: unknown field {}", where, key);
  }
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!entry.contains(key)) refuse("{}: the field {} is missing", where, key);
  }
  StoredTensor tensor;
  tensor.name = name;
  const Json& dtype = entry["dtype"];
  const std::optional<StoredType> type =
      dtype.is_string() ? stored_type(dtype.get<std::string>()) : std::nullopt;
  if (!type) refuse("{}: unknown dtype {}", where, dtype.dump());
  tensor.type = *type;
  if (!entry["shape"].is_array()) refuse("{}: shape is not a list", where);
  for (const Json& size : entry["shape"]) tensor.shape.push_back(size_value(size, where, "a size in shape"));
  const Json& offsets = entry["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2) refuse("{}: data_offsets is not a list of two", where);
  tensor.offset = size_value(offsets[0], where, "data_offsets[0]");
  const std::int64_t end = size_value(offsets[1], where, "data_offsets[1]");
  if (tensor.offset > end || end > data_bytes) {
    refuse("{}: data_offsets [{}, {}] lie outside the {} bytes of data (truncated file?)", where,
           tensor.offset, end, data_bytes);
  }
  if (checked_bytes(tensor) != end - tensor.offset) {
    refuse("{}: {} bytes do not hold a {} of shape [{}]", where, end - tensor.offset,
           stored_type_name(tensor.type), fmt::join(tensor.shape, ", "));
  }
  return tensor;
}

std::map<std::string, std::string> read_metadata(const Json& entry, const std::string& path) {
  if (!entry.is_object()) refuse("{}: {} is not an object", path, metadata_key);
  std::map<std::string, std::string> metadata;
  for (const auto& [key, value] : entry.items()) {
    if (!value.is_string()) refuse("{}: {} {} is not a text", path, metadata_key, key);
    metadata[key] = value.get<std::string>();
  }
  return metadata;
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(path, "safetensors file") {
  std::uint64_t length = 0;
  const std::int64_t after_length = file_.size() - static_cast<std::int64_t>(sizeof length);
  if (after_length < 0) refuse("{}: not a safetensors file: {} bytes only", path, file_.size());
  file_.read(0, std::as_writable_bytes(std::span(&length, 1)));
  if (length > largest_header || static_cast<std::int64_t>(length) > after_length) {
    refuse("{}: not a safetensors file, or truncated: it gives its header {} bytes and has {}", path, length,
           after_length);
  }
  std::string text(static_cast<std::size_t>(length), '\0');
  file_.read(sizeof length, std::as_writable_bytes(std::span(text)));
  if (!text.starts_with('{')) refuse("{}: not a safetensors file: its header does not begin with {{", path);
  const Json header = parse_header(text, path);
  data_begin_ = static_cast<std::int64_t>(sizeof length + length);
  const std::int64_t data_bytes = file_.size() - data_begin_;
  for (const auto& [name, entry] : header.items()) {
    if (name == metadata_key) {
      metadata_ = read_metadata(entry, path);
    } else {
      tensors_.push_back(read_tensor(name, entry, data_bytes, path));
    }
  }
  const auto end_of = [](const StoredTensor& t) { return t.offset + t.bytes(); };
  std::sort(tensors_.begin(), tensors_.end(), [&](const StoredTensor& a, const StoredTensor& b) {
    return std::pair(a.offset, end_of(a)) < std::pair(b.offset, end_of(b));
  });
  std::int64_t filled = 0;
  for (const StoredTensor& t : tensors_) {
    if (t.offset != filled) {
      refuse("{}: tensor {} begins at byte {} of the data; the one before it ends at {}", path, t.name,
             t.offset, filled);
    }
    filled = end_of(t);
  }
  if (filled != data_bytes)
    refuse("{}: {} bytes of data, and the tensors end at {}", path, data_bytes, filled);
  for (std::size_t i = 0; i < tensors_.size(); ++i) by_name_[tensors_[i].name] = i;
}

const StoredTensor* SafetensorsFile::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &tensors_[found->second];
}

const StoredTensor& SafetensorsFile::at(std::string_view name) const {
  const StoredTensor* tensor = find(name);
  if (tensor == nullptr) refuse("{}: there is no tensor {}", path(), name);
  return *tensor;
}

void SafetensorsFile::read(const StoredTensor& tensor, std::int64_t begin, std::span<std::byte> out) const {
  file_.read(data_begin_ + tensor.offset + begin, out);
}

std::vector<std::byte> SafetensorsFile::bytes(const StoredTensor& tensor) const {
  std::vector<std::byte> all(static_cast<std::size_t>(tensor.bytes()));
  read(tensor, 0, all);
  return all;
}

void SafetensorsFile::read_checked(const StoredTensor& tensor, std::uint64_t expected,
                                   std::span<std::byte> out) const {
  check(out.size() == static_cast<std::size_t>(tensor.bytes()), "a stored tensor is read into another size");
  read(tensor, 0, out);
  const std::uint64_t found = checksum(out);
  if (found != expected) {
    refuse("{}: tensor {} is damaged: its checksum is {:016x}, expected {:016x}", path(), tensor.name, found,
           expected);
  }
}

}  // namespace echelon

#include "checkpoint/stored_model.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/bf16.h"
#include "base/error.h"
#include "base/json_text.h"
#include "base/open_file.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// IEEE's binary16, for storage only.
struct Half {
  std::uint16_t bits;

  explicit operator float() const {
    const std::uint32_t magnitude = bits & 0x7fffu, sign = std::uint32_t{bits & 0x8000u} << 16;
    if (magnitude < 0x400u)  // below the smallest normal number
      return std::bit_cast<float>(sign |
                                  std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-24f));
    const std::uint32_t bias = magnitude >= 0x7c00u ? 0xe0u : 0x70u;  // infinities and NaN are preserved
    return std::bit_cast<float>(sign | ((magnitude << 13) + (bias << 23)));
  }
};

// Rounded once, since widening is exact.
template <class F, class S>
F rounded_to(S x) {
  if constexpr (std::is_same_v<S, double>)
    return static_cast<F>(x);
  else
    return static_cast<F>(static_cast<float>(x));
}

// Reads elements of the stored type S, a few pages of the file at a time, and rounds them to F.
template <class S, class F>
void read_and_round(const SafetensorsFile& file, const StoredTensor& tensor, std::int64_t begin,
                    std::span<F> out) {
  std::array<S, (std::size_t{1} << 16) / sizeof(S)> stored;
  while (!out.empty()) {
    const std::span<S> some = std::span(stored).first(std::min(stored.size(), out.size()));
    file.read(tensor, begin * static_cast<std::int64_t>(sizeof(S)), std::as_writable_bytes(some));
    std::transform(some.begin(), some.end(), out.begin(), rounded_to<F, S>);
    begin += std::ssize(some);
    out = out.subspan(some.size());
  }
}

template <class F>
constexpr StoredType stored_as() {
  if constexpr (std::is_same_v<F, double>) return StoredType::f64;
  if constexpr (std::is_same_v<F, float>) return StoredType::f32;
  return StoredType::bf16;
}

}  // namespace

template <class F>
void StoredNumbers::read(std::int64_t begin, std::span<F> out) const {
  if (tensor_->type == stored_as<F>())
    return file_->read(*tensor_, begin * static_cast<std::int64_t>(sizeof(F)), std::as_writable_bytes(out));
  switch (tensor_->type) {
    case StoredType::f64:
      return read_and_round<double>(*file_, *tensor_, begin, out);
    case StoredType::f32:
      return read_and_round<float>(*file_, *tensor_, begin, out);
    case StoredType::bf16:
      return read_and_round<bf16>(*file_, *tensor_, begin, out);
    default:
      return read_and_round<Half>(*file_, *tensor_, begin, out);
  }
}

template void StoredNumbers::read(std::int64_t, std::span<float>) const;
template void StoredNumbers::read(std::int64_t, std::span<double>) const;
template void StoredNumbers::read(std::int64_t, std::span<bf16>) const;

std::vector<double> StoredNumbers::all() const {
  std::vector<double> numbers(static_cast<std::size_t>(numel()));
  read(0, std::span(numbers));
  return numbers;
}

StoredModel::StoredModel(const std::string& directory) : directory_(directory) {
  std::set<std::string> names;
  std::error_code none;
  // If both exist, transformers reads the single file.
  if (!fs::exists(fs::path(directory) / single_file, none) &&
      fs::exists(fs::path(directory) / index_file, none)) {
    const std::string path = (fs::path(directory) / index_file).string();
    const json index = parse_json(read_text(path), path);
    if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
      refuse("{}/{}: has no \"weight_map\"", directory, index_file);
    for (const auto& [tensor, file] : index["weight_map"].items()) {
      if (!file.is_string() || file.get<std::string>().find('/') != std::string::npos)
        refuse("{}/{}: {} is in {}, which is no name of a file", directory, index_file, tensor, file.dump());
      names.insert(file.get<std::string>());
    }
  } else {
    names.insert(single_file);
  }
  for (const std::string& name : names) {
    files_.push_back(std::make_unique<SafetensorsFile>((fs::path(directory) / name).string()));
    for (const StoredTensor& tensor : files_.back()->tensors())
      if (!places_.emplace(tensor.name, files_.back().get()).second)
        refuse("{}: {} is in two files", directory, tensor.name);
  }
}

const std::string* StoredModel::find(const std::string& name) const {
  const auto found = places_.find(name);
  return found == places_.end() ? nullptr : &found->first;
}

std::set<std::string> StoredModel::names() const {
  std::set<std::string> all;
  for (const auto& [name, file] : places_) all.insert(name);
  return all;
}

bool StoredModel::has(StoredType type) const {
  return std::any_of(files_.begin(), files_.end(), [&](const auto& file) {
    return std::ranges::any_of(file->tensors(), [&](const StoredTensor& t) { return t.type == type; });
  });
}

const std::vector<std::int64_t>& StoredModel::shape(const std::string& name) const {
  return places_.at(name)->at(name).shape;
}

StoredNumbers StoredModel::numbers(const std::string& name, const std::vector<std::int64_t>& shape) const {
  const SafetensorsFile& file = *places_.at(name);
  const StoredTensor& tensor = file.at(name);
  if (tensor.shape != shape)
    refuse("{}: {} has shape ({}) where the model has ({})", file.path(), name, fmt::join(tensor.shape, ", "),
           fmt::join(shape, ", "));
  if (tensor.type != StoredType::f64 && tensor.type != StoredType::f32 && tensor.type != StoredType::f16 &&
      tensor.type != StoredType::bf16)
    refuse("{}: {} is {}; legal: F64, F32, F16, BF16", file.path(), name, stored_type_name(tensor.type));
  return {file, tensor};
}

bool StoredModel::equal(const std::string& a, const std::string& b,
                        const std::vector<std::int64_t>& shape) const {
  const StoredNumbers first = numbers(a, shape), second = numbers(b, shape);
  constexpr std::int64_t at_once = 1 << 13;
  std::array<double, at_once> x, y;
  for (std::int64_t begin = 0; begin < first.numel(); begin += at_once) {
    const auto count = static_cast<std::size_t>(std::min(at_once, first.numel() - begin));
    first.read(begin, std::span(x).first(count));
    second.read(begin, std::span(y).first(count));
    if (!std::equal(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(count), y.begin())) return false;
  }
  return true;
}

StoredParameter::StoredParameter(const StoredNumbers& numbers, const StoredPlace& place,
                                 std::vector<std::int64_t> shape, std::vector<std::int64_t> places,
                                 double less)
    : numbers_(numbers),
      place_(place),
      places_(std::move(places)),
      rows_(shape.front()),
      width_(shape.size() == 1 ? 1 : shape.back()),
      less_(less) {}

std::int64_t StoredParameter::row_in_file(std::int64_t row) const {
  const std::int64_t in_order = places_.empty() ? row : places_[static_cast<std::size_t>(row)];
  return place_.first_row +
         (place_.run == 0 ? in_order : in_order / place_.run * place_.step + in_order % place_.run);
}

template <class F>
void StoredParameter::read_as_stored(std::int64_t begin, std::span<F> out) const {
  while (!out.empty()) {
    const std::int64_t row = begin / width_, column = begin % width_, there = row_in_file(row);
    // As many rows as are consecutive in the file too.
    std::int64_t rows = 1;
    const bool in_order = places_.empty() && place_.run == 0;
    if (in_order) rows = rows_ - row;
    while (!in_order && rows * width_ - column < std::ssize(out) && row_in_file(row + rows) == there + rows)
      ++rows;
    const auto here = static_cast<std::size_t>(std::min(rows * width_ - column, std::ssize(out)));
    numbers_.read(there * width_ + column, out.first(here));
    begin += static_cast<std::int64_t>(here);
    out = out.subspan(here);
  }
}

template <class F>
void StoredParameter::read_scattered(std::span<F> out) const {
  const std::int64_t parts = place_.expert_parts, column = rows_ * parts, stride = place_.in_turn ? parts : 1,
                     begin = place_.part * (place_.in_turn ? 1 : rows_);
  // As many columns as fit in a cache.
  const std::int64_t at_once = std::clamp((std::int64_t{1} << 16) / column, std::int64_t{1}, width_);
  std::vector<F> columns(static_cast<std::size_t>(at_once * column));
  for (std::int64_t first = 0; first < width_; first += at_once) {
    const std::int64_t count = std::min(at_once, width_ - first);
    numbers_.read((place_.first_row * width_ + first) * column,
                  std::span(columns).first(static_cast<std::size_t>(count * column)));
    for (std::int64_t r = 0; r < rows_; ++r)
      for (std::int64_t c = 0; c < count; ++c)
        out[static_cast<std::size_t>(r * width_ + first + c)] =
            columns[static_cast<std::size_t>(c * column + r * stride + begin)];
  }
}

template <class F>
void StoredParameter::read(std::int64_t begin, std::span<F> out) const {
  if (less_ != 0) {
    check(!is_scattered(), "no part of an expert is less in files");
    std::vector<double> exact(out.size());
    read_as_stored(begin, std::span(exact));
    std::transform(exact.begin(), exact.end(), out.begin(),
                   [&](double x) { return static_cast<F>(x + less_); });
    return;
  }
  if (!is_scattered()) return read_as_stored(begin, out);
  check(begin == 0 && std::ssize(out) == numel(), "a part of an expert is read whole");
  read_scattered(out);
}
template void StoredParameter::read(std::int64_t, std::span<float>) const;
template void StoredParameter::read(std::int64_t, std::span<double>) const;
template void StoredParameter::read(std::int64_t, std::span<bf16>) const;

}  // namespace echelon

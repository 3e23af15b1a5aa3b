#include "checkpoint/hugging_face_shards.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "checkpoint/checkpoint_file.h"
#include "checkpoint/router_biases.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/stored_model.h"
#include "tensor/host.h"

namespace echelon {
namespace {

// A vector has one column.
std::pair<std::int64_t, std::int64_t> rows_and_columns(const ParamSpec& spec) {
  return {spec.shape.front(), spec.shape.size() == 1 ? 1 : spec.shape.back()};
}

// Puts rows into the order of the files.
template <class T>
void order_rows(const std::vector<std::int64_t>& rows, std::vector<T>& values) {
  if (rows.empty()) return;
  const auto width = std::ssize(values) / std::ssize(rows);
  std::vector<T> ordered;
  for (const std::int64_t row : rows)
    ordered.insert(ordered.end(), values.begin() + row * width, values.begin() + (row + 1) * width);
  values = std::move(ordered);
}

std::vector<double> read_numbers(CheckpointReader& reader, const ParamSpec& spec) {
  std::vector<std::byte> bytes = reader.read(spec.name, spec, reader.info().dtype);
  return copy_numbers_to_host(Tensor::view_of(bytes.data(), reader.info().dtype, {spec.numel()}));
}

// Adds scale B A.
void merge(CheckpointReader& reader, const AdaptedMatrix& adapted, std::vector<double>& weight) {
  const std::vector<double> a = read_numbers(reader, adapted.a), b = read_numbers(reader, adapted.b);
  const std::int64_t rank = adapted.a.shape[0], in = adapted.a.shape[1], out = adapted.b.shape[0];
  const bool in_out = adapted.order == WeightOrder::in_out;
  for (std::int64_t o = 0; o < out; ++o)
    for (std::int64_t r = 0; r < rank; ++r) {
      const double factor = adapted.scale * b[static_cast<std::size_t>(o * rank + r)];
      for (std::int64_t i = 0; i < in; ++i)
        weight[static_cast<std::size_t>(in_out ? i * out + o : o * in + i)] +=
            factor * a[static_cast<std::size_t>(r * in + i)];
    }
}

// For one expert.
template <class T>
std::vector<T> elements_in_turn(const FileTensor& tensor, const std::vector<std::vector<T>>& parts) {
  const auto [rows, cols] = rows_and_columns(tensor.parts.front());
  const auto width = std::ssize(parts.front()) / (rows * cols);  // of an element
  std::vector<T> all;
  all.reserve(parts.size() * parts.front().size());
  for (std::int64_t column = 0; column < cols; ++column)
    for (std::int64_t row = 0; row < rows; ++row)
      for (const std::vector<T>& part : parts) {
        const auto begin = part.begin() + (row * cols + column) * width;
        all.insert(all.end(), begin, begin + width);
      }
  return all;
}

// The parts of a tensor in the file's order: one after another, or alternating runs of rows.
template <class T>
std::vector<T> rows_in_turn(const FileTensor& tensor, const std::vector<std::vector<T>>& parts) {
  if (tensor.expert_parts > 0) return elements_in_turn(tensor, parts);
  std::vector<T> all;
  for (std::int64_t turn = 0; turn < tensor.turns; ++turn)
    for (const std::vector<T>& part : parts) {
      const auto size = std::ssize(part) / tensor.turns, begin = turn * size;
      all.insert(all.end(), part.begin() + begin, part.begin() + begin + size);
    }
  return all;
}

void write_router_bias(CheckpointReader& reader, const FileTensor& tensor, DType dtype,
                       SafetensorsWriter& writer) {
  std::vector<double> bias(static_cast<std::size_t>(tensor.numel()));  // zeros for a run without biases
  const std::string& name = tensor.parts.front().name;
  if (reader.has(name)) {
    const auto bytes = reader.read_whole(name, tensor.parts.front().shape, DType::f64);
    std::memcpy(bias.data(), bytes.data(), bytes.size());
  }
  std::vector<std::byte> bytes(static_cast<std::size_t>(tensor.numel() * element_bytes(dtype)));
  copy_numbers_from_host(bias, Tensor::view_of(bytes.data(), dtype, {tensor.numel()}));
  writer.write(tensor.name, bytes.data(), bytes.size());
}

// Weights of another dtype are rounded to this one.
std::vector<std::byte> bytes_in_file(CheckpointReader& reader, const FileTensor& tensor,
                                     const Adapters& adapters, DType dtype) {
  const DType kept = reader.info().dtype;
  const ModelSpec& model = reader.info().model;
  const double less = less_in_files(model, tensor.parts.front());
  const bool adapted = std::any_of(tensor.parts.begin(), tensor.parts.end(),
                                   [&](const ParamSpec& part) { return adapters.contains(part.name); });
  if (dtype == kept && less == 0 && !adapted) {
    std::vector<std::vector<std::byte>> parts;
    for (const ParamSpec& part : tensor.parts) {
      parts.push_back(reader.read(part.name, part, kept));
      order_rows(rows_in_files(model, part), parts.back());
    }
    return rows_in_turn(tensor, parts);
  }
  std::vector<std::vector<double>> parts;
  for (const ParamSpec& part : tensor.parts) {
    parts.push_back(read_numbers(reader, part));
    if (const auto found = adapters.find(part.name); found != adapters.end())
      merge(reader, found->second, parts.back());
    order_rows(rows_in_files(model, part), parts.back());
  }
  std::vector<double> numbers = rows_in_turn(tensor, parts);
  for (double& x : numbers) x -= less;
  std::vector<std::byte> bytes(static_cast<std::size_t>(tensor.numel() * element_bytes(dtype)));
  copy_numbers_from_host(numbers, Tensor::view_of(bytes.data(), dtype, {tensor.numel()}));
  return bytes;
}

}  // namespace

DType type_in_file(const FileTensor& tensor, DType dtype) {
  return is_router_bias(tensor.parts.front().name) && dtype == DType::bf16 ? DType::f32 : dtype;
}

std::vector<Shard> cut_into_shards(const std::vector<FileTensor>& all, DType dtype,
                                   std::int64_t shard_bytes) {
  std::vector<Shard> shards;
  std::int64_t filled = 0;
  for (const FileTensor& tensor : all) {
    const std::int64_t bytes = tensor.numel() * element_bytes(type_in_file(tensor, dtype));
    if (shards.empty() || filled + bytes > shard_bytes) {
      shards.emplace_back();
      filled = 0;
    }
    shards.back().tensors.push_back(tensor);
    filled += bytes;
  }
  for (std::size_t i = 0; i < shards.size(); ++i)
    shards[i].name = shards.size() == 1
                         ? single_file
                         : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
  return shards;
}

Adapters adapters_of(const ModelSpec& model) {
  Adapters adapters;
  for (AdaptedMatrix& one : adapted_matrices(model)) {
    const std::string name = one.weight.name;
    adapters.emplace(name, std::move(one));
  }
  return adapters;
}

void write_shard(CheckpointReader& reader, const Shard& shard, const Adapters& adapters,
                 const std::string& path, DType dtype) {
  std::vector<StoredTensor> declared;
  for (const FileTensor& tensor : shard.tensors)
    declared.push_back({tensor.name, stored_type(type_in_file(tensor, dtype)), tensor.shape()});
  SafetensorsWriter writer(path, declared, {{"format", "pt"}});
  for (const FileTensor& tensor : shard.tensors) {
    if (tensor.constant) {
      std::vector<std::byte> bytes(static_cast<std::size_t>(element_bytes(dtype)));
      const std::vector<double> number{*tensor.constant};
      copy_numbers_from_host(number, Tensor::view_of(bytes.data(), dtype, {1}));
      writer.write(tensor.name, bytes.data(), bytes.size());
      continue;
    }
    if (is_router_bias(tensor.parts.front().name)) {
      write_router_bias(reader, tensor, type_in_file(tensor, dtype), writer);
      continue;
    }
    // One expert at a time, or the whole tensor.
    const auto each = tensor.expert_parts > 0 ? static_cast<std::size_t>(tensor.expert_parts)
                      : tensor.stacked > 0    ? tensor.parts.size() / static_cast<std::size_t>(tensor.stacked)
                                              : tensor.parts.size();
    for (auto begin = tensor.parts.begin(); begin != tensor.parts.end();
         begin += static_cast<std::ptrdiff_t>(each)) {
      const FileTensor piece{tensor.name,    {begin, begin + static_cast<std::ptrdiff_t>(each)},
                             tensor.turns,   tensor.expert_parts,
                             tensor.in_turn, tensor.depthwise};
      const std::vector<std::byte> bytes = bytes_in_file(reader, piece, adapters, dtype);
      writer.write(tensor.name, bytes.data(), bytes.size());
    }
  }
  writer.finish();
}

}  // namespace echelon

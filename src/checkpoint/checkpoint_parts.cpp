#include "checkpoint/checkpoint_parts.h"

#include <fmt/format.h>

#include <charconv>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "checkpoint/checkpoint_carried.h"
#include "checkpoint/checkpoint_file.h"
#include "checkpoint/logical_tensors.h"
#include "checkpoint/router_biases.h"
#include "tensor/host.h"
#include "tensor/split_weights.h"

namespace echelon {
namespace {

// The part of a parameter that the ranks with one tp coordinate hold (tp = 1: all of it).
struct Slice {
  int tp = 1, index = 0;
};

// The slice that this rank writes, if it does. `turn` decides which tp rank writes what all of them hold.
std::optional<Slice> written_slice(const Rank& rank, const ParamSpec& spec, std::size_t turn) {
  const int tp = rank.size(Axis::tp), index = rank.coordinate(Axis::tp);
  if (spec.parts > 1) return Slice{spec.parts * tp, spec.part * tp + index};
  if (spec.shard_dim < 0 || tp == 1) {
    if (static_cast<int>(turn % static_cast<std::size_t>(tp)) != index) return {};
    return Slice{};
  }
  if (index % tp_replicas(spec, tp) != 0) return {};
  return Slice{tp, index};
}

OwnedTensor owned(const ParamSpec& spec, const std::string& name, const Slice& slice, Range range,
                  const Tensor& flat, DType dtype) {
  TensorPart part{name, slice.tp, slice.index, range, slice.tp == 1 && range.size() == spec.numel()};
  StoredTensor stored;
  stored.name = part.key();
  stored.type = stored_type(dtype);
  stored.shape = part.whole ? spec.shape : std::vector<std::int64_t>{range.size()};
  return {stored, flat};
}

}  // namespace

std::string TensorPart::key() const {
  return whole ? tensor : fmt::format("{}|{}/{}|{}-{}", tensor, index, tp, range.begin, range.end);
}

TensorPart parse_part(const std::string& key) {
  TensorPart part{key, 1, 0, {}, true};
  const std::size_t range_at = key.rfind('|');
  const std::size_t slice_at =
      range_at == std::string::npos || range_at == 0 ? std::string::npos : key.rfind('|', range_at - 1);
  if (slice_at == std::string::npos) return part;
  const char *at = key.data() + slice_at + 1, *const end = key.data() + key.size();
  const auto number = [&](auto& value, char after) {
    const auto [stop, error] = std::from_chars(at, end, value);
    const bool right = error == std::errc() && (after == 0 ? stop == end : stop != end && *stop == after);
    at = stop + (after != 0 && right ? 1 : 0);
    return right;
  };
  TensorPart cut{key.substr(0, slice_at), 1, 0, {}, false};
  const bool reads = number(cut.index, '/') && number(cut.tp, '|') && number(cut.range.begin, '-') &&
                     number(cut.range.end, 0);
  return reads ? cut : part;
}

std::optional<OwnedTensor> owned_slice(const Rank& rank, const ParamSpec& spec, const std::string& name,
                                       const Tensor& data) {
  const auto slice = written_slice(rank, spec, 0);
  if (!slice) return {};
  return owned(spec, name, *slice, {0, data.numel()}, data.flat(), data.dtype());
}

std::string file_name(const std::string& kind, const Rank& rank) {
  if (rank.mesh().num_ranks() == 1) return kind + ".safetensors";
  return fmt::format("{}-{:05}.safetensors", kind, rank.index());
}

void copy_stored_bytes(const OwnedTensor& tensor, std::vector<std::byte>& to) {
  const Tensor& from = tensor.data;
  const StoredType type = tensor.stored.type;
  to.resize(static_cast<std::size_t>(from.numel() * stored_type_bytes(type)));
  if (type == stored_type(from.dtype())) return copy_bytes_to_host(from, to);
  if (tensor.remainder.defined())
    return join_weights(from, tensor.remainder,
                        {reinterpret_cast<float*>(to.data()), static_cast<std::size_t>(from.numel())});
  const std::vector<double> numbers = copy_numbers_to_host(from);
  check(type == StoredType::f32 && from.dtype() == DType::bf16, "a narrower number is stored as f32");
  const std::vector<float> wide(numbers.begin(), numbers.end());
  std::memcpy(to.data(), wide.data(), to.size());
}

// Calls visit(parameter, its slice, the elements of that slice) for each whose elements this rank writes.
template <class Visit>
static void each_owned(const Rank& rank, const ParameterStore& parameters, const Visit& visit) {
  const Mesh& mesh = rank.mesh();
  const int place = mesh.dp_cp_index(rank.coordinates());
  for (std::size_t i = 0; i < parameters.model().size(); ++i) {
    const Parameter* const p = parameters.find_here(parameters.model()[i].name);
    if (p == nullptr || p->holders.front() != rank.along(Axis::pp).rank()) continue;
    const bool is_cut = p->shard_group != nullptr, expert = p->spec.expert >= 0;
    const int copy = expert ? place / mesh.ep : place,
              copies = expert ? mesh.expert_replicas() : mesh.dp_cp_size();
    // Only the first of the replicated groups of shards (hsdp) writes. Without ZeRO, all dp ranks hold the
    // same (for experts, all replicas of their ranks), and take turns by parameter.
    if (is_cut ? place >= parameters.shards() : copy != static_cast<int>(i) % copies) continue;
    const auto slice = written_slice(rank, p->spec, i);
    if (!slice || (is_cut && p->own.size() == 0)) continue;
    visit(*p, *slice, is_cut ? p->own : Range{0, p->value.numel()});
  }
}

std::vector<OwnedTensor> owned_weights(const Rank& rank, const ParameterStore& parameters,
                                       const ModelSpec& model, const RouterBiases& biases) {
  std::vector<OwnedTensor> weights;
  each_owned(rank, parameters, [&](const Parameter& p, const Slice& slice, Range range) {
    weights.push_back(owned(p.spec, p.spec.name, slice, range, p.own_value, rank.precision().master));
    weights.back().remainder = p.own_remainder;
  });
  for (OwnedTensor& bias : owned_router_biases(rank, parameters, model, biases))
    weights.push_back(std::move(bias));
  return weights;
}

std::vector<OwnedFile> owned_files(const Rank& rank, const ParameterStore& parameters,
                                   const CheckpointInfo& info, const std::vector<CarriedTensor>& carried,
                                   const RouterBiases& biases) {
  std::vector<OwnedFile> files{{"model", owned_weights(rank, parameters, info.model, biases)},
                               {"optimizer", {}},
                               {"compression", owned_carried(rank, parameters, info.compression, carried)}};
  each_owned(rank, parameters, [&](const Parameter& p, const Slice& slice, Range range) {
    if (p.spec.frozen) return;
    for (const auto& [suffix, moment] : {std::pair{".exp_avg", &p.exp_avg}, {".exp_avg_sq", &p.exp_avg_sq}})
      if (moment->defined())
        files[1].tensors.push_back(
            owned(p.spec, p.spec.name + suffix, slice, range, moment->flat(), rank.precision().master));
  });
  std::erase_if(files, [](const OwnedFile& file) { return file.tensors.empty(); });
  return files;
}

}  // namespace echelon

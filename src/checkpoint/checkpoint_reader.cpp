#include "checkpoint/checkpoint_reader.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "base/error.h"

namespace echelon {
namespace {

constexpr int largest_tp = 65536;

std::int64_t numel(const std::vector<std::int64_t>& shape) {
  std::int64_t product = 1;
  for (std::int64_t size : shape) product *= size;
  return product;
}

// What the ranks of a tp group would write of the tensor: the number of elements, for each rank that writes.
std::map<int, std::int64_t> expected_slices(const ParamSpec& spec, int tp) {
  if (tp == 1) return {{0, spec.numel()}};
  std::map<int, std::int64_t> slices;
  const int replicas = tp_replicas(spec, tp);
  for (int index = 0; index < tp; index += replicas) slices[index] = numel(local_shape(spec, tp, index));
  return slices;
}

}  // namespace

CheckpointReader::CheckpointReader(const std::string& path)
    : manifest_(read_manifest(path)), where_((std::filesystem::path(path) / manifest_name).string()) {
  for (const auto& [file, tensors] : manifest_.checksums)
    for (const auto& [key, sum] : tensors) {
      TensorPart part = parse_part(key);
      parts_[part.tensor].push_back({file, std::move(part)});
    }
}

std::vector<std::string> CheckpointReader::names() const {
  std::vector<std::string> all;
  for (const auto& [name, parts] : parts_) all.push_back(name);
  return all;
}

CheckpointContents CheckpointReader::contents() const {
  CheckpointContents c;
  c.step = manifest_.info.step;
  std::error_code none;
  for (const auto& [file, tensors] : manifest_.checksums) {
    ++c.files;
    c.parts += static_cast<std::int64_t>(tensors.size());
    const auto bytes = std::filesystem::file_size(std::filesystem::path(manifest_.info.path) / file, none);
    if (!none) c.bytes += static_cast<std::int64_t>(bytes);
  }
  return c;
}

template <class Read>
auto CheckpointReader::while_it_is_there(const Read& read) const {
  try {
    return read();
  } catch (const std::runtime_error&) {
    if (!is_checkpoint(manifest_.info.path))
      fail(
          "{}: was removed while it was read, as by --keep of a run that writes beside it; read the last one",
          manifest_.info.path);
    throw;
  }
}

const CheckpointFile& CheckpointReader::file(const std::string& name) {
  auto& place = files_[name];
  if (!place)
    place = while_it_is_there([&] {
      return std::make_unique<CheckpointFile>(manifest_.info.path, name, manifest_.checksums, where_);
    });
  return *place;
}

const std::vector<CheckpointReader::StoredPart>& CheckpointReader::parts(const std::string& name) const {
  const auto found = parts_.find(name);
  if (found == parts_.end())
    refuse("{}: damaged or of another model: it has no checksum of {}", where_, name);
  return found->second;
}

void CheckpointReader::read_part(const StoredPart& stored, const ParamSpec& spec, DType dtype,
                                 std::span<std::byte> logical) {
  const TensorPart& part = stored.part;
  const std::int64_t width = element_bytes(dtype);
  const auto bytes_of = [&](std::int64_t first, std::int64_t count) {
    return logical.subspan(static_cast<std::size_t>(first * width), static_cast<std::size_t>(count * width));
  };
  const std::vector<std::int64_t> shape =
      part.whole ? spec.shape : std::vector<std::int64_t>{part.range.size()};
  const CheckpointFile& from = file(stored.file);
  const auto read_into = [&](std::span<std::byte> out) {
    while_it_is_there([&] { from.read(part.key(), shape, dtype, out); });
  };
  if (part.whole) return read_into(logical);
  if (part.tp == 1)  // a piece of the whole tensor
    return read_into(bytes_of(part.range.begin, part.range.size()));
  std::vector<std::byte> bytes(static_cast<std::size_t>(part.range.size() * width));
  read_into(bytes);
  for_each_run(spec, part.tp, part.index,
               [&](std::int64_t logical_begin, std::int64_t local_begin, std::int64_t count) {
                 const std::int64_t begin = std::max(local_begin, part.range.begin),
                                    end = std::min(local_begin + count, part.range.end);
                 if (begin >= end) return;
                 const auto to = bytes_of(logical_begin + begin - local_begin, end - begin);
                 std::memcpy(to.data(), bytes.data() + (begin - part.range.begin) * width, to.size());
               });
}

std::vector<std::byte> CheckpointReader::read(const std::string& name, const ParamSpec& wanted, DType dtype) {
  ParamSpec spec = wanted;  // all of it is read, whatever part is wanted here
  spec.parts = 1;
  spec.part = 0;
  const std::vector<StoredPart>& all = parts(name);
  const int tp = all.front().part.tp;
  const auto damaged = [&](const char* why) { refuse("{}: damaged: the parts of {} {}", where_, name, why); };
  if (tp < 1 || tp > largest_tp || (tp > 1 && spec.shard_dim < 0)) damaged("are cut as it cannot be");
  std::map<int, std::vector<Range>> ranges;
  for (const StoredPart& stored : all) {
    if (stored.part.tp != tp) damaged("are cut in two ways");
    if (!stored.part.whole && stored.part.range.begin >= stored.part.range.end) damaged("have an empty one");
    ranges[stored.part.index].push_back(stored.part.whole ? Range{0, spec.numel()} : stored.part.range);
  }
  std::map<int, std::int64_t> expected;
  try {
    expected = expected_slices(spec, tp);
  } catch (const InvariantError&) {
    damaged("are cut as it cannot be");
  }
  if (ranges.size() != expected.size()) damaged("are not all there");
  for (auto& [index, pieces] : ranges) {
    if (!expected.contains(index)) damaged("are cut as it cannot be");
    std::sort(pieces.begin(), pieces.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    std::int64_t covered = 0;
    for (const Range& piece : pieces) {
      if (piece.begin != covered) damaged("do not lie side by side");
      covered = piece.end;
    }
    if (covered != expected[index]) damaged("are not all there");
  }
  std::vector<std::byte> logical(static_cast<std::size_t>(spec.numel() * element_bytes(dtype)));
  for (const StoredPart& stored : all) read_part(stored, spec, dtype, logical);
  return logical;
}

std::vector<std::byte> CheckpointReader::read_whole(const std::string& name,
                                                    const std::vector<std::int64_t>& shape, DType dtype) {
  ParamSpec spec;
  spec.name = name;
  spec.shape = shape;
  return read(name, spec, dtype);
}

std::optional<std::vector<std::int64_t>> CheckpointReader::whole_shape(const std::string& name) {
  const auto found = parts_.find(name);
  if (found == parts_.end() || found->second.size() != 1 || !found->second.front().part.whole) return {};
  const StoredTensor* const tensor = file(found->second.front().file).find(name);
  if (tensor == nullptr) return {};
  return tensor->shape;
}

}  // namespace echelon

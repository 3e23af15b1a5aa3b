#include "comm/rank.h"

#include <numeric>
#include <utility>

#include "base/error.h"

namespace echelon {

Rank::Rank(World& world, const Mesh& mesh, int index, const PrecisionRecipe& precision, Arena& arena,
           Kernels& kernels, Collectives collectives, int first, TraceRecorder* recorder)
    : world_(world),
      mesh_(mesh),
      index_(index),
      first_(first),
      precision_(precision),
      arena_(arena),
      kernels_(kernels),
      collectives_(collectives),
      recorder_(recorder),
      traffic_(std::make_unique<Traffic>()),
      messages_(std::make_unique<Traffic>()) {
  check(mesh.ep >= 1 && mesh.dp_cp_size() % mesh.ep == 0, "expert groups make up the dp x cp group");
  for (Axis axis : all_axes)
    axes_[static_cast<std::size_t>(axis)] = join(in_world(mesh.group(index, axis)), axis_name(axis), axis);
}

std::vector<int> Rank::in_world(std::vector<int> ranks) const {
  for (int& rank : ranks) rank += first_;
  return ranks;
}

std::unique_ptr<Communicator> Rank::join(const std::vector<int>& ranks, const std::string& name,
                                         Axis axis) const {
  auto group = world_.join(first_ + index_, ranks, name);
  if (collectives_ != Collectives::direct) {
    auto channels = world_.join(first_ + index_, ranks, name + " collectives");
    group = with_algorithms(std::move(group),
                            record_traffic(std::move(channels), axis, *messages_,
                                           {recorder_, name + " collectives", ranks, true}),
                            collectives_);
  }
  return record_traffic(std::move(group), axis, *traffic_, {recorder_, name, ranks});
}

std::unique_ptr<Communicator> Rank::join_aside(const std::vector<int>& ranks, const std::string& name) const {
  return world_.join(first_ + index_, in_world(ranks), name);
}

std::unique_ptr<Communicator> Rank::join_job_aside(const std::string& name) const {
  std::vector<int> everyone(static_cast<std::size_t>(world_.num_ranks()));
  std::iota(everyone.begin(), everyone.end(), 0);
  return world_.join(first_ + index_, everyone, name);
}

Communicator& Rank::joined(std::unique_ptr<Communicator>& place, const std::vector<int>& group,
                           const char* name, Axis axis) const {
  if (!place) place = join(group, name, axis);
  check(place->size() == static_cast<int>(group.size()), "a part of an axis has one size in a run");
  return *place;
}

// Where groups are cut into blocks of `size` neighbours: the block with the rank at `index`...
static std::vector<int> block_of(const std::vector<int>& group, int index, int size) {
  check(size >= 1 && group.size() % static_cast<std::size_t>(size) == 0, "blocks make up their group");
  const auto first = group.begin() + index / size * size;
  return {first, first + size};
}

// ... and the ranks at its place in all blocks.
static std::vector<int> across_blocks_of(const std::vector<int>& group, int index, int size) {
  std::vector<int> ranks;
  for (auto i = static_cast<std::size_t>(index % size); i < group.size(); i += static_cast<std::size_t>(size))
    ranks.push_back(group[i]);
  return ranks;
}

Communicator& Rank::tp_replicas(int replicas) const {
  const std::vector<int> tp = in_world(mesh_.group(index_, Axis::tp));
  return joined(replicas_, block_of(tp, coordinate(Axis::tp), replicas), "tp replicas", Axis::tp);
}

Communicator& Rank::dp_cp() const {
  if (size(Axis::cp) == 1) return along(Axis::dp);
  return joined(dp_cp_, in_world(mesh_.dp_cp_group(index_)), "dp x cp", Axis::dp);
}

Communicator& Rank::dp_cp_block(int size) const {
  if (size == mesh_.dp_cp_size()) return dp_cp();
  const std::vector<int> all = in_world(mesh_.dp_cp_group(index_));
  return joined(dp_cp_block_, block_of(all, mesh_.dp_cp_index(coordinates()), size), "dp shards", Axis::dp);
}

Communicator& Rank::dp_cp_across_blocks(int size) const {
  const std::vector<int> all = in_world(mesh_.dp_cp_group(index_));
  return joined(dp_cp_across_blocks_, across_blocks_of(all, mesh_.dp_cp_index(coordinates()), size),
                "dp replicas", Axis::dp);
}

Communicator& Rank::ep() const {
  const std::vector<int> all = in_world(mesh_.dp_cp_group(index_));
  return joined(ep_, block_of(all, mesh_.dp_cp_index(coordinates()), mesh_.ep), "ep", Axis::ep);
}

Communicator& Rank::same_experts(int size) const {
  if (mesh_.ep == 1) return dp_cp_block(size);
  const int index = mesh_.dp_cp_index(coordinates());
  const std::vector<int> block = block_of(in_world(mesh_.dp_cp_group(index_)), index, size);
  return joined(same_experts_, across_blocks_of(block, index % size, mesh_.ep), "same experts", Axis::dp);
}

Communicator& Rank::cp_block(int size) const {
  if (size == this->size(Axis::cp)) return along(Axis::cp);
  const std::vector<int> cp = in_world(mesh_.group(index_, Axis::cp));
  return joined(cp_block_, block_of(cp, coordinate(Axis::cp), size), "cp heads", Axis::cp);
}

Communicator& Rank::cp_across_blocks(int size) const {
  if (size == 1) return along(Axis::cp);
  const std::vector<int> cp = in_world(mesh_.group(index_, Axis::cp));
  return joined(cp_across_blocks_, across_blocks_of(cp, coordinate(Axis::cp), size), "cp ring", Axis::cp);
}

}  // namespace echelon

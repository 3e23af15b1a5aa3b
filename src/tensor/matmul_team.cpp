#include "tensor/matmul_team.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include "base/split.h"
#include "tensor/matmul_packed.h"
#include "tensor/matmul_packing.h"
#include "tensor/matmul_scratch.h"

namespace echelon {
namespace {

// Blocks of a that threads take one after the other, each in `groups` parts. A thread packs the block that it
// works on, so threads keep to blocks of their own until none is left, and then help others with theirs.
class BlockQueue {
 public:
  struct Task {
    std::int64_t block, group;
  };

  BlockQueue(std::int64_t blocks, std::int64_t groups)
      : groups_(groups), taken_(static_cast<std::size_t>(blocks)) {}

  // A part of the block that the thread works on (-1: none yet), or else of another; empty if all are taken.
  std::optional<Task> take(std::int64_t block) {
    if (block >= 0)
      if (const auto task = take_of(block)) return task;
    if (begun_ < std::ssize(taken_)) {
      const std::int64_t fresh = begun_++;
      if (fresh < std::ssize(taken_))
        if (const auto task = take_of(fresh)) return task;
    }
    for (std::int64_t other = std::ssize(taken_) - 1; other >= 0; --other)
      if (const auto task = take_of(other)) return task;
    return {};
  }

 private:
  std::optional<Task> take_of(std::int64_t block) {
    std::atomic<std::int64_t>& taken = taken_[static_cast<std::size_t>(block)];
    if (taken >= groups_) return {};
    const std::int64_t group = taken++;
    if (group >= groups_) return {};
    return Task{block, group};
  }

  std::int64_t groups_;
  std::atomic<std::int64_t> begun_{0};            // blocks
  std::vector<std::atomic<std::int64_t>> taken_;  // of each block
};

// A product that the threads of a team compute together, rather than one part each. b is packed once for all
// of them, and they take small parts, so that a thread whose core has other work leaves more to the others.
class TeamProduct {
 public:
  TeamProduct(const MicroKernel& kernel, const Product& p, std::byte* scratch,
              std::int64_t scratch_per_thread, const ThreadTeam& team)
      : kernel_(kernel), p_(p), team_(team), past_caches_(goes_past_caches(kernel, p)) {
    for (int t = 0; t < team.threads(); ++t) rooms_.emplace_back(scratch + t * scratch_per_thread);
  }

  void make() {
    if (is_summed_where_it_lies(kernel_, p_)) return make_columns({0, p_.m});
    // As many rows as there is memory for sums, but about as many each time.
    const std::int64_t times = pieces(p_.m, ProductScratch::piece_floats / sums_stride()),
                       most = pieces(pieces(p_.m, times), kernel_.rows) * kernel_.rows;
    for (std::int64_t i = 0; i < p_.m; i += most) make_columns({i, std::min(i + most, p_.m)});
  }

 private:
  std::int64_t threads() const { return std::ssize(rooms_); }
  ProductScratch& room(std::int64_t thread) { return rooms_[static_cast<std::size_t>(thread)]; }

  // The most columns whose panels are in a thread's room.
  std::int64_t most_cols(bool waits) const {
    const std::int64_t deep = depth_of(kernel_, waits ? DType::f32 : p_.c.type);
    const std::int64_t most_words = words_of(kernel_, filled_words(kernel_, std::min(deep, p_.k)));
    const std::int64_t most = multiple_below(ProductScratch::b_words / most_words, kernel_.cols);
    return waits ? std::min(most, multiple_below(ProductScratch::piece_cols, kernel_.cols)) : most;
  }
  // From a row of sums that wait to the next: all columns in a thread's room.
  std::int64_t sums_stride() const {
    const std::int64_t most = most_cols(true);
    return std::min(most, panels_of_room({0, std::min(p_.n, most * threads())}) * kernel_.cols);
  }

  void make_columns(Range rows) {
    const bool waits = !is_summed_where_it_lies(kernel_, p_);
    const std::int64_t most = most_cols(waits);
    for (std::int64_t first = 0; first < p_.n; first += most * threads()) {
      const Range cols{first, std::min(first + most * threads(), p_.n)};
      for (Range k; k.end < p_.k;) {
        k = run_of_depth(kernel_, waits ? DType::f32 : p_.c.type, {0, p_.k}, k.end);
        const std::int64_t filled = filled_words(kernel_, k.size()), words = words_of(kernel_, filled);
        pack_right(cols, k, filled, words);
        multiply(rows, cols, k, filled, words, waits);
      }
      if (waits) store_sums(rows, cols);
    }
  }

  // How many panels of b are in each thread's room: equally many, except in the last.
  std::int64_t panels_of_room(Range cols) const {
    return pieces(pieces(cols.size(), kernel_.cols), threads());
  }
  // Of these columns, those of panels [begin, end).
  Range columns_of(Range cols, std::int64_t begin, std::int64_t end) const {
    const auto column = [&](std::int64_t panel) {
      return std::min(cols.begin + panel * kernel_.cols, cols.end);
    };
    return {column(begin), column(end)};
  }

  // Panels of columns are whole vectors wide: packing one writes nothing beyond it.
  void pack_right(Range cols, Range k, std::int64_t filled, std::int64_t words) {
    constexpr std::int64_t at_once = 8;
    const std::int64_t of_room = panels_of_room(cols), parts = pieces(of_room, at_once);
    team_.each_task(parts * threads(), [&](std::int64_t t, int) {
      const std::int64_t thread = t / parts, from = t % parts * at_once, panel = thread * of_room + from;
      const Range mine = columns_of(cols, panel, panel + std::min(at_once, of_room - from));
      if (mine.size() > 0)
        pack(p_.b, p_.tb == Transpose::yes, packing_of_b(kernel_), mine.begin, mine.size(), k, filled, words,
             room(thread).b + from * words * kernel_.cols);
    });
  }

  void multiply(Range rows, Range cols, Range k, std::int64_t filled, std::int64_t words, bool waits) {
    // Enough parts that a slow thread delays the end only by a small part.
    constexpr std::int64_t parts_of_thread = 8, fewest_panels = 4;
    const std::int64_t blocks = pieces(rows.size(), rows_of_block(kernel_, words, rows.size())),
                       block_rows = pieces(pieces(rows.size(), blocks), kernel_.rows) * kernel_.rows;
    const std::int64_t panels = pieces(cols.size(), kernel_.cols), of_room = panels_of_room(cols);
    const std::int64_t groups =
        std::clamp<std::int64_t>(panels / fewest_panels, 1, pieces(parts_of_thread * threads(), blocks));
    BlockQueue queue(pieces(rows.size(), block_rows), groups);
    team_.each_task(threads(), [&](std::int64_t, int thread) {
      const ProductScratch& mine = room(thread);
      std::int64_t packed = -1;  // the block that is in `mine`
      while (const auto task = queue.take(packed)) {
        const std::int64_t i = rows.begin + task->block * block_rows,
                           here = std::min(block_rows, rows.end - i);
        if (std::exchange(packed, task->block) != task->block)
          pack(p_.a, p_.ta == Transpose::no, packing_of_a(kernel_), i, here, k, filled, words, mine.a);
        const Range part = split_range(panels, groups, task->group);
        for (std::int64_t panel = part.begin; panel < part.end;) {
          const std::int64_t owner = panel / of_room, end = std::min(part.end, (owner + 1) * of_room);
          const Range columns = columns_of(cols, panel, end);
          ProductScratch both = mine;
          both.b = room(owner).b + panel % of_room * words * kernel_.cols;
          const bool is_first = k.begin == 0;
          if (waits)
            multiply_block(kernel_, words, both, here, columns.size(), 1, is_first ? 0.0f : 1.0f, false,
                           at(sums_of(owner), i - rows.begin, panel % of_room * kernel_.cols), Ahead());
          else
            multiply_block(kernel_, words, both, here, columns.size(), p_.alpha, is_first ? p_.beta : 1.0f,
                           past_caches_, at(p_.c, i, columns.begin), Ahead());
          panel = end;
        }
      }
    });
  }

  // The sums for the columns whose panels are in a thread's room.
  Panel sums_of(std::int64_t thread) { return {room(thread).piece, sums_stride()}; }
  void store_sums(Range rows, Range cols) {
    const std::int64_t of_room = panels_of_room(cols);
    constexpr std::int64_t at_once = 32;
    const std::int64_t parts = pieces(rows.size(), at_once);
    team_.each_task(parts * threads(), [&](std::int64_t t, int) {
      const std::int64_t thread = t / parts, i = t % parts * at_once;
      const Range mine = columns_of(cols, thread * of_room, (thread + 1) * of_room);
      store(static_cast<const float*>(at(sums_of(thread), i, 0).data), sums_stride(),
            target_of(at(p_.c, rows.begin + i, mine.begin), std::min(at_once, rows.size() - i), mine.size(),
                      p_.alpha, p_.beta));
    });
  }

  const MicroKernel& kernel_;
  const Product& p_;
  const ThreadTeam& team_;
  bool past_caches_;
  std::vector<ProductScratch> rooms_;
};

}  // namespace

bool is_worth_a_team(const MicroKernel& kernel, const Product& p, int threads) {
  constexpr double worth = 1 << 27;  // for products of this size, waiting for each other costs little
  const bool is_large =
      static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k) >= worth;
  return threads > 1 && is_large && kernel.column != nullptr && p.blocks == nullptr && !is_thin(kernel, p) &&
         !(is_short(kernel, p) && is_summed_where_it_lies(kernel, p));
}

void multiply_together(const MicroKernel& kernel, const Product& p, std::byte* scratch,
                       std::int64_t scratch_per_thread, const ThreadTeam& team) {
  if (p.m > 0 && p.n > 0) TeamProduct(kernel, p, scratch, scratch_per_thread, team).make();
}

}  // namespace echelon

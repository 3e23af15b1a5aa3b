// Rows of tables, and the steps of cross-entropy over a part of the vocabulary, as specified in Kernels.
#pragma once

#include <cmath>

#include "base/bf16.h"
#include "tensor/rows/check_anywhere.h"
#include "tensor/rows/columns.h"
#include "tensor/rows/team.h"

namespace echelon::rows {

// The column of an id among the `columns` that begin at `first_id`; -1 if the id is ignored (negative) or
// held elsewhere.
ECHELON_HOST_DEVICE inline std::int64_t local_column(std::int32_t id, std::int64_t first_id,
                                                     std::int64_t columns) {
  return id >= 0 && id >= first_id && id < first_id + columns ? id - first_id : -1;
}

template <class T>
struct Embedding {
  static constexpr int columns = columns_of<T>;
  const std::int32_t* ids;
  Matrix<T> table;
  std::int64_t first_id;
  Matrix<T> y;
  bool is_aligned() const { return are_aligned<columns>(table, y); }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, Columns<N> at) const {
    const std::int64_t row = local_column(ids[i], first_id, table.rows);
    at.write(y[i], at.read_or(row >= 0 ? table[row] : nullptr, 0));
  }
};

// The block of the first row with an id adds all rows with that id, in order: so only one block writes a row
// of the table. The running sums stay in registers, and the rows are listed first, so that several reads are
// in flight: in text, some ids are a tenth of all.
template <class T>
struct EmbeddingBackward {
  const std::int32_t* ids;
  Matrix<T> dy;
  std::int64_t first_id;
  Matrix<Wide<T>> dtable;
  static std::size_t shared_bytes(std::int64_t lanes) {
    return sizeof(std::int32_t) * static_cast<std::size_t>((ids_of_lane + 1) * lanes);
  }
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const std::int64_t i = team.block(), row = local_column(ids[i], first_id, dtable.rows);
    if (row < 0) return;
    for (std::int64_t at = 0; at < i; at += ids_of_lane * team.lanes())
      if (any_of(team, same_of_lane(team, i, at, i) > 0)) return;
    constexpr int columns = columns_of<T>;
    if (team.lanes() == 1)
      add_in_memory(i, dtable[row]);
    else if (is_aligned<columns>(dy) && is_aligned<columns>(dtable) && dy.cols % columns == 0)
      add<columns>(team, i, dtable[row]);
    else
      add<1>(team, i, dtable[row]);
  }

 private:
  static constexpr std::int64_t ids_of_lane = 16;  // so that lanes seldom have to synchronize

  // How many of a lane's ids equal row i's: from row `at` on, each lane has this many neighbouring rows, up
  // to `end`.
  template <class Team>
  ECHELON_HOST_DEVICE int same_of_lane(const Team& team, std::int64_t i, std::int64_t at,
                                       std::int64_t end) const {
    int same = 0;
    each_of_lane(team, at, end, [&](std::int64_t row) { same += ids[row] == ids[i] ? 1 : 0; });
    return same;
  }
  template <class Team, class Body>
  ECHELON_HOST_DEVICE void each_of_lane(const Team& team, std::int64_t at, std::int64_t end,
                                        const Body& body) const {
    const std::int64_t first = at + team.lane() * ids_of_lane;
    for (std::int64_t k = 0; k < ids_of_lane; ++k)
      if (first + k < end) body(first + k);
  }
  // Lists the rows with row i's id among the next rows from `at` on, as many as all lanes have ids; returns
  // how many. They are counted from `at`.
  template <class Team>
  ECHELON_HOST_DEVICE int list_same(const Team& team, std::int64_t i, std::int64_t at, std::int32_t* counts,
                                    std::int32_t* list) const {
    const int mine = same_of_lane(team, i, at, dy.rows);
    if (!any_of(team, mine > 0)) return 0;
    team.sync();  // the last list has been read
    counts[team.lane()] = mine;
    team.sync();
    int before = 0, all = 0;
    for (std::int64_t lane = 0; lane < team.lanes(); ++lane) {
      if (lane < team.lane()) before += counts[lane];
      all += counts[lane];
    }
    each_of_lane(team, at, dy.rows, [&](std::int64_t row) {
      if (ids[row] == ids[i]) list[before++] = static_cast<std::int32_t>(row - at);
    });
    team.sync();
    return all;
  }
  // For a single lane, which has all columns.
  ECHELON_HOST_DEVICE void add_in_memory(std::int64_t i, Wide<T>* to) const {
    for (std::int64_t row = i; row < dy.rows; ++row)
      if (ids[row] == ids[i])
        for (std::int64_t j = 0; j < dy.cols; ++j) to[j] += Wide<T>(dy[row][j]);
  }
  template <int N, class Team>
  ECHELON_HOST_DEVICE void add(const Team& team, std::int64_t i, Wide<T>* to) const {
    auto* const counts = reinterpret_cast<std::int32_t*>(team.shared());
    std::int32_t* const list = counts + team.lanes();
    for (std::int64_t begin = 0; begin < dy.cols; begin += N * team.lanes()) {
      const Columns<N> mine{begin + N * team.lane()};
      const bool is = mine.begin < dy.cols;
      Wide<T> sums[N] = {};
      if (is) {
        const auto so_far = mine.read(to);
        for (int k = 0; k < N; ++k) sums[k] = so_far[k];
      }
      for (std::int64_t at = i; at < dy.rows; at += ids_of_lane * team.lanes()) {
        const int count = list_same(team, i, at, counts, list);
        if (!is) continue;
#ifdef __CUDA_ARCH__
#pragma unroll 8
#endif
        for (int n = 0; n < count; ++n) {
          const auto x = mine.read(dy[at + list[n]]);
          for (int k = 0; k < N; ++k) sums[k] += Wide<T>(x[k]);
        }
      }
      if (is) mine.write(to, [&](int k) { return sums[k]; });
    }
  }
};

template <class T>
struct CombineRows {
  static constexpr int columns = columns_of<T>;
  Matrix<T> x;
  const std::int32_t* places;
  const Wide<T>* weights;  // or null: all ones
  std::int64_t each;
  Matrix<T> y;
  bool is_aligned() const { return are_aligned<columns>(x, y); }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, Columns<N> at) const {
    Wide<T> sums[N] = {};
    for (std::int64_t j = i * each; j < (i + 1) * each; ++j) {
      if (places[j] < 0) continue;
      check_anywhere(places[j] < x.rows, "combine_rows: a place lies after the last row");
      const auto of = at.read(x[places[j]]);
      const Wide<T> weight = weights == nullptr ? Wide<T>(1) : weights[j];
      for (int k = 0; k < N; ++k) sums[k] += weight * of[k];
    }
    at.write(y[i], [&](int k) { return sums[k]; });
  }
};

// The first of a block's keys that a query sees.
struct FirstKey {
  const std::int32_t* starts;
  std::int64_t first_position, stride, count;
  std::int32_t* first;
  ECHELON_HOST_DEVICE void operator()(std::int64_t, std::int64_t j) const {
    const std::int64_t key = (starts[j] - first_position + stride - 1) / stride;
    first[j] = static_cast<std::int32_t>(key < 0 ? 0 : key > count ? count : key);
  }
};

template <class F>
struct SoftCap {
  Matrix<F> x;
  F cap;
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, std::int64_t j) const {
    x[i][j] = cap * std::tanh(x[i][j] / cap);
  }
};

template <class F>
struct RowMax {
  Matrix<F> logits;
  F* max;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    F most = -static_cast<F>(INFINITY);
    each_of_row(team, logits[i], logits.cols, [&](std::int64_t, F logit) { most = Larger()(most, logit); });
    most = largest_of(team, most);
    if (team.lane() == 0) max[i] = most;
  }
};

template <class F>
struct ExpSum {
  Matrix<F> logits;
  const F* max;
  const std::int32_t* targets;
  std::int64_t first_id;
  F *sum, *target;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    const std::int64_t column = local_column(targets[i], first_id, logits.cols);
    if (column < 0 && team.lane() == 0) target[i] = F(0);
    const F most = max[i];
    F of_lane = 0;
    each_of_row(team, logits[i], logits.cols, [&](std::int64_t j, F logit) {
      const F shifted = logit - most;
      if (j == column) target[i] = shifted;
      of_lane += logits[i][j] = std::exp(shifted);
    });
    of_lane = sum_of(team, of_lane);
    if (team.lane() == 0) sum[i] = of_lane;
  }
};

template <class F, class T>
struct CrossEntropyBackward {
  static constexpr int columns = columns_of<F>;
  Matrix<F> p;
  const F* sum;
  const std::int32_t* targets;
  std::int64_t first_id;
  F loss_scale;
  Matrix<T> dlogits;
  F cap;         // 0: none
  const F* max;  // only with a cap
  bool is_aligned() const { return are_aligned<columns>(p, dlogits); }
  template <int N>
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, Columns<N> at) const {
    if (targets[i] < 0) {
      at.write(dlogits[i], [](int) { return F(0); });
      return;
    }
    const auto e = at.read(p[i]);
    const std::int64_t column = local_column(targets[i], first_id, p.cols) - at.begin;
    const F whole = sum[i], most = cap > 0 ? max[i] : F(0);
    at.write(dlogits[i], [&](int k) {
      F slope = 1;  // the cap's slope at the logit of e
      if (cap > 0) {
        const F bent = (most + std::log(e[k])) / cap;
        slope -= bent * bent;
      }
      return loss_scale * (e[k] / whole - (k == column ? F(1) : F(0))) * slope;
    });
  }
};

// All three steps at once, a block for each row: maximum and sum in one pass, in which a lane's sum is
// rescaled whenever it finds a larger logit; and gradients in another. The gradients may overwrite the
// logits.
template <class F, class T>
struct CrossEntropy {
  Matrix<F> logits;
  const std::int32_t* targets;
  F loss_scale, cap;  // cap 0: none
  F *max, *sum, *target;
  Matrix<T> dlogits;
  // Only few rows are in progress at a time: a row is long, and is read again from a cache if it is still
  // there.
  static constexpr int block_lanes = 512;

  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team) const {
    const std::int64_t i = team.block(), column = local_column(targets[i], 0, logits.cols);
    const F* const row = logits[i];
    const F at_target = column >= 0 ? row[column] : F(0);
    F most = -static_cast<F>(INFINITY), total = 0;
    groups_of_row(team, row, logits.cols, [&]<int N>(std::int64_t, const F(&x)[N], int count) {
      F larger = most;
      for (int k = 0; k < N; ++k)
        if (k < count) larger = Larger()(larger, x[k]);
      if (larger > most) total *= std::exp(most - larger), most = larger;
      const F base = most == -static_cast<F>(INFINITY) ? F(0) : most;
      for (int k = 0; k < N; ++k)
        if (k < count) total += std::exp(x[k] - base);
    });
    const F of_row = largest_of(team, most);
    total = sum_of(team, total * std::exp(most - of_row));
    if (team.lane() == 0)
      max[i] = of_row, sum[i] = total, target[i] = column >= 0 ? at_target - of_row : F(0);

    T* const to = dlogits[i];
    if (targets[i] < 0) {
      for (std::int64_t j = team.lane(); j < logits.cols; j += team.lanes()) to[j] = T{};
      return;
    }
    const F factor = loss_scale / total;
    groups_of_row<true>(team, row, logits.cols, [&]<int N>(std::int64_t first, const F(&x)[N], int count) {
      for (int k = 0; k < N; ++k) {
        if (k >= count) continue;
        const std::int64_t j = first + k * team.lanes();
        const F p = std::exp(x[k] - of_row);
        F d = j == column ? loss_scale * (p / total - 1) : p * factor;
        if (cap > 0) d *= 1 - x[k] / cap * (x[k] / cap);
        to[j] = T(d);
      }
    });
  }
};

// loss += the sum of the losses of targets that are not ignored, which is computed first, in double
// precision. One block.
template <class F>
struct AddLosses {
  const F *sum, *target;
  const std::int32_t* targets;
  std::int64_t rows;
  double* loss;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t) const {
    double total = 0;
    for (std::int64_t i = team.lane(); i < rows; i += team.lanes())
      if (targets[i] >= 0) total += std::log(static_cast<double>(sum[i])) - static_cast<double>(target[i]);
    total = sum_of(team, total);
    if (team.lane() == 0) *loss += total;
  }
};

// One row of a softmax whose columns are cut into `count` parts.
template <class F>
struct MergeSoftmax {
  const F* parts;  // (count, 3, rows)
  const std::int32_t* targets;
  const std::int64_t* bounds;  // (count + 1)
  std::int64_t count, rows;
  F *sum, *target, *scales, *shares;
  ECHELON_HOST_DEVICE F of(std::int64_t part, int which, std::int64_t i) const {
    return parts[(3 * part + which) * rows + i];
  }
  ECHELON_HOST_DEVICE void operator()(std::int64_t, std::int64_t i) const {
    F max = of(0, 0, i);
    for (std::int64_t part = 1; part < count; ++part) max = Larger()(max, of(part, 0, i));
    F total = 0, at_target = 0;
    for (std::int64_t part = 0; part < count; ++part) {
      const F shift = of(part, 0, i) - max;
      total += of(part, 1, i) * std::exp(shift);
      if (targets[i] >= bounds[part] && targets[i] < bounds[part + 1]) at_target = of(part, 2, i) + shift;
    }
    sum[i] = total;
    target[i] = at_target;
    for (std::int64_t part = 0; part < count; ++part) {
      // Infinite if all probabilities of the part vanish; they do then.
      const F scale = total * std::exp(max - of(part, 0, i));
      scales[part * rows + i] = scale;
      shares[part * rows + i] = of(part, 1, i) / scale;
    }
  }
};

// What merge_gradients() sums for one part.
template <class T>
struct GradientPart {
  const T *mean, *of_target;  // (rows, cols)
  const Wide<T>* share;       // (rows)
};
template <class T>
struct MergeGradients {
  const GradientPart<T>* parts;
  std::int64_t count;
  const std::int32_t* targets;
  Wide<T> factor;
  Matrix<T> y;
  ECHELON_HOST_DEVICE void operator()(std::int64_t i, std::int64_t j) const {
    using F = Wide<T>;
    F sum = 0;
    for (std::int64_t p = 0; p < count && targets[i] >= 0; ++p) {
      const std::int64_t at = i * y.cols + j;
      sum += parts[p].share[i] * F(parts[p].mean[at]) - F(parts[p].of_target[at]);
    }
    y[i][j] = T(factor * sum);
  }
};

}  // namespace echelon::rows

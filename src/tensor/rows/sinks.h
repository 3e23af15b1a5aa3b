// Attention sinks (Kernels::attention_sink): from the log-sum-exp and the output of the keys to those with a
// sink.
#pragma once

#include <cmath>

#include "base/bf16.h"
#include "tensor/rows/team.h"

namespace echelon::rows {

// A query's log-sum-exp with a sink, from that of its keys.
template <class F>
ECHELON_HOST_DEVICE F with_sink(F sink, F keys) {
  const F largest = sink < keys ? keys : sink;
  return largest + std::log(std::exp(sink - largest) + std::exp(keys - largest));
}

// Sizes of an AttentionShape; lse and delta are indexed by (sequence, head, query).
struct SinkShape {
  std::int64_t batch, q_len, num_heads, head_dim;
  ECHELON_HOST_DEVICE std::int64_t index(std::int64_t row, std::int64_t head) const {
    return (row / q_len * num_heads + head) * q_len + row % q_len;
  }
};

// A block for each query and head: scales the output by the keys' share of the softmax.
template <class T>
struct AttentionSink {
  const T* sinks;
  SinkShape shape;
  Matrix<T> out;
  Wide<T>* lse;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t i) const {
    using F = Wide<T>;
    const std::int64_t row = i / shape.num_heads, head = i % shape.num_heads, at = shape.index(row, head);
    const F keys = lse[at], all = with_sink(F(sinks[head]), keys), left = std::exp(keys - all);
    T* const begin = out[row] + head * shape.head_dim;
    for (std::int64_t j = team.lane(); j < shape.head_dim; j += team.lanes()) begin[j] = T(begin[j] * left);
    team.sync();  // all lanes have read it
    if (team.lane() == 0) lse[at] = all;
  }
};

// A block for each head. A sink's score has the gradient p (0 - delta), since its value is 0.
template <class T>
struct AttentionSinkBackward {
  const T* sinks;
  SinkShape shape;
  const Wide<T>* lse;
  const Wide<T>* delta;
  Wide<T>* dsinks;
  template <class Team>
  ECHELON_HOST_DEVICE void operator()(const Team& team, std::int64_t head) const {
    using F = Wide<T>;
    double sum = 0;
    for (std::int64_t row = team.lane(); row < shape.batch * shape.q_len; row += team.lanes()) {
      const std::int64_t at = shape.index(row, head);
      sum -= static_cast<double>(std::exp(F(sinks[head]) - lse[at]) * delta[at]);
    }
    sum = sum_of(team, sum);
    if (team.lane() == 0) dsinks[head] += F(sum);
  }
};

}  // namespace echelon::rows

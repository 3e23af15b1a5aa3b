// The formulas of docs/compression.md: what a reduction sends and holds, told apart from the code that does
// it.
#pragma once

#include <cstdint>
#include <vector>

#include "spec/compression.h"
#include "spec/memory.h"
#include "spec/traffic.h"

namespace echelon::compression_tests {

// What is common to the sizes and the volumes of top-k and PowerSGD.
struct Factors {
  std::int64_t matrix = 0, p = 0, q = 0, rest = 0;  // elements
};
inline Factors factors_of(const Compression& compression, const GradientBucket& bucket) {
  Factors sum;
  for (const GradientSection& s : bucket.sections) {
    if (!is_factored(compression, s)) {
      sum.rest += s.range.size();
      continue;
    }
    sum.matrix += s.range.size();
    sum.p += s.rows * compression.rank;
    sum.q += s.cols * compression.rank;
  }
  return sum;
}

inline std::int64_t total_kept(const Compression& compression, const GradientBucket& bucket) {
  std::int64_t sum = 0;
  for (const GradientSection& s : bucket.sections) sum += elements_kept(compression, s);
  return sum;
}

// Adds what rank `rank` of a dp group of `size` sends, by verb, for one reduction of the bucket in step
// `step` (0 for the first).
inline void add_reduction_traffic(const Compression& compression, const GradientBucket& bucket, DType dtype,
                                  int size, int rank, std::int64_t step, Axis axis, Traffic& traffic) {
  if (size == 1) return;
  const std::int64_t width = element_bytes(dtype);
  const auto add = [&](Verb verb, std::int64_t bytes) {
    traffic.at(axis, verb).calls += 1;
    traffic.at(axis, verb).bytes += bytes;
  };
  const auto all_reduce = [&](std::int64_t count) {
    add(Verb::all_reduce, all_reduce_bytes_sent(count, size, rank, width));
  };
  const auto whole = [&] {
    if (bucket.shards.empty()) return all_reduce(bucket.numel());
    add(Verb::reduce_scatter, bytes_sent(Verb::reduce_scatter, bucket.shards, rank, width));
  };
  switch (compression.kind) {
    case CompressionKind::none:
      return whole();
    case CompressionKind::bf16:
    case CompressionKind::fp16:
    case CompressionKind::int8: {
      std::vector<std::int64_t> counts;
      for (const Range& part : quantized_parts(compression.kind, bucket, size))
        counts.push_back(quantized_bytes(compression.kind, bucket, part));
      add(Verb::all_to_all, bytes_sent(Verb::all_to_all, counts, rank, 1));
      if (bucket.shards.empty()) add(Verb::all_gather, bytes_sent(Verb::all_gather, counts, rank, 1));
      return;
    }
    case CompressionKind::topk: {
      const std::int64_t kept = total_kept(compression, bucket);
      add(Verb::all_gather, (size - 1) * kept * width);  // values
      add(Verb::all_gather, (size - 1) * kept * 4);      // indices
      return;
    }
    case CompressionKind::powersgd: {
      const Factors factors = factors_of(compression, bucket);
      if (step < compression.warmup_steps || factors.matrix == 0) return whole();
      if (factors.rest > 0) all_reduce(factors.rest);
      all_reduce(factors.p);
      all_reduce(factors.q);
      return;
    }
  }
}

// The same as one number of bytes.
inline std::int64_t compressed_bytes_sent(const Compression& compression, const GradientBucket& bucket,
                                          DType dtype, int size, int rank, std::int64_t step) {
  Traffic traffic;
  add_reduction_traffic(compression, bucket, dtype, size, rank, step, Axis::dp, traffic);
  return traffic.bytes(Axis::dp);
}

// What that rank holds for the bucket as long as the run lasts: payloads (communication); the error carried
// over and PowerSGD's factor (optimizer).
inline Memory reduction_memory(const Compression& compression, const GradientBucket& bucket, DType dtype,
                               int size, int rank) {
  Memory memory;
  if (size == 1) return memory;
  const std::int64_t width = element_bytes(dtype);
  switch (compression.kind) {
    case CompressionKind::none:
      break;
    case CompressionKind::bf16:
    case CompressionKind::fp16:
    case CompressionKind::int8: {
      const std::vector<Range> parts = quantized_parts(compression.kind, bucket, size);
      for (const Range& part : parts)  // what goes out
        memory[MemoryCategory::communication] += quantized_bytes(compression.kind, bucket, part);
      memory[MemoryCategory::communication] +=  // what comes in: everybody's elements of my part
          size * quantized_bytes(compression.kind, bucket, parts[static_cast<std::size_t>(rank)]);
      break;
    }
    case CompressionKind::topk:
      memory[MemoryCategory::optimizer] = bucket.numel() * width;
      memory[MemoryCategory::communication] = size * total_kept(compression, bucket) * (width + 4);
      break;
    case CompressionKind::powersgd: {
      const Factors factors = factors_of(compression, bucket);
      memory[MemoryCategory::optimizer] = (factors.matrix + factors.q) * width;
      if (factors.matrix > 0) memory[MemoryCategory::communication] = (factors.p + factors.rest) * width;
      break;
    }
  }
  return memory;
}

}  // namespace echelon::compression_tests

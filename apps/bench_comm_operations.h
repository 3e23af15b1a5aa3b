// What `bench comm` measures: every collective, direct and by messages, and what each of them does.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "comm/collectives.h"

namespace echelon {

// What a rank measures with.
struct CommBuffers {
  Communicator& group;
  std::vector<std::int64_t> counts;  // an even cut
  Tensor a, b;                       // of the size that is measured
  Tensor own, place;                 // this rank's part: apart, and in b
  std::vector<std::int64_t> equal;   // as many elements for every rank, a remainder left out
  Tensor out, in;                    // that much of a and b
  Scratch scratch{};
  int root = 0;  // the next one: with one and the same, it could run ahead of the others

  int next_root() { return std::exchange(root, (root + 1) % group.size()); }
};

// What one operation does.
struct CommWork {
  int steps = 0;
  double sent = 0;    // elements, by the rank that sends most
  double copied = 0;  // elements read and written, by all ranks together; only read: half
};

struct CommOperation {
  const char* name;
  double (*bus)(double n);  // bytes that a rank must at least send, over the bytes of its buffer
  void (*run)(CommBuffers&);
  std::function<CommWork(int n, std::int64_t count)> work;
  int ranks = 0;  // that take part; 0: all
  int times = 1;  // how often run() does it
};

// The first two copy memory; the one for two ranks sends a message there and back.
const std::vector<CommOperation>& comm_operations();

}  // namespace echelon

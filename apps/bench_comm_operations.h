// What `bench comm` measures: every collective, direct and by messages, and how much work each is.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "comm/collectives.h"

namespace echelon {

// The buffers of a rank.
struct CommBuffers {
  Communicator& group;
  std::vector<std::int64_t> counts;  // an even cut
  Tensor a, b;                       // of the measured size
  Tensor own, place;                 // this rank's part: separate, and inside b
  std::vector<std::int64_t> equal;   // equally many elements for every rank, without a remainder
  Tensor out, in;                    // views of a and b of that size
  Scratch scratch{};
  int root = 0;  // changes each time: with a fixed root, the root could run ahead of the others

  int next_root() { return std::exchange(root, (root + 1) % group.size()); }
};

// The work of one operation.
struct CommWork {
  int steps = 0;
  double sent = 0;    // elements, by the rank that sends most
  double copied = 0;  // elements read and written, over all ranks; only read: half
};

struct CommOperation {
  const char* name;
  double (*bus)(double n);  // bytes that a rank must send at least, relative to its buffer
  void (*run)(CommBuffers&);
  std::function<CommWork(int n, std::int64_t count)> work;
  int ranks = 0;  // that take part; 0: all
  int times = 1;  // how often run() does it
};

// The first two copy memory; the one for two ranks sends a message there and back.
const std::vector<CommOperation>& comm_operations();

}  // namespace echelon

// What process_world.cpp needs of MPI: processes that find each other, and messages of bytes. One of two
// files has it, mpi.cpp or no_mpi.cpp, as CMake finds a library or not; nothing else knows of MPI.
//
// Not thread-safe: one thread at a time calls in here, whichever it is (MPI_THREAD_SERIALIZED).
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace echelon {

// Messages under way together. On one channel of a space and a tag they arrive in the order they were sent.
class Messages {
 public:
  Messages();
  ~Messages();  // what is still under way is left to itself
  Messages(Messages&&) noexcept;
  Messages& operator=(Messages&&) noexcept;

  // `space` as open() numbers it; `to` and `from` count in it. The memory stays untouched until finished.
  void send(int space, int to, int tag, const void* data, std::size_t bytes);
  void receive(int space, int from, int tag, void* data, std::size_t bytes);

  // Goes on without waiting; appends whom a message has come from to `arrived` as the last piece of it does.
  // True when all have finished. CommError where MPI says so, or where a message is longer than its receive.
  bool advance(std::vector<int>& arrived);
  // Whom a message has not come from, and whom one has not left for.
  std::vector<int> missing() const;
  std::vector<int> leaving() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

struct Processes {
  int rank = 0, size = 1;
  std::vector<std::string> nodes;  // the machine of each rank; ranks of one share memory
};

// Whether this build has MPI; else what to do about it.
bool have_message_passing();
std::string how_to_get_message_passing();

// Collective over the processes that the launcher started; once in a process. RequestError without MPI.
Processes start_message_passing();
// Collective; nothing is under way. Not called after a failure: it would wait for ranks that are gone.
void end_message_passing();

// A space of messages of its own for these ranks, which all call this in the same order.
int open_message_space(const std::vector<int>& ranks);
// Every process's bytes, by rank. Waits without a deadline: for the start.
std::vector<std::string> all_gather_text(const std::string& text);

// Tags are below this.
inline constexpr int num_message_tags = 32767;

}  // namespace echelon

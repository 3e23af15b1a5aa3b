// What process_world.cpp needs of MPI: processes that find each other, and messages of bytes. Implemented by
// mpi.cpp or no_mpi.cpp, depending on whether CMake finds a library; nothing else depends on MPI.
//
// Not thread-safe: any thread may call, but only one at a time (MPI_THREAD_SERIALIZED).
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace echelon {

// A set of messages in progress. On a channel (a space and a tag) they arrive in the order in which they were
// sent.
class Messages {
 public:
  Messages();
  ~Messages();  // messages still in progress are abandoned
  Messages(Messages&&) noexcept;
  Messages& operator=(Messages&&) noexcept;

  // `space`: from open_message_space(); `to` and `from` are ranks within it. The memory must not be touched
  // until finished.
  void send(int space, int to, int tag, const void* data, std::size_t bytes);
  void receive(int space, int from, int tag, void* data, std::size_t bytes);

  // Advances without waiting. Appends to `arrived` the sender of each message whose last piece has come. True
  // when all have finished. CommError if MPI fails, or if a message is longer than its receive.
  bool advance(std::vector<int>& arrived);
  // The ranks from which a message has not arrived, and those to which one has not left.
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

// Whether this build has MPI; if not, what to do about it.
bool have_message_passing();
std::string how_to_get_message_passing();

// Collective over the processes that the launcher started; once per process. RequestError without MPI.
Processes start_message_passing();
// Collective; no message may be in progress. Not called after a failure: it would wait for dead ranks.
void end_message_passing();

// Opens a separate message space for these ranks, which all call this in the same order.
int open_message_space(const std::vector<int>& ranks);
// Gathers every process's text, by rank. Without a deadline: for the start of a job.
std::vector<std::string> all_gather_text(const std::string& text);

// Tags are below this.
inline constexpr int num_message_tags = 32767;

}  // namespace echelon

// A build without MPI.
#include "base/error.h"
#include "comm/message_passing.h"

namespace echelon {

namespace {
[[noreturn]] void not_built() { throw InvariantError("messages of a build without MPI"); }
}  // namespace

struct Messages::State {};
Messages::Messages() = default;
Messages::~Messages() = default;
Messages::Messages(Messages&&) noexcept = default;
Messages& Messages::operator=(Messages&&) noexcept = default;
void Messages::send(int, int, int, const void*, std::size_t) { not_built(); }
void Messages::receive(int, int, int, void*, std::size_t) { not_built(); }
bool Messages::advance(std::vector<int>&) { not_built(); }
std::vector<int> Messages::missing() const { return {}; }
std::vector<int> Messages::leaving() const { return {}; }

bool have_message_passing() { return false; }
std::string how_to_get_message_passing() {
  return "this build has no MPI: install libopenmpi-dev and openmpi-bin (or another MPI), run cmake again "
         "and build";
}

Processes start_message_passing() { refuse("--comm mpi: {}", how_to_get_message_passing()); }
void end_message_passing() { not_built(); }
int open_message_space(const std::vector<int>&) { not_built(); }
std::vector<std::string> all_gather_text(const std::string&) { not_built(); }

}  // namespace echelon

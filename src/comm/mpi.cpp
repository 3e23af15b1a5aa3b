// All calls of MPI, through its C interface, since MPI has dropped the C++ one.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "base/error.h"
#include "comm/message_passing.h"

namespace echelon {
namespace {

// MPI counts in int.
constexpr std::size_t largest_message = std::size_t{1} << 30;

std::vector<MPI_Comm>& spaces() {
  static std::vector<MPI_Comm> all;  // of the process, as MPI itself
  return all;
}

std::string text_of(int error) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(error, text.data(), &length);
  return {text.data(), static_cast<std::size_t>(length)};
}

void need(int result, const char* doing) {
  if (result != MPI_SUCCESS) throw CommError(fmt::format("MPI cannot {}: {}", doing, text_of(result)));
}

}  // namespace

struct Messages::State {
  std::vector<MPI_Request> requests;
  std::vector<int> from, to;  // of each request; -1: it sends, or receives
  std::vector<int> indices;   // room for MPI_Testsome
  std::vector<MPI_Status> statuses;
  int open = 0;
};

Messages::Messages() : state_(std::make_unique<State>()) {}
Messages::~Messages() = default;
Messages::Messages(Messages&&) noexcept = default;
Messages& Messages::operator=(Messages&&) noexcept = default;

void Messages::send(int space, int to, int tag, const void* data, std::size_t bytes) {
  const auto* at = static_cast<const std::byte*>(data);
  do {
    const std::size_t piece = std::min(bytes, largest_message);
    MPI_Request request = MPI_REQUEST_NULL;
    need(MPI_Isend(at, static_cast<int>(piece), MPI_BYTE, to, tag, spaces()[static_cast<std::size_t>(space)],
                   &request),
         "send");
    state_->requests.push_back(request);
    state_->from.push_back(-1);
    state_->to.push_back(to);
    ++state_->open;
    at += piece;
    bytes -= piece;
  } while (bytes > 0);
}

void Messages::receive(int space, int from, int tag, void* data, std::size_t bytes) {
  auto* at = static_cast<std::byte*>(data);
  do {
    const std::size_t piece = std::min(bytes, largest_message);
    MPI_Request request = MPI_REQUEST_NULL;
    need(MPI_Irecv(at, static_cast<int>(piece), MPI_BYTE, from, tag,
                   spaces()[static_cast<std::size_t>(space)], &request),
         "receive");
    state_->requests.push_back(request);
    state_->from.push_back(from);
    state_->to.push_back(-1);
    ++state_->open;
    at += piece;
    bytes -= piece;
  } while (bytes > 0);
}

bool Messages::advance(std::vector<int>& arrived) {
  if (state_->open == 0) return true;
  const auto count = static_cast<int>(state_->requests.size());
  state_->indices.resize(state_->requests.size());
  state_->statuses.resize(state_->requests.size());
  int done = 0;
  const int result =
      MPI_Testsome(count, state_->requests.data(), &done, state_->indices.data(), state_->statuses.data());
  if (result != MPI_SUCCESS && result != MPI_ERR_IN_STATUS) need(result, "go on");
  if (done == MPI_UNDEFINED) done = state_->open;
  state_->open -= done;
  for (int i = 0; i < done; ++i) {
    const auto at = static_cast<std::size_t>(state_->indices[static_cast<std::size_t>(i)]);
    const int error =
        result == MPI_ERR_IN_STATUS ? state_->statuses[static_cast<std::size_t>(i)].MPI_ERROR : MPI_SUCCESS;
    const int from = state_->from[at];
    if (error != MPI_SUCCESS && error != MPI_ERR_PENDING)
      throw CommError(fmt::format("MPI: a message {}: {}",
                                  from < 0 ? "cannot be sent" : fmt::format("from group rank {}", from),
                                  text_of(error)));
    if (from >= 0 && std::none_of(state_->from.begin(), state_->from.end(), [&](const int& other) {
          return other == from &&
                 state_->requests[static_cast<std::size_t>(&other - state_->from.data())] != MPI_REQUEST_NULL;
        }))
      arrived.push_back(from);
  }
  return state_->open == 0;
}

static std::vector<int> under_way(const std::vector<MPI_Request>& requests, const std::vector<int>& peers) {
  std::vector<int> ranks;
  for (std::size_t i = 0; i < requests.size(); ++i)
    if (peers[i] >= 0 && requests[i] != MPI_REQUEST_NULL &&
        std::find(ranks.begin(), ranks.end(), peers[i]) == ranks.end())
      ranks.push_back(peers[i]);
  return ranks;
}

std::vector<int> Messages::missing() const { return under_way(state_->requests, state_->from); }
std::vector<int> Messages::leaving() const { return under_way(state_->requests, state_->to); }

bool have_message_passing() { return true; }
std::string how_to_get_message_passing() { return ""; }

Processes start_message_passing() {
  // Uses four TCP connections between each two processes, unless the user has asked Open MPI for another
  // number. On a single connection, the permission to send a large message queues behind the large message
  // that goes the same way: an exchange, of which collectives are made, then runs at half the network's
  // speed.
  ::setenv("OMPI_MCA_btl_tcp_links", "4", 0);
  int level = 0;
  need(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level), "start");
  if (level < MPI_THREAD_SERIALIZED)
    refuse("--comm mpi: this MPI lets only one thread of a process call it, and two do, in turns");
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  Processes processes;
  MPI_Comm_rank(MPI_COMM_WORLD, &processes.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &processes.size);
  // Ranks of one node share memory; its name is that of its first rank's processor.
  MPI_Comm node = MPI_COMM_NULL;
  need(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, processes.rank, MPI_INFO_NULL, &node),
       "tell which ranks share memory");
  int first = processes.rank;
  MPI_Bcast(&first, 1, MPI_INT, 0, node);
  MPI_Comm_free(&node);
  std::array<char, MPI_MAX_PROCESSOR_NAME> name{};
  int length = 0;
  MPI_Get_processor_name(name.data(), &length);
  const auto names = all_gather_text(std::string(name.data(), static_cast<std::size_t>(length)));
  std::vector<int> firsts(static_cast<std::size_t>(processes.size));
  MPI_Allgather(&first, 1, MPI_INT, firsts.data(), 1, MPI_INT, MPI_COMM_WORLD);
  for (int f : firsts) {
    std::string node_name = names[static_cast<std::size_t>(f)];
    // Two nodes of one name are told apart.
    for (int other = 0; other < f; ++other)
      if (firsts[static_cast<std::size_t>(other)] == other &&
          names[static_cast<std::size_t>(other)] == node_name) {
        node_name += fmt::format("#{}", f);
        break;
      }
    processes.nodes.push_back(node_name);
  }
  return processes;
}

void end_message_passing() {
  for (MPI_Comm& space : spaces()) MPI_Comm_free(&space);
  spaces().clear();
  MPI_Finalize();
}

int open_message_space(const std::vector<int>& ranks) {
  MPI_Group world = MPI_GROUP_NULL, group = MPI_GROUP_NULL;
  MPI_Comm_group(MPI_COMM_WORLD, &world);
  MPI_Group_incl(world, static_cast<int>(ranks.size()), ranks.data(), &group);
  MPI_Comm space = MPI_COMM_NULL;
  const int result = MPI_Comm_create_group(MPI_COMM_WORLD, group, 0, &space);
  MPI_Group_free(&group);
  MPI_Group_free(&world);
  need(result, "make a group of ranks");
  MPI_Comm_set_errhandler(space, MPI_ERRORS_RETURN);
  spaces().push_back(space);
  return static_cast<int>(spaces().size()) - 1;
}

std::vector<std::string> all_gather_text(const std::string& text) {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const auto length = static_cast<int>(text.size());
  std::vector<int> lengths(static_cast<std::size_t>(size)), offsets(static_cast<std::size_t>(size));
  need(MPI_Allgather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, MPI_COMM_WORLD), "gather texts");
  int total = 0;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    offsets[i] = total;
    total += lengths[i];
  }
  std::string all(static_cast<std::size_t>(total), '\0');
  need(MPI_Allgatherv(text.data(), length, MPI_CHAR, all.data(), lengths.data(), offsets.data(), MPI_CHAR,
                      MPI_COMM_WORLD),
       "gather texts");
  std::vector<std::string> texts;
  for (std::size_t i = 0; i < lengths.size(); ++i)
    texts.push_back(all.substr(static_cast<std::size_t>(offsets[i]), static_cast<std::size_t>(lengths[i])));
  return texts;
}

}  // namespace echelon

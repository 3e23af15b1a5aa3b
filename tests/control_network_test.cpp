// The sockets of the control network: ranks find each other whoever else calls, and nobody else is heard.
#include "comm/control_network.h"

#include <fmt/format.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstring>
#include <new>
#include <sstream>
#include <thread>

#include "base/error.h"
#include "comm/control_door.h"
#include "patience.h"

namespace echelon::control_network_test {
namespace {

using namespace echelon::checks;
using Addresses = std::vector<std::vector<std::string>>;
using Names = std::vector<std::string>;

TEST(ControlSockets, ListenOnLoopbackAloneForOneNode) {
  const Addresses addresses(3, {"10.0.0.1", "172.17.0.1"});
  const auto nowhere = [](const std::string&) -> std::string { throw std::logic_error("asked for a way"); };
  EXPECT_EQ(where_to_listen(0, addresses, {"a", "a", "a"}, nowhere), Names{"127.0.0.1"});
  EXPECT_EQ(where_to_listen(2, addresses, {"a", "a", "a"}, nowhere), Names{});  // nobody calls it
}

TEST(ControlSockets, ListenWhereTheOtherNodesAreAndNowhereElse) {
  // Two networks, a bridge for containers that every machine has, and a third machine on the first network
  // alone.
  const Addresses addresses{{"10.0.0.1", "10.1.0.1", "172.17.0.1", "192.0.2.1"},
                            {"10.0.0.1", "10.1.0.1", "172.17.0.1", "192.0.2.1"},
                            {"10.0.0.2", "10.1.0.2", "172.17.0.1"},
                            {"10.0.0.3", "172.17.0.1"}};
  const auto towards = [](const std::string& there) -> std::string {
    if (there.starts_with("10.0.")) return "10.0.0.1";
    if (there.starts_with("10.1.")) return "10.1.0.1";
    return "";
  };
  EXPECT_EQ(where_to_listen(0, addresses, {"a", "a", "b", "c"}, towards),
            (Names{"127.0.0.1", "10.0.0.1", "10.1.0.1"}));
  EXPECT_EQ(where_to_listen(1, addresses, {"a", "a", "b", "c"}, towards), (Names{"10.0.0.1", "10.1.0.1"}));
  EXPECT_EQ(where_to_listen(2, addresses, {"a", "a", "b", "c"}, towards), Names{"10.0.0.1"});
  try {
    where_to_listen(0, {{"10.0.0.1"}, {"198.51.100.1", "198.51.100.2"}}, {"a", "b"}, towards);
    ADD_FAILURE();
  } catch (const RunError& error) {
    EXPECT_STREQ(
        error.what(),
        "rank 0 on a finds no way to rank 1 on b (IPv4 addresses there: 198.51.100.1, 198.51.100.2)");
  }
}

Names places_in(const std::string& invitation) {
  std::istringstream in(invitation);
  Names places;
  std::string secret;
  in >> secret;
  for (std::string place; in >> place;) places.push_back(place);
  return places;
}

// Ranks of one node, each with its network in this process.
class Ranks {
 public:
  explicit Ranks(int n) : nodes_(static_cast<std::size_t>(n), "here") {
    for (int r = 0; r < n; ++r) {
      all_.push_back(std::make_unique<ControlNetwork>(r, n,
                                                      ControlNetwork::Hooks{[r] {
                                                                              RankState s;
                                                                              s.rank = r;
                                                                              s.instruction =
                                                                                  fmt::format("step {}", r);
                                                                              return s;
                                                                            },
                                                                            {},
                                                                            {},
                                                                            {}},
                                                      Time{}));
      invitations_.push_back(all_.back()->open(Addresses(nodes_.size()), nodes_));
    }
  }
  void connect() {
    std::vector<std::jthread> threads;
    for (auto& network : all_)
      threads.emplace_back(
          [&] { network->connect(invitations_, nodes_, std::chrono::milliseconds(patience)); });
  }
  const Names& invitations() const { return invitations_; }
  int size() const { return static_cast<int>(all_.size()); }
  ControlNetwork& operator[](int r) { return *all_[static_cast<std::size_t>(r)]; }
  // Every rank hears of every other one what that one says.
  void expect_all_heard() {
    for (int r = 0; r < size(); ++r)
      for (int other = 0; other < size(); ++other) {
        if (other == r) continue;
        wait_until([&] { return !(*this)[r].last_heard(other).instruction.empty() || (*this)[r].failed(); });
        EXPECT_EQ((*this)[r].last_heard(other).instruction, fmt::format("step {}", other));
      }
    for (int r = 0; r < size(); ++r) EXPECT_FALSE((*this)[r].failed()) << (*this)[r].failure().why;
  }

 private:
  Names nodes_, invitations_;
  std::vector<std::unique_ptr<ControlNetwork>> all_;
};

// What strangers and this test know of each other.
struct Shared {
  std::atomic<int> num_ports{0}, frames{0}, refused{0}, heard{0};
  std::array<std::uint16_t, 16> ports{};
};

int call(std::uint16_t port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const timeval second{.tv_sec = 1, .tv_usec = 0};
  ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &second, sizeof second);
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0) {
    sockaddr_in own{};
    socklen_t length = sizeof own;
    ::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length);
    if (own.sin_port != to.sin_port) return fd;  // else it has reached itself, where nobody listens
  }
  ::close(fd);
  return -1;
}

// Frames that once ended a rank, took its place, or reached the terminal.
std::string hostile_words(int kind, int rank) {
  std::string words;
  const std::int32_t number = rank;
  if (kind == 1) words.assign(reinterpret_cast<const char*>(&number), sizeof number);
  if (kind == 2) {  // all but the secret
    words = "echelon1";
    words.append(reinterpret_cast<const char*>(&number), sizeof number);
    words.append(32, '\0');
  }
  if (kind == 3) words = std::string(97, '\xff');
  for (int i = 0; i < 4; ++i) {
    words += encode_frame(ControlFrame::state, R"({"at":5})");
    words += encode_frame(ControlFrame::failure, R"({"why":"\u001b[2Jowned","found_by":0})");
    words += std::string(4, '\0');  // an empty frame
  }
  return words;
}
constexpr int frames_of_words = 12;

// Never returns; the calls of a process that has only been forked.
[[noreturn]] void be_strangers(Shared& shared, const std::array<std::string, 16>& words) {
  if (::getuid() == 0 && (::setgroups(0, nullptr) != 0 || ::setgid(65534) != 0 || ::setuid(65534) != 0))
    ::_exit(1);
  std::array<int, 200> held{};
  held.fill(-1);
  for (std::size_t i = 0;; ++i) {
    const int ports = shared.num_ports.load();
    if (ports == 0) {
      ::usleep(1000);
      continue;
    }
    const int fd = call(shared.ports[i % static_cast<std::size_t>(ports)]);
    if (fd < 0) {
      ++shared.refused;
      continue;
    }
    const std::string& said = words[i % words.size()];
    if (i % 3 != 0 && ::send(fd, said.data(), said.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(said.size()))
      shared.frames += frames_of_words;
    char answer = 0;
    if (::recv(fd, &answer, 1, MSG_DONTWAIT) > 0) ++shared.heard;
    int& place = held[i % held.size()];  // kept open as long as there is room
    if (place >= 0) ::close(place);
    place = fd;
  }
}

class Strangers {
 public:
  Strangers()
      : shared_(new (::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                            0)) Shared) {
    std::array<std::string, 16> words;
    for (std::size_t i = 0; i < words.size(); ++i)
      words[i] = hostile_words(static_cast<int>(i % 4), static_cast<int>(i / 4));
    pid_ = ::fork();
    if (pid_ == 0) be_strangers(*shared_, words);
  }
  ~Strangers() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    ::munmap(shared_, sizeof(Shared));
  }
  Strangers(const Strangers&) = delete;
  Strangers& operator=(const Strangers&) = delete;
  void tell(const Names& invitations) {
    std::size_t ports = 0;
    for (const std::string& invitation : invitations)
      for (const std::string& place : places_in(invitation)) {
        EXPECT_TRUE(place.starts_with("127.0.0.1:")) << place;
        shared_->ports.at(ports++) = static_cast<std::uint16_t>(std::stoi(place.substr(place.find(':') + 1)));
      }
    shared_->num_ports = static_cast<int>(ports);
  }
  const Shared& did() const { return *shared_; }

 private:
  Shared* shared_;
  pid_t pid_ = -1;
};

// From another user's process where this one may become another user: before the ranks call each other, while
// they do, and when all are there.
TEST(ControlNetwork, StrangersAreNeitherHeardNorInTheWay) {
  Strangers strangers;
  Ranks ranks(4);
  strangers.tell(ranks.invitations());
  wait_until([&] { return strangers.did().frames > 1000; });  // more callers wait than any door keeps
  ranks.connect();
  ranks.expect_all_heard();
  // Nobody listens any more.
  const int before = strangers.did().refused;
  wait_until([&] { return strangers.did().refused > before + 20'000; });
  EXPECT_EQ(strangers.did().heard, 0);
  ranks.expect_all_heard();
}

// While one door stays open, because a rank is missing, 20,000 frames come to it.
TEST(ControlNetwork, TheDoorStandsAFlood) {
  Strangers strangers;
  ControlDoor door(0, 3, {"127.0.0.1"});
  strangers.tell({door.invitation()});
  std::jthread admits([&](const std::stop_token& stop) { door.admit(Clock::now() + patience, stop); });
  const Descriptor first = knock(door.invitation(), 1, true, Clock::now() + patience);
  EXPECT_TRUE(first);
  wait_until([&] { return strangers.did().frames > 20'000; });
  const Descriptor second = knock(door.invitation(), 2, true, Clock::now() + patience);
  EXPECT_TRUE(second);
  admits.join();
  EXPECT_TRUE(door.missing().empty());
  EXPECT_EQ(strangers.did().heard, 0);
}

TEST(ControlDoor, LetsInNobodyWithAnotherSecretOrRank) {  // long
  ControlDoor door(1, 4, {"127.0.0.1"}), other(1, 4, {"127.0.0.1"});
  std::jthread admits([&](const std::stop_token& stop) { door.admit(Clock::now() + patience, stop); });
  const std::string invitation = door.invitation();
  std::string wrong = invitation;
  wrong[63] = wrong[63] == '0' ? '1' : '0';  // the last digit of the half that callers show
  const auto soon = [] { return Clock::now() + std::chrono::milliseconds(200); };
  EXPECT_FALSE(knock(wrong, 2, true, soon()));
  EXPECT_FALSE(knock(other.invitation().substr(0, 128) + invitation.substr(128), 2, true, soon()));
  for (int rank : {-1, 0, 1, 4, 1 << 30}) EXPECT_FALSE(knock(invitation, rank, true, soon())) << rank;
  EXPECT_FALSE(knock(invitation, 2, false, soon()));  // from another machine there is no way
  // The caller knows the door too.
  wrong = invitation;
  wrong[127] = wrong[127] == '0' ? '1' : '0';
  EXPECT_FALSE(knock(wrong, 2, true, soon()));
  EXPECT_TRUE(knock(invitation, 2, true, Clock::now() + patience));
  EXPECT_TRUE(knock(invitation, 3, true, Clock::now() + patience));
  admits.join();
  EXPECT_TRUE(door.missing().empty());
}

TEST(ControlDoor, HasASecretOfItsOwn) {
  const ControlDoor a(0, 2, {"127.0.0.1"}), b(0, 2, {"127.0.0.1"});
  EXPECT_NE(a.invitation().substr(0, 64), b.invitation().substr(0, 64));
  EXPECT_NE(a.invitation().substr(0, 64), a.invitation().substr(64, 64));
}

// A rank whose words break the rules is lost, and it is said which rule.
TEST(ControlNetwork, AConnectionThatBreaksTheRulesIsEnded) {
  for (const std::uint32_t length : {0u, 0x7fffffffu}) {
    ControlNetwork network(0, 2, {[] { return RankState{}; }, {}, {}, {}}, Time{});
    const Names nodes{"here", "here"};
    const std::string invitation = network.open(Addresses(2), nodes);
    Descriptor rank_1;
    std::jthread calls([&] { rank_1 = knock(invitation, 1, true, Clock::now() + patience); });
    network.connect({invitation, ""}, nodes, std::chrono::milliseconds(patience));
    calls.join();
    const std::string harmless = encode_frame(ControlFrame::state, R"({"at":5})") +
                                 encode_frame(static_cast<ControlFrame>(200), "?") +
                                 encode_frame(ControlFrame::state, R"({"at":"\u001b[2Jhere"})");
    ASSERT_TRUE(send_all(rank_1.get(), harmless.data(), harmless.size()));
    wait_until(
        [&] { return network.last_heard(1).instruction == "\xef\xbf\xbd[2Jhere" || network.failed(); });
    EXPECT_FALSE(network.failed()) << network.failure().why;
    ASSERT_TRUE(send_all(rank_1.get(), &length, sizeof length));
    wait_until([&] { return network.failed(); });
    EXPECT_EQ(network.failure().why,
              fmt::format("rank 1 is gone: it sent a frame of {} bytes (legal: 1 to 1048576)", length));
    EXPECT_EQ(network.failure().origin, 1);
    network.wait_for_report();
  }
}

}  // namespace
}  // namespace echelon::control_network_test

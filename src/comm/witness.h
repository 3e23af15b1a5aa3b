// What leaves a rank for others and what arrives from them, witnessed while a step runs: a fingerprint of
// each block of bytes. A rank's code is deterministic, so where a step runs twice from the same state every
// fingerprint is the same; the first that is not tells whose fault it is. Where what a rank sends differs and
// nothing that it has received did, the rank differs from itself; where what it has received differs and its
// sender's did not, the message was changed on its way. (End-to-end checks: Saltzer, Reed, Clark 1984.)
//
// For that every block has one rank that it comes from and one or all that it goes to. So while it watches, a
// sum is made of movements whose blocks have: an all_to_all to the rank that adds up a part, its sum by
// halves of the ranks as everywhere (the same bits), and an all_gather. Collectives end before they return:
// nothing is hidden behind anything. Room for the parts is the host's own.
//
// The few numbers that the host steers by (i32, and f64 up to 64 KiB) are compared with their senders'
// fingerprints as they arrive, and sent again where they differ: a rank that took another way than the others
// could not be run again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/world.h"

namespace echelon {

// What a planted flip does.
inline void change_bit(std::byte* bytes, std::uint64_t bit) { bytes[bit / 8] ^= std::byte(1 << (bit % 8)); }

// Of one rank, by its own thread.
class Witness {
 public:
  enum class Side : std::uint8_t { sent, received, state };
  enum class Way : std::uint8_t { exchange, gather, broadcast, message, none };
  // Blocks that come one after another, the same way between the same ranks.
  struct Stream {
    Side side = Side::state;
    Way way = Way::none;
    std::string group{};  // its name and ranks
    int peer = -1;        // rank of the job; -1: all of the group
    bool operator==(const Stream&) const = default;
  };
  struct Entry {
    std::uint32_t stream = 0, number = 0;  // of the block in its stream, since take_log()
    std::int64_t step = 0;
    std::uint64_t fingerprint = 0;
  };
  using Log = std::vector<Entry>;  // in the order in which the rank's program came to know of them
  // Numbers that arrived changed, and were sent again.
  struct Repeat {
    std::int64_t step = 0;
    int from = 0;  // ranks of the job
    std::string group;
  };
  using Hash = std::uint64_t (*)(std::span<const std::byte>);

  explicit Witness(Hash hash) : hash_(hash) {}
  Witness(const Witness&) = delete;
  Witness& operator=(const Witness&) = delete;

  // All ranks of the job begin and end together.
  void begin_step(std::int64_t step);
  void end_step() { step_.reset(); }
  bool watches() const { return step_.has_value(); }
  // Since the last call; numbers begin anew.
  Log take_log();
  std::vector<Repeat> take_repeats() { return std::exchange(repeats_, {}); }

  std::uint32_t add_stream(const Stream& stream);
  const std::vector<Stream>& streams() const { return streams_; }
  std::uint32_t next_number(std::uint32_t stream) { return next_[stream]++; }
  void note(std::uint32_t stream, std::uint32_t number, std::uint64_t fingerprint);
  void note(std::uint32_t stream, std::uint64_t fingerprint) {
    note(stream, next_number(stream), fingerprint);
  }
  void note_repeat(int from, const std::string& group);
  std::uint64_t fingerprint(const Tensor& block) const;

  // Changes one bit on its way: this one of those that leave the rank from the next step on. Once.
  void plant(std::uint64_t bit);
  bool is_planted() const { return planted_.has_value(); }
  std::uint64_t bits_sent() const { return bits_sent_; }  // since plant()
  // So many bits leave now: which of them is changed, if one is.
  std::optional<std::int64_t> strike(std::int64_t bits);

 private:
  Hash hash_;
  std::optional<std::int64_t> step_;
  std::vector<Stream> streams_;
  std::vector<std::uint32_t> next_;  // by stream
  Log log_;
  std::vector<Repeat> repeats_;
  std::optional<std::uint64_t> planted_;
  std::uint64_t bits_sent_ = 0;
};

// The first entry of `again` whose fingerprint is not that of `before`, in the order of `again`. What only
// one of them has is passed over.
const Witness::Entry* first_difference(const Witness::Log& before, const Witness::Log& again);
// Whether block `number` of a stream is in both with the same fingerprint.
bool is_same(const Witness::Log& before, const Witness::Log& again, std::uint32_t stream,
             std::uint32_t number);

// A world whose groups a witness watches. For one rank; `inner` and `witness` outlive it and all that join.
class WitnessedWorld final : public World {
 public:
  WitnessedWorld(World& inner, Witness& witness) : inner_(inner), witness_(witness) { job_ = inner.job(); }

  int num_ranks() const override { return inner_.num_ranks(); }
  std::unique_ptr<Communicator> join(int rank, const std::vector<int>& ranks,
                                     const std::string& name) override;
  void run(const std::function<void(int rank)>& body) override { inner_.run(body); }
  void abort(const std::string& why) override { inner_.abort(why); }
  bool failed() const override { return inner_.failed(); }
  std::chrono::milliseconds timeout() const override { return inner_.timeout(); }
  FlightRecorder& recorder(int rank) override { return inner_.recorder(rank); }
  std::vector<RankState> states() override { return inner_.states(); }
  const Time& time() const override { return inner_.time(); }

 private:
  World& inner_;
  Witness& witness_;
};

}  // namespace echelon

// Records fingerprints of all blocks of bytes that a rank sends and receives while a step runs. A rank's code
// is deterministic, so if a step runs twice from the same state every fingerprint must be the same, and the
// first that differs shows who is at fault. If a sent block differs and nothing received before it does, the
// rank itself computed differently. If a received block differs and the sender's does not, the message was
// corrupted on its way. (End-to-end checks: Saltzer, Reed, Clark 1984.)
//
// This needs every block to have one source and one destination, or all ranks as destinations. So during a
// watched step, a sum is built from such transfers: an all_to_all to the rank that sums a part, its sum by
// halves of the ranks as everywhere (the same bits), and an all_gather. Collectives finish before they
// return, so no communication is hidden. Buffers for the parts are in host memory.
//
// The few numbers that control the host (i32, and f64 up to 64 KiB) are compared with the sender's
// fingerprint on arrival and sent again if they differ: a rank that took another branch than the others could
// not be run again.
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

// Flips a bit, as a planted fault does.
inline void change_bit(std::byte* bytes, std::uint64_t bit) { bytes[bit / 8] ^= std::byte(1 << (bit % 8)); }

// Of one rank; used by its own thread.
class Witness {
 public:
  enum class Side : std::uint8_t { sent, received, state };
  enum class Way : std::uint8_t { exchange, gather, broadcast, message, none };
  // A sequence of blocks that go the same way between the same ranks.
  struct Stream {
    Side side = Side::state;
    Way way = Way::none;
    std::string group{};  // its name and ranks
    int peer = -1;        // rank of the job; -1: all of the group
    bool operator==(const Stream&) const = default;
  };
  struct Entry {
    std::uint32_t stream = 0, number = 0;  // index of the block in its stream, since take_log()
    std::int64_t step = 0;
    std::uint64_t fingerprint = 0;
  };
  using Log = std::vector<Entry>;  // in the order in which the rank's program saw them
  // Numbers that arrived corrupted and were sent again.
  struct Repeat {
    std::int64_t step = 0;
    int from = 0;  // ranks of the job
    std::string group;
  };
  using Hash = std::uint64_t (*)(std::span<const std::byte>);

  explicit Witness(Hash hash) : hash_(hash) {}
  Witness(const Witness&) = delete;
  Witness& operator=(const Witness&) = delete;

  // All ranks of the job call these together.
  void begin_step(std::int64_t step);
  void end_step() { step_.reset(); }
  bool watches() const { return step_.has_value(); }
  // The log since the last call; block numbers restart at 0.
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

  // Flips one bit in transit, once: bit number `bit` of those that leave the rank from the next step on.
  void plant(std::uint64_t bit);
  bool is_planted() const { return planted_.has_value(); }
  std::uint64_t bits_sent() const { return bits_sent_; }  // since plant()
  // Called when `bits` bits leave: the index of the one to flip, if any.
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

// The first entry of `again`, in its order, whose fingerprint differs from that in `before`. Entries that
// only one log has are skipped.
const Witness::Entry* first_difference(const Witness::Log& before, const Witness::Log& again);
// Whether both logs have block `number` of a stream with the same fingerprint.
bool is_same(const Witness::Log& before, const Witness::Log& again, std::uint32_t stream,
             std::uint32_t number);

// A World whose groups are watched by a witness. For one rank; `inner` and `witness` outlive it and all its
// communicators.
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

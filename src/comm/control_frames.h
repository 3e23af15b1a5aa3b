// The words of the control network: what its frames hold, and how they lie one behind the other on a
// connection. Whatever arrives, reading it ends no process: a stream that breaks the rules is refused, a
// value that is no value is left out, a text becomes printable. No socket is in here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "comm/flight_recorder.h"

namespace echelon {

// Why a job ends.
struct Failure {
  int origin = -1;  // the rank at fault; -1: none, or not known
  std::string why;
  bool refused = false;  // the request is wrong, and nothing else
  bool late = false;     // a wait lasted too long: who is at fault is for the records of all ranks to say
  bool lost = false;     // a connection ended: why is not known
  int found_by = -1;     // rank
};

enum class ControlFrame : std::uint8_t { state, failure, last_words, report, done, goodbye, back };

// Length (4 bytes), type (1), text.
std::string encode_frame(ControlFrame type, std::string_view text);
// JSON objects.
std::string encode(const RankState& state);
std::string encode(const Failure& failure);

// What rank `from` says of itself, in a job of so many ranks; none where that is no JSON object. Ranks
// outside the job are left out of waits_for, and are no origin; a found_by outside it is `from`.
std::optional<RankState> decode_state(int from, int num_ranks, const std::string& text);
std::optional<Failure> decode_failure(int from, int num_ranks, const std::string& text);

// Cuts the bytes of a connection into frames.
class FrameReader {
 public:
  // The type and the text: where a job of 100,000 ranks stands has room in it.
  static constexpr std::size_t largest = std::size_t{1} << 20;

  void add(std::string_view bytes) { bytes_ += bytes; }
  std::optional<std::pair<ControlFrame, std::string>> next();
  // Why nothing more is read from this connection; empty: all is well.
  const std::string& refusal() const { return refusal_; }

 private:
  std::string bytes_, refusal_;
};

}  // namespace echelon

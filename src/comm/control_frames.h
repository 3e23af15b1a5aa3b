// The wire format of the control network: the contents of its frames, and how they follow each other on a
// connection. No input can crash the process: a stream that breaks the format is refused, invalid values are
// ignored, and text is made printable. There are no sockets here.
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
  int origin = -1;  // the rank at fault; -1: none or unknown
  std::string why;
  bool refused = false;  // the request is invalid; nothing else went wrong
  bool late = false;     // a wait was too long; the records of all ranks must show who is at fault
  bool lost = false;     // a connection ended; the reason is unknown
  int found_by = -1;     // rank
};

enum class ControlFrame : std::uint8_t { state, failure, last_words, report, done, goodbye, back };

// Length (4 bytes), type (1), text.
std::string encode_frame(ControlFrame type, std::string_view text);
// JSON objects.
std::string encode(const RankState& state);
std::string encode(const Failure& failure);

// What rank `from` of `num_ranks` reports; empty if the text is no JSON object. Ranks outside the job are
// dropped from waits_for and from origin; a found_by outside it becomes `from`.
std::optional<RankState> decode_state(int from, int num_ranks, const std::string& text);
std::optional<Failure> decode_failure(int from, int num_ranks, const std::string& text);

// Splits the bytes of a connection into frames.
class FrameReader {
 public:
  // Limit of type and text: enough for the state of a job of 100,000 ranks.
  static constexpr std::size_t largest = std::size_t{1} << 20;

  void add(std::string_view bytes) { bytes_ += bytes; }
  std::optional<std::pair<ControlFrame, std::string>> next();
  // Why this connection is not read any more; empty if all is well.
  const std::string& refusal() const { return refusal_; }

 private:
  std::string bytes_, refusal_;
};

}  // namespace echelon

#include "comm/control_frames.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/utf8.h"

namespace echelon {
namespace {

using nlohmann::json;

std::string text_of(const json& object) {
  return object.dump(-1, ' ', false, json::error_handler_t::replace);
}

// Empty if it is no object. Anything nested deeper than a frame can be is dropped while it is read, so that
// no depth is ever stored.
std::optional<json> parse_object(const std::string& text) {
  const auto is_shallow = [](int depth, json::parse_event_t, json&) { return depth <= 2; };
  json j = json::parse(text, is_shallow, false);
  if (!j.is_object()) return {};
  return std::optional<json>(std::in_place, std::move(j));
}

std::string text_in(const json& j, const char* key) {
  const auto at = j.find(key);
  return at != j.end() && at->is_string() ? printable(at->get_ref<const std::string&>()) : "";
}

bool flag_in(const json& j, const char* key) {
  const auto at = j.find(key);
  return at != j.end() && at->is_boolean() && at->get<bool>();
}

// -1 where it is no rank of the job.
int rank_of(const json& value, int num_ranks) {
  if (!value.is_number_integer()) return -1;
  const bool inside = value.is_number_unsigned()
                          ? value.get<std::uint64_t>() < static_cast<std::uint64_t>(num_ranks)
                          : value.get<std::int64_t>() >= 0 && value.get<std::int64_t>() < num_ranks;
  return inside ? value.get<int>() : -1;
}

int rank_in(const json& j, const char* key, int num_ranks) {
  const auto at = j.find(key);
  return at != j.end() ? rank_of(*at, num_ranks) : -1;
}

double seconds_in(const json& j, const char* key) {
  const auto at = j.find(key);
  const double seconds = at != j.end() && at->is_number() ? at->get<double>() : 0;
  return std::isfinite(seconds) ? std::clamp(seconds, 0.0, 1e9) : 0;
}

}  // namespace

std::string encode_frame(ControlFrame type, std::string_view text) {
  text = text.substr(0, FrameReader::largest - 1);
  const auto length = static_cast<std::uint32_t>(text.size() + 1);
  std::string frame(sizeof length, '\0');
  std::memcpy(frame.data(), &length, sizeof length);
  frame += static_cast<char>(type);
  frame += text;
  return frame;
}

std::string encode(const RankState& s) {
  return text_of({{"at", s.instruction},
                  {"finished", s.last_finished},
                  {"in", s.waits_in},
                  {"for", s.waits_for},
                  {"to_take", s.to_take},
                  {"seconds", s.seconds}});
}

std::string encode(const Failure& f) {
  return text_of({{"origin", f.origin},
                  {"why", f.why},
                  {"refused", f.refused},
                  {"late", f.late},
                  {"lost", f.lost},
                  {"found_by", f.found_by}});
}

std::optional<RankState> decode_state(int from, int num_ranks, const std::string& text) {
  const std::optional<json> j = parse_object(text);
  if (!j) return {};
  RankState s;
  s.rank = from;
  s.instruction = text_in(*j, "at");
  s.last_finished = text_in(*j, "finished");
  s.waits_in = text_in(*j, "in");
  if (const auto ranks = j->find("for"); ranks != j->end() && ranks->is_array())
    for (const json& rank : *ranks)
      if (const int r = rank_of(rank, num_ranks);
          r >= 0 && s.waits_for.size() < static_cast<std::size_t>(num_ranks))
        s.waits_for.push_back(r);
  s.to_take = flag_in(*j, "to_take");
  s.seconds = seconds_in(*j, "seconds");
  return s;
}

std::optional<Failure> decode_failure(int from, int num_ranks, const std::string& text) {
  const std::optional<json> j = parse_object(text);
  if (!j) return {};
  Failure f;
  f.origin = rank_in(*j, "origin", num_ranks);
  f.why = text_in(*j, "why");
  if (f.why.empty()) f.why = fmt::format("rank {} says that the job has failed", from);
  f.refused = flag_in(*j, "refused");
  f.late = flag_in(*j, "late");
  f.lost = flag_in(*j, "lost");
  f.found_by = rank_in(*j, "found_by", num_ranks);
  if (f.found_by < 0) f.found_by = from;
  return f;
}

std::optional<std::pair<ControlFrame, std::string>> FrameReader::next() {
  std::uint32_t length = 0;
  if (!refusal_.empty() || bytes_.size() < sizeof length) return {};
  std::memcpy(&length, bytes_.data(), sizeof length);
  if (length == 0 || length > largest) {
    refusal_ = fmt::format("it sent a frame of {} bytes (legal: 1 to {})", length, largest);
    bytes_.clear();
    return {};
  }
  if (bytes_.size() < sizeof length + length) return {};
  std::pair frame(static_cast<ControlFrame>(bytes_[sizeof length]),
                  bytes_.substr(sizeof length + 1, length - 1));
  bytes_.erase(0, sizeof length + length);
  return frame;
}

}  // namespace echelon

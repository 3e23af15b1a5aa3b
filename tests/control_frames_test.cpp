// Whatever bytes the control network is sent, a process reads them to their end, believes nothing that no
// rank could say, and keeps no text that does more than stand there.
#include "comm/control_frames.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <random>

#include "base/utf8.h"
#include "comm/control_protocol.h"
#include "comm/world.h"

namespace echelon::control_frames_test {
namespace {

using namespace std::chrono_literals;

TEST(Printable, LeavesWhatPeopleWriteAndTakesWhatATerminalObeys) {
  EXPECT_EQ(printable("dp collective 11 (all_reduce of 1000 f32): Größe 宽 😀"),
            "dp collective 11 (all_reduce of 1000 f32): Größe 宽 😀");
  EXPECT_EQ(printable("a\nb\tc\rd"), "a b c d");
  const std::string gone = "\xef\xbf\xbd";
  EXPECT_EQ(printable("\x1b[31mred\x7f"), gone + "[31mred" + gone);
  EXPECT_EQ(printable(std::string("a\0b", 3)), "a" + gone + "b");
  EXPECT_EQ(printable("\xc2\x9b"
                      "2J"),
            gone + "2J");  // CSI as one character
  EXPECT_EQ(printable("\xe2\x80\xae"
                      "txt.exe"),
            gone + "txt.exe");  // turns what follows
  EXPECT_EQ(printable("\xff\xc0\x80"
                      "a"),
            gone + gone + gone + "a");
  EXPECT_EQ(printable("cut \xe5\xae"), "cut " + gone + gone);
  EXPECT_EQ(printable("12345", 3), "123");
  EXPECT_EQ(printable("\xe5\xae\xbd\xe5\xae\xbd", 5), "\xe5\xae\xbd");  // not in the middle of a character
}

TEST(ControlFrames, SaysWhatWasSaid) {
  RankState state;
  state.rank = 2;
  state.instruction = "step 3, 1F0";
  state.last_finished = "dp collective 4";
  state.waits_in = "tp collective 9";
  state.waits_for = {0, 3};
  state.to_take = true;
  state.seconds = 1.5;
  const auto read = decode_state(2, 4, encode(state));
  ASSERT_TRUE(read);
  EXPECT_EQ(describe(*read), describe(state));
  EXPECT_EQ(read->waits_for, state.waits_for);
  const Failure failure{
      .origin = 3, .why = "rank 3 failed: disk \"full\"", .late = true, .lost = true, .found_by = 1};
  const auto heard = decode_failure(0, 4, encode(failure));
  ASSERT_TRUE(heard);
  EXPECT_EQ(
      std::tie(heard->origin, heard->why, heard->refused, heard->late, heard->lost, heard->found_by),
      std::tie(failure.origin, failure.why, failure.refused, failure.late, failure.lost, failure.found_by));
}

TEST(ControlFrames, WhatIsNoValueIsLeftOut) {
  const auto s = decode_state(
      1, 4,
      R"({"at": 5, "finished": null, "in": ["x"], "for": [0, -1, 4, 3, 1e99, "2", [1], 18446744073709551615,
                -9223372036854775808, 2.0], "to_take": "yes", "seconds": -3})");
  ASSERT_TRUE(s);
  EXPECT_EQ(s->rank, 1);
  EXPECT_EQ(s->instruction + s->last_finished + s->waits_in, "");
  EXPECT_EQ(s->waits_for, (std::vector<int>{0, 3}));
  EXPECT_FALSE(s->to_take);
  EXPECT_EQ(s->seconds, 0);
  const auto f = decode_failure(1, 4, R"({"origin": 4, "why": "\u001b[2J\n", "late": 1, "found_by": -7})");
  ASSERT_TRUE(f);
  EXPECT_EQ(f->origin, -1);
  EXPECT_EQ(f->found_by, 1);
  EXPECT_EQ(f->why, "\xef\xbf\xbd[2J ");
  EXPECT_FALSE(f->late);
  for (const char* text : {"", "5", "[]", "null", "{\"at\":", "{\"seconds\": 1e999}", "\xff"}) {
    EXPECT_FALSE(decode_state(1, 4, text)) << text;
    EXPECT_FALSE(decode_failure(1, 4, text)) << text;
  }
}

TEST(ControlFrames, NoDepthOfNestingIsFollowed) {
  const std::size_t deep = FrameReader::largest / 2;
  for (const char* open : {"[", "{\"at\":"}) {
    std::string text = "{\"at\": ";
    while (text.size() < deep) text += open;
    EXPECT_FALSE(decode_state(0, 2, text));
  }
  const std::string whole =
      "{\"at\": " + std::string(deep / 2, '[') + std::string(deep / 2, ']') + ", \"in\": \"b\"}";
  const auto s = decode_state(0, 2, whole);
  ASSERT_TRUE(s);
  EXPECT_EQ(s->waits_in, "b");
}

TEST(ControlFrames, AFrameIsReadHoweverItIsCutAndNeverWithoutBounds) {
  const std::string stream = encode_frame(ControlFrame::state, "one") +
                             encode_frame(ControlFrame::goodbye, "") +
                             encode_frame(ControlFrame::report, "three");
  FrameReader reader;
  std::vector<std::string> texts;
  for (const char byte : stream) {
    reader.add({&byte, 1});
    while (const auto frame = reader.next()) texts.push_back(frame->second);
  }
  EXPECT_EQ(texts, (std::vector<std::string>{"one", "", "three"}));
  EXPECT_EQ(reader.refusal(), "");

  for (const std::uint32_t length : {0u, static_cast<std::uint32_t>(FrameReader::largest) + 1, UINT32_MAX}) {
    FrameReader broken;
    broken.add(encode_frame(ControlFrame::done, ""));
    broken.add({reinterpret_cast<const char*>(&length), sizeof length});
    broken.add(encode_frame(ControlFrame::done, ""));
    EXPECT_TRUE(broken.next());
    EXPECT_FALSE(broken.next());
    EXPECT_EQ(broken.refusal(), fmt::format("it sent a frame of {} bytes (legal: 1 to 1048576)", length));
    EXPECT_FALSE(broken.next());
  }
  // What is sent is never longer than what is taken.
  FrameReader long_text;
  long_text.add(encode_frame(ControlFrame::state, std::string(3 * FrameReader::largest, 'x')));
  EXPECT_TRUE(long_text.next());
}

constexpr int ranks = 4;

bool is_clean(const std::string& text) { return printable(text, text.size()) == text; }

void expect_sane(const RankState& s) {
  for (const std::string& text : {s.instruction, s.last_finished, s.waits_in})
    ASSERT_TRUE(is_clean(text)) << text;
  for (const int r : s.waits_for) ASSERT_TRUE(r >= 0 && r < ranks) << r;
  ASSERT_GE(s.seconds, 0);
}

class Hostile {
 public:
  explicit Hostile(std::uint32_t seed) : random_(seed) {
    RankState state;
    state.instruction = "step 1";
    state.waits_in = "dp collective 11";
    state.waits_for = {0, 1};
    texts_ = {encode(state),
              encode(Failure{.origin = 1, .why = "waited", .late = true, .found_by = 2}),
              encode(Failure{.origin = 2, .why = "rank 2 failed: disk full", .found_by = 2}),
              R"({"at":5})",
              R"({"for":[99,-5,1e99,18446744073709551615]})",
              R"({"origin":-2147483649,"found_by":2147483648,"why":{"a":[]}})",
              "{\"why\":\"\x1b]0;owned\x07\\u001b[2J\\u009b\\n\\n\",\"found_by\":77}",
              "{\"at\":\"\xff\xfe\",\"in\":\"\\ud800\"}",
              std::string(3000, '['),
              std::string(500, '{'),
              ""};
  }
  int below(std::size_t n) { return static_cast<int>(random_() % n); }
  // A frame, or what is left of one.
  std::string next() {
    std::string text = texts_[static_cast<std::size_t>(below(texts_.size()))];
    for (int changes = below(4); changes > 0; --changes) change(text);
    std::string frame = encode_frame(static_cast<ControlFrame>(below(10) == 0 ? below(256) : below(7)), text);
    if (below(20) == 0) change(frame);
    return frame;
  }

 private:
  void change(std::string& text) {
    const auto at = static_cast<std::size_t>(below(text.size() + 1));
    switch (below(4)) {
      case 0:
        text.insert(at, 1, static_cast<char>(below(256)));
        break;
      case 1:
        text.erase(at, static_cast<std::size_t>(below(5)));
        break;
      case 2:
        text.insert(at, texts_[static_cast<std::size_t>(below(texts_.size()))].substr(0, 40));
        break;
      default:
        if (at < text.size()) text[at] = static_cast<char>(below(256));
    }
  }
  std::mt19937 random_;
  std::vector<std::string> texts_;
};

TEST(ControlFrames, TwentyThousandHostileOnesEndNothing) {
  int taken = 0, refused = 0, reports = 0;
  Hostile hostile(1);
  for (int round = 0; taken < 20'000; ++round) {
    SCOPED_TRACE(round);
    Clock::time_point now{};
    ControlProtocol protocol(0, ranks, now);
    std::vector<FrameReader> lines(ranks);
    std::vector<bool> lost(ranks);
    bool spoke = false;
    for (int i = 0; i < 60; ++i) {
      now += std::chrono::milliseconds(hostile.below(300));
      const int from = 1 + hostile.below(ranks - 1);
      FrameReader& line = lines[static_cast<std::size_t>(from)];
      if (lost[static_cast<std::size_t>(from)]) continue;
      const std::string bytes = hostile.next();
      const auto cut = static_cast<std::size_t>(hostile.below(bytes.size() + 1));
      for (const std::string_view part :
           {std::string_view(bytes).substr(0, cut), std::string_view(bytes).substr(cut)}) {
        line.add(part);
        while (const auto frame = line.next()) {
          ASSERT_NO_THROW(protocol.take(from, frame->first, frame->second, now));
          ++taken;
        }
      }
      if (!line.refusal().empty()) {
        protocol.lose(from, now, line.refusal());
        lost[static_cast<std::size_t>(from)] = true;
        ++refused;
      }
      if (i == 40) protocol.fail({.why = "dp collective 11: rank 0 waited", .late = true}, now);
      if (protocol.failed()) {
        protocol.say_last_words({}, now);
        protocol.come_back("");
      }
      for (int r = 0; r < ranks; ++r) expect_sane(protocol.last_heard(r, now));
      const Failure failure = protocol.failure();
      ASSERT_TRUE(failure.origin >= -1 && failure.origin < ranks) << failure.origin;
      ASSERT_TRUE(failure.found_by >= -1 && failure.found_by < ranks) << failure.found_by;
      ASSERT_TRUE(is_clean(failure.why)) << failure.why;
      if (const auto report = protocol.report_when_due(now)) {
        ASSERT_FALSE(spoke);
        spoke = true;
        ++reports;
        const std::string text =
            failure_report(report->failure.why, report->further, report->failure.origin, report->states, {});
        std::string lines_of_it = text;
        std::erase(lines_of_it, '\n');
        ASSERT_TRUE(is_clean(lines_of_it)) << text;
        ASSERT_EQ(static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n')),
                  report->further.size() + report->states.size());
      }
    }
  }
  EXPECT_GT(refused, 10);
  EXPECT_GT(reports, 10);
}

}  // namespace
}  // namespace echelon::control_frames_test

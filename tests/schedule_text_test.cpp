// Both forms of text are read and written without loss, and nothing that can be typed crashes the reader.
#include "schedule/text.h"

#include <gtest/gtest.h>

#include <random>

#include "base/error.h"
#include "schedule/lower.h"
#include "schedule/schedules.h"
#include "schedule/validate.h"

namespace echelon::schedule_text_test {
namespace {

void expect_same(const Schedule& a, const Schedule& b) {
  EXPECT_EQ(a.num_stages, b.num_stages);
  EXPECT_EQ(a.num_microbatches, b.num_microbatches);
  EXPECT_EQ(a.ranks, b.ranks);
}

std::string error_of(const std::string& text) {
  try {
    from_text(text, "my.txt");
  } catch (const RequestError& error) {
    return error.what();
  }
  return "no error";
}

void refused(const std::string& text, const std::vector<std::string>& words) {
  const std::string error = error_of(text);
  for (const std::string& word : words)
    EXPECT_NE(error.find(word), std::string::npos) << word << " in: " << error;
}

TEST(ScheduleText, ReadsTheFormOfTheDocumentation) {
  const Schedule s = from_text(
      "# two ranks, four stages\n"
      "0F0 0F1 . 3BW0\t(0F2;3BW1)\r\n"
      "\n"
      "1F0  1B0@2 1W0 1S@2\n",
      "mine");
  EXPECT_EQ(s.name, "mine");
  EXPECT_EQ(s.num_stages, 4);
  EXPECT_EQ(s.num_microbatches, 3);
  ASSERT_EQ(s.num_ranks(), 2);
  EXPECT_EQ(s.ranks[0],
            (std::vector<Instruction>{
                {Op::F, 0, 0}, {Op::F, 0, 1}, {Op::BW, 3, 0}, {Op::F, 0, 2, 0, true}, {Op::BW, 3, 1}}));
  EXPECT_EQ(s.ranks[1],
            (std::vector<Instruction>{{Op::F, 1, 0}, {Op::B, 1, 0, 2}, {Op::W, 1, 0}, {Op::step, 1, 0, 2}}));
}

TEST(ScheduleText, ReadsAndWritesTorchCsv) {
  // As torch.distributed.pipelining writes them: I is the gradient of the input, B the fused backward.
  const std::string csv = "0F0,0F1,,0I0,0W0,(0F2;3B1)OVERLAP_F_B\n,1F0,1B0,,,\n";
  const Schedule s = from_text(csv, "torch.csv");
  EXPECT_EQ(to_text(s), "0F0 0F1 0B0 0W0 (0F2;3BW1)\n1F0 1BW0\n");
  EXPECT_EQ(to_csv(s), "0F0,0F1,0I0,0W0,(0F2;3B1)OVERLAP_F_B\n1F0,1B0\n");
  // In one column nothing but the comma tells that B is fused.
  const Schedule one = from_text("0B0,\n1B0\n", "torch.csv");
  EXPECT_EQ(one.ranks[1][0].op, Op::BW);
  expect_same(from_text(to_csv(one), "x"), one);
}

TEST(ScheduleText, RoundTrips) {
  for (const Schedule& s :
       {naive(3, 2), gpipe(4, 5), one_f_one_b(4, 8), zb_h1(4, 8), zb_h2(3, 7), zb_v(4, 9)}) {
    expect_same(from_text(to_text(s), "x"), s);
    expect_same(from_text(to_csv(s), "x"), s);
    expect_same(from_text(to_text(lower(s)), "x"), lower(s));
    EXPECT_THROW(to_csv(lower(s)), RequestError);
  }
  const Schedule steps = from_text("0F0@1 0BW0@1 0S@1\n.\n", "x");
  EXPECT_EQ(to_text(steps), "0F0@1 0BW0@1 0S@1\n.\n");
  EXPECT_THROW(to_csv(steps), RequestError);
}

TEST(ScheduleText, ErrorsNameLineRankTokenAndWhatIsLegal) {
  refused("0F0 0BW0\n\n1F0 1X0\n", {"my.txt, line 3 (rank 1): 1X0:", "no operation X", "F, B, W or BW"});
  refused("0F0 0\n", {"line 1 (rank 0): 0:", "operation is missing"});
  refused("0F\n", {"0F:", "microbatch is missing"});
  refused("F0\n", {"F0:", "stage is missing"});
  refused("0F0x\n", {"0F0x:", "something follows"});
  refused("0F1000000\n", {"0F1000000", "too large, above 999999; legal: [stage]"});
  refused("0F0 0BW0 0S\n", {"0S:", "version", "is missing", "[stage]S@[version]"});
  refused("0F99999999999999999999\n", {"too large"});
  refused("(0F0;1B0\n", {"(0F0;1B0:", ") is missing"});
  refused("(0F0;1S@0)\n", {"only computations run together"});
  refused("(0A0<1;1F0)\n", {"begins and ends with a computation"});
  refused("(1F0;1A0>1)\n", {"begins and ends with a computation"});
  refused("0A0\n", {"sent (>) or received (<)"});
  refused("0F0,0BW0\n", {"0BW0:", "no operation BW", "F, I, W or B"});
  refused("0F0,1UNSHARD\n", {"1UNSHARD:", "no operation UNSHARD"});
  refused("0I0\n", {"no operation I"});
  refused("", {"my.txt", "holds no instruction"});
  refused(".\n# nothing\n", {"holds no instruction"});
  refused(std::string("0F0 \x01\xff\n"), {"??"});
}

// Either a request error or a schedule that survives both forms; validate() may refuse it but not crash.
TEST(ScheduleText, SurvivesMutations) {
  std::mt19937 random(7);
  const auto below = [&](std::size_t n) {
    return std::uniform_int_distribution<std::size_t>(0, n - 1)(random);
  };
  const std::string alphabet = "0123456789FBWISAG(;)@<>.,# \n\r\t#OVERLAP_F_B\xff";
  const std::vector<std::string> seeds{to_text(zb_v(2, 3)), to_csv(zb_h1(3, 3)),
                                       "(0F0;1BW0) 0F1@2 0S@2 0A1>1\n1F1 0A1<0 .\n",
                                       "0F0,(0F3;7B1)OVERLAP_F_B,\n1I0,,1W0\n"};
  int read = 0, valid = 0;
  for (int k = 0; k < 2000; ++k) {
    std::string text = seeds[below(seeds.size())];
    for (std::size_t edits = 1 + below(4); edits > 0 && !text.empty(); --edits) {
      const std::size_t at = below(text.size());
      const char c = alphabet[below(alphabet.size())];
      switch (below(4)) {
        case 0:
          text[at] = c;
          break;
        case 1:
          text.insert(at, 1, c);
          break;
        case 2:
          text.erase(at, 1 + below(6));
          break;
        default:
          text += text.substr(at, below(20));
      }
    }
    try {
      const Schedule s = from_text(text, "fuzz");
      ++read;
      expect_same(from_text(to_text(s), "again"), s);
      try {
        expect_same(from_text(to_csv(s), "again"), s);
      } catch (const RequestError&) {
      }
      validate(s);
      ++valid;
    } catch (const RequestError& error) {
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    }
  }
  EXPECT_GT(read, 100);
  EXPECT_GT(valid, 0);
}

}  // namespace
}  // namespace echelon::schedule_text_test

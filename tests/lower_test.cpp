// Rules, lowering and the proof that a program finishes: what holds for good schedules and what is said of
// broken ones.
#include "schedule/lower.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "base/error.h"
#include "schedule/schedules.h"
#include "schedule/simulate.h"
#include "schedule/text.h"
#include "schedule/validate.h"

namespace echelon::lower_test {
namespace {

template <class Run>
void refused(const Run& run, const std::vector<std::string>& words) {
  std::string error = "no error";
  try {
    run();
  } catch (const RequestError& e) {
    error = e.what();
  }
  EXPECT_EQ(error.find('\n'), std::string::npos);
  for (const std::string& word : words)
    EXPECT_NE(error.find(word), std::string::npos) << word << " in: " << error;
}
void invalid(const std::string& text, const std::vector<std::string>& words) {
  refused([&] { validate(from_text(text, "mine")); }, words);
}
void stuck(const std::string& program, const std::vector<std::string>& words) {
  refused([&] { prove_finishes(from_text(program, "mine")); }, words);
}

std::vector<Schedule> published(int ranks, int microbatches) {
  return {naive(ranks, microbatches), gpipe(ranks, microbatches), one_f_one_b(ranks, microbatches),
          zb_h1(ranks, microbatches), zb_h2(ranks, microbatches), zb_v(ranks, microbatches)};
}

TEST(Validate, AcceptsThePublishedSchedules) {
  for (int ranks : {1, 2, 3, 4, 7})
    for (int microbatches : {1, 2, 3, 8, 20})
      for (const Schedule& s : published(ranks, microbatches))
        EXPECT_NO_THROW(validate(s)) << s.name << " " << ranks << " " << microbatches;
}

TEST(Validate, TakesNoMemoryForRanksThatNeverTalk) {
  const Schedule s = one_f_one_b(100000, 2);  // ten thousand million pairs of ranks
  validate(s);
  EXPECT_EQ(simulate(s, {}).messages, 2 * 2 * 99999);
}

TEST(Validate, AcceptsStashedWeightsAndTwoDirections) {
  validate(
      from_text("0F0 0F1 0BW0 0S@0 0F2@1 0BW1 0S@1 0BW2@1 0S@2\n"
                "1F0 1BW0 1S@0 1F1@1 1BW1@1 1S@1 1F2@2 1BW2@2 1S@2\n",
                "pipedream"));
  validate(from_text("0F0 1F1 1BW1 0BW0\n1F0 1BW0 0F1 0BW1\n", "two directions"));
}

TEST(Validate, NamesWhatIsMissing) {
  invalid("0F0 0B0\n", {"rank 0, instruction 1 (0B0)", "W of stage 0, microbatch 0 is missing"});
  invalid("0F0 0BW0 0F1\n1F0 1BW0 1F1 1BW1\n",
          {"rank 0, instruction 2 (0F1)", "B of stage 0, microbatch 1 is missing"});
  invalid("0F0 0BW0 0BW1\n", {"rank 0, instruction 2 (0BW1)", "F of stage 0, microbatch 1 is missing"});
  invalid("0F0 0BW0 0W1\n", {"rank 0, instruction 2 (0W1)", "F of stage 0, microbatch 1 is missing"});
  invalid("0F0 0W0\n", {"rank 0, instruction 1 (0W0)", "B of stage 0, microbatch 0 is missing"});
  invalid("0F0 0BW0\n1F0 1BW0 1F1 1BW1\n", {"rank 0", "stage 0 has no microbatch 1"});
  // No other stage has microbatch 1 either.
  invalid("0F0 0F2 0BW0 0BW2\n",
          {"stage 0 has no microbatch 1", "every stage must have microbatches 0 to 2"});
  invalid("0F0 0BW0\n2F0 2BW0\n", {"stage 1 is on no rank"});
  invalid("0F999999 999999F0\n", {"stage 0", "microbatch 0"});
}

TEST(Validate, NamesWhatIsThereTwice) {
  invalid("0F0 0F0 0BW0\n", {"rank 0, instruction 1 (0F0)", "second time", "instruction 0"});
  invalid("0F0 0BW0 0BW0\n", {"rank 0, instruction 2 (0BW0)", "second time"});
  invalid("0F0 0BW0 0W0\n", {"rank 0, instruction 2 (0W0)", "fused backward at instruction 1"});
  invalid("0F0 0BW0\n1F0 1BW0 0F0 0BW0\n", {"rank 1, instruction 2 (0F0)", "already on rank 0"});
  invalid("0F0 0BW0\n0F1 0BW1\n0F2 0BW2\n", {"rank 2, instruction 0 (0F2)", "ranks 0 and 1"});
  invalid("0F0 0BW0 1F0 1BW0 1F1 1BW1\n0F1 0BW1\n", {"stage 1 is on 1 rank and stage 0 on 2"});
  invalid("0F0\n0BW0\n", {"rank 1, instruction 0 (0BW0)", "already on rank 0"});
}

TEST(Validate, NamesWhatIsOutOfOrder) {
  invalid("0BW0 0F0\n", {"rank 0, instruction 0 (0BW0)", "comes before F of stage 0, microbatch 0"});
  invalid("0F0 0W0 0B0\n", {"rank 0, instruction 1 (0W0)", "comes before B of stage 0, microbatch 0"});
  invalid("0F0 0A0>1 0BW0\n1F0 1BW0\n", {"rank 0, instruction 1", "no messages of its own"});
  invalid("0F0@1 0BW0@1\n", {"rank 0, instruction 0 (0F0)", "version 1", "not there yet"});
  invalid("0F0 0BW0 0S@0 0F1 0BW1@1\n",
          {"rank 0, instruction 4 (0BW1)", "version 1", "its forward", "version 0"});
  invalid("0F0 0F1 0BW0 0S@0 0BW1 0S@0\n", {"rank 0, instruction 5", "steps from version 0", "newest is 1"});
}

TEST(Validate, NamesTheCircle) {
  // A swapped pair: rank 0 wants the gradient of microbatch 1 before it sends its activation.
  invalid("0F0 0BW1 0F1 0BW0\n1F0 1F1 1BW0 1BW1\n", {"rank 0, instruction 1 (0BW1)", "comes before F"});
  // Rank 0 runs backward before the forward that rank 1 waits for.
  invalid("0F0 0BW0 0F1 0BW1\n1F0 1F1 1BW0 1BW1\n",
          {"never finishes", "rank 0, instruction 1 (0BW0) waits for the gradient of stage 0's activation",
           "from rank 1; rank 1, instruction 1 (1F1) waits for the activation of stage 0, microbatch 1 from "
           "rank 0",
           "rank 0 waits for itself"});
  // The last stage's backward before its own forward's input: no message is missing.
  invalid("1F0 0F0 0BW0 1BW0\n", {"rank 0, instruction 0 (1F0)", "never gets the activation of stage 0"});
  // A pair that reads what its own other half writes, itself or by way of another rank.
  invalid("(0F0;0BW0)\n", {"rank 0, instruction 1 (0BW0)", "what F of stage 0, microbatch 0 keeps"});
  invalid("(0F0;1F0) 1BW0 0BW0\n",
          {"rank 0, instruction 1 (1F0)", "the activation of stage 0, microbatch 0"});
  invalid("(0F0;2F0) 2BW0 0BW0\n1F0 1BW0\n",
          {"never finishes", "rank 0, instruction 1 (2F0) waits for the activation of stage 1",
           "rank 0 waits for itself"});
}

TEST(Lower, SendsAfterTheWriterAndReceivesBeforeTheReader) {
  EXPECT_EQ(to_text(lower(one_f_one_b(2, 2))),
            "0F0 0A0>1 0F1 0A1>1 0G0<1 0BW0 0G1<1 0BW1\n"
            "0A0<0 1F0 1BW0 0G0>0 0A1<0 1F1 1BW1 0G1>0\n");
  // Where a microbatch turns round on one rank nothing is sent.
  EXPECT_EQ(to_text(lower(zb_v(1, 1))), "0F0 1F0 1B0 1W0 0B0 0W0\n");
  // Each of two that run together has its messages beside it.
  EXPECT_EQ(to_text(lower(from_text("0F0 0F1 0BW0 0BW1\n1F0 (1F1;1BW0) 1BW1\n", "x"))),
            "0F0 0A0>1 0F1 0A1>1 0G0<1 0BW0 0G1<1 0BW1\n"
            "0A0<0 1F0 0A1<0 (1F1;1BW0) 0G0>0 1BW1 0G1>0\n");
  EXPECT_EQ(to_text(lower(from_text("0F0 (0F1;0BW0) 0BW1\n1F0 1BW0 1F1 1BW1\n", "x"))),
            "0F0 0A0>1 (0F1;0A1>1;0G0<1;0BW0) 0G1<1 0BW1\n"
            "0A0<0 1F0 1BW0 0G0>0 0A1<0 1F1 1BW1 0G1>0\n");
}

TEST(Lower, ReceivesInTheOrderOfTheChannel) {
  const Schedule s = from_text("0F0 0F1 0F2 0BW2 0BW0 0BW1\n1F2 1BW2 1F0 1F1 1BW1 1BW0\n", "x");
  const Schedule lowered = lower(s);
  EXPECT_EQ(to_text(lowered),
            "0F0 0A0>1 0F1 0A1>1 0F2 0A2>1 0G2<1 0BW2 0G1<1 0G0<1 0BW0 0BW1\n"
            "0A0<0 0A1<0 0A2<0 1F2 1BW2 0G2>0 1F0 1F1 1BW1 0G1>0 1BW0 0G0>0\n");
  prove_finishes(lowered);
}

// Every value that crosses ranks is sent once and received once; what the simulator counts.
TEST(Lower, HasTheMessagesThatTheSimulatorCounts) {
  std::vector<Schedule> all = published(4, 9);
  all.push_back(dualpipe(4, 10));
  all.push_back(dualpipe_v(4, 9));
  for (const Schedule& s : all) {
    std::map<Op, std::int64_t> count;
    for (const auto& list : lower(s).ranks)
      for (const Instruction& i : list) ++count[i.op];
    const Simulation simulation = simulate(s, {});
    EXPECT_EQ(count[Op::send], simulation.messages) << s.name;
    EXPECT_EQ(count[Op::recv], simulation.messages) << s.name;
  }
}

// On every rank a random order that keeps each backward behind its forward, some of it in pairs.
Schedule random_schedule(std::mt19937& random, int ranks, int chunks, int microbatches) {
  Schedule s{"random", ranks * chunks, microbatches, {}};
  for (int r = 0; r < ranks; ++r) {
    auto& list = s.ranks.emplace_back();
    std::vector<Instruction> can;
    for (int stage = r; stage < s.num_stages; stage += ranks)
      for (int m = 0; m < microbatches; ++m) can.push_back({Op::F, stage, m});
    while (!can.empty()) {
      // The first few in the list: orders that finish are not too rare.
      const std::size_t k = random() % std::min<std::size_t>(can.size(), 2);
      const Instruction i = can[k];
      can.erase(can.begin() + static_cast<std::ptrdiff_t>(k));
      list.push_back(i);
      const bool is_second = list.size() > 1 && list[list.size() - 2].overlaps_next;
      list.back().overlaps_next = !is_second && !can.empty() && random() % 4 == 0;
      if (i.op == Op::F)
        can.insert(can.begin() + static_cast<std::ptrdiff_t>(random() % (can.size() + 1)),
                   {Op::BW, i.stage, i.microbatch});
    }
    list.back().overlaps_next = false;
  }
  return s;
}

TEST(ProveFinishes, WhenTheSimulatorDoes) {
  std::mt19937 random(3);
  int finished = 0, stuck_ones = 0;
  for (int trial = 0; trial < 4000; ++trial) {
    const Schedule s =
        random_schedule(random, 1 + static_cast<int>(random() % 3), 1 + static_cast<int>(random() % 2),
                        1 + static_cast<int>(random() % 4));
    check_rules(s);
    const auto ends = [&](const auto& run) {
      try {
        run();
        return true;
      } catch (const RequestError&) {
        return false;
      }
    };
    const bool does = ends([&] { simulate(s, {}); });
    ASSERT_EQ(does, ends([&] { prove_finishes(lower(s)); })) << to_text(s);
    ++(does ? finished : stuck_ones);
  }
  EXPECT_GE(finished, 500);
  EXPECT_GE(stuck_ones, 500);
}

TEST(ProveFinishes, KnowsTheLawOfMessages) {
  const std::string rank0 = "0F0 0A0>1 0F1 0A1>1 0G0<1 0BW0 0G1<1 0BW1\n";
  prove_finishes(from_text(rank0 + "0A0<0 0A1<0 1F0 1BW0 0G0>0 1F1 1BW1 0G1>0\n", "early receive"));
  stuck(rank0 + "0A1<0 1F1 0A0<0 1F0 1BW0 0G0>0 1BW1 0G1>0\n",
        {"rank 1, instruction 0 (1F1)", "waits for the activation of stage 0, microbatch 1 from rank 0",
         "next message of that channel is the activation of stage 0, microbatch 0"});
  stuck(rank0 + "0A0<0 1F0 1BW0 0G0>0 1F1 1BW1 0G1>0\n",
        {"rank 1, instruction 2 (1F1)", "never gets the activation of stage 0, microbatch 1"});
  stuck(rank0 + "0A0<0 1F0 1BW0 0G0>0\n",
        {"rank 0, instruction 3 (0BW1)", "gradient of stage 0's activation, microbatch 1", "rank 1 ends"});
  stuck("0F0 0A0>1 1F0\n.\n",
        {"rank 0 sends the activation of stage 0, microbatch 0 to rank 1", "never receives"});
  stuck("0F0 0A0>1 1F0\n0A0<0\n", {"rank 1 receives the activation", "never uses"});
  stuck("0F0 0A0>7 1F0\n", {"rank 0", "no such other rank"});
  stuck("0A0>1\n0A0<0 1F0\n", {"rank 0", "never gets the activation of stage 0, microbatch 0"});
}

}  // namespace
}  // namespace echelon::lower_test

// `echelon simulate` as its users meet it.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "page_checks.h"
#include "verb_test.h"

namespace echelon::simulate_command_test {
namespace {

namespace checks = echelon::checks;
using checks::CommandResult;
using nlohmann::json;

class SimulateCommand : public checks::VerbTest {
 protected:
  SimulateCommand() : VerbTest("simulate") {}
  json object(const std::string& arguments) const {
    const CommandResult r = run(arguments + " --json");
    EXPECT_EQ(r.status, 0) << arguments;
    return json::parse(r.output);
  }
};

TEST_F(SimulateCommand, AnswersInOneObject) {
  EXPECT_EQ(object("--schedule zb-v --pp 4 --microbatches 12"), (json{{"schedule", "zb-v"},
                                                                      {"pp", 4},
                                                                      {"microbatches", 12},
                                                                      {"valid", true},
                                                                      {"makespan", 37.5},
                                                                      {"work_per_rank", 36.0},
                                                                      {"bubble_time", 1.5},
                                                                      {"bubble_fraction", 0.04},
                                                                      {"local_bubble_time", 0.0},
                                                                      {"peak_activations", {4, 4, 4, 4}},
                                                                      {"weight_versions", {1, 1, 1, 1}},
                                                                      {"staleness", {0, 0, 0, 0}},
                                                                      {"parameter_copies", 1},
                                                                      {"messages", 144}}));
  EXPECT_EQ(object("--schedule zb-h1 --pp 4 --microbatches 12 --times 1,1.2,0.8")["bubble_time"], 4.2);
  EXPECT_EQ(object("--schedule dualpipe --pp 8 --microbatches 20")["makespan"], 66.0);
  EXPECT_EQ(object("--schedule gpipe --pp 2 --microbatches 2 --comm-time 0.5")["makespan"], 10.0);
  // Of stages that are not alike, in the mean.
  const json uneven = object("--schedule gpipe --pp 2 --microbatches 2 --stage-times '1,1,1;2,2,2'");
  EXPECT_EQ(uneven["work_per_rank"], 9.0);
  EXPECT_EQ(uneven["makespan"], 15.0);
  EXPECT_EQ(uneven["bubble_time"], 6.0);
  EXPECT_EQ(uneven["bubble_fraction"], 0.4);
}

// A file with parts of the output layer says nothing of how long they take.
TEST_F(SimulateCommand, PartsOfTheOutputLayerNeedItsTimes) {
  ASSERT_EQ(run("--schedule 1f1b --pp 2 --microbatches 2 --output-layer 1,1,1 --vocabulary-parallel "
                "--format rows --out parts.txt")
                .status,
            0);
  refused("--schedule parts.txt", {"parts", "V, VW", "legal: with --output-layer 1,1,1"});
  EXPECT_EQ(
      object("--schedule parts.txt --output-layer 1,1,1")["makespan"],
      object(
          "--schedule 1f1b --pp 2 --microbatches 2 --output-layer 1,1,1 --vocabulary-parallel")["makespan"]);
}

// Times have any unit: what is rounded away is a share of them.
TEST_F(SimulateCommand, RoundsShortAndLongTimesAlike) {
  for (const std::string unit : {"1e-15", "1e-12", "1", "1e9"}) {
    const std::string flags = "--pp 3 --microbatches 7 --times " + unit + "," + unit + "," + unit;
    const json answer = object(flags);
    EXPECT_EQ(answer["makespan"], std::stod("27" + unit.substr(1))) << unit;
    EXPECT_EQ(answer["work_per_rank"], std::stod("21" + unit.substr(1))) << unit;
    EXPECT_EQ(answer["bubble_time"], std::stod("6" + unit.substr(1))) << unit;
    EXPECT_EQ(answer["local_bubble_time"], answer["bubble_time"]) << unit;
    EXPECT_EQ(run(flags).output.find("bubble 0 ("), std::string::npos) << unit;
  }
}

// A page says in its drawing what it says in its table.
TEST_F(SimulateCommand, APageHasOneBubble) {
  EXPECT_EQ(run("--stage-times '2,2,2;1,1,1;1,1,1;1,1,1' --out u.html").status, 0);
  const json document = checks::document_of(read("u.html"));
  EXPECT_NEAR(document["tracks"][0]["bubble"].get<double>(),
              document["answer"]["bubble_fraction"].get<double>(), 1e-8);
}

TEST_F(SimulateCommand, ComparesInOneTable) {
  const json rows = object("--compare 1f1b,dualpipe,zb-h1 --pp 3 --microbatches 6")["schedules"];
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0]["valid"], true);
  EXPECT_EQ(rows[1]["valid"], false);
  EXPECT_NE(rows[1]["reason"].get<std::string>().find("dualpipe"), std::string::npos);
  const CommandResult table = run("--compare 1f1b,dualpipe --pp 3 --microbatches 6");
  EXPECT_EQ(table.status, 0);
  EXPECT_NE(table.output.find("\n1f1b "), std::string::npos) << table.output;
  EXPECT_NE(table.output.find("\ndualpipe "), std::string::npos) << table.output;
  EXPECT_EQ(run("--compare dualpipe --pp 3").status, 1);
}

TEST_F(SimulateCommand, DrawsAPageWithItsAnswer) {
  const json answer = object("--compare 1f1b,zb-v,dualpipe --pp 3 --microbatches 6 --format html --out both.html");
  const json page = checks::document_of(read("both.html"));
  EXPECT_EQ(page["answer"], answer);
  EXPECT_EQ(page["command"],
            "echelon simulate --compare 1f1b,zb-v,dualpipe --pp 3 --microbatches 6 --out both.html --format html "
            "--json");
  ASSERT_EQ(page["tracks"].size(), 2u);  // dualpipe does not fit 3 ranks, and the answer says so
  EXPECT_EQ(page["tracks"][1]["title"], "zb-v");
  for (const json& track : page["tracks"]) {
    EXPECT_LE(track["two_makespan"], 2 * track["makespan"].get<double>());
    EXPECT_EQ(track["two"][0].size(), 2 * track["ranks"][0].size());
    EXPECT_EQ(track["memory"].size(), 3u);
  }
  const json stream = object("--schedule pipedream --pp 3 --steps 2 --format html --out stream.html");
  EXPECT_EQ(checks::document_of(read("stream.html"))["answer"], stream);
  EXPECT_FALSE(checks::document_of(read("stream.html"))["tracks"][0].contains("two"));
}

TEST_F(SimulateCommand, CountsOneActivationAsOne) {
  (void)object("--schedule 1f1b --pp 1 --microbatches 1 --format text --out one.txt");
  EXPECT_NE(read("one.txt").find(", peak 1 activation\n"), std::string::npos) << read("one.txt");
}

TEST_F(SimulateCommand, SaysWhichGroupingIsBetter) {
  const struct {
    int microbatches;
    double bubble;
    json groups;
  } cases[] = {{13, 10.0, {5, 4, 4}}, {14, 9.5, {5, 5, 4}}, {15, 5.5, {5, 5, 5}}};
  for (const auto& c : cases) {
    const std::string size = " --chunks 2 --microbatches " + std::to_string(c.microbatches);
    const json classic = object("--schedule interleaved" + size);
    EXPECT_EQ(classic["bubble_time"], c.bubble);
    EXPECT_EQ(classic["peak_activations"], (json{5.5, 4.5, 3.5, 2.5}));
    const json even = object("--schedule interleaved-even" + size);
    EXPECT_FALSE(even.contains("better_grouping"));
    EXPECT_EQ(even["bubble_time"], 4.5);
    EXPECT_EQ(classic["better_grouping"], (json{{"schedule", "interleaved-even"},
                                                {"groups", c.groups},
                                                {"makespan", even["makespan"]},
                                                {"bubble_time", 4.5},
                                                {"peak_activations", even["peak_activations"]}}));
  }
  EXPECT_FALSE(object("--schedule interleaved --microbatches 12").contains("better_grouping"));
  EXPECT_EQ(object("--schedule interleaved --microbatches 13 --chunks 1")["bubble_time"], 9.0);
  EXPECT_EQ(object("--schedule interleaved --microbatches 13 --group-size 5")["peak_activations"][0], 6.0);
  EXPECT_NE(
      run("--schedule interleaved --microbatches 13")
          .output.find(
              "--schedule interleaved-even takes them in groups of 5 4 4: makespan 43.5, bubble 4.5, peak "
              "activations 6 5 4 3\n"),
      std::string::npos);
}

TEST_F(SimulateCommand, SearchesUnderALimit) {  // long
  const struct {
    const char *size, *limit;
    double span;
  } published[] = {{"--pp 4 --microbatches 12", "4", 390},  {"--pp 4 --microbatches 12", "6", 370},
                   {"--pp 4 --microbatches 12", "8", 360},  {"--pp 8 --microbatches 24", "8", 790},
                   {"--pp 8 --microbatches 24", "12", 750}, {"--pp 8 --microbatches 24", "16", 720}};
  for (const auto& p : published) {
    const json found = object(std::string("--schedule zb-auto --times 10,10,10 ") + p.size +
                              " --activation-limit " + p.limit);
    EXPECT_LE(found["span"], p.span);
    EXPECT_EQ(found["lower_bound"], found["span"]);
    EXPECT_EQ(found["gap"], 0.0);
    EXPECT_EQ(found["optimal"], true);
    EXPECT_LE(found["makespan_lower_bound"], found["makespan"]);
    for (const json& peak : found["peak_activations"]) EXPECT_LE(peak, std::stod(p.limit));
  }
  // Without a limit: what 1f1b holds.
  EXPECT_EQ(object("--schedule zb-auto --microbatches 12")["peak_activations"], (json{4, 4, 4, 4}));

  const std::string uneven =
      "--pp 3 --microbatches 6 --comm-time 0.5 --stage-times '3,4,2;2,2,2;4,5,4' --activation-limit 2,3,1.5 "
      "--stage-memory '1,-0.5,-0.5;1,0,-1;0.5,0.5,-1' ";
  const json found = object(uneven + "--schedule zb-auto");
  EXPECT_LE(found["lower_bound"], found["span"]);
  const std::vector<double> memory = found["peak_memory"], limit{2, 3, 1.5};
  for (std::size_t r = 0; r < 3; ++r) EXPECT_LE(memory[r], limit[r]);
  const json rows = object(uneven + "--compare zb-h1,zb-auto")["schedules"];
  EXPECT_FALSE(rows[0].contains("span"));
  EXPECT_EQ(rows[1], found);

  const CommandResult proven = run("--schedule zb-auto --pp 2 --microbatches 3 --width 60");
  EXPECT_NE(proven.output.find("zb-auto: span 10 from a rank's first F to its last W, proven least"),
            std::string::npos)
      << proven.output;
  EXPECT_NE(proven.output.find("rank 1  .  F0 B0 "), std::string::npos) << proven.output;
  const CommandResult open =
      run("--compare zb-auto --pp 8 --microbatches 24 --times 1,1.2,0.8 --activation-limit 5");
  EXPECT_NE(open.output.find("no less than 95 (gap 14%)"), std::string::npos) << open.output;
}

TEST_F(SimulateCommand, DrawsAndWritesWhatItReads) {
  const CommandResult text = run("--schedule 1f1b --pp 2 --microbatches 3 --width 60");
  EXPECT_NE(text.output.find("rank 1  .  F0 BW0-- F1 BW1-- F2 BW2-- .  .\n"), std::string::npos)
      << text.output;
  EXPECT_TRUE(run("--format svg 2>/dev/null").output.starts_with("<svg "));
  EXPECT_TRUE(json::parse(run("--format perfetto 2>/dev/null").output).contains("traceEvents"));
  EXPECT_EQ(run("--schedule zb-v --pp 2 --microbatches 4 --format rows --out mine.txt").status, 0);
  EXPECT_EQ(run("--schedule zb-v --pp 2 --microbatches 4 --format csv --out mine.csv").status, 0);
  const json named = object("--schedule zb-v --pp 2 --microbatches 4");
  for (const char* file : {"mine.txt", "mine.csv"}) {
    json mine = object(std::string("--schedule ") + file);
    EXPECT_EQ(mine["schedule"], "mine");
    mine["schedule"] = "zb-v";
    EXPECT_EQ(mine, named);
  }
  EXPECT_NE(run("--schedule mine.txt --format lowered 2>/dev/null").output.find("0A0>1"), std::string::npos);
}

TEST_F(SimulateCommand, TheNameOfTheFileSaysTheFormat) {
  const std::string small = "--pp 2 --microbatches 2 ";
  for (const auto& [name, begin] : {std::pair{"a.svg", "<svg "},
                                    {"a.html", "<!doctype html>"},
                                    {"a.htm", "<!doctype html>"},
                                    {"a.json", "{"},
                                    {"a.csv", "0F0,"},
                                    {"a.txt", "1f1b"},
                                    {"a", "1f1b"}}) {
    EXPECT_EQ(run(small + "--out " + name).status, 0) << name;
    EXPECT_TRUE(read(name).starts_with(begin)) << name << ": " << read(name).substr(0, 40);
  }
  EXPECT_EQ(run(small + "--format svg --out b").status, 0);
  EXPECT_TRUE(read("b").starts_with("<svg "));
  EXPECT_EQ(run(small + "--format rows --out b.txt").status, 0);
  refused("--format svg --out a.html", {"--format svg", "--out a.html", "legal: html"});
  refused("--format text --out a.json", {"--format text", "legal: perfetto"});
  refused("--format html --out a.txt", {"--format html", "legal: text, rows, lowered"});
}

TEST_F(SimulateCommand, RefusesWrongRequestsByName) {  // long
  refused("--schedule zigzag", {"--schedule zigzag", "zb-v"});
  refused("--compare 1f1b,zigzag", {"--compare zigzag", "zb-v"});
  refused("--compare 1f1b --schedule gpipe", {"--schedule", "--compare"});
  refused("--pp 0", {"--pp 0"});
  refused("--microbatches 0", {"--microbatches 0"});
  refused("--schedule dualpipe --pp 4 --microbatches 6", {"dualpipe", "8"});
  refused("--schedule 1f1b --chunks 2", {"--chunks 2"});
  refused("--schedule 1f1b --steps 2", {"--steps 2"});
  refused("--pp 100000 --microbatches 100000", {"--pp 100000", "legal"});
  refused("--times 1,1", {"--times 1,1", "F,B,W"});
  refused("--times 1,1,-1", {"--times 1,1,-1"});
  refused("--times 0,0,0", {"--times 0,0,0", "not all be 0"});
  refused("--pp 2 --stage-times '0,0,0;0,0,0'", {"--stage-times 0,0,0;0,0,0", "not all be 0"});
  refused("--stage-times '1,1,1;1,1,1'", {"--stage-times", "2 stages", "4"});
  refused("--format png", {"--format png", "svg"});
  refused("--format svg --out absent/x.svg", {"--out absent/x.svg", "No such file"});
  refused("--comm-time nan", {"--comm-time nan"});
  refused("--overlap-factor 0", {"--overlap-factor 0"});
  refused("--group-size 3", {"--group-size 3", "interleaved", "1f1b"});
  refused("--schedule interleaved --chunks 1 --group-size 2", {"--group-size 2", "--chunks 1", "--chunks 2"});
  refused("--schedule zb-auto --activation-limit 4 --output-layer 1,1,1 --vocabulary-parallel",
          {"--activation-limit 4", "--vocabulary-parallel"});
  refused("--block b.png --model gpt2-tiny", {"--block b.png", "SVG", "b.svg"});
  refused("--block b.svg --model gpt2-tiny --sp on", {"--sp on", "--tp 1"});
  refused("--schedule interleaved --group-size -1", {"--group-size -1"});
  refused("--activation-limit 3", {"--activation-limit 3", "zb-auto", "1f1b"});
  refused("--compare 1f1b,gpipe --stage-memory 1,0,-1", {"--stage-memory 1,0,-1", "zb-auto"});
  refused("--schedule zb-auto --activation-limit 0.5", {"--activation-limit 0.5", "needs 1"});
  refused("--schedule zb-auto --activation-limit 4,x", {"--activation-limit x"});
  refused("--schedule zb-auto --activation-limit 4,nan", {"--activation-limit 4,nan"});
  refused("--schedule zb-auto --activation-limit 4,4", {"--activation-limit", "2 entries", "4"});
  refused("--schedule zb-auto --stage-memory 1,0,0", {"--stage-memory 1,0,0", "sum"});
  refused("--schedule zb-auto --stage-memory 1,0", {"--stage-memory 1,0", "F,B,W"});
  refused("--schedule zb-auto --chunks 2", {"--chunks 2", "zb-auto"});
}

TEST_F(SimulateCommand, RefusesBrokenSchedulesWithRankInstructionAndWhy) {
  const auto broken = [&](const std::string& text, const std::vector<std::string>& words) {
    write("mine.txt", text);
    refused("--schedule mine.txt", words);
  };
  broken("0F0 0BW0 0F1 0BW1\n1F0 1F1 1BW0 1BW1\n",
         {"never finishes", "rank 0, instruction 1 (0BW0)", "rank 1"});
  broken("0F0 0B0\n1F0 1B0 1W0\n", {"rank 0, instruction 1 (0B0)", "W of stage 0, microbatch 0 is missing"});
  broken("0BW0 0F0\n", {"rank 0, instruction 0 (0BW0)", "comes before F"});
  broken("0F0 0BW0 0F0\n", {"rank 0, instruction 2 (0F0)", "second time"});
  broken("(0F0;0B0;0W0)\n", {"rank 0, instruction 0 (0F0)", "two passes in parentheses"});
  // Optimizer steps: after gradients, of stages that the rank runs, and of all of them.
  broken("0F0 0S@0 0BW0\n", {"rank 0, instruction 1 (step of stage 0", "no BW or W of it comes before"});
  broken("0F0 0BW0 0S@0 0S@1\n", {"rank 0, instruction 3 (step of stage 0", "since its last step"});
  broken("0F0 0B0 0S@0 0W0\n", {"rank 0, instruction 2 (step of stage 0", "no gradients of stage 0"});
  broken("0F0 0BW0 1S@0\n1F0 1BW0 1S@0\n",
         {"rank 0, instruction 2 (step of stage 1", "of which rank 0 runs nothing"});
  broken("0F0 0BW0 0S@0\n1F0 1BW0\n", {"rank 1", "stage 1 has no optimizer step", "every stage, or none"});
  broken("0F0 0BW0 0S@0 0F1@1 0B1@1 0W1\n", {"rank 0, instruction 5 (0W1)", "no step of stage 0 follows"});
  broken("0F0 0Q0\n", {"mine.txt, line 1 (rank 0)", "0Q0", "F, B, W or BW"});
  write("mine.txt", "0F0 0BW0\n");
  refused("--schedule mine.txt --pp 2", {"--pp 2", "1 rank"});
  refused("--schedule mine.txt --microbatches 2", {"--microbatches 2", "1"});
}

}  // namespace
}  // namespace echelon::simulate_command_test

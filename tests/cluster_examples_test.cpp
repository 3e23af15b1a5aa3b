// What examples/cluster hands to Slurm, Kubernetes, Docker and Apptainer, as far as can be said without them:
// it is well formed, what it runs is a training that Echelon takes, and the Slurm job does what it promises.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "run_command.h"
#include "temporary_directory.h"

namespace echelon::cluster_examples_test {
namespace {

namespace fs = std::filesystem;
using namespace checks;

fs::path example(const char* name) { return fs::path(ECHELON_SOURCE_DIR) / "examples/cluster" / name; }

std::string first_match(const std::string& text, const char* form) {
  std::smatch match;
  EXPECT_TRUE(std::regex_search(text, match, std::regex(form))) << form;
  return match.empty() ? "" : match[1].str();
}

bool is_here(const char* program) { return output_of(fmt::format("command -v {}", program)).status == 0; }

// The ranks of a plan's flags, which Echelon takes.
int ranks_of(const std::string& plan) {
  const CommandResult dry = run_command(fmt::format("'{}' train --dry-run {}", ECHELON_BINARY, plan));
  EXPECT_EQ(dry.status, 0) << plan << "\n" << dry.output;
  const std::string ranks = first_match(dry.output, R"(mesh +(\d+) ranks)");
  return ranks.empty() ? 0 : std::stoi(ranks);
}

TEST(ClusterExamples, TheSlurmJobHasATaskForEachRank) {
  const std::string script = read_bytes(example("train.sbatch").string());
  EXPECT_EQ(run_command(fmt::format("bash -n '{}'", example("train.sbatch").string())).output, "");
  const int nodes = std::stoi(first_match(script, R"(#SBATCH --nodes=(\d+))")),
            tasks = std::stoi(first_match(script, R"(#SBATCH --ntasks-per-node=(\d+))"));
  EXPECT_EQ(ranks_of(first_match(script, R"(\nplan=\((.*)\)\n)")), nodes * tasks);
}

// The job with programs in Slurm's place: srun notes what it is to run, and plays what `srun` says.
class SlurmJob : public testing::Test {
 protected:
  SlurmJob() {
    fs::create_directory(place_ / "bin");
    program("scontrol", "echo \"$@\" >>'" + (place_ / "requeued") + "'");
  }
  void program(const std::string& name, const std::string& body) const {
    write_text(place_ / ("bin/" + name), "#!/bin/bash\n" + body + "\n");
    fs::permissions(place_ / ("bin/" + name), fs::perms::owner_all);
  }
  int run(const std::string& srun) const {
    program("srun", "printf '%s\\n' \"$@\" >'" + (place_ / "ran") + "'\n" + srun);
    return run_command(
               fmt::format("cd '{0}' && PATH='{0}/bin':$PATH SLURM_JOB_ID=42 SLURM_CPUS_PER_TASK=3 DATA=d "
                           "CHECKPOINT='{0}/run' bash '{1}'",
                           place_.path().string(), example("train.sbatch").string()))
        .status;
  }
  std::string ran() const { return read_bytes(place_ / "ran"); }
  std::string requeued() const { return read_bytes(place_ / "requeued"); }

  const TemporaryDirectory place_;
};

TEST_F(SlurmJob, EndsAsItsTrainingEnds) {
  EXPECT_EQ(run("exit 0"), 0);
  EXPECT_NE(ran().find("echelon\ntrain\n--data\nd\n"), std::string::npos) << ran();
  EXPECT_NE(ran().find("--threads\n3\n"), std::string::npos) << ran();
  EXPECT_EQ(ran().find("--resume"), std::string::npos) << "there is nothing to resume";
  EXPECT_EQ(run("exit 3"), 3);
  EXPECT_EQ(requeued(), "");
}

TEST_F(SlurmJob, IsQueuedAgainWhenItsTimeIsOverAndGoesOn) {
  // As Slurm does, tells the script; and as a training does, ends when it is told.
  const std::string out_of_time = "trap 'exit 0' USR1\nwhile :; do kill -USR1 $PPID; sleep 0.05; done";
  EXPECT_EQ(run(out_of_time), 0);
  EXPECT_EQ(requeued(), "requeue 42\n");
  fs::create_directories(place_ / "run/step-00000100");
  EXPECT_EQ(run("exit 0"), 0);
  EXPECT_NE(ran().find("\n--resume\n"), std::string::npos) << ran();
  EXPECT_EQ(requeued(), "requeue 42\n") << "only once";
}

// What it leaves is refused by --resume, and it could never begin again.
TEST_F(SlurmJob, BeginsAnewWhereItDiedBeforeItsFirstCheckpoint) {
  fs::create_directories(place_ / "run/.step-00000100.unfinished-0123");
  write_text(place_ / "run/.lock", "");
  EXPECT_EQ(run("exit 0"), 0);
  EXPECT_EQ(ran().find("--resume"), std::string::npos) << ran();
}

TEST_F(SlurmJob, IsNotQueuedAgainWhenItsTrainingFailsWhileItEnds) {
  EXPECT_EQ(run("trap 'exit 3' USR1\nwhile :; do kill -USR1 $PPID; sleep 0.05; done"), 3);
  EXPECT_EQ(requeued(), "");
}

TEST(ClusterExamples, TheKubernetesJobHasASlotForEachRank) {
  const std::string path = example("mpijob.yaml").string(), text = read_bytes(path);
  const std::string shell = first_match(text, R"(exec mpirun ([^$]*))");
  const int processes = std::stoi(first_match(shell, R"(-n (\d+))"));
  std::string plan = first_match(shell, R"(train ([^]*) --data)");
  std::erase(plan, '\\');
  std::replace(plan.begin(), plan.end(), '\n', ' ');
  EXPECT_EQ(ranks_of(plan), processes);
  EXPECT_NE(text.find("ls -d /work/run/step-* "), std::string::npos)
      << "it may have died without a checkpoint";
  if (!is_here("python3") || output_of("python3 -c 'import yaml'").status != 0)
    GTEST_SKIP() << "python3 with yaml is not installed";
  const CommandResult read = run_command(
      fmt::format("python3 -c 'import yaml; job = yaml.safe_load(open(\"{}\")); spec = job[\"spec\"]; "
                  "r = spec[\"mpiReplicaSpecs\"]; print(job[\"kind\"], spec[\"slotsPerWorker\"] * "
                  "r[\"Worker\"][\"replicas\"]); "
                  "print(r[\"Launcher\"][\"template\"][\"spec\"][\"containers\"][0][\"args\"][0])'",
                  path));
  EXPECT_EQ(read.status, 0) << read.output;
  EXPECT_TRUE(read.output.starts_with(fmt::format("MPIJob {}\n", processes))) << read.output;
  const TemporaryDirectory place;
  write_text(place / "command", read.output.substr(read.output.find('\n') + 1));
  EXPECT_EQ(run_command("sh -n '" + (place / "command") + "'").output, "");
}

// Lines that a backslash joins as one; comments and empty lines left out.
std::vector<std::string> logical_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  bool joins = false;
  for (std::string line; std::getline(in, line);) {
    if (!joins && (line.empty() || line[0] == '#')) continue;
    const bool goes_on = line.ends_with("\\");
    if (goes_on) line.pop_back();
    joins ? void(lines.back() += line) : lines.push_back(line);
    joins = goes_on;
  }
  EXPECT_FALSE(joins) << "the last line goes on";
  return lines;
}

void expect_shell(const std::string& commands) {
  const TemporaryDirectory place;
  write_text(place / "commands", commands + "\n");
  EXPECT_EQ(run_command("sh -n '" + (place / "commands") + "'").output, "") << commands;
}

TEST(ClusterExamples, TheDockerfileHasStagesThatFitTogether) {
  const std::set<std::string> known{"FROM", "RUN", "COPY",  "WORKDIR", "ENTRYPOINT", "CMD",
                                    "ENV",  "ARG", "LABEL", "USER",    "HEALTHCHECK"};
  std::set<std::string> stages;
  int from = 0;
  for (const std::string& line : logical_lines(read_bytes(example("Dockerfile").string()))) {
    std::istringstream words(line);
    std::string instruction, first, second, third;
    words >> instruction >> first >> second >> third;
    EXPECT_TRUE(known.contains(instruction)) << line;
    from += instruction == "FROM" ? 1 : 0;
    EXPECT_GE(from, 1) << "before FROM: " << line;
    if (instruction == "FROM" && second == "AS") stages.insert(third);
    if (instruction == "RUN") expect_shell(line.substr(4));
    if (instruction == "COPY" && first.starts_with("--from=")) {
      EXPECT_TRUE(stages.contains(first.substr(7))) << line;
    }
    if (instruction == "ENTRYPOINT" || instruction == "CMD") {
      EXPECT_TRUE(std::regex_match(line, std::regex(R"([A-Z]+ \["[^"]*"(, "[^"]*")*\])"))) << line;
    }
  }
  EXPECT_EQ(from, 2);
}

TEST(ClusterExamples, TheApptainerRecipeHasSectionsThatFitTogether) {
  const std::set<std::string> known{"files", "post", "runscript", "test", "help", "environment", "labels"};
  std::istringstream in(read_bytes(example("echelon.def").string()));
  std::set<std::string> stages;
  std::string section, commands;
  int headers = 0;
  const auto end_section = [&] {
    if (section == "post" || section == "runscript" || section == "test") expect_shell(commands);
    commands.clear();
  };
  for (std::string line; std::getline(in, line);) {
    if (line.empty()) continue;
    if (line.starts_with("Bootstrap: ")) end_section(), section.clear(), ++headers;
    if (line.starts_with("Stage: ")) stages.insert(line.substr(7));
    if (line[0] == '%') {
      end_section();
      std::istringstream words(line.substr(1));
      std::string from, stage;
      words >> section >> from >> stage;
      EXPECT_TRUE(known.contains(section)) << line;
      EXPECT_TRUE(from.empty() || (section == "files" && from == "from" && stages.contains(stage))) << line;
    } else if (section.empty()) {
      EXPECT_TRUE(std::regex_match(line, std::regex("(Bootstrap|From|Stage): .+"))) << line;
    } else {
      EXPECT_TRUE(line.starts_with("    ")) << line;
      commands += line + "\n";
    }
  }
  end_section();
  EXPECT_EQ(headers, 2);
}

}  // namespace
}  // namespace echelon::cluster_examples_test

// The page that `echelon view` serves while a run writes its log.
#include <gtest/gtest.h>
#include <httplib.h>

#include <csignal>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "page_checks.h"
#include "run_command.h"
#include "temporary_directory.h"

namespace echelon::view_test {
namespace {

using namespace checks;
using nlohmann::json;

// `echelon view PATH FLAGS` under way: a process of its own, which a signal ends.
class Viewer {
 public:
  explicit Viewer(const std::string& arguments) {
    const std::string command = "echo $$; exec '" ECHELON_BINARY "' view " + arguments + " 2>&1";
    pipe_ = ::popen(command.c_str(), "r");
    process_ = std::stoi(line());
    said_ = line();
    const std::string before = "http://127.0.0.1:";
    const std::size_t at = said_.find(before);
    if (at != std::string::npos) port_ = std::stoi(said_.substr(at + before.size()));
  }
  ~Viewer() {
    if (pipe_ != nullptr) end(SIGKILL);
  }
  Viewer(const Viewer&) = delete;
  Viewer& operator=(const Viewer&) = delete;

  int port() const { return port_; }
  const std::string& said() const { return said_; }
  // Its exit status, or the signal below 0.
  int end(int signal) {
    ::kill(process_, signal);
    return wait();
  }
  int wait() {
    const int status = ::pclose(pipe_);
    pipe_ = nullptr;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  std::string line() {
    std::string text;
    for (int c; (c = std::fgetc(pipe_)) != EOF && c != '\n';) text += static_cast<char>(c);
    return text;
  }

  std::FILE* pipe_ = nullptr;
  int process_ = 0, port_ = 0;
  std::string said_;
};

std::string step_line(int step) {
  return json{{"step", step},           {"loss", 2.5 / step},  {"grad_norm", 1.0}, {"lr", 0.01},
              {"step_seconds", 0.5}, {"tokens_per_second", 100}, {"mfu", 0.25}}
             .dump() +
         "\n";
}

void append(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::app | std::ios::binary) << text;
}

class View : public testing::Test {
 protected:
  std::string quoted() const { return "'" + directory_.path().string() + "'"; }
  const TemporaryDirectory directory_;
};

TEST_F(View, FollowsARunAndEnds) {
  Viewer viewer(quoted());
  ASSERT_GT(viewer.port(), 0) << viewer.said();
  httplib::Client client("127.0.0.1", viewer.port());
  auto got = client.Get("/");
  ASSERT_TRUE(got) << viewer.said();
  EXPECT_EQ(got->status, 200);
  json page = document_of(got->body, PageUse::served);
  EXPECT_EQ(page["kind"], "waiting");  // there is no log yet
  const auto document = [&](const std::string& tag, int status) {
    const auto answer = client.Get("/document.json", {{"If-None-Match", tag}});
    EXPECT_TRUE(answer);
    EXPECT_EQ(answer->status, status);
    return answer->status == 200 ? json::parse(answer->body) : json();
  };
  const std::string log = directory_ / "run.jsonl";
  append(log, step_line(1));
  const json first = document(page["served"]["tag"], 200);
  EXPECT_EQ(first["kind"], "run");
  EXPECT_EQ(first["history"]["steps"]["step"], json({1}));
  document(first["served"]["tag"], 304);
  append(log, step_line(2) + "{\"step\": 3, \"lo");  // which is being written
  const json second = document(first["served"]["tag"], 200);
  EXPECT_EQ(second["history"]["steps"]["step"], json({1, 2}));
  EXPECT_GE(second["served"]["wait_seconds"].get<double>(), 1.0);
  got = client.Get("/");
  ASSERT_TRUE(got);
  page = document_of(got->body, PageUse::served);
  EXPECT_EQ(page["history"], second["history"]);
  append(log, "ss\n");
  EXPECT_NE(document("", 200)["subtitle"].get<std::string>().find("line 3"), std::string::npos);
  EXPECT_EQ(viewer.end(SIGINT), 0);
}

TEST_F(View, HandsTracesOutAndNothingElse) {
  write_text(directory_ / "log.jsonl", step_line(1));
  const std::string trace = "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [\n]}\n";
  write_text(directory_ / "step 1.json", trace);
  write_text(directory_ / "other.json", "{\"secret\": 1}");
  write_text(directory_ / "text", "traceEvents");
  std::filesystem::create_symlink(directory_ / "step 1.json", directory_ / "link.json");
  Viewer viewer(quoted());
  ASSERT_GT(viewer.port(), 0) << viewer.said();
  httplib::Client client("127.0.0.1", viewer.port());
  const auto status = [&](const std::string& path, const httplib::Headers& headers = {}) {
    const auto got = client.Get(path, headers);
    return got ? got->status : -1;
  };
  const auto page = client.Get("/");
  ASSERT_TRUE(page);
  const json served = document_of(page->body, PageUse::served)["served"];
  ASSERT_EQ(served["traces"].size(), 1u) << served;
  EXPECT_EQ(served["traces"][0]["name"], "step 1.json");
  EXPECT_EQ(served["traces"][0]["bytes"], trace.size());
  const auto got = client.Get("/trace/step%201.json");
  ASSERT_TRUE(got);
  EXPECT_EQ(got->body, trace);
  EXPECT_EQ(got->get_header_value("X-Content-Type-Options"), "nosniff");
  EXPECT_NE(page->get_header_value("Content-Security-Policy").find("default-src 'none'"), std::string::npos);
  for (const char* path : {"/trace/other.json", "/trace/link.json", "/trace/absent.json", "/trace/text",
                           "/trace/..%2flog.jsonl", "/log.jsonl", "/../log.jsonl", "/trace/"})
    EXPECT_GE(status(path), 400) << path;
  // By any other name it is a page of somebody else's that asks.
  const std::string port = std::to_string(viewer.port());
  EXPECT_EQ(status("/", {{"Host", "localhost:" + port}}), 200);
  for (const std::string& host : std::vector<std::string>{"evil.example:" + port, "127.0.0.1", "127.0.0.1.evil.example:" + port, "127.0.0.1:1", "[::1]:" + port}) {
    EXPECT_EQ(status("/", {{"Host", host}}), 403) << host;
    EXPECT_EQ(status("/document.json", {{"Host", host}}), 403) << host;
    EXPECT_EQ(status("/trace/step%201.json", {{"Host", host}}), 403) << host;
  }
  EXPECT_GE(client.Post("/", "", "text/plain")->status, 400);
  // The port is its own.
  const CommandResult again =
      run_command(std::string("'") + ECHELON_BINARY + "' view " + quoted() + " --port " + port);
  EXPECT_EQ(again.status, 2);
  EXPECT_NE(again.output.find("--port " + port + ": cannot be listened on"), std::string::npos) << again.output;
  EXPECT_EQ(viewer.end(SIGTERM), 0);
}

}  // namespace
}  // namespace echelon::view_test

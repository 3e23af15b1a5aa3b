// Files that others may change while they are read, and files that are there whole or as they were.
#include "base/open_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/atomic_file.h"
#include "base/json_text.h"
#include "base/output_file.h"
#include "refusals.h"
#include "temporary_directory.h"

namespace echelon::open_file_test {
namespace {

using namespace checks;
namespace fs = std::filesystem;

class Files : public testing::Test {
 protected:
  std::string put(const std::string& name, const std::string& text) const {
    write_text(directory_ / name, text);
    return directory_ / name;
  }
  std::vector<std::string> listing() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(directory_.path()))
      names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }
  const TemporaryDirectory directory_;
};

std::string read(const OpenFile& file, std::int64_t at, std::size_t count) {
  std::string text(count, '\0');
  file.read(at, std::as_writable_bytes(std::span(text)));
  return text;
}

template <class Act>
void expect_failure(const Act& act, const std::vector<std::string>& words) {
  try {
    act();
  } catch (const RunError& error) {
    for (const std::string& word : words)
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << word << " in: " << error.what();
    return;
  }
  ADD_FAILURE() << "no failure";
}

// Of a file that is not there, and one that could be read with more descriptors.
TEST_F(Files, AreUnreadableWhereTheSystemSaysSo) {
  const std::string path = put("a", "0123456789");
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  struct rlimit none = before;
  none.rlim_cur = 0;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  std::string unreadable;
  try {
    const OpenFile file(path);
  } catch (const Unreadable& error) {
    unreadable = error.what();
  }
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(unreadable, path + ": cannot be read: Too many open files");
  try {
    const OpenFile file(path + "b");
    FAIL();
  } catch (const Unreadable& error) {
    FAIL() << error.what();
  } catch (const RequestError& error) {
    EXPECT_NE(std::string(error.what()).find("No such file"), std::string::npos) << error.what();
  }
}

TEST_F(Files, AreReadAtPositions) {
  OpenFile file(put("a", "0123456789"), "--data");
  EXPECT_EQ(file.size(), 10);
  EXPECT_EQ(read(file, 3, 4), "3456");
  EXPECT_EQ(read(file, 10, 0), "");
  file.close();
  EXPECT_EQ(read(file, 8, 2), "89");
  EXPECT_EQ(read(OpenFile(std::move(file)), 0, 1), "0");
}

TEST_F(Files, OneThatBecomesShorterIsNamed) {
  const std::string path = put("a", std::string(300000, 'x'));
  const OpenFile file(path, "--data");
  EXPECT_EQ(read(file, 200000, 100000), std::string(100000, 'x'));
  fs::resize_file(path, 250000);
  EXPECT_EQ(read(file, 0, 250000), std::string(250000, 'x'));
  expect_failure([&] { read(file, 200000, 100000); },
                 {"--data", path, "shorter", "at byte 250000", "300000"});
  expect_failure([&] { read(file, 260000, 1); }, {"--data", path, "shorter", "before byte 260000", "300000"});
}

TEST_F(Files, OneThatWasWrittenToSaysSo) {
  const std::string path = put("a", "first");
  OpenFile kept(path), closed(path);
  closed.close();
  read(kept, 0, 5);
  read(closed, 0, 5);
  EXPECT_FALSE(kept.was_written_to() || closed.was_written_to());
  put("a", "other");
  fs::last_write_time(path, fs::last_write_time(path) + std::chrono::seconds(1));
  read(kept, 0, 1);
  read(closed, 0, 1);
  EXPECT_TRUE(kept.was_written_to() && closed.was_written_to());
  EXPECT_TRUE(OpenFile(std::move(kept)).was_written_to());
}

TEST_F(Files, OneThatIsReplacedWhileItIsClosedIsNamed) {
  const std::string path = put("a", "first");
  OpenFile kept(path, "--data"), closed(path, "--data");
  closed.close();
  fs::rename(put("b", "other"), path);
  EXPECT_EQ(read(kept, 0, 5), "first");
  expect_failure([&] { read(closed, 0, 5); }, {"--data", path, "another file"});
  fs::remove(path);
  expect_failure([&] { read(closed, 0, 5); }, {path, "No such file"});
}

TEST_F(Files, WhatIsNoRegularFileIsRefusedAtOnce) {
  ASSERT_EQ(::mkfifo((directory_ / "pipe").c_str(), 0600), 0);
  fs::create_symlink(directory_ / "pipe", directory_ / "link");
  expect_refusal([&] { read_text(directory_ / "pipe", "--plan"); }, {"--plan", "pipe", "a named pipe"});
  expect_refusal([&] { read_text(directory_ / "link", "--plan"); }, {"link", "a named pipe"});
  expect_refusal([&] { read_text(directory_.path(), "--plan"); }, {"--plan", "a directory"});
  expect_refusal([&] { read_text("/dev/zero"); }, {"/dev/zero", "a device"});
  expect_refusal([&] { read_text("/proc/self/mem"); }, {"/proc/self/mem", "Input/output error"});
  expect_refusal([&] { read_text(directory_ / "absent"); }, {"absent", "No such file"});
  expect_refusal([&] { read_text(std::string(5000, 'a')); }, {"File name too long"});
}

TEST_F(Files, TextIsReadToItsEndAndNotBeyondALimit) {
  EXPECT_EQ(read_text(put("empty", "")), "");
  const std::string text(200000, 'y');
  EXPECT_EQ(read_text(put("a", text)), text);
  EXPECT_EQ(read_text(put("a", text), "", 200000), text);
  expect_refusal([&] { read_text(directory_ / "a", "--plan", 199999); },
                 {"--plan", "a", "195.31 KiB", "most"});
  EXPECT_NE(read_text("/proc/self/status").find("Pid:"), std::string::npos);  // its size is 0
  fs::resize_file(directory_ / "a", std::uintmax_t{1} << 40);
  expect_refusal([&] { read_text(directory_ / "a"); }, {"64.00 MiB"});
}

TEST_F(Files, AnOutputIsWholeOrAsItWas) {
  const std::string path = put("out", "old");
  check_output("--out", path);
  EXPECT_EQ(read_bytes(path), "old");
  write_output("--out", path, "new");
  EXPECT_EQ(read_bytes(path), "new");
  fs::create_symlink("out", directory_ / "link");
  write_output("--out", directory_ / "link", "newer");
  EXPECT_EQ(read_bytes(path), "newer");
  EXPECT_TRUE(fs::is_symlink(directory_ / "link"));
  EXPECT_EQ(listing(), (std::vector<std::string>{"link", "out"}));  // and no temporary file
}

TEST_F(Files, AnOutputIsNotWhatIsReadNorAnotherOutput) {
  const std::string data = put("data", "text");
  fs::create_symlink("data", directory_ / "link");
  const std::vector<NamedFile> read{{"--data", data}};
  for (const std::string& path : {data, directory_ / "link", directory_ / "./data"})
    expect_refusal([&] { check_apart({{"--log", path}}, read); }, {"--log " + path, "--data", "its own"});
  expect_refusal(
      [&] {
        check_apart({{"--trace", directory_ / "x.html"}, {"--report", directory_ / "./x.html"}}, read);
      },
      {"--report", "--trace names"});
  check_apart({{"--log", directory_ / "a"}, {"--trace", directory_ / "b"}}, read);
  check_apart({{"--log", "/dev/null"}, {"--trace", "/dev/null"}}, read);
}

TEST_F(Files, AnOutputThatCannotBeIsRefusedBeforeTheWork) {
  expect_refusal([&] { check_output("--out", directory_.path()); }, {"--out", "Is a directory"});
  expect_refusal([&] { check_output("--out", directory_ / "absent/out"); }, {"absent/out", "No such file"});
  expect_refusal([&] { check_output("--out", put("plain", "text") + "/out"); },
                 {"plain/out", "Not a directory"});
  fs::remove(directory_ / "plain");
  expect_refusal([&] { check_output("--out", std::string(5000, 'a')); }, {"--out", "File name too long"});
  check_output("--out", directory_ / "fresh");
  EXPECT_TRUE(listing().empty());
  EXPECT_THROW(write_output("--out", directory_ / "gone/out", "late"), RunError);  // the work is done
}

TEST_F(Files, AnOutputMayBeAPipeOrADevice) {
  const std::string pipe = directory_ / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  check_output("--out", pipe);
  std::string got;
  std::thread reader([&] { got = read_bytes(pipe); });
  write_output("--out", pipe, "through");
  reader.join();
  EXPECT_EQ(got, "through");
  write_output("--out", "/dev/null", "nowhere");
  EXPECT_EQ(listing(), (std::vector<std::string>{"pipe"}));
}

// As one that is made while the file is written.
TEST_F(Files, AFileTakesNoPipesPlace) {
  const std::string pipe = directory_ / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  expect_failure([&] { write_file_atomically(pipe, "text"); },
                 {"cannot replace", pipe, "not a regular file"});
  EXPECT_TRUE(fs::is_fifo(pipe));
  EXPECT_EQ(listing(), (std::vector<std::string>{"pipe"}));
}

TEST(JsonText, IsParsedOrRefusedInWords) {
  EXPECT_EQ(parse_json("{\"a\": [1]}", "x")["a"][0], 1);
  expect_refusal([] { parse_json("{", "x.json"); }, {"x.json: not JSON: parse error"});
  expect_refusal([] { parse_json(std::string("{}\0{}", 5), "x.json"); },
                 {"x.json: not JSON: byte 3 is zero"});
  const auto deep = [](std::size_t n) { return std::string(n, '[') + std::string(n, ']'); };
  EXPECT_EQ(parse_json(deep(100), "x").dump(), deep(100));
  expect_refusal([&] { parse_json(deep(1000000), "x.json"); }, {"x.json", "nested too deeply", "100"});
}

TEST(Messages, SpeakOfNoLibrary) {
  EXPECT_EQ(message_of(std::bad_alloc()), "out of memory");
  EXPECT_EQ(message_of(fs::filesystem_error("cannot look", "a/b", std::make_error_code(std::errc::io_error))),
            "a/b: Input/output error");
  const std::system_error thread(std::make_error_code(std::errc::resource_unavailable_try_again));
  EXPECT_NE(message_of(thread).find("ulimit -u"), std::string::npos);
  EXPECT_EQ(message_of(RunError("as it is")), "as it is");
}

}  // namespace
}  // namespace echelon::open_file_test

#include "train/log_formats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "temporary_directory.h"
#include "train/run_outputs.h"

namespace echelon::log_formats_test {
namespace {

namespace fs = std::filesystem;
using namespace checks;

StepRecord record_of_step(std::int64_t step) {
  StepRecord record{step, 2.5, 1.25, 0.001, 512, 1000.0, 0.5, 0.512, "", {}};
  record.experts = {{1, 1.5, 0.25, 0, {}, {}}, {2, 2.0, 0.75, 0, {}, {}}};
  return record;
}
const std::vector<LogEntry> entries{record_of_step(1), Evaluation{1, 3.5},
                                    WorkSpread{1, 2, {0.25, 0.75, 0.5}}, Fingerprint{2, "abc"},
                                    RunBegin{0, R"({"ranks":3})"}, SavedCheckpoint{2, "a \"b\""},
                                    RunEnd{2, R"({"steps":2})"}};

TEST(Crc32c, HasThePublishedValues) {  // RFC 3720, B.4
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(crc32c(""), 0u);
}

TEST(LogFormats, CsvHasACellForEveryColumn) {
  std::vector<std::vector<std::string>> rows;
  std::string table = csv_header();
  for (const LogEntry& entry : entries) table += csv_row(entry);
  std::istringstream lines(table);
  for (std::string line; std::getline(lines, line);) {
    rows.emplace_back();
    std::istringstream cells(line + ",");
    for (std::string cell; std::getline(cells, cell, ',');) rows.back().push_back(cell);
  }
  ASSERT_EQ(rows.size(), 5u);
  for (const auto& row : rows) EXPECT_EQ(row.size(), rows[0].size());
  const auto cell = [&](std::size_t row, const char* column) {
    const auto at = std::find(rows[0].begin(), rows[0].end(), column);
    EXPECT_NE(at, rows[0].end()) << column;
    return rows[row][static_cast<std::size_t>(at - rows[0].begin())];
  };
  EXPECT_EQ(cell(1, "step"), "1");
  EXPECT_EQ(cell(1, "loss"), "2.5");
  EXPECT_EQ(cell(1, "lr"), "0.001");
  EXPECT_EQ(cell(1, "expert_imbalance"), "2");
  EXPECT_EQ(cell(1, "expert_drop_rate"), "0.5");
  EXPECT_EQ(cell(1, "validation_loss"), "");
  EXPECT_EQ(cell(2, "validation_loss"), "3.5");
  EXPECT_EQ(cell(2, "loss"), "");
  EXPECT_EQ(cell(3, "step"), "2");
  EXPECT_EQ(cell(3, "slowest_rank"), "1");
  EXPECT_EQ(cell(3, "slowest_seconds"), "0.75");
  EXPECT_EQ(cell(4, "fingerprint"), "abc");
}

TEST(LogFormats, JsonLinesHaveTheWholeRun) {
  std::vector<nlohmann::json> lines;
  for (const LogEntry& entry : entries) lines.push_back(nlohmann::json::parse(json_line(entry)));
  ASSERT_EQ(lines.size(), 7u);
  EXPECT_EQ(lines[4], nlohmann::json::parse(R"({"step": 0, "start": {"ranks": 3}})"));
  EXPECT_EQ(lines[5], nlohmann::json::parse(R"({"step": 2, "checkpoint": "a \"b\""})"));
  EXPECT_EQ(lines[6], nlohmann::json::parse(R"({"step": 2, "summary": {"steps": 2}})"));
}

TEST(LogFormats, CsvQuotesAndSaysWhatIsNotFinite) {
  StepRecord record = record_of_step(3);
  record.loss = std::numeric_limits<double>::quiet_NaN();
  record.skipped = "the gradient of \"w\", not finite";
  const std::string row = csv_row(record);
  EXPECT_TRUE(row.starts_with("3,nan,")) << row;
  EXPECT_TRUE(row.ends_with(",\"the gradient of \"\"w\"\", not finite\",\n")) << row;
}

// ---- TensorBoard's files, read again by what their formats say

template <class T>
T little_endian(const std::string& bytes, std::size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

std::vector<std::string> records_of(const std::string& file) {
  std::vector<std::string> records;
  const auto expect_crc = [&](std::size_t at, const std::string& of) {
    const std::uint32_t masked = little_endian<std::uint32_t>(file, at);
    EXPECT_EQ(std::rotl(masked - 0xa282ead8u, 15), crc32c(of));
  };
  for (std::size_t at = 0; at < file.size();) {
    const auto length = little_endian<std::uint64_t>(file, at);
    EXPECT_LE(at + 16 + length, file.size());
    expect_crc(at + 8, file.substr(at, 8));
    records.push_back(file.substr(at + 12, length));
    expect_crc(at + 12 + length, records.back());
    at += 16 + length;
  }
  return records;
}

// Fields of a message by number: numbers as doubles, messages and texts as bytes.
struct Message {
  std::multimap<int, double> numbers;
  std::multimap<int, std::string> bytes;
};
Message parse(const std::string& text) {
  Message message;
  std::size_t at = 0;
  const auto varint = [&] {
    std::uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<unsigned char>(text.at(at++));
      value |= std::uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return value;
    }
  };
  while (at < text.size()) {
    const std::uint64_t key = varint();
    const int number = static_cast<int>(key >> 3);
    if ((key & 7) == 0) message.numbers.emplace(number, static_cast<double>(varint()));
    if ((key & 7) == 1) message.numbers.emplace(number, little_endian<double>(text, at)), at += 8;
    if ((key & 7) == 5) message.numbers.emplace(number, little_endian<float>(text, at)), at += 4;
    if ((key & 7) == 2) {
      const std::uint64_t length = varint();
      message.bytes.emplace(number, text.substr(at, length));
      at += length;
    }
  }
  return message;
}

// step -> tag -> value
std::map<double, std::map<std::string, double>> scalars_of_file(const std::string& file) {
  std::map<double, std::map<std::string, double>> scalars;
  for (const std::string& record : records_of(file)) {
    const Message event = parse(record);
    const auto summary = event.bytes.find(5);
    if (summary == event.bytes.end()) continue;
    for (const auto& [number, value] : parse(summary->second).bytes) {
      EXPECT_EQ(number, 1);
      const Message scalar = parse(value);
      scalars[event.numbers.find(2)->second][scalar.bytes.find(1)->second] = scalar.numbers.find(2)->second;
    }
  }
  return scalars;
}

TEST(LogFormats, TensorBoardReadsScalarsAndWhereARunStarts) {
  std::string file = tensorboard_beginning(300, 1e9);
  // Every event file begins with these bytes: the length of its first record, and that one's check sum.
  EXPECT_EQ(file.substr(0, 13), std::string("\x18\0\0\0\0\0\0\0\xa3\x7f\x4b\x22\x09", 13));
  for (const LogEntry& entry : entries) file += tensorboard_event(entry, 1e9 + 1);
  EXPECT_EQ(tensorboard_event(Fingerprint{2, "abc"}, 1e9), "");
  const std::vector<std::string> records = records_of(file);
  ASSERT_EQ(records.size(), 5u);
  EXPECT_EQ(parse(records[0]).bytes.find(3)->second, "brain.Event:2");
  EXPECT_EQ(parse(records[1]).numbers.find(2)->second, 300);
  EXPECT_EQ(parse(parse(records[1]).bytes.find(7)->second).numbers.find(1)->second, 1) << "START";
  const auto scalars = scalars_of_file(file);
  EXPECT_EQ(scalars.at(1).at("train/loss"), 2.5);
  EXPECT_EQ(scalars.at(1).at("speed/tokens"), 512);
  EXPECT_EQ(scalars.at(1).at("experts/imbalance"), 2.0);
  EXPECT_EQ(scalars.at(1).at("validation/loss"), 3.5);
  EXPECT_EQ(scalars.at(2).at("ranks/slowest_seconds"), 0.75);
  EXPECT_EQ(scalars.size(), 2u);
}

// ---- where they go

class Logs : public testing::Test {
 protected:
  TrainRequest asking(const std::vector<std::string>& names) const {
    TrainRequest request;
    for (const std::string& name : names) request.log_paths.push_back(place_ / name);
    return request;
  }
  void write(const std::vector<std::string>& names, bool anew, std::int64_t first, std::int64_t last) const {
    RunOutputs outputs(asking(names));
    outputs.start_logs(anew, first);
    for (std::int64_t step = first + 1; step <= last; ++step) outputs.write_log(record_of_step(step));
  }
  std::string read(const std::string& name) const { return read_bytes(place_ / name); }
  std::vector<std::string> files_in(const std::string& name) const {
    std::vector<std::string> files;
    for (const auto& entry : fs::directory_iterator(place_ / name)) files.push_back(entry.path().string());
    return files;
  }

  const TemporaryDirectory place_;
};

TEST_F(Logs, HaveTheFormThatTheirNamesSay) {
  write({"log", "log.csv", "board/"}, true, 0, 2);
  const std::string lines = read("log");
  EXPECT_EQ(nlohmann::json::parse(lines.substr(0, lines.find('\n'))).at("loss"), 2.5);
  EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 2);
  const std::string table = read("log.csv");
  EXPECT_TRUE(table.starts_with(csv_header() + "1,2.5,")) << table;
  ASSERT_EQ(files_in("board").size(), 1u);
  EXPECT_NE(files_in("board")[0].find("/events.out.tfevents."), std::string::npos);
  EXPECT_EQ(scalars_of_file(read_bytes(files_in("board")[0])).size(), 2u);
}

TEST_F(Logs, GoOnOrBeginAnew) {
  write({"log.csv"}, true, 0, 3);
  write({"log.csv"}, false, 2, 4);
  std::string table = read("log.csv");
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 1 + 3 + 2) << "one header";
  write({"log.csv"}, true, 0, 1);
  table = read("log.csv");
  EXPECT_EQ(table, csv_header() + csv_row(record_of_step(1)));
}

// A run that died while it wrote, as on a full disk, leaves a part of a line, which would spoil the next one.
TEST_F(Logs, GoOnBehindTheLastWholeLine) {
  for (const char* name : {"log", "log.csv"}) {
    write({name}, true, 0, 3);
    const std::string whole = read(name);
    write_text(place_ / name, whole.substr(0, whole.size() - 5));
    write({name}, false, 2, 3);
    EXPECT_EQ(read(name), whole);
    write_text(place_ / name, "a part");
    write({name}, false, 0, 3);
    EXPECT_EQ(read(name), whole);
  }
}

TEST_F(Logs, OfARequestThatIsRefusedLeaveNothing) {
  write_text(place_ / "kept", "kept\n");
  EXPECT_THROW(RunOutputs(asking({"new", "new.csv", "board/", "kept", "absent/log"})), RequestError);
  EXPECT_EQ(files_in("."), std::vector<std::string>{place_ / "./kept"});
  EXPECT_EQ(read("kept"), "kept\n");
  EXPECT_THROW(RunOutputs(asking({"absent/board/"})), RequestError);
  RunOutputs(asking({"new", "board/"})).remove_new_logs();
  EXPECT_EQ(files_in(".").size(), 1u);
}

}  // namespace
}  // namespace echelon::log_formats_test

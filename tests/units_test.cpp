#include "base/units.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/parse_number.h"

namespace echelon::units_test {
namespace {

TEST(Units, BytesAreReadInEveryUnit) {
  EXPECT_EQ(parse_bytes("1536", "--x"), 1536);
  EXPECT_EQ(parse_bytes("1.5KiB", "--x"), 1536);
  EXPECT_EQ(parse_bytes("64 MB", "--x"), 64'000'000);
  EXPECT_EQ(parse_bytes("2GiB", "--x"), std::int64_t{1} << 31);
  EXPECT_EQ(parse_bytes("3B", "--x"), 3);
}

TEST(Units, MemoryOfDevices) {
  EXPECT_EQ(format_device_memory(78.14e9), "78.1 GB");
  EXPECT_EQ(format_device_memory(0.1e9), "0.1 GB");
  EXPECT_EQ(format_device_memory(10.48e6), "10.5 MB");
  EXPECT_EQ(format_device_memory(0), "0 B");
  EXPECT_EQ(format_device_memory(99'999), "100.0 kB");
  EXPECT_EQ(format_device_memory(21'300), "21.3 kB");
  EXPECT_EQ(format_device_memory(7), "7 B");
}

TEST(Units, SecondsNeverReachTheNextUnit) {
  EXPECT_EQ(format_seconds(0), "0s");
  EXPECT_EQ(format_seconds(0.0000004), "0us");
  EXPECT_EQ(format_seconds(0.00099), "990us");
  EXPECT_EQ(format_seconds(0.0009999), "1ms");
  EXPECT_EQ(format_seconds(0.0054), "5ms");
  EXPECT_EQ(format_seconds(0.9997), "1.0s");
  EXPECT_EQ(format_seconds(59.97), "1m00s");
  EXPECT_EQ(format_seconds(95), "1m35s");
  EXPECT_EQ(format_seconds(7384), "2h03m");
  EXPECT_EQ(format_whole_seconds(0.7), "1s");
  EXPECT_EQ(format_whole_seconds(59.6), "1m00s");
}

TEST(Units, OtherTextIsRefused) {
  for (const char* text : {"", "MiB", "-1", "0", "1 XB", "1MiBs", "nan", "1e30", "0.2"}) try {
      parse_bytes(text, "--memory-limit");
      ADD_FAILURE() << text;
    } catch (const RequestError& error) {
      EXPECT_NE(std::string(error.what()).find(std::string("--memory-limit ") + text), std::string::npos);
    }
}

std::string refusal_of_number(const auto& parse, const std::string& text) {
  try {
    return fmt::format("accepted as {}", parse("--x", text));
  } catch (const RequestError& error) {
    return error.what();
  }
}

TEST(Units, NumbersAreReadAsPeopleWriteThem) {
  for (const auto& [text, value] :
       std::vector<std::pair<const char*, std::int64_t>>{{"15T", 15'000'000'000'000},
                                                         {"1.1T", 1'100'000'000'000},
                                                         {"7b", 7'000'000'000},
                                                         {"1e12", 1'000'000'000'000},
                                                         {"1.5e3", 1500},
                                                         {"2E+2", 200},
                                                         {"100e-2", 1},
                                                         {"8.0", 8},
                                                         {"-3", -3},
                                                         {"-1e1", -10},
                                                         {"0e9", 0},
                                                         {".5e1", 5},
                                                         {"007", 7},
                                                         {"9223372036854775807", INT64_MAX},
                                                         {"9223372036854775.807e3", INT64_MAX}}) {
    EXPECT_EQ(parse_number<std::int64_t>("--x", text), value) << text;
    EXPECT_EQ(parse_number<double>("--x", text), static_cast<double>(value)) << text;
  }
  EXPECT_EQ(parse_number<double>("--x", "0.5T"), 5e11);
  EXPECT_EQ(parse_number<std::uint64_t>("--x", "18446744073709551615"), UINT64_MAX);
}

TEST(Units, NumbersThatCouldBeTwoAreRefusedWithBoth) {
  const auto whole = [](const std::string& text) {
    return refusal_of_number(parse_number<std::int64_t>, text);
  };
  const auto real = [](const std::string& text) { return refusal_of_number(parse_number<double>, text); };
  EXPECT_EQ(whole("8k"), "--x 8k: k may be 10^3 or 2^10; legal: 8000, 8192");
  EXPECT_EQ(whole("1.5K"), "--x 1.5K: K may be 10^3 or 2^10; legal: 1500, 1536");
  EXPECT_EQ(whole("4M"), "--x 4M: M may be 10^6 or 2^20; legal: 4000000, 4194304");
  EXPECT_EQ(real("2G"), "--x 2G: G may be 10^9 or 2^30; legal: 2000000000, 2147483648");
  EXPECT_EQ(whole("1.001k"), "--x 1.001k: must be a whole number, written as 4096, 1e9 or 15T");
}

TEST(Units, OtherNumbersAreRefused) {
  const auto int_of = [](const std::string& text) { return refusal_of_number(parse_number<int>, text); };
  for (const char* text : {"", "-", ".", "T", "k", "x", "e3", "nan", "inf", " 8"})
    EXPECT_EQ(int_of(text), fmt::format("--x {}: must be a whole number", text));
  for (const char* text : {"2.5", "1e-3", "8 ", "1,000", "1_000", "8kb", "1e", "1e3T", "1.2.3", "0x10",
                           "1e9999", "1e-2147483648"})
    EXPECT_EQ(int_of(text), fmt::format("--x {}: must be a whole number, written as 4096, 1e9 or 15T", text));
  for (const char* text : {"15T", "1e10", "99999999999"})
    EXPECT_EQ(int_of(text), fmt::format("--x {}: too large or too small a number", text));
  EXPECT_EQ(refusal_of_number(parse_number<std::uint64_t>, "-1"),
            "--x -1: must be a whole number of at least 0");
  for (const char* text : {"1e3", "15T", "8.0"})
    EXPECT_EQ(refusal_of_number(parse_plain_number<int>, text),
              fmt::format("--x {}: must be a whole number", text));
}

TEST(Units, CountsInTheSingularAndThePlural) {
  EXPECT_EQ(counted(0, "rank"), "0 ranks");
  EXPECT_EQ(counted(1, "microbatch"), "1 microbatch");
  EXPECT_EQ(counted(2, "microbatch"), "2 microbatches");
}

}  // namespace
}  // namespace echelon::units_test

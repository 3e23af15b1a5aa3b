#include "base/units.h"

#include <gtest/gtest.h>

#include "base/error.h"

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

TEST(Units, CountsInTheSingularAndThePlural) {
  EXPECT_EQ(counted(0, "rank"), "0 ranks");
  EXPECT_EQ(counted(1, "microbatch"), "1 microbatch");
  EXPECT_EQ(counted(2, "microbatch"), "2 microbatches");
}

}  // namespace
}  // namespace echelon::units_test

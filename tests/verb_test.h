// What the tests of one verb of the program share: it runs in a directory of the test's own.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "run_command.h"
#include "temporary_directory.h"

namespace echelon::checks {

class VerbTest : public testing::Test {
 protected:
  explicit VerbTest(std::string verb) : verb_(std::move(verb)) {}

  CommandResult run(const std::string& arguments) const {
    return output_of("cd '" + directory_.path().string() + "' && '" + ECHELON_BINARY + "' " + verb_ + " " +
                     arguments);
  }
  // One sentence, with these words in it.
  void refused(const std::string& arguments, const std::vector<std::string>& words) const {
    const CommandResult r = run(arguments + " 2>&1");
    EXPECT_EQ(r.status, 2) << r.output;
    EXPECT_TRUE(r.output.starts_with("echelon: ")) << r.output;
    EXPECT_EQ(std::count(r.output.begin(), r.output.end(), '\n'), 1) << r.output;
    for (const std::string& word : words)
      EXPECT_NE(r.output.find(word), std::string::npos) << word << " in: " << r.output;
  }
  void write(const std::string& name, const std::string& text) const { write_text(directory_ / name, text); }
  std::string read(const std::string& name) const { return read_bytes(directory_ / name); }
  std::string path_of(const std::string& name) const { return directory_ / name; }

 private:
  std::string verb_;
  const TemporaryDirectory directory_;
};

}  // namespace echelon::checks

// The rooms include each other one way. A new room or arrow is a decision: it is made here.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>

namespace echelon::architecture_test {
namespace {

namespace fs = std::filesystem;

const std::map<std::string, std::set<std::string>>& stands_on() {
  static const std::map<std::string, std::set<std::string>> rooms{
      {"base", {}},
      {"spec", {"base"}},
      {"schedule", {"base", "spec"}},
      {"draw", {"base", "spec", "schedule"}},
      {"plan", {"base", "spec", "schedule"}},
      {"tensor", {"base", "spec"}},
      {"comm", {"base", "spec", "tensor"}},
      {"parallel", {"base", "spec", "schedule", "tensor", "comm"}},
      {"model", {"base", "spec", "schedule", "tensor", "comm", "parallel"}},
      {"text", {"base"}},
      {"data", {"base", "text"}},
      {"checkpoint", {"base", "spec", "schedule", "tensor", "comm", "parallel", "model", "text", "data"}},
      {"train",
       {"base", "spec", "schedule", "plan", "tensor", "comm", "parallel", "model", "text", "data",
        "checkpoint"}},
      {"verify",
       {"base", "spec", "schedule", "plan", "tensor", "comm", "parallel", "model", "text", "data",
        "checkpoint", "train"}},
  };
  return rooms;
}

TEST(Architecture, RoomsIncludeDownwardsOnly) {
  const fs::path source = fs::path(ECHELON_SOURCE_DIR) / "src";
  int arrows = 0;
  for (const auto& entry : fs::recursive_directory_iterator(source)) {
    if (!entry.is_regular_file()) continue;
    const std::string room = fs::relative(entry.path(), source).begin()->string();
    ASSERT_TRUE(stands_on().contains(room)) << "src/" << room << " is not a room";
    std::ifstream in(entry.path());
    for (std::string line; std::getline(in, line);) {
      if (!line.starts_with("#include \"")) continue;
      const std::string path = line.substr(10, line.find('"', 10) - 10);
      const std::string other = path.substr(0, path.find('/'));
      if (other == room) continue;
      EXPECT_TRUE(stands_on().at(room).contains(other)) << entry.path() << " includes " << path;
      ++arrows;
    }
  }
  EXPECT_GT(arrows, 50);  // the test read something
}

// What a step computes is on the rank's device: the host reads and writes copies (tensor/host.h).
TEST(Architecture, OnlyStorageCommunicationAndFilesSeeMemory) {
  const std::set<std::string> allowed{"src/tensor", "src/comm", "src/checkpoint", "src/data"};
  std::set<std::string> seeing;
  for (const char* half : {"src", "apps"})
    for (const auto& entry : fs::recursive_directory_iterator(fs::path(ECHELON_SOURCE_DIR) / half)) {
      if (!entry.is_regular_file()) continue;
      const std::string room = fs::relative(entry.path().parent_path(), ECHELON_SOURCE_DIR).string();
      std::ifstream in(entry.path());
      for (std::string line; std::getline(in, line);)
        for (const char* access : {".host<", ".host_bytes("}) {
          if (line.find(access) == std::string::npos) continue;
          EXPECT_TRUE(allowed.contains(room)) << entry.path() << ": " << line;
          seeing.insert(room);
        }
    }
  EXPECT_TRUE(seeing.contains("src/tensor") && seeing.contains("src/comm"));  // the test read something
}

// What only one file may know, so that another version or vendor is one file's change.
TEST(Architecture, EachVendorHasOneFile) {
  const std::map<std::string, std::string> home{
      {"cublasLt", "src/tensor/cuda/matmul_cublaslt.cpp"},
      {"cublas_v2.h>", "src/tensor/cuda/cublas_types.h"},
      {"zlib.h>", "src/data/compressed_input.cpp"}, {"zstd.h>", "src/data/compressed_input.cpp"},
      {"dnnl", "src/tensor/matmul_onednn.cpp"},     {"Random123/", "src/base/philox_words.h"},
      {"pcre2", "src/text/regex_pcre2.cpp"},        {"sentencepiece", "src/text/sentencepiece_model.cpp"},
      {"toml++/", "src/spec/toml_text.h"},          {"unicode/", "src/text/unicode_icu.cpp"}};
  for (const auto& entry : fs::recursive_directory_iterator(fs::path(ECHELON_SOURCE_DIR) / "src")) {
    if (!entry.is_regular_file()) continue;
    std::ifstream in(entry.path());
    for (std::string line; std::getline(in, line);)
      for (const auto& [vendor, file] : home)
        if (line.starts_with("#include <" + vendor)) {
          EXPECT_EQ(fs::relative(entry.path(), ECHELON_SOURCE_DIR).string(), file) << line;
        }
  }
}

}  // namespace
}  // namespace echelon::architecture_test

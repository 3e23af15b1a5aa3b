#include "checkpoint/safetensors.h"
#include "data/checksum.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <numeric>

#include "base/error.h"
#include "base/philox.h"
#include "checkpoint/checkpoint_file.h"
#include "refusals.h"
#include "temporary_directory.h"
#include "tensor/host.h"

namespace echelon::safetensors_test {
namespace {

namespace fs = std::filesystem;

using checks::expect_refusal;

class Safetensors : public ::testing::Test {
 protected:
  void put(const std::string& bytes) const {
    fs::remove(path_);  // ext4 waits for the disk when a file is emptied and written again
    checks::write_text(path_, bytes);
  }
  std::string get() const { return checks::read_bytes(path_); }
  // A file with this header and this many bytes of data.
  void put_header(const std::string& header, std::size_t data_bytes) const {
    const std::uint64_t length = header.size();
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &length, 8);
    put(bytes + header + std::string(data_bytes, 'x'));
  }
  const checks::TemporaryDirectory temporary_;
  const fs::path directory_ = temporary_.path();
  const std::string path_ = temporary_ / "model.safetensors";
};

const std::vector<StoredTensor> example{{"a.weight", StoredType::f32, {2, 3}},
                                        {"empty", StoredType::f64, {0, 5}},
                                        {"step", StoredType::i64, {}},
                                        {"m\"\\\n\xc3\xa9", StoredType::f64, {4}},
                                        {"flags", StoredType::u8, {7}}};

std::vector<std::byte> pattern(std::int64_t bytes, int seed) {
  std::vector<std::byte> out(static_cast<std::size_t>(bytes));
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i] = static_cast<std::byte>(i * 37 + static_cast<std::size_t>(seed));
  return out;
}

std::vector<std::uint64_t> write_example(const std::string& path, std::size_t piece) {
  SafetensorsWriter writer(path, example, {{"format", "pt"}, {"step", "7"}});
  for (std::size_t i = 0; i < example.size(); ++i) {
    const std::vector<std::byte> bytes = pattern(example[i].bytes(), static_cast<int>(i));
    for (std::size_t at = 0; at < bytes.size(); at += piece) {
      writer.write(example[i].name, bytes.data() + at, std::min(piece, bytes.size() - at));
    }
  }
  writer.finish();
  return writer.checksums();
}

TEST_F(Safetensors, RoundTrip) {
  const std::vector<std::uint64_t> sums = write_example(path_, 1000);
  const std::string bytes = get();
  std::uint64_t header = 0;
  std::memcpy(&header, bytes.data(), 8);
  EXPECT_EQ(header % 8, 0U);
  EXPECT_EQ(bytes.size(), 8 + header + 24 + 8 + 32 + 7);
  const SafetensorsFile file(path_);
  ASSERT_EQ(file.tensors().size(), example.size());
  EXPECT_EQ(file.metadata().at("step"), "7");
  EXPECT_EQ(file.metadata().size(), 2U);
  for (std::size_t i = 0; i < example.size(); ++i) {
    const StoredTensor& t = file.at(example[i].name);
    EXPECT_EQ(t.shape, example[i].shape);
    EXPECT_EQ(t.type, example[i].type);
    const std::vector<std::byte> expected = pattern(example[i].bytes(), static_cast<int>(i));
    std::vector<std::byte> found(expected.size());
    file.read_checked(t, sums[i], found);
    EXPECT_TRUE(std::equal(found.begin(), found.end(), expected.begin(), expected.end())) << t.name;
    EXPECT_EQ(sums[i], checksum(expected));
  }
  EXPECT_EQ(file.find("absent"), nullptr);
  expect_refusal([&] { file.at("absent"); }, {path_, "absent"});
  // The pieces make no difference, and no temporary file stays.
  EXPECT_EQ(write_example(path_, 3), sums);
  EXPECT_EQ(get(), bytes);
  EXPECT_EQ(std::distance(fs::directory_iterator(directory_), fs::directory_iterator{}), 1);
}

TEST_F(Safetensors, EveryTypeHasItsNameAndSize) {
  std::vector<StoredTensor> all;
  for (int i = 0; i <= static_cast<int>(StoredType::f8_e5m2); ++i) {
    const auto type = static_cast<StoredType>(i);
    all.push_back({stored_type_name(type), type, {3}});
  }
  SafetensorsWriter writer(path_, all);
  for (const StoredTensor& t : all) {
    writer.write(t.name, pattern(t.bytes(), 0).data(), static_cast<std::size_t>(t.bytes()));
  }
  writer.finish();
  const SafetensorsFile file(path_);
  for (const StoredTensor& t : all) EXPECT_EQ(file.at(t.name).type, t.type);
}

// Every pattern of bf16, by the dtype of a tensor: what is written is BF16 of other programs, and comes back.
TEST_F(Safetensors, Bf16TensorsAreWrittenAndReadAsTheyAre) {
  const Tensor written = Tensor::of_host(DType::bf16, {256, 256}),
               read = Tensor::of_host(DType::bf16, {256, 256});
  for (std::int64_t i = 0; i < written.numel(); ++i)
    written.host<bf16>()[i] = bf16::of_bits(static_cast<std::uint16_t>(i));
  SafetensorsWriter writer(path_, {{"w", stored_type(DType::bf16), written.shape()}});
  writer.write("w", written.host_bytes(), static_cast<std::size_t>(written.bytes()));
  writer.finish();
  EXPECT_NE(get().find("\"dtype\":\"BF16\""), std::string::npos);
  const SafetensorsFile file(path_);
  ASSERT_EQ(file.at("w").bytes(), read.bytes());
  std::vector<std::byte> bytes = file.bytes(file.at("w"));
  copy_bytes_from_host(bytes, read);
  for (std::int64_t i = 0; i < read.numel(); ++i)
    ASSERT_EQ(read.host<bf16>()[i].bits, written.host<bf16>()[i].bits) << i;
}

TEST_F(Safetensors, NoTensorsAtAll) {
  SafetensorsWriter(path_, {}).finish();
  EXPECT_TRUE(SafetensorsFile(path_).tensors().empty());
  put_header("{}", 0);
  EXPECT_TRUE(SafetensorsFile(path_).tensors().empty());
}

TEST_F(Safetensors, TheWriterIsUsedInOrder) {
  const auto bytes = pattern(100, 0);
  {
    SafetensorsWriter writer(path_, example);
    EXPECT_THROW(writer.write("step", bytes.data(), 8), InvariantError);
    EXPECT_THROW(writer.write("a.weight", bytes.data(), 25), InvariantError);
    writer.write("a.weight", bytes.data(), 23);
    EXPECT_THROW(writer.write("a.weight", bytes.data(), 2), InvariantError);
    EXPECT_THROW(writer.finish(), InvariantError);
  }
  EXPECT_TRUE(fs::is_empty(directory_));  // neither the file nor its temporary
  const std::vector<StoredTensor> twice{{"a", StoredType::u8, {1}}, {"a", StoredType::u8, {1}}};
  EXPECT_THROW(SafetensorsWriter(path_, twice), InvariantError);
  EXPECT_THROW(SafetensorsWriter(path_, {{"__metadata__", StoredType::u8, {1}}}), InvariantError);
  EXPECT_THROW(SafetensorsWriter(path_, {{"a", StoredType::u8, {-1}}}), InvariantError);
  EXPECT_TRUE(fs::is_empty(directory_));
}

TEST_F(Safetensors, DamageIsFoundByTheChecksum) {
  const std::vector<std::uint64_t> sums = write_example(path_, 1000);
  std::string bytes = get();
  bytes.back() ^= 1;
  put(bytes);
  const SafetensorsFile file(path_);
  const auto check_bytes = [&](const char* name, std::uint64_t sum) {
    std::vector<std::byte> read(static_cast<std::size_t>(file.at(name).bytes()));
    file.read_checked(file.at(name), sum, read);
  };
  check_bytes("a.weight", sums[0]);
  expect_refusal([&] { check_bytes("flags", sums[4]); }, {path_, "flags", "damaged"});
}

TEST_F(Safetensors, BadHeadersAreRefusedByName) {
  const auto refused = [this](const std::string& header, std::size_t data_bytes,
                              std::vector<std::string> words) {
    put_header(header, data_bytes);
    words.push_back(path_);
    expect_refusal([this] { SafetensorsFile file(path_); }, words);
  };
  const auto entry = [](const char* dtype, const char* shape, const char* offsets) {
    return fmt::format(R"({{"dtype":{},"shape":{},"data_offsets":{}}})", dtype, shape, offsets);
  };
  const auto one = [&](const char* dtype, const char* shape, const char* offsets) {
    return R"({"w":)" + entry(dtype, shape, offsets) + "}";
  };
  put_header(one("\"F32\"", "[2]", "[0,8]"), 8);
  EXPECT_EQ(SafetensorsFile(path_).tensors().size(), 1U);

  refused("", 0, {"does not begin with {"});
  refused("[]", 0, {"does not begin with {"});
  refused(" {}", 0, {"does not begin with {"});
  refused("{", 0, {"not JSON"});
  refused("{} {}", 0, {"not JSON"});
  refused("{\"w\": \"\xff\"}", 0, {"not JSON"});
  refused("{\"w\": {\"shape\": [1e999]}}", 0, {"not JSON"});
  refused("{\"w\":" + std::string(100000, '['), 0, {"nested"});
  refused(R"({"w":3})", 0, {"tensor w", "not an object"});
  refused(R"({"w":{"dtype":"F32","shape":[]}})", 0, {"tensor w", "data_offsets", "missing"});
  refused(R"({"w":{"dtype":"F32","shape":[],"data_offsets":[0,4],"more":1}})", 4, {"tensor w", "more"});
  refused(R"({"w":{"dtype":"F32","dtype":"F32","shape":[],"data_offsets":[0,4]}})", 4, {"dtype", "twice"});
  refused("{\"w\":" + entry("\"U8\"", "[1]", "[0,1]") + ",\"w\":" + entry("\"U8\"", "[1]", "[1,2]") + "}", 2,
          {"key w", "twice"});
  refused(one("\"F31\"", "[2]", "[0,8]"), 8, {"tensor w", "dtype", "F31"});
  refused(one("32", "[2]", "[0,8]"), 8, {"tensor w", "dtype", "32"});
  refused(one("\"F32\"", "2", "[0,8]"), 8, {"tensor w", "shape"});
  refused(one("\"F32\"", "[-2]", "[0,8]"), 8, {"tensor w", "shape", "-2"});
  refused(one("\"F32\"", "[2.0]", "[0,8]"), 8, {"tensor w", "shape", "2.0"});
  refused(one("\"F32\"", "[\"2\"]", "[0,8]"), 8, {"tensor w", "shape"});
  refused(one("\"F32\"", "[18446744073709551615]", "[0,8]"), 8, {"tensor w", "shape"});
  refused(one("\"F32\"", "[4611686018427387904,4]", "[0,0]"), 0, {"tensor w", "do not hold"});
  refused(one("\"F32\"", "[4611686018427387904,4,0]", "[0,0]"), 0, {"tensor w", "do not hold"});
  refused(one("\"F32\"", "[3]", "[0,8]"), 8, {"tensor w", "8 bytes", "F32", "[3]"});
  refused(one("\"F32\"", "[2]", "[0,8]"), 7, {"tensor w", "[0, 8]", "7 bytes"});
  refused(one("\"F32\"", "[2]", "[8,0]"), 8, {"tensor w", "[8, 0]"});
  refused(one("\"F32\"", "[2]", "[0]"), 8, {"tensor w", "data_offsets"});
  refused(one("\"F32\"", "[2]", "[-8,0]"), 8, {"tensor w", "data_offsets"});
  refused(one("\"F32\"", "[2]", "[4,12]"), 12, {"tensor w", "byte 4"});
  refused(one("\"F32\"", "[2]", "[0,8]"), 12, {"12 bytes", "end at 8"});
  const auto two = [&](const char* first, const char* second) {
    return "{\"a\":" + entry("\"U8\"", "[4]", first) + ",\"b\":" + entry("\"U8\"", "[4]", second) + "}";
  };
  refused(two("[0,4]", "[2,6]"), 6, {"tensor b", "byte 2", "ends at 4"});
  refused(two("[0,4]", "[0,4]"), 4, {"tensor", "byte 0", "ends at 4"});
  refused(two("[0,4]", "[6,10]"), 10, {"tensor b", "byte 6"});
  refused(R"({"__metadata__":{"a":1}})", 0, {"__metadata__", "a"});
  refused(R"({"__metadata__":[]})", 0, {"__metadata__"});

  put(std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8) + "{}");
  expect_refusal([this] { SafetensorsFile file(path_); }, {path_, "truncated"});
  put("short");
  expect_refusal([this] { SafetensorsFile file(path_); }, {path_, "5 bytes"});
  put("");
  expect_refusal([this] { SafetensorsFile file(path_); }, {path_});
  expect_refusal([this] { SafetensorsFile file(path_ + "-absent"); }, {"-absent", "No such file"});
  expect_refusal([this] { SafetensorsFile file(directory_.string()); }, {"not a regular file"});
}

// What a reader may rely on whatever the bytes were: the tensors fill the data and can be read to the last
// byte.
void expect_consistent(const SafetensorsFile& file, std::size_t file_bytes) {
  std::int64_t end = 0;
  std::size_t used = 0;
  for (const StoredTensor& t : file.tensors()) {
    EXPECT_EQ(t.offset, end);
    end += t.bytes();
    const std::vector<std::byte> bytes = file.bytes(t);
    used += bytes.size();
    checksum(bytes);
  }
  EXPECT_LE(used, file_bytes);
}

// Loads or is refused; nothing else. True when it loads with exactly the tensors of the original.
bool loads_equal(const std::string& path, const std::vector<StoredTensor>& original,
                 const std::vector<std::uint64_t>& sums, std::size_t file_bytes, int& loaded) {
  try {
    const SafetensorsFile file(path);
    ++loaded;
    expect_consistent(file, file_bytes);
    if (file.tensors().size() != original.size()) return false;
    for (std::size_t i = 0; i < original.size(); ++i) {
      const StoredTensor* t = file.find(original[i].name);
      if (t == nullptr || t->type != original[i].type || t->shape != original[i].shape) return false;
      if (checksum(file.bytes(*t)) != sums[i]) return false;
    }
    return true;
  } catch (const RequestError& error) {
    EXPECT_NE(std::string(error.what()).find(path), std::string::npos) << error.what();
    return false;
  }
}

TEST_F(Safetensors, MutatedFilesLoadOrAreRefused) {
  const std::vector<std::uint64_t> sums = write_example(path_, 1000);
  const std::string good = get();
  const Philox random(7, Stream::test, 1);
  std::uint64_t header = 0;
  std::memcpy(&header, good.data(), 8);
  const std::string tokens = "{}[]\",:0123456789-eE.\\ \n\x80\xff";
  int loaded = 0, equal = 0, unchanged = 0;
  for (std::uint64_t i = 0; i < 2000; ++i) {
    const auto draw = [&](std::uint64_t k, std::uint64_t bound) {
      return static_cast<std::size_t>(random.below(i * 64 + k, bound));
    };
    std::string bytes = good;
    switch (draw(0, 5)) {
      case 0:  // cut short
        bytes.resize(draw(1, bytes.size()));
        break;
      case 1:  // any bytes anywhere
        for (std::uint64_t k = 0; k <= draw(1, 4); ++k)
          bytes[draw(2 + 2 * k, bytes.size())] = static_cast<char>(draw(3 + 2 * k, 256));
        break;
      case 2:  // what JSON is made of, in the header
        for (std::uint64_t k = 0; k <= draw(1, 3); ++k)
          bytes[8 + draw(2 + 2 * k, header)] = tokens[draw(3 + 2 * k, tokens.size())];
        break;
      case 3: {  // a piece taken out or doubled
        const std::size_t at = draw(1, bytes.size()), size = 1 + draw(2, 40);
        draw(3, 2) == 0 ? bytes.erase(at, size) : bytes.insert(at, bytes.substr(at, size));
        break;
      }
      default:  // one bit
        bytes[draw(1, bytes.size())] ^= static_cast<char>(1 << draw(2, 8));
    }
    put(bytes);
    const bool same = loads_equal(path_, example, sums, bytes.size(), loaded);
    equal += same;
    unchanged += bytes == good;
    EXPECT_TRUE(same || bytes != good);
  }
  // The mutations reach both outcomes: some hit only the data or a name, most break the header.
  EXPECT_GT(loaded, 50);
  EXPECT_LT(loaded, 1500);
  EXPECT_GE(equal, unchanged);
}

// Runs `act` where a file can grow to `bytes` only: the kernel then answers as on a full disk, if with
// another reason.
template <class Act>
void with_file_limit(std::uint64_t bytes, const Act& act) {
  rlimit old{};
  ::getrlimit(RLIMIT_FSIZE, &old);
  auto* handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{bytes, old.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  act();
  ::setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
}

TEST_F(Safetensors, AFullDiskKeepsTheOldFile) {
  write_example(path_, 1000);
  const std::string before = get();
  const std::vector<StoredTensor> large{{"w", StoredType::f32, {1000000}}};
  const std::vector<float> values(1000000, 1.0F);
  for (const std::uint64_t limit : {0UL, 100UL, 70000UL, 1000000UL, 3999000UL}) {
    with_file_limit(limit, [&] {
      try {
        SafetensorsWriter writer(path_, large);
        for (std::size_t at = 0; at < values.size(); at += 1000) writer.write("w", values.data() + at, 4000);
        writer.finish();
        ADD_FAILURE() << "no error at " << limit;
      } catch (const RunError& error) {
        EXPECT_NE(std::string(error.what()).find(path_), std::string::npos) << error.what();
        EXPECT_NE(std::string(error.what()).find("large"), std::string::npos) << error.what();  // EFBIG
      }
    });
    EXPECT_EQ(get(), before);
    EXPECT_EQ(std::distance(fs::directory_iterator(directory_), fs::directory_iterator{}), 1) << limit;
  }
}

TEST_F(Safetensors, WritesTextAtomically) {
  const std::string file = (directory_ / "manifest.json").string();
  write_file_atomically(file, "one");
  write_file_atomically(file, std::string(1000000, 'x'));
  EXPECT_EQ(fs::file_size(file), 1000000U);
  with_file_limit(10, [&] { EXPECT_THROW(write_file_atomically(file, "twelve bytes"), RunError); });
  EXPECT_EQ(fs::file_size(file), 1000000U);
  EXPECT_EQ(std::distance(fs::directory_iterator(directory_), fs::directory_iterator{}), 1);
  const std::string nowhere = (directory_ / "absent" / "x").string();
  EXPECT_THROW(write_file_atomically(nowhere, ""), RunError);
  EXPECT_THROW(write_file_atomically(directory_.string(), ""), RunError);  // a directory has that name
  const fs::path above = directory_.parent_path();
  for (const auto& entry : fs::directory_iterator(above))
    EXPECT_FALSE(entry.path().string().starts_with(directory_.string() + ".tmp-")) << entry.path();
}

}  // namespace
}  // namespace echelon::safetensors_test

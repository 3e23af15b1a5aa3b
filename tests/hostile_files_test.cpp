// Files that are damaged, exchanged or changed while they are read: whatever is in them and whatever they
// are, the answer is what they say or a sentence. ECHELON_MUTATIONS asks for more of them.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <zlib.h>
#include <zstd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "base/open_file.h"
#include "base/philox.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_compare.h"
#include "checkpoint/safetensors.h"
#include "data/tokens.h"
#include "mesh_runs.h"
#include "model/scratch_file.h"
#include "refusals.h"
#include "schedule/schedules.h"
#include "schedule/text.h"
#include "spec/machine.h"
#include "spec/software.h"
#include "temporary_directory.h"

namespace echelon::hostile_files_test {
namespace {

using namespace checks;
namespace fs = std::filesystem;

int num_mutations() {
  const char* const asked = std::getenv("ECHELON_MUTATIONS");
  return asked != nullptr ? std::atoi(asked) : 300;
}

// One to four changes: bytes that the formats are made of put in, pieces lost, doubled or moved, the end cut
// off.
class Mutator {
 public:
  explicit Mutator(std::uint64_t seed) : random_(seed, Stream::test, 0) {}

  std::string of(std::string text) {
    static const std::string alphabet = "{}[]()\"'\\=,:;.#-+eE0123456789 \n\t\xff\x80" + std::string(1, '\0');
    for (std::uint64_t k = 0, changes = 1 + draw(4); k < changes; ++k) {
      const std::size_t at = draw(text.size() + 1), length = 1 + draw(draw(3) == 0 ? 100 : 4);
      switch (draw(6)) {
        case 0:
          text.resize(at);
          break;
        case 1:
          text.insert(at, 1 + draw(draw(8) == 0 ? 5000 : 2), alphabet[draw(alphabet.size())]);
          break;
        case 2:
          text.erase(at, length);
          break;
        case 3:
          text.insert(at, text.substr(draw(text.size() + 1), length));
          break;
        case 4:
          if (at < text.size()) text[at] = alphabet[draw(alphabet.size())];
          break;
        default:
          if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << draw(8)));
      }
    }
    return text;
  }
  std::size_t draw(std::size_t below) {
    return static_cast<std::size_t>(random_.below(at_++, std::max<std::size_t>(below, 1)));
  }

 private:
  Philox random_;
  std::uint64_t at_ = 0;
};

void expect_sentence(const std::string& message) {
  for (const char* raw :
       {"json.exception", "basic_string", "filesystem error", "std::", "bad_alloc", "vector::"})
    EXPECT_EQ(message.find(raw), std::string::npos) << raw << " in: " << message;
}

// Of each mutation of `text` `read` makes something, or refuses it.
void read_mutations(const std::string& text, std::uint64_t seed,
                    const std::function<void(const std::string&)>& read) {
  Mutator mutator(seed);
  int refused = 0;
  const int mutations = num_mutations();
  read(text);
  for (int i = 0; i < mutations; ++i) {
    const std::string changed = mutator.of(text);
    try {
      read(changed);
    } catch (const RequestError& error) {
      expect_sentence(error.what());
      ++refused;
    } catch (const std::exception& error) {
      ADD_FAILURE() << "mutation " << i << ": " << error.what() << "\n" << changed;
    }
  }
  EXPECT_GT(refused, mutations / 4);
}

std::string config(const std::string& path) {
  return read_text((fs::path(ECHELON_SOURCE_DIR) / path).string());
}

TEST(HostileFiles, MutatedConfigurations) {
  read_mutations(config("configs/models/mixtral-tiny.toml"), 1,
                 [](const std::string& text) { validate(model_from_toml(text, "m.toml")); });
  read_mutations(config("configs/machines/h100.toml"), 2,
                 [](const std::string& text) { machine_from_toml(text, "m.toml"); });
  read_mutations(config("configs/software/megatron-2021.toml"), 3,
                 [](const std::string& text) { software_from_toml(text, "s.toml"); });
  read_mutations(config("tests/fixtures/hugging_face/llama/config.json"), 4,
                 [](const std::string& text) { validate(model_from_hugging_face(text, "config.json")); });
  Plan plan;
  plan.model = load_model("gpt2-tiny");
  read_mutations(to_toml(plan), 5,
                 [](const std::string& text) { validate(plan_from_toml(text, "plan.toml")); });
  read_mutations(to_text(one_f_one_b(3, 5)), 6, [](const std::string& text) { from_text(text, "rows"); });
}

TEST(HostileFiles, MutatedTokens) {
  const TemporaryDirectory directory;
  const std::string path = directory / "a.bin";
  const std::vector<std::int32_t> ids(3000, 7);
  write_token_file(path, ids, 2);
  read_mutations(read_bytes(path), 7, [&](const std::string& bytes) {
    write_text(path, bytes);
    const TokenData data({path}, 100);
    for (std::int64_t i = 0; i < data.size(); ++i) ASSERT_LT(data.token(i), 100);
  });
}

TEST(HostileFiles, MutatedRecordsIndicesAndCompressedFiles) {
  const TemporaryDirectory directory;
  DataReading reading;
  reading.cache_directory = directory / "cache";
  const auto mutate = [&](const std::string& name, const std::string& text, std::uint64_t seed) {
    const std::string path = directory / name, data = name.ends_with(".idx") ? directory / "a.bin" : path;
    read_mutations(text, seed, [&](const std::string& bytes) {
      write_text(path, bytes);
      try {
        const TokenData read({data}, 300, reading);
        for (const std::int64_t start : read.document_starts()) ASSERT_LE(start, read.size());
        for (std::int64_t i = 0; i < read.size(); ++i) ASSERT_LT(read.token(i), 300);
      } catch (const RequestError& error) {
        ASSERT_NE(std::string(error.what()).find(directory / "a."), std::string::npos) << error.what();
        throw;
      }
    });
  };
  const std::string records =
      "{\"text\":\"a\"}\n{\"prompt\":\"\",\"completion\":\"b\"}\n"
      "{\"messages\":[{\"role\":\"user\",\"content\":\"c\"},{\"role\":\"assistant\",\"content\":\"d\"}]}\n";
  mutate("a.jsonl", records, 11);
  std::string gzip(4096, '\0');
  z_stream stream{};
  ASSERT_EQ(deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(records.data()));
  stream.avail_in = static_cast<uInt>(records.size());
  stream.next_out = reinterpret_cast<Bytef*>(gzip.data());
  stream.avail_out = static_cast<uInt>(gzip.size());
  ASSERT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  gzip.resize(stream.total_out);
  deflateEnd(&stream);
  mutate("a.jsonl.gz", gzip, 12);
  std::string zstd(4096, '\0');
  zstd.resize(ZSTD_compress(zstd.data(), zstd.size(), records.data(), records.size(), 3));
  mutate("a.jsonl.zst", zstd, 13);
  std::string ids(12, '\0');
  for (std::size_t i = 0; i < ids.size(); i += 2) ids[i] = static_cast<char>(i + 1);
  write_text(directory / "a.bin", ids);
  std::string index("MMIDIDX\0\0\1\0\0\0\0\0\0\0\10\3\0\0\0\0\0\0\0\3\0\0\0\0\0\0\0", 34);
  for (const std::int32_t length : {2, 1, 3}) index.append(reinterpret_cast<const char*>(&length), 4);
  for (const std::int64_t place : {0, 4, 6, 0, 2, 3}) index.append(reinterpret_cast<const char*>(&place), 8);
  mutate("a.idx", index, 14);
}

// In the place of each file of a checkpoint: what would be waited for, never ends, or is not to be read.
TEST(HostileFiles, ACheckpointOfPipesAndDevices) {
  const TemporaryDirectory directory;
  const Plan plan = odd_plan(odd_llama(), 1, 1, false, DType::f64);
  std::string path;
  on_mesh(plan, [&](const Rank& rank) {
    const Trainer trainer(rank, plan, {}, 1);
    CheckpointInfo info;
    info.dtype = plan.precision.master;
    info.model = plan.model;
    path = save_checkpoint(rank, trainer.parameters(), directory.path(), info);
  });
  check_checkpoint(path);
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(path)) files.push_back(entry.path());
  EXPECT_EQ(files.size(), 3u);
  for (const fs::path& file : files) {
    fs::rename(file, directory / "kept");
    const auto refused = [&](const std::string& why) {
      expect_refusal([&] { check_checkpoint(path); }, {path, why});
      fs::remove(file);
    };
    ::mkfifo(file.c_str(), 0600);
    refused("a named pipe");
    fs::create_directory(file);
    refused("a directory");
    fs::create_symlink("/dev/zero", file);
    refused("a device");
    fs::create_symlink(file, file);
    refused("");
    fs::create_symlink("/proc/self/mem", file);
    refused("");
    fs::rename(directory / "kept", file);
  }
  check_checkpoint(path);
}

// Cut short and made long again while samples are drawn and tensors read: what is read is read, or it is
// said.
TEST(HostileFiles, FilesThatChangeWhileTheyAreRead) {
  const TemporaryDirectory directory;
  const std::string text = directory / "text", path = directory / "a.safetensors";
  constexpr std::int64_t size = 1 << 20;
  write_text(text, std::string(size, 'x'));
  {
    SafetensorsWriter writer(path, {{"a", StoredType::u8, {size}}});
    writer.write("a", std::string(size, 'y').data(), size);
    writer.finish();
  }
  const TokenData data({text}, bytes_vocab);
  const SafetensorsFile stored(path);
  const auto whole = fs::file_size(path);
  std::atomic<bool> ends{false};
  std::thread changing([&] {
    for (std::uint64_t i = 0; !ends; ++i) {
      fs::resize_file(text, i % 2 == 0 ? 1000 : size);
      fs::resize_file(path, i % 2 == 0 ? 1000 : whole);
    }
  });
  int read = 0, said = 0;
  std::vector<std::int32_t> tokens(4096);
  // Until both have been seen, and some more.
  for (int i = 0; i < 2000 || read == 0 || said == 0; ++i) try {
      data.copy(size / 2, std::ssize(tokens), tokens.data());
      (void)stored.bytes(stored.at("a"));
      ++read;
    } catch (const RunError& error) {
      EXPECT_NE(std::string(error.what()).find("shorter"), std::string::npos) << error.what();
      ++said;
    }
  ends = true;
  changing.join();
}

TEST(HostileFiles, ATemporaryDirectoryThatIsNone) {
  const TemporaryDirectory directory;
  write_text(directory / "file", "");
  const char* const before = std::getenv("TMPDIR");
  const std::string kept = before != nullptr ? before : "";
  for (const char* name : {"absent", "file"}) {
    ::setenv("TMPDIR", (directory / name).c_str(), 1);
    expect_refusal([] { check_scratch_directory(""); }, {"TMPDIR", directory / name});
    expect_refusal([] { ScratchFile("", 100, Device::cpu, "a test"); }, {"TMPDIR", directory / name});
  }
  ::setenv("TMPDIR", "", 1);
  expect_refusal([] { check_scratch_directory(""); }, {"TMPDIR (empty)", "legal"});
  expect_refusal([&] { check_scratch_directory(directory / "absent"); },
                 {"--offload-dir", "absent", "No such file"});
  before != nullptr ? ::setenv("TMPDIR", kept.c_str(), 1) : ::unsetenv("TMPDIR");
}

}  // namespace
}  // namespace echelon::hostile_files_test

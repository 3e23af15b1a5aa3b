#include "data/tokens.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <limits>
#include <numeric>
#include <set>

#include "refusals.h"
#include "temporary_directory.h"

namespace echelon::tokens_test {
namespace {

namespace fs = std::filesystem;

using checks::expect_refusal;

class Tokens : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return directory_ / name; }
  std::string write(const std::string& name, const std::string& text) const {
    fs::create_directories(fs::path(path(name)).parent_path());
    checks::write_text(path(name), text);
    return path(name);
  }
  const checks::TemporaryDirectory directory_;
};

std::vector<std::int32_t> all_of(const TokenData& data) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(data.size()));
  data.copy(0, data.size(), out.data());
  return out;
}

std::string text_of(const TokenData& data) {
  std::string out;
  for (const std::int32_t id : all_of(data)) out += id == end_of_text ? '|' : static_cast<char>(id);
  return out;
}

TEST_F(Tokens, BytesAndEndOfText) {
  const TokenData data({write("a.txt", "hello"), write("b.txt", "\xff\x00\x80")}, bytes_vocab);
  EXPECT_EQ(data.kind(), TokenData::Kind::text);
  EXPECT_EQ(data.num_files(), 2);
  EXPECT_EQ(all_of(data),
            (std::vector<std::int32_t>{'h', 'e', 'l', 'l', 'o', 256, 255, 256}));  // "\0" ends the literal
  for (std::int64_t i = 0; i < data.size(); ++i)
    EXPECT_EQ(data.token(i), all_of(data)[static_cast<std::size_t>(i)]);
}

TEST_F(Tokens, AnyRangeIsAsTheWhole) {
  std::vector<std::string> paths;
  // Lengths about the border between files that are read and files that are mapped, and single bytes.
  for (const std::size_t length : {1UL, 65535UL, 65536UL, 65537UL, 1UL, 2UL, 100000UL}) {
    std::string text(length, ' ');
    for (std::size_t i = 0; i < length; ++i) text[i] = static_cast<char>(' ' + (i * 7 + length) % 95);
    paths.push_back(write(fmt::format("{}.txt", paths.size()), text));
  }
  const TokenData data(paths, bytes_vocab);
  const std::vector<std::int32_t> whole = all_of(data);
  const Philox random(1, Stream::test, 0);
  for (std::uint64_t i = 0; i < 300; ++i) {
    const auto begin = static_cast<std::int64_t>(random.below(2 * i, whole.size() + 1));
    const auto count = static_cast<std::int64_t>(
        random.below(2 * i + 1, whole.size() - static_cast<std::size_t>(begin) + 1));
    std::vector<std::int32_t> out(static_cast<std::size_t>(count));
    data.copy(begin, count, out.data());
    ASSERT_TRUE(std::equal(out.begin(), out.end(), whole.begin() + begin)) << begin << " " << count;
  }
  std::int32_t one = 0;
  EXPECT_THROW(data.copy(-1, 1, &one), InvariantError);
  EXPECT_THROW(data.copy(data.size(), 1, &one), InvariantError);
  EXPECT_THROW(data.copy(1, std::numeric_limits<std::int64_t>::max(), &one), InvariantError);
  data.copy(data.size(), 0, nullptr);
}

TEST_F(Tokens, DirectoriesAreReadInTheOrderOfTheirPaths) {
  write("d/b.txt", "B");
  write("d/a/z.txt", "Z");
  write("d/a.txt", "A");
  write("d/empty.txt", "");
  write("out.txt", "O");
  fs::create_symlink("b.txt", path("d/0-link"));             // to a file that is there anyway, though later
  fs::create_symlink(path("out.txt"), path("d/c-outside"));  // to one that is not
  fs::create_symlink(path("out.txt"), path("d/d-outside"));
  fs::create_symlink("nowhere", path("d/broken"));
  fs::create_directory_symlink(path("d"), path("d/loop"));
  EXPECT_EQ(text_of(TokenData({path("d")}, bytes_vocab)), "A|Z|B|O|");  // '.' comes before '/'
  EXPECT_EQ(text_of(TokenData({path("d"), path("out.txt")}, bytes_vocab)), "A|Z|B|O|");
  EXPECT_EQ(text_of(TokenData({path("out.txt"), path("out.txt")}, bytes_vocab)), "O|O|");  // as asked
}

// A directory of text with what else lies about.
TEST_F(Tokens, WhatIsNoTextIsSaidAndSkippedOrRefused) {
  write("d/a.txt", "A");
  write("d/latin.txt", "caf\xe9 cr\xe8me");
  write("d/colours.log", "\x1b[31mred\x1b[0m");
  write("d/picture.png", std::string("\x89PNG\r\n\x1a\n\0\0\0\rIHDR", 16));
  write("d/packed.tgz", "\x1f\x8b\x08\x08\xd1\xb5packed");
  write("d/z.txt", "Z");
  const TokenData data({path("d")}, bytes_vocab);
  EXPECT_EQ(text_of(data), "A|\x1b[31mred\x1b[0m|caf\xe9 cr\xe8me|Z|");
  EXPECT_EQ(data.notes(), "skipped " + path("d/packed.tgz") + ", " + path("d/picture.png") + ": binary\n");
  EXPECT_EQ(TokenData({path("d/a.txt")}, bytes_vocab).notes(), "");
  expect_refusal([&] { TokenData({path("d/picture.png")}, bytes_vocab); }, {"picture.png", "binary", "text"});
  for (const char* text : {"d/a.txt", "d/z.txt", "d/latin.txt", "d/colours.log"}) fs::remove(path(text));
  expect_refusal([&] { TokenData({path("d")}, bytes_vocab); }, {"no text", "picture.png", "packed.tgz"});
  // Many are counted.
  for (int i = 0; i < 9; ++i) write(fmt::format("d/{}.bmp", i), std::string(3, '\0'));
  write("d/a.txt", "A");
  EXPECT_NE(TokenData({path("d")}, bytes_vocab).notes().find(" and 8 more: binary"), std::string::npos);
}

// What a directory has besides its text is not trained on, and nothing is left out without a word.
TEST_F(Tokens, WhatIsHiddenIsSaidAndSkipped) {
  write("d/a.txt", "A");
  write("d/.git/config", "[core]");
  write("d/.gitattributes", "*.bin binary");
  write("d/sub/.hidden.txt", "H");
  write("elsewhere/b.txt", "B");
  fs::create_directory_symlink(path("elsewhere"), path("d/link"));
  fs::create_symlink("nowhere", path("d/broken"));
  fs::create_symlink("sub/.hidden.txt", path("d/z.txt"));  // a link has a name of its own
  const TokenData data({path("d")}, bytes_vocab);
  EXPECT_EQ(text_of(data), "A|H|");
  EXPECT_EQ(data.notes(), "skipped " + path("d/link") + ": a link to a directory\nskipped " + path("d/.git") +
                              ", " + path("d/.gitattributes") + ", " + path("d/sub/.hidden.txt") +
                              ": hidden\nskipped " + path("d/broken") + ": not a regular file\n");
  // What is named is read.
  EXPECT_EQ(text_of(TokenData({path("d/.git"), path("d/sub/.hidden.txt"), path("d/link")}, bytes_vocab)),
            "[core]|H|B|");
  fs::remove(path("d/a.txt"));
  fs::remove(path("d/z.txt"));
  expect_refusal([&] { TokenData({path("d")}, bytes_vocab); }, {"no text", ".gitattributes", "hidden"});
}

TEST_F(Tokens, TokenFilesRoundTrip) {
  std::vector<std::int32_t> ids(70000);
  std::iota(ids.begin(), ids.end(), 0);
  write_token_file(path("wide.bin"), ids, 4);
  ids.resize(50000);
  write_token_file(path("narrow.bin"), ids, 2);
  EXPECT_EQ(fs::file_size(path("narrow.bin")), 1024U + 100000U);
  const TokenData data({path("narrow.bin"), path("wide.bin")}, 70000);
  EXPECT_EQ(data.kind(), TokenData::Kind::tokens);
  ASSERT_EQ(data.size(), 120000);
  for (std::int64_t i = 0; i < data.size(); i += 7) EXPECT_EQ(data.token(i), i < 50000 ? i : i - 50000);
  expect_refusal(
      [&] {
        TokenData({path("narrow.bin"), path("wide.bin")}, 69999);
      },
      {"wide.bin", "token 69999", "id 69999", "69998"});
  expect_refusal([&] { TokenData({path("narrow.bin")}, 1000); },
                 {"narrow.bin", "token 1000 is id 1000", "999"});
  expect_refusal([&] { write_token_file(path("x.bin"), ids, 3); }, {"x.bin", "3", "2 or 4"});
  ids = {1, 65536};
  expect_refusal([&] { write_token_file(path("x.bin"), ids, 2); }, {"x.bin", "token 1", "65536", "65535"});
  ids = {-1};
  expect_refusal([&] { write_token_file(path("x.bin"), ids, 4); }, {"token 0", "-1"});
  EXPECT_FALSE(fs::exists(path("x.bin")));
}

TEST_F(Tokens, HeaderIsThatOfLlmC) {
  std::vector<std::int32_t> ids{3, 4, 5};
  write_token_file(path("a.bin"), ids, 2);
  write_token_file(path("b.bin"), ids, 4);
  const auto words = [](const std::string& file) {
    std::array<std::int32_t, 3> header{};
    std::ifstream(file, std::ios::binary).read(reinterpret_cast<char*>(header.data()), sizeof header);
    return header;
  };
  EXPECT_EQ(words(path("a.bin")), (std::array<std::int32_t, 3>{20240520, 1, 3}));
  EXPECT_EQ(words(path("b.bin")), (std::array<std::int32_t, 3>{20240801, 7, 3}));
}

TEST_F(Tokens, DamagedTokenFilesAreRefused) {
  const std::vector<std::int32_t> ids{1, 2, 3};
  write_token_file(path("a.bin"), ids, 2);
  const std::string good = checks::read_bytes(path("a.bin"));
  const auto refused = [&](const std::string& bytes, const std::vector<std::string>& words) {
    const std::string file = write("damaged.bin", bytes);
    expect_refusal([&] { TokenData({file}, 100); }, words);
  };
  refused(good.substr(0, good.size() - 1), {"damaged.bin", "truncated", "1029", "1030"});
  refused(good.substr(0, 1023), {"truncated", "1023"});
  refused(good.substr(0, 4), {"truncated"});
  refused(good.substr(0, 3), {"not a token file"});
  refused(good + "x", {"damaged", "1031", "1030"});
  std::string version = good;
  version[4] = 2;
  refused(version, {"version 2", "20240520", "only version 1"});
  std::string negative = good;
  negative[11] = '\xff';
  refused(negative, {"count of -"});
  std::string none = good.substr(0, 1024);
  none[8] = 0;
  refused(none, {"nothing but empty files"});
}

TEST_F(Tokens, RefusalsNameTheFile) {
  const std::string text = write("t.txt", "text");
  const std::vector<std::int32_t> ids{1, 2, 3};
  write_token_file(path("a.bin"), ids, 2);
  expect_refusal([&] { TokenData({}, 257); }, {"--data"});
  expect_refusal([&] { TokenData({path("absent")}, 257); }, {"--data", "absent", "no such file"});
  expect_refusal([&] { TokenData({text, path("a.bin")}, 257); }, {"t.txt", "a.bin", "one kind"});
  expect_refusal([&] { TokenData({path("a.bin"), text}, 257); }, {"a.bin is a token file", "t.txt is text"});
  expect_refusal([&] { TokenData({directory_.path().string()}, 257); }, {"one kind"});
  expect_refusal([&] { TokenData({text}, 256); }, {"t.txt", "257", "256"});
  expect_refusal([&] { TokenData({text}, 0); }, {"257"});
  fs::create_directory(path("hollow"));
  expect_refusal([&] { TokenData({path("hollow")}, 257); }, {"hollow", "no files"});
  expect_refusal([&] { TokenData({write("hollow/e", "")}, 257); }, {"empty"});
  expect_refusal([&] { TokenData({path("hollow")}, 257); }, {"empty"});
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  expect_refusal([&] { TokenData({path("pipe")}, 257); }, {"pipe", "not a regular file"});
  if (::geteuid() == 0) return;  // root may read everything
  fs::permissions(text, fs::perms::none);
  expect_refusal([&] { TokenData({text}, 257); }, {"t.txt", "ermission"});
  fs::permissions(path("hollow"), fs::perms::none);
  expect_refusal([&] { TokenData({path("hollow")}, 257); }, {"hollow", "ermission"});
  fs::permissions(path("hollow"), fs::perms::owner_all);
  fs::create_directory(path("hollow/inner"));
  fs::permissions(path("hollow/inner"), fs::perms::none);
  expect_refusal([&] { TokenData({path("hollow")}, 257); },
                 {"hollow/inner: cannot be read: Permission denied"});
  fs::permissions(path("hollow/inner"), fs::perms::owner_all);
}

// It ended the process: the file was mapped, and its last pages were gone.
TEST_F(Tokens, AFileThatBecomesShorterIsNamed) {
  std::vector<std::int32_t> ids(100000, 5);
  write_token_file(path("a.bin"), ids, 2);
  const TokenData tokens({path("a.bin")}, 10), text({write("t.txt", std::string(200000, 'x'))}, bytes_vocab);
  fs::resize_file(path("a.bin"), 100000);
  fs::resize_file(path("t.txt"), 100000);
  EXPECT_EQ(tokens.token(1000), 5);
  for (const auto& [data, name] : {std::pair{&tokens, "a.bin"}, {&text, "t.txt"}}) try {
      (void)data->token(99000);
      data->token(data->size() - 2);
      ADD_FAILURE() << name;
    } catch (const RunError& error) {
      EXPECT_NE(std::string(error.what()).find(path(name)), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("shorter"), std::string::npos) << error.what();
    }
}

// More than a process may hold open, and pieces that reach over many of them.
TEST_F(Tokens, ManyFilesAreReadAsOneText) {
  std::string whole;
  for (int i = 0; i < 600; ++i) {
    const std::string text = fmt::format("{:04}", i);
    write("d/" + text, text);
    whole += text + "|";
  }
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  rlimit few = before;
  few.rlim_cur = 400;
  ::setrlimit(RLIMIT_NOFILE, &few);
  const TokenData data({path("d")}, bytes_vocab);
  EXPECT_EQ(text_of(data), whole);
  ::setrlimit(RLIMIT_NOFILE, &before);
}

TEST_F(Tokens, TheFingerprintIsOfWhatIsRead) {
  const auto of = [&](const std::vector<std::string>& paths) {
    return TokenData(paths, 70000).fingerprint();
  };
  const std::string text(200000, 'a'), a = write("a.txt", text);
  std::string other = text;
  other[150000] = 'b';
  EXPECT_EQ(of({a}).size(), 16u);
  EXPECT_EQ(of({a}), of({write("copy.txt", text)}));  // names do not count
  EXPECT_NE(of({a}), of({write("b.txt", other)}));
  EXPECT_NE(of({a, path("b.txt")}), of({path("b.txt"), a}));
  // The same bytes in files of other lengths have other ends of text.
  EXPECT_NE(of({write("x", "ab"), write("y", "c")}), of({write("x2", "a"), write("y2", "bc")}));
  const std::vector<std::int32_t> ids{1, 2, 3};
  write_token_file(path("a.bin"), ids, 2);
  EXPECT_NE(of({path("a.bin")}), of({a}));
  // Of a large file the first and the last block, and blocks between, such as that which begins here.
  constexpr std::int64_t size = std::int64_t{100} << 20;
  fs::resize_file(write("large", std::string(65536, 'x')), size);  // zeros are text only after the beginning
  std::set<std::string> seen{of({path("large")})};
  for (const std::int64_t at : {std::int64_t{0}, (size - 65536) * 512 / 1023 + 100, size - 1}) {
    std::fstream(path("large"), std::ios::in | std::ios::out | std::ios::binary).seekp(at).put('!');
    EXPECT_TRUE(seen.insert(of({path("large")})).second) << at;
  }
}

TEST(TokenSplit, HoldsTheEndOut) {
  Split split = split_tokens(1000, 0.1, 64);
  EXPECT_EQ(split.train, (Range{0, 900}));
  EXPECT_EQ(split.validation, (Range{900, 1000}));
  split = split_tokens(1000, 0.0, 64);
  EXPECT_EQ(split.train, (Range{0, 1000}));
  EXPECT_EQ(split.validation.size(), 0);
  EXPECT_EQ(split_tokens(1000, 0.1, 99).validation.size(), 100);  // exactly one sequence and its next token
  EXPECT_EQ(split_tokens(1000, 0.1, 100).validation.size(), 0);
  EXPECT_EQ(split_tokens(1000, 0.1, 100).train.size(), 1000);
  EXPECT_EQ(split_tokens(65, 0.5, 64).train.size(), 65);
}

TEST(TokenSplit, Refusals) {
  expect_refusal(
      [] { split_tokens(64, 0.0, 64); },
      {"text of 64 tokens is shorter than one sequence of 64 + 1; legal: more text, or --seq-len up to 63"});
  expect_refusal([] { split_tokens(0, 0.1, 1); }, {"text of 0 tokens"});
  expect_refusal([] { split_tokens(200, 0.9, 64); }, {"text of 200 tokens", "20", "0.9", "64 + 1"});
  expect_refusal([] { split_tokens(200, 1.0, 64); }, {"fraction 1"});
  expect_refusal([] { split_tokens(200, -0.1, 64); }, {"fraction -0.1"});
  expect_refusal([] { split_tokens(200, std::numeric_limits<double>::quiet_NaN(), 64); }, {"fraction nan"});
  expect_refusal([] { split_tokens(200, 0.1, 0); }, {"--seq-len 0"});
  expect_refusal([] { split_tokens(200, 0.1, std::numeric_limits<std::int64_t>::max()); }, {"shorter"});
}

class Sampling : public Tokens {
 protected:
  void SetUp() override {
    Tokens::SetUp();
    std::vector<std::int32_t> ids(1000);
    std::iota(ids.begin(), ids.end(), 0);  // a token's id is its place
    write_token_file(path("a.bin"), ids, 2);
  }
};

TEST_F(Sampling, TargetsAreTheNextTokensInsideTheRange) {
  const TokenData data({path("a.bin")}, 1000);
  for (const std::int64_t seq_len : {1, 7, 99}) {
    const Sampler sampler(data, {100, 200}, 5);
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(seq_len)), targets(tokens.size());
    for (std::int64_t step = 0; step < 50; ++step) {
      sampler.sample(step, step % 3, seq_len, tokens.data(), targets.data());
      EXPECT_EQ(tokens[0], sampler.start(step, step % 3, seq_len));
      EXPECT_GE(tokens[0], 100);
      EXPECT_LT(targets.back(), 200);
      for (std::size_t t = 0; t < tokens.size(); ++t) {
        EXPECT_EQ(tokens[t], tokens[0] + static_cast<std::int32_t>(t));
        EXPECT_EQ(targets[t], tokens[t] + 1);
      }
    }
  }
  std::int32_t out[200];
  EXPECT_THROW(Sampler(data, {100, 200}, 5).sample(0, 0, 100, out, out + 100), InvariantError);
  Sampler(data, {100, 200}, 5).sample(0, 0, 99, out, out + 100);
  EXPECT_EQ(out[0], 100);  // the only place
}

TEST_F(Sampling, DependsOnSeedStepAndIndexAlone) {
  const TokenData data({path("a.bin")}, 1000), again({path("a.bin")}, 5000);
  const Sampler a(data, {0, 1000}, 1), b(again, {0, 1000}, 1), other(data, {0, 1000}, 2);
  int same_seed = 0, same_step = 0, same_index = 0;
  for (std::int64_t step = 0; step < 100; ++step) {
    for (std::int64_t index = 0; index < 8; ++index) {
      // In any order, by any sampler, any number of times.
      const std::int64_t here = a.start(step, index, 16);
      EXPECT_EQ(b.start(99 - step, 7 - index, 16), a.start(99 - step, 7 - index, 16));
      EXPECT_EQ(b.start(step, index, 16), here);
      same_seed += other.start(step, index, 16) == here;
      same_step += a.start(step + 100, index, 16) == here;
      same_index += a.start(step, index + 8, 16) == here;
    }
  }
  // 800 pairs that agree with probability 1/984 each.
  EXPECT_LT(same_seed, 8);
  EXPECT_LT(same_step, 8);
  EXPECT_LT(same_index, 8);
}

TEST_F(Sampling, StartsAreUniform) {
  const TokenData data({path("a.bin")}, 1000);
  const Sampler sampler(data, {200, 310}, 3);  // 100 places for 10 tokens
  std::array<int, 100> seen{};
  const int draws = 50000;
  for (int i = 0; i < draws; ++i) ++seen[static_cast<std::size_t>(sampler.start(i / 8, i % 8, 10) - 200)];
  double chi2 = 0;
  for (const int count : seen) chi2 += (count - draws / 100.0) * (count - draws / 100.0) / (draws / 100.0);
  // 99 degrees of freedom: mean 99, standard deviation 14.
  EXPECT_GT(chi2, 99 - 4 * 14.1);
  EXPECT_LT(chi2, 99 + 4 * 14.1);
}

TEST_F(Tokens, ASampleGoesOnFromWholeWords) {
  const auto prompt = [&](const std::string& text, Range range, std::int64_t most) {
    const TokenData data({write("words.txt", text)}, bytes_vocab);
    std::string out;
    for (std::int32_t id : sample_prompt(data, range, most))
      out += id == end_of_text ? '|' : static_cast<char>(id);
    return out;
  };
  const std::string text = "In the beginning was the word.";
  EXPECT_EQ(prompt(text, {0, 30}, 10), "In the");  // "In the beg" ends inside a word
  EXPECT_EQ(prompt(text, {0, 30}, 16), "In the beginning");
  EXPECT_EQ(prompt(text, {4, 30}, 13), "beginning was");   // begins inside "the"
  EXPECT_EQ(prompt(text, {3, 30}, 8), "the");              // behind a space
  EXPECT_EQ(prompt(text, {6, 30}, 12), "beginning");       // at a space
  EXPECT_EQ(prompt(text, {17, 31}, 32), "was the word.");  // not over the end of a text
  EXPECT_EQ(prompt(text, {0, 30}, 1), "I");                // no room for a word
  EXPECT_EQ(prompt(text, {8, 14}, 32), "eginni");          // no word begins there
  EXPECT_EQ(prompt("    \n", {0, 5}, 3), "   ");
  write_token_file(path("ids.bin"), std::vector<std::int32_t>{32, 7, 32, 9}, 2);
  EXPECT_EQ(sample_prompt(TokenData({path("ids.bin")}, 100), {1, 4}, 2), (std::vector<std::int32_t>{7, 32}));
}

TEST_F(Tokens, AFullDiskLeavesNothing) {
  const std::vector<std::int32_t> ids(300000, 1);
  rlimit old{};
  ::getrlimit(RLIMIT_FSIZE, &old);
  auto* handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{100000, old.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  EXPECT_THROW(write_token_file(path("a.bin"), ids, 2), RunError);
  ::setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  EXPECT_TRUE(fs::is_empty(directory_.path()));
}

}  // namespace
}  // namespace echelon::tokens_test

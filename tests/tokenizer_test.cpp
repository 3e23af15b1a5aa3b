// Tokenizers against what Hugging Face's library made of the same texts
// (fixtures/tokenizers/make_fixtures.py), and files that say something wrong. ECHELON_MUTATIONS asks for more
// of these.
#include "text/tokenizer.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "base/open_file.h"
#include "refusals.h"
#include "temporary_directory.h"
#include "text/tokenizer_files.h"

namespace echelon::tokenizer_test {
namespace {

using namespace checks;
using nlohmann::json;
using Ids = std::vector<std::int32_t>;

const std::filesystem::path fixtures =
    std::filesystem::path(ECHELON_SOURCE_DIR) / "tests/fixtures/tokenizers";

json expected() { return json::parse(read_text((fixtures / "expected.json").string())); }

std::shared_ptr<const Tokenizer> fixture(const std::string& name) {
  return read_tokenizer((fixtures / (name + ".json")).string());
}

// The fixture with `change` made to it, in a file.
template <class Change>
std::string changed(const TemporaryDirectory& directory, const std::string& name, const Change& change) {
  json file = json::parse(read_text((fixtures / (name + ".json")).string()));
  change(file);
  const std::string path = directory / "tokenizer.json";
  std::ofstream(path) << file.dump();
  return path;
}

TEST(TokenizerFixtures, GiveTheIdsAndTextsOfHuggingFace) {
  int texts = 0;
  const json all = expected();
  for (const auto& [name, rows] : all.items()) {
    const auto tokenizer = fixture(name);
    for (const json& row : rows) {
      const auto text = row["text"].get<std::string>();
      const Ids ids = row["ids"].get<Ids>();
      EXPECT_EQ(tokenizer->encode(text), ids) << name << ": " << row["text"];
      EXPECT_EQ(tokenizer->encode(text), ids) << name << ", from the cache: " << row["text"];
      EXPECT_EQ(tokenizer->encode_whole(text), row["whole"].get<Ids>()) << name << ": " << row["text"];
      EXPECT_EQ(tokenizer->decode(ids), row["decoded"].get<std::string>()) << name << ": " << row["text"];
      EXPECT_EQ(tokenizer->decode(ids, Special::dropped), row["plain"].get<std::string>()) << name;
      TextStream stream(tokenizer);
      std::string streamed;
      for (const std::int32_t id : ids) streamed += stream.next(id);
      EXPECT_EQ(streamed + stream.finish(), row["plain"].get<std::string>()) << name << ": " << row["text"];
      ++texts;
    }
  }
  EXPECT_GT(texts, 150);
}

TEST(TokenizerFixtures, ManyMergesAreThoseOfAFewAtATime) {
  // A piece of hundreds of characters goes by the heap; the same words apart go by the scan.
  const auto tokenizer = fixture("gpt2");
  std::string word;
  for (int i = 0; i < 40; ++i) word += "beginningheaven";
  const Ids ids = tokenizer->encode(word);
  EXPECT_EQ(tokenizer->decode(ids), word);
  const Ids once = tokenizer->encode("beginningheavenbeginningheaven");
  const auto half = static_cast<std::ptrdiff_t>(once.size() / 2);
  ASSERT_TRUE(std::equal(once.begin(), once.begin() + half, once.begin() + half));
  EXPECT_EQ(ids.size(), static_cast<std::size_t>(half) * 40);
  EXPECT_TRUE(std::equal(once.begin(), once.end(), ids.begin()));
}

// Of "aaa" there are two ways with the same tokens. By the scores as written their sums are equal, and the
// first one would be taken; tokenizers 0.23.3 reads them one bit beside, and takes the other.
TEST(TokenizerText, ScoresAreReadAsHuggingFaceReadsThem) {
  const TemporaryDirectory directory;
  for (const auto& [mark, one, two] :
       {std::tuple{-1.4919582555279467, -9.788596541398796, -9.788737210483177},
        {-7.25, -9.787412634268062, -9.787552828093759}}) {
    EXPECT_EQ(mark + one + two, mark + two + one);
    const auto tokenizer = read_tokenizer(changed(directory, "unigram", [&](json& f) {
      f["normalizer"] = f["added_tokens"] = nullptr;
      json& vocab = f["model"]["vocab"] = json::array();
      for (const auto& [token, score] : {std::pair{"<unk>", 0.0}, {"\u2581", mark}, {"a", one}, {"aa", two}})
        vocab.push_back(json::array({token, score}));
    }));
    EXPECT_EQ(tokenizer->encode("aaa"), (Ids{1, 3, 2}));
  }
}

// As its trainer writes special tokens that the text has too.
TEST(TokenizerText, ATokenThatIsListedTwiceHasBothIds) {
  const TemporaryDirectory directory;
  const auto tokenizer = read_tokenizer(changed(directory, "unigram", [](json& f) {
    json& vocab = f["model"]["vocab"];
    vocab[10] = vocab[11];
  }));
  const Ids first{10}, last{11};
  EXPECT_FALSE(tokenizer->decode(first).empty());
  EXPECT_EQ(tokenizer->decode(first), tokenizer->decode(last));
}

TEST(TokenizerText, BrokenUtf8IsReadAsTheReplacementCharacter) {
  const auto tokenizer = fixture("gpt2");
  EXPECT_EQ(tokenizer->encode("a\xe4\xbd\x62\xff\xc3"), tokenizer->encode("a\ufffdb\ufffd\ufffd"));
  EXPECT_EQ(tokenizer->encode("\xed\xa0\x80"), tokenizer->encode("\ufffd\ufffd\ufffd"));  // half of a pair
  EXPECT_EQ(bytes_tokenizer()->decode(bytes_tokenizer()->encode("a\xe4\xff")), "a\xe4\xff");
}

TEST(TokenizerText, AStreamGivesWholeCharacters) {
  for (const auto& tokenizer : {bytes_tokenizer(), fixture("gpt2"), fixture("llama2")}) {
    TextStream stream(tokenizer);
    std::string all;
    for (const std::int32_t id : tokenizer->encode("né 你 🎉!")) {
      const std::string piece = stream.next(id);
      all += piece;
      for (const char* whole : {"é", "你", "🎉"})  // all of it or nothing
        EXPECT_EQ(piece.find(whole[0]) != std::string::npos, piece.find(whole) != std::string::npos) << piece;
    }
    EXPECT_EQ(all + stream.finish(), "né 你 🎉!") << tokenizer->name();
  }
}

TEST(TokenizerText, ThreadsShareOne) {
  const auto tokenizer = fixture("llama3");
  const std::string text = expected()["llama3"].back()["text"];
  const Ids ids = expected()["llama3"].back()["ids"];
  std::vector<int> wrong(4);
  {
    std::vector<std::jthread> threads;
    for (int& count : wrong)
      threads.emplace_back([&] {
        for (int i = 0; i < 50; ++i) count += tokenizer->encode(text) != ids;
      });
  }
  EXPECT_EQ(wrong, std::vector<int>(4));
}

TEST(TokenizerRefusals, NameWhatIsNotUnderstood) {
  const TemporaryDirectory directory;
  const auto refused = [&](const char* name, auto change, const std::vector<std::string>& words) {
    expect_refusal([&] { (void)read_tokenizer(changed(directory, name, change)); }, words);
  };
  refused("gpt2", [](json& f) { f["model"]["type"] = "Future"; }, {"model", "Future", "legal: BPE"});
  refused("gpt2", [](json& f) { f["model"]["dropout"] = 0.1; }, {"model.dropout", "0.1", "legal: null"});
  refused("gpt2", [](json& f) { f["model"]["new"] = 1; }, {"model", "new", "legal:"});
  refused("gpt2", [](json& f) { f["pre_tokenizer"]["type"] = "UnicodeScripts"; },
          {"pre_tokenizer", "UnicodeScripts", "legal:"});
  refused("gpt2", [](json& f) { f["normalizer"] = {{"type", "Nmt"}}; }, {"normalizer", "Nmt", "legal:"});
  refused("gpt2", [](json& f) { f["decoder"]["type"] = "CTC"; }, {"decoder", "CTC", "legal:"});
  refused("gpt2", [](json& f) { f["model"]["merges"][3] = "q nothing"; }, {"merges[3]", "nothing"});
  refused("gpt2", [](json& f) { f["added_tokens"][0]["id"] = -1; },
          {"added_tokens[0].id", "-1", "legal: 0 to"});
  refused("llama3", [](json& f) { f["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a"; },
          {"pretokenizers[0]", "(a", "no regular expression"});
  refused("llama3",
          [](json& f) { f["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "[a-z&&[^b]]"; },
          {"&&", "legal"});
  refused("llama3", [](json& f) { f["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Sideways"; },
          {"behavior", "Sideways", "legal: Isolated"});
  expect_refusal([&] { (void)fixture("gpt2")->decode(Ids{100000}); }, {"100000", "no such token"});
  expect_refusal([&] { (void)read_tokenizer(directory / "missing.json"); }, {"missing.json"});
  const TemporaryDirectory empty;
  expect_refusal([&] { (void)read_tokenizer(empty.path().string()); }, {"tokenizer.json", "legal"});
}

TEST(TokenizerFiles, ADirectorySaysWhatEndsAText) {
  const TemporaryDirectory directory;
  (void)changed(directory, "gpt2", [](json&) {});
  EXPECT_FALSE(read_tokenizer(directory.path().string())->end_of_text());
  std::ofstream(directory / "tokenizer_config.json") << R"({"eos_token": {"content": "<|end|>"}})";
  const auto tokenizer = read_tokenizer(directory.path().string());
  EXPECT_EQ(Ids{tokenizer->end_of_text().value()}, tokenizer->encode("<|end|>"));
  const TokenizerFiles files = read_tokenizer_files(directory.path().string());
  EXPECT_EQ(files.size(), 2u);
  EXPECT_EQ(files.at("tokenizer.json"), read_text(directory / "tokenizer.json"));
}

TEST(TokenizerFiles, RankFilesMergeByTheRankOfTheWhole) {
  const TemporaryDirectory directory;
  const auto base64 = [](const std::string& bytes) {
    const char* const digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string text;
    for (std::size_t i = 0; i < bytes.size(); i += 3) {
      std::uint32_t held = 0;
      for (std::size_t k = 0; k < 3; ++k)
        held = held << 8 | (i + k < bytes.size() ? static_cast<unsigned char>(bytes[i + k]) : 0u);
      for (std::size_t k = 0; k < 4; ++k)
        text += i + k > bytes.size() ? '=' : digits[held >> (18 - 6 * k) & 63u];
    }
    return text;
  };
  const std::string path = directory / "tiny_cl100k.tiktoken";
  {
    std::ofstream out(path);
    for (int b = 0; b < 256; ++b) out << base64(std::string(1, static_cast<char>(b))) << ' ' << b << '\n';
    out << base64("bc") << " 256\n" << base64("ab") << " 257\n" << base64("abcd") << " 258\n";
  }
  const auto tokenizer = read_tokenizer(path);
  EXPECT_EQ(tokenizer->encode("abc"), (Ids{'a', 256}));
  EXPECT_EQ(tokenizer->encode("abcd"), Ids{258});  // a whole piece, though no merges lead there
  EXPECT_EQ(tokenizer->encode("ab<|endoftext|>"), (Ids{257, 100257}));
  EXPECT_EQ(tokenizer->decode(Ids{257, 100257}), "ab<|endoftext|>");
  EXPECT_EQ(tokenizer->end_of_text(), 100257);
  std::filesystem::copy_file(path, directory / "whose.tiktoken");
  expect_refusal([&] { (void)read_tokenizer(directory / "whose.tiktoken"); },
                 {"whose.tiktoken", "legal", "cl100k"});
}

// A byte changed, taken out, put in or doubled: it is read as something else, or refused; nothing else.
TEST(TokenizerMutations, AreReadOrRefused) {
  const char* const asked = std::getenv("ECHELON_MUTATIONS");
  const int wanted = asked != nullptr ? std::atoi(asked) : 300;
  const TemporaryDirectory directory;
  const std::string path = directory / "tokenizer.json";
  std::vector<std::string> files;
  const json all = expected();
  for (const auto& [name, rows] : all.items())
    files.push_back(read_text((fixtures / (name + ".json")).string()));
  std::mt19937 random(5);
  const std::string text = expected()["gpt2"].back()["text"];
  int refused = 0, read = 0;
  for (int i = 0; i < wanted; ++i) {
    std::string file = files[random() % files.size()];
    for (unsigned change = 0; change <= random() % 3; ++change) {
      const std::size_t at = random() % file.size(),
                        size = random() % std::min<std::size_t>(40, file.size() - at);
      switch (random() % 4) {
        case 0:
          file[at] = static_cast<char>(random());
          break;
        case 1:
          file.erase(at, size);
          break;
        case 2:
          file.insert(at, file.substr(at, size));
          break;
        default:
          file[at] = "0123456789-[]{}\",:eE"[random() % 20];
      }
    }
    std::ofstream(path) << file;
    try {
      const auto tokenizer = read_tokenizer(path);
      (void)tokenizer->decode(tokenizer->encode(text));
      ++read;
    } catch (const RequestError& error) {
      EXPECT_NE(std::string(error.what()).find("tokenizer.json"), std::string::npos) << error.what();
      ++refused;
    } catch (const RunError&) {
      ++read;  // a vocabulary that has no token for the text
    }
  }
  EXPECT_GT(refused, wanted / 10);
  EXPECT_GT(read, 0);
}

}  // namespace
}  // namespace echelon::tokenizer_test

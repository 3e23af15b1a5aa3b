// Text that becomes tokens once: records, compressed files, other tokenizers, and the files of tokens of
// others.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <zlib.h>
#include <zstd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/begins_document.h"
#include "data/record.h"
#include "data/tokenize.h"
#include "data/tokens.h"
#include "refusals.h"
#include "temporary_directory.h"

namespace echelon::data_test {
namespace {

namespace fs = std::filesystem;
using checks::expect_refusal;
using Ids = std::vector<std::int32_t>;

// A word is a token, and so is each other character. `dummy`: one that begins every text, as SentencePiece's
// does.
class Words final : public Tokenizer {
 public:
  explicit Words(bool dummy = false) : dummy_(dummy) {}
  std::int64_t vocab() const override { return 1002; }
  Ids encode(std::string_view text) const override {
    ++calls;
    Ids ids;
    if (dummy_ && !text.empty()) ids.push_back(1000);
    for (std::size_t at = 0; at < text.size();) {
      std::size_t end = at;
      const auto is_letter = [](unsigned char c) { return std::isalpha(c) != 0 || c >= 0x80; };
      while (end < text.size() && is_letter(static_cast<unsigned char>(text[end]))) ++end;
      if (end == at) ++end;
      std::uint32_t hash = 0;
      for (; at < end; ++at) hash = hash * 31 + static_cast<unsigned char>(text[at]);
      ids.push_back(static_cast<std::int32_t>(hash % 1000));
    }
    return ids;
  }
  std::string decode(std::span<const std::int32_t> ids, Special) const override {
    return fmt::format("{} ids", ids.size());
  }
  std::optional<std::int32_t> end_of_text() const override { return 1001; }
  std::string name() const override { return "words"; }

  mutable std::atomic<int> calls = 0;

 private:
  bool dummy_;
};

class Data : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return directory_ / name; }
  std::string write(const std::string& name, const std::string& text) const {
    fs::create_directories(fs::path(path(name)).parent_path());
    checks::write_text(path(name), text);
    return path(name);
  }
  DataReading reading() const {
    DataReading reading;
    reading.cache_directory = path("cache");
    reading.threads = 2;
    return reading;
  }
  DataReading by(std::shared_ptr<const Tokenizer> tokenizer, std::uint64_t identity = 7) const {
    DataReading r = reading();
    r.text = {std::move(tokenizer), chatml(), identity};
    return r;
  }
  const checks::TemporaryDirectory directory_;
};

Ids marked(const TokenData& data) {
  Ids ids(static_cast<std::size_t>(data.size()));
  data.copy_marked(0, data.size(), ids.data());
  return ids;
}

// What the loss counts in brackets; '|' is the end of text.
std::string shown(const TokenData& data) {
  std::string text;
  bool inside = false;
  for (const std::int32_t id : marked(data)) {
    if ((id >= 0) != inside) text += std::exchange(inside, id >= 0) ? ']' : '[';
    const std::int32_t token = id & 0x7fffffff;
    text += token == end_of_text ? '|' : static_cast<char>(token);
  }
  return text + (inside ? "]" : "");
}

std::string gzipped(const std::string& text) {
  z_stream stream{};
  EXPECT_EQ(deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string out(text.size() + 1000, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}
std::string zstandard(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
  return out;
}

std::string long_text(std::size_t bytes) {
  std::string text;
  for (int i = 0; text.size() < bytes; ++i)
    text += fmt::format("Line {} of many,\n\n  indented {}.\nNext\n", i, i * 7);
  return text;
}

// Whose lines begin with letters of more than one byte, and whose words may have no end.
std::string text_of_other_scripts(std::size_t bytes) {
  std::string text;
  for (int i = 0; text.size() < bytes; ++i) {
    text += fmt::format("Строка {} из многих.\n語言{}模型。\n", i, i * 7);
    for (int k = 0; i % 50 == 0 && k < 1000; ++k) text += k % 3 == 0 ? "日" : "本";
    text += "한국어\n";
  }
  return text;
}

TEST_F(Data, OfRecordsTheAnswersAloneCount) {
  const std::string file = write("a.jsonl",
                                 "{\"text\": \"abc\"}\n"
                                 "\n"
                                 "{\"prompt\": \"Q\", \"completion\": \"A\", \"id\": 3}\r\n"
                                 "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}, "
                                 "{\"role\": \"assistant\", \"content\": \"yo\"}]}");
  const TokenData data({file}, bytes_vocab, reading());
  EXPECT_EQ(shown(data),
            "[abc|]Q[A|]<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[yo<|im_end|>]\n|");
  EXPECT_TRUE(data.is_masked());
  EXPECT_EQ(data.kind(), TokenData::Kind::text);
  EXPECT_EQ(data.document_starts(), (std::vector<std::int64_t>{0, 4, 7}));
  ASSERT_EQ(data.files().size(), 1u);
  EXPECT_EQ(data.files()[0].documents, 3);
  EXPECT_EQ(data.files()[0].counted, 4 + 2 + 12);
  EXPECT_EQ(data.files()[0].path, file);
  // In a directory, beside text.
  write("d/b.jsonl", "{\"prompt\": \"Q\", \"completion\": \"A\"}\n");
  write("d/a.txt", "T");
  EXPECT_EQ(shown(TokenData({path("d")}, bytes_vocab, reading())), "[T|]Q[A|]");
}

// Some tokenizers begin each text with a space, or join what is on both sides of where an answer begins.
TEST_F(Data, OfAConversationTheTokensAreThoseOfTheWholeText) {
  const std::string file = write("talk.jsonl",
                                 "{\"messages\": [{\"role\": \"user\", \"content\": \"Is it so?\"}, "
                                 "{\"role\": \"assistant\", \"content\": \"Yes, it is.\"}, "
                                 "{\"role\": \"user\", \"content\": \"Why?\"}, "
                                 "{\"role\": \"assistant\", \"content\": \"It just is.\"}]}");
  const nlohmann::json talk = nlohmann::json::parse(checks::read_bytes(file))["messages"];
  for (const char* name : {"llama2", "mistral", "llama3", "qwen", "gpt2"}) {
    const std::string fixtures = std::string(ECHELON_SOURCE_DIR) + "/tests/fixtures/tokenizers/";
    write(std::string(name) + "/tokenizer.json", checks::read_bytes(fixtures + name + ".json"));
    write(std::string(name) + "/chat_template.jinja",
          "<s>{% for m in messages %}"
          "{{ '[INST] ' ~ m.content ~ ' [/INST]' if m.role == 'user' else ' ' ~ m.content ~ '</s>' }}"
          "{% endfor %}");
    DataReading r = reading();
    r.text = text_tokens(path(name));
    const Ids whole = r.text.tokenizer->encode(r.text.chat->render(talk, false, {}));
    const Ids ids = marked(TokenData({file}, r.text.tokenizer->vocab(), r));
    ASSERT_GE(ids.size(), whole.size()) << name;
    Ids counted;
    for (std::size_t i = 0; i < whole.size(); ++i) {
      EXPECT_EQ(ids[i] & 0x7fffffff, whole[i]) << name << " " << i;
      if (ids[i] >= 0) counted.push_back(ids[i]);
    }
    std::string said = r.text.tokenizer->decode(counted);
    said.erase(0, said.find_first_not_of(' '));
    EXPECT_EQ(said, said.find("</s> ") == std::string::npos ? "Yes, it is.</s>It just is.</s>"
                                                            : "Yes, it is.</s> It just is.</s>")
        << name;
  }
}

TEST_F(Data, WhatIsNoRecordIsRefusedByFileAndLine) {
  const auto refused = [&](const std::string& line, const std::vector<std::string>& words) {
    const std::string file = write("bad.jsonl", "{\"text\": \"fine\"}\n" + line + "\n");
    std::vector<std::string> all{"--data " + file + ": line 2"};
    all.insert(all.end(), words.begin(), words.end());
    expect_refusal([&] { TokenData({file}, bytes_vocab, reading()); }, all);
  };
  refused("{\"text\": ", {});
  refused("[1]", {"no JSON object"});
  refused("{\"words\": \"x\"}", {"\"text\"", "\"prompt\"", "\"messages\""});
  refused("{\"text\": 3}", {"\"text\" must be a string, and is of type number"});
  refused("{\"prompt\": \"x\"}", {"no field \"completion\""});
  refused("{\"messages\": []}", {"\"messages\" must be a list"});
  refused("{\"messages\": [{\"role\": \"user\"}]}", {"message 1", "\"content\""});
  refused("{\"messages\": [\"hello\"]}", {"message 1", "no object"});
  refused("{\"text\": \"\xff\"}", {});
  EXPECT_TRUE(!fs::exists(path("cache")) ||
              std::distance(fs::directory_iterator(path("cache")), {}) <= 1);  // its lock
}

TEST_F(Data, CompressedIsAsWhatIsInIt) {
  const std::string text = long_text(300'000),
                    records = "{\"text\": \"abc\"}\n{\"prompt\": \"Q\", \"completion\": \"A\"}\n";
  const Ids expected = marked(TokenData({write("a.txt", text)}, bytes_vocab));
  EXPECT_EQ(marked(TokenData({write("a.txt.gz", gzipped(text))}, bytes_vocab, reading())), expected);
  EXPECT_EQ(marked(TokenData({write("a.txt.zst", zstandard(text))}, bytes_vocab, reading())), expected);
  const std::string half = text.substr(0, 1000), rest = text.substr(1000);
  EXPECT_EQ(marked(TokenData({write("two.gz", gzipped(half) + gzipped(rest))}, bytes_vocab, reading())),
            expected);
  EXPECT_EQ(marked(TokenData({write("two.zst", zstandard(half) + zstandard(rest))}, bytes_vocab, reading())),
            expected);
  EXPECT_EQ(shown(TokenData({write("r.jsonl.gz", gzipped(records))}, bytes_vocab, reading())), "[abc|]Q[A|]");
  EXPECT_EQ(shown(TokenData({write("r.jsonl.zst", zstandard(records))}, bytes_vocab, reading())),
            "[abc|]Q[A|]");
  for (const std::string& name : {std::string("a.txt.gz"), std::string("a.txt.zst")}) {
    const std::string whole = checks::read_bytes(path(name)),
                      cut = write("cut-" + name, whole.substr(0, whole.size() / 2));
    expect_refusal([&] { TokenData({cut}, bytes_vocab, reading()); }, {cut, "damaged", "ends in the middle"});
    std::string flipped = whole;
    flipped[0] = 'X';
    const std::string bad = write("bad-" + name, flipped);
    expect_refusal([&] { TokenData({bad}, bytes_vocab, reading()); }, {bad, "damaged"});
  }
  const std::string binary = write("b.gz", gzipped(std::string(100, '\0')));
  expect_refusal([&] { TokenData({binary}, bytes_vocab, reading()); }, {binary, "binary"});
  expect_refusal([&] { TokenData({path("a.txt.gz")}, bytes_vocab); }, {"--data-cache"});
  DataReading nowhere = reading();
  nowhere.cache_directory = "/proc/none";
  expect_refusal([&] { TokenData({path("a.txt.gz")}, bytes_vocab, nowhere); },
                 {"--data-cache /proc/none", "legal: a directory where files can be made"});
}

TEST_F(Data, PiecesOfATextHaveTheTokensOfTheWhole) {  // long
  for (const std::string& text : {long_text(3 << 20), text_of_other_scripts(3 << 20)})
    for (const auto& [dummy, threads] : {std::pair{false, 1}, {false, 3}, {true, 1}, {true, 3}}) {
      const std::string file = write("long.txt", text);
      const auto words = std::make_shared<const Words>(dummy);
      Ids expected = words->encode(text);
      expected.push_back(1001);
      const int before = words->calls;
      DataReading r = by(words, static_cast<std::uint64_t>(10 + 2 * threads + dummy));
      r.threads = threads;
      const TokenData data({file}, 1002, r);
      EXPECT_EQ(marked(data), expected);
      EXPECT_EQ(data.kind(), TokenData::Kind::tokens);
      EXPECT_TRUE(data.from_text());
      EXPECT_FALSE(data.is_masked());
      EXPECT_EQ(data.document_starts(), std::vector<std::int64_t>{0});
      if (!dummy) {
        EXPECT_GT(words->calls - before, 2 + 2 * 3);  // it was cut
      }
    }
}

TEST_F(Data, TextIsTokenisedOnceForItsContentAndTokenizer) {
  const std::string file = write("a.txt", "some words and more words");
  const auto words = std::make_shared<const Words>();
  const TokenData first({file}, 1002, by(words));
  const int calls = words->calls;
  const TokenData again({write("other-name.txt", "some words and more words")}, 1002, by(words));
  EXPECT_EQ(words->calls, calls);
  EXPECT_EQ(marked(again), marked(first));
  EXPECT_EQ(again.fingerprint(), first.fingerprint());
  const auto made = [&] {
    return std::distance(fs::directory_iterator(path("cache")), {}) - 1;
  };  // and the lock
  EXPECT_EQ(made(), 1);
  const TokenData other({file}, 1002, by(std::make_shared<const Words>(true), 8));
  EXPECT_EQ(made(), 2);
  EXPECT_NE(other.fingerprint(), first.fingerprint());
  write("a.txt", "some words and more Words");
  const TokenData changed({file}, 1002, by(words));
  EXPECT_EQ(made(), 3);
  expect_refusal([&] { TokenData({file}, 1001, by(words)); }, {"--tokenizer words", "1002 tokens", "1001"});
  // A file beside the tokenizer's own says what ends a text.
  const auto ending = [&](const char* token) {
    const std::string directory = token;
    write(directory + "/tokenizer.json",
          checks::read_bytes(std::string(ECHELON_SOURCE_DIR) + "/tests/fixtures/tokenizers/llama2.json"));
    write(directory + "/tokenizer_config.json", fmt::format(R"({{"eos_token": "{}"}})", token));
    DataReading r = reading();
    r.text = text_tokens(path(directory));
    return marked(TokenData({file}, r.text.tokenizer->vocab(), r)).back();
  };
  EXPECT_NE(ending("</s>"), ending("<unk>"));
}

TEST_F(Data, TokensThatAreDamagedAreMadeAgain) {
  const std::string file = write("a.txt", "some words and more words");
  const auto words = std::make_shared<const Words>();
  const Ids whole = marked(TokenData({file}, 1002, by(words)));
  std::string made;
  for (const auto& entry : fs::directory_iterator(path("cache")))
    if (entry.path().extension() == ".tokens") made = entry.path();
  const std::string bytes = checks::read_bytes(made);
  for (std::size_t size : {std::size_t{0}, std::size_t{9}, bytes.size() / 2, bytes.size() - 1}) {
    for (const std::string& begin : {bytes, std::string(bytes.size(), '\0')}) {
      checks::write_text(made, begin.substr(0, size));
      EXPECT_EQ(marked(TokenData({file}, 1002, by(words))), whole) << size;
      EXPECT_EQ(checks::read_bytes(made), bytes) << size;
    }
  }
  std::string flipped = bytes;
  flipped[18] = static_cast<char>(flipped[18] ^ 1);  // of an id
  checks::write_text(made, flipped);
  EXPECT_EQ(marked(TokenData({file}, 1002, by(words))), whole);
  EXPECT_EQ(checks::read_bytes(made), bytes);
  // What a process left that was ended goes when others are made.
  checks::write_text(made + ".tmp-1", bytes);
  (void)TokenData({write("b.txt", "other words")}, 1002, by(words));
  EXPECT_FALSE(fs::exists(made + ".tmp-1"));
  EXPECT_TRUE(fs::exists(made));
}

// As the processes of a run do.
TEST_F(Data, SeveralMakeTheSameTokensOnce) {
  const std::string file = write("a.jsonl", "{\"text\": \"abc def\"}\n{\"text\": \"ghi\"}\n");
  const auto words = std::make_shared<const Words>();
  std::vector<std::thread> threads;
  std::vector<Ids> found(4);
  for (Ids& ids : found) threads.emplace_back([&] { ids = marked(TokenData({file}, 1002, by(words))); });
  for (std::thread& thread : threads) thread.join();
  for (const Ids& ids : found) EXPECT_EQ(ids, found.front());
  EXPECT_EQ(found.front().size(), 3u + 1 + 1 + 1);
  EXPECT_EQ(words->calls, 2 + 2);  // what surrounds a text is asked for by two, and each record once
}

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

std::string megatron_index(int code, const std::vector<std::int32_t>& lengths,
                           const std::vector<std::int64_t>& places,
                           const std::vector<std::int64_t>& documents) {
  return std::string("MMIDIDX\0\0", 9) + bytes_of(std::vector<std::uint64_t>{1}) + static_cast<char>(code) +
         bytes_of(std::vector<std::uint64_t>{lengths.size(), documents.size()}) + bytes_of(lengths) +
         bytes_of(places) + bytes_of(documents);
}

TEST_F(Data, MegatronsFilesAreRead) {
  const std::string bin = write("m.bin", bytes_of(std::vector<std::uint16_t>{1, 2, 3, 4, 5, 6}));
  write("m.idx", megatron_index(8, {2, 1, 3}, {0, 4, 6}, {0, 2, 3}));
  const TokenData data({bin}, 7);
  EXPECT_EQ(marked(data), (Ids{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(data.document_starts(), (std::vector<std::int64_t>{0, 3}));
  EXPECT_EQ(data.files()[0].kind, "Megatron");
  EXPECT_EQ(TokenData({path("")}, 7).notes(), "");  // the index belongs to it
  expect_refusal([&] { TokenData({bin}, 6); }, {"m.bin", "token 5 is id 6"});
  expect_refusal([&] { TokenData({path("m.idx")}, 7); }, {"m.idx", "index of a .bin"});
  const std::string wide = write("w.bin", bytes_of(std::vector<std::int32_t>{70000, 2}));
  write("w.idx", megatron_index(4, {2}, {0}, {0, 1}));
  EXPECT_EQ(marked(TokenData({wide}, 70001)), (Ids{70000, 2}));
  const auto refused = [&](const std::string& index, const std::vector<std::string>& words) {
    write("m.idx", index);
    expect_refusal([&] { TokenData({bin}, 7); }, words);
  };
  refused("MMIDI", {"m.idx", "truncated"});
  refused(std::string(50, 'x'), {"m.idx", "MMIDIDX"});
  refused(megatron_index(6, {6}, {0}, {0, 1}), {"type 6", "legal: 4"});
  refused(megatron_index(8, {5}, {0}, {0, 1}), {"m.bin", "12 bytes", "5 tokens"});
  refused(megatron_index(8, {3, 3}, {0, 4}, {0, 2}), {"sequence 1", "byte 4"});
  refused(megatron_index(8, {6}, {0}, {0, 1000, 2000, 1}), {"document 1", "sequence 1000"});
  refused(megatron_index(8, {6}, {0}, {0}), {"do not cover"});
}

TEST_F(Data, IdsAloneAreReadWhereSomethingSaysThatTheyAre) {
  const std::string ids = bytes_of(std::vector<std::uint16_t>{5, 6, 7, 8});
  const std::string bare = write("bare/train.bin", ids), known = write("nano/train.bin", ids);
  write("nano/meta.pkl", "pickled");
  expect_refusal([&] { TokenData({bare}, 9); }, {"train.bin", "meta.pkl", "--raw-tokens"});
  EXPECT_EQ(marked(TokenData({known}, 9)), (Ids{5, 6, 7, 8}));
  DataReading raw;
  raw.raw_width = 2;
  EXPECT_EQ(marked(TokenData({bare}, 9, raw)), (Ids{5, 6, 7, 8}));
  raw.raw_width = 4;
  EXPECT_EQ(marked(TokenData({bare}, 1 << 20, raw)), (Ids{5 + (6 << 16), 7 + (8 << 16)}));
  const std::string odd = write("odd.bin", "abc");
  expect_refusal([&] { TokenData({odd}, 9, raw); }, {"odd.bin", "3 bytes"});
}

TEST_F(Data, FilesOfTokensKeepDocumentsAndMarksAndAreRefusedWhereDamaged) {
  const std::string file = path("a.tokens");
  TokenStoreWriter writer(file, 4, 99);
  writer.begin_document();
  writer.write(std::vector<std::uint32_t>{1, 2 | not_counted});
  writer.begin_document();
  writer.write(std::vector<std::uint32_t>{3});
  writer.commit();
  const TokenData data({file}, 4);
  EXPECT_EQ(marked(data), (Ids{1, static_cast<std::int32_t>(2 | not_counted), 3}));
  EXPECT_EQ(data.token(1), 2);
  EXPECT_EQ(data.document_starts(), (std::vector<std::int64_t>{0, 2}));
  EXPECT_EQ(data.files()[0].counted, 2);
  EXPECT_EQ(token_store_info(OpenFile(file))->tokenizer, 99u);
  expect_refusal([&] { TokenData({file}, 3); }, {"a.tokens", "id 3"});
  const std::string whole = checks::read_bytes(file);
  for (const std::string& damaged : {whole.substr(0, whole.size() - 1), whole.substr(0, 40), whole + "x",
                                     whole.substr(0, 16) + whole.substr(24)}) {
    checks::write_text(file, damaged);
    expect_refusal([&] { TokenData({file}, 4); }, {"a.tokens", "damaged"});
  }
  // Each bit of the ids, their marks, where documents begin, and the counts.
  for (std::size_t bit = 64; bit < 8 * (whole.size() - 8); ++bit) {
    std::string damaged = whole;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ 1 << bit % 8);
    checks::write_text(file, damaged);
    expect_refusal([&] { TokenData({file}, 4); }, {"a.tokens", "damaged", "make it again"});
  }
  std::string earlier = whole;
  earlier[7] = '1';
  checks::write_text(file, earlier);
  expect_refusal([&] { TokenData({file}, 4); }, {"a.tokens", "earlier version", "make it again"});
}

// Whose tokens a file has is said where text would be read by another tokenizer.
TEST_F(Data, TokensOfAnotherTokenizerAreSaid) {
  const auto words = std::make_shared<const Words>();
  const DataReading r = by(words, 9);
  tokenize_file(OpenFile(write("a.txt", "some words"), "--data"), path("nine.tokens"), r.text, 1, {});
  EXPECT_EQ(TokenData({path("nine.tokens")}, 1002, by(words, 9)).notes(), "");
  EXPECT_EQ(TokenData({path("nine.tokens")}, 1002, reading()).notes(), "");  // bytes are not asked for
  EXPECT_EQ(TokenData({path("nine.tokens")}, 1002, by(words, 8)).notes(),
            path("nine.tokens") + ": its tokens are those of another tokenizer's file, not of words\n");
}

// Records' beginnings, which the token that ends a turn as well would not tell.
TEST_F(Data, SamplesSayWhereDocumentsBegin) {
  TokenData data({write("a.jsonl", "{\"text\": \"abc\"}\n{\"text\": \"de\"}\n{\"text\": \"fghi\"}\n")},
                 bytes_vocab, reading());
  const Sampler sampler(data, {0, data.size()}, 1);
  Ids tokens(8), targets(8);
  const auto begins = [&](std::int64_t first) {
    sampler.window(first, 8, tokens.data(), targets.data());
    std::string places;
    for (std::int32_t& id : tokens) {
      places += (id & begins_document) != 0 ? 'x' : '.';
      id &= ~begins_document;
    }
    EXPECT_TRUE(std::equal(tokens.begin() + 1, tokens.end(), targets.begin()));
    return places;
  };
  EXPECT_EQ(begins(0), "........");
  data.cut_documents();
  EXPECT_EQ(begins(0), "x...x..x");  // abc|de|fghi|
  EXPECT_EQ(begins(2), "x.x..x..");
  EXPECT_EQ(begins(3), "xx..x...");
  // Of ids alone nobody knows it.
  write_token_file(path("ids.bin"), std::vector<std::int32_t>(20, 3), 2);
  TokenData ids({path("ids.bin")}, 10);
  ids.cut_documents();
  Sampler(ids, {0, 20}, 1).window(0, 8, tokens.data(), targets.data());
  EXPECT_EQ(tokens, Ids(8, 3));
}

// In validation each token counts once, and windows without one are passed over.
TEST_F(Data, WindowsWithATargetLieSideBySide) {
  const std::string answer = "{\"prompt\": \"" + std::string(29, 'p') + "\", \"completion\": \"yes\"}\n";
  const TokenData data({write("a.jsonl", answer + answer)}, bytes_vocab, reading());  // of 33 tokens each
  const Sampler sampler(data, {0, data.size()}, 1);
  EXPECT_EQ(sampler.windows(8, 10), (std::vector<std::int64_t>{24, 56}));  // targets 29 to 32, and 62 to 65
  EXPECT_EQ(sampler.windows(8, 1), (std::vector<std::int64_t>{24}));
  EXPECT_EQ(Sampler(data, {0, 24}, 1).windows(8, 10), std::vector<std::int64_t>());
}

// A long prompt between short answers: most windows have nothing to learn.
TEST_F(Data, EverySampleHasATarget) {
  std::string records;
  for (int i = 0; i < 5; ++i)
    records += "{\"prompt\": \"" + std::string(200, 'p') + "\", \"completion\": \"yes\"}\n";
  const TokenData data({write("a.jsonl", records)}, bytes_vocab, reading());
  const Range range{0, data.size()};
  const Sampler sampler(data, range, 3);
  Ids tokens(16), targets(16), again(16);
  int moved = 0;
  const Ids all = marked(data);
  for (std::int64_t i = 0; i < 200; ++i) {
    sampler.sample(1, i, 16, tokens.data(), targets.data());
    EXPECT_GT(std::count_if(targets.begin(), targets.end(), [](std::int32_t t) { return t >= 0; }), 0);
    for (std::size_t t = 0; t + 1 < tokens.size(); ++t)
      if (targets[t] >= 0) {
        EXPECT_EQ(targets[t], tokens[t + 1]);
      }
    const std::int64_t start = sampler.start(1, i, 16);
    const auto begin = all.begin() + start + 1;
    if (std::all_of(begin, begin + 16, [](std::int32_t id) { return id < 0; })) {
      ++moved;
    } else {
      for (std::size_t t = 0; t < 16; ++t)
        EXPECT_EQ(targets[t], std::max(begin[static_cast<std::ptrdiff_t>(t)], -1));
    }
    sampler.sample(1, i, 16, again.data(), targets.data());
    EXPECT_EQ(again, tokens);
  }
  EXPECT_GT(moved, 100);
  EXPECT_EQ(next_counted(data, {0, 200}), 200);
  EXPECT_EQ(next_counted(data, range), 200);
}

}  // namespace
}  // namespace echelon::data_test

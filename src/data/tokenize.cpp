#include "data/tokenize.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

#include "base/error.h"
#include "base/in_parallel.h"
#include "data/checksum.h"
#include "data/record.h"
#include "data/text_input.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t piece_bytes = 1 << 20, batch_bytes = 4 << 20, longest_line = std::size_t{256} << 20;
constexpr std::uint64_t recipe_version = 3;  // of what is made of a text; part of a cached file's name

using Ids = std::vector<std::uint32_t>;

void append(Ids& to, const std::vector<std::int32_t>& ids, bool counted) {
  for (const std::int32_t id : ids)
    to.push_back(static_cast<std::uint32_t>(id) | (counted ? 0 : not_counted));
}

// What the tokenizer puts before and after a text of any words.
struct Surroundings {
  std::vector<std::int32_t> before, after;
};
Surroundings surroundings(const Tokenizer& tokenizer) {
  // Of a letter, or of what one of its own tokens stands for where it has none for that.
  std::string text = "a";
  std::vector<std::int32_t> inside = tokenizer.encode(text);
  for (std::int32_t id = 0; inside.empty() && id < tokenizer.vocab(); ++id) try {
      text = tokenizer.decode(std::span(&id, 1), Special::dropped);
      inside = tokenizer.encode(text);
    } catch (const RequestError&) {  // an id without a token
    }
  const auto whole = tokenizer.encode_whole(text);
  const auto at = std::search(whole.begin(), whole.end(), inside.begin(), inside.end());
  Surroundings around;
  if (at != whole.end()) {
    around.before.assign(whole.begin(), at);
    around.after.assign(at + std::ssize(inside), whole.end());
  }
  const auto end = tokenizer.end_of_text();
  if (end && (around.after.empty() || around.after.back() != *end)) around.after.push_back(*end);
  return around;
}

// A record, or a piece of a text.
struct TextWork {
  std::string text;
  std::int64_t line = 0;  // of a record
  bool begins = true, ends = true;
  Ids ids{};
};

bool is_white(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
bool is_inside_character(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

// Whether a letter stands there. Of UTF-8 by its first byte, or two: the scripts of the world, without the
// blocks of marks and pictures between them.
bool begins_with_letter(std::string_view text) {
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const unsigned first = byte(0);
  if (first < 0x80) return (first >= 'a' && first <= 'z') || (first >= 'A' && first <= 'Z');
  return (first >= 0xC3 && first <= 0xE1) || (first == 0xE3 && byte(1) > 0x80) ||
         (first >= 0xE4 && first <= 0xED);
}

// Reads a file as work. Of a text, pieces whose tokens are together those of the whole.
class WorkReader {
 public:
  WorkReader(const OpenFile& file, const Tokenizer& tokenizer)
      : file_(&file), tokenizer_(&tokenizer), records_(holds_records(file.path())), input_(open_text(file)) {}

  // About `bytes` of it; none at the end.
  std::vector<TextWork> next(std::size_t bytes) {
    std::vector<TextWork> batch;
    for (std::size_t have = 0; have < bytes && (records_ ? next_record(batch) : next_piece(batch));)
      have += batch.back().text.size();
    return batch;
  }
  double done() const { return input_->done(); }
  bool records() const { return records_; }

 private:
  bool read_more() {
    const std::size_t have = buffer_.size();
    buffer_.resize(have + piece_bytes);
    const std::size_t got = input_->read(std::as_writable_bytes(std::span(buffer_).subspan(have)));
    buffer_.resize(have + got);
    return got > 0;
  }

  bool next_record(std::vector<TextWork>& batch) {
    for (;;) {
      std::size_t end = buffer_.find('\n', std::max(begin_, looked_at_));
      while (end == std::string::npos) {
        if (buffer_.size() - begin_ > longest_line)
          refuse("--data {}: line {}: longer than {} bytes, the most that a record may have", file_->path(),
                 line_ + 1, longest_line);
        buffer_.erase(0, std::exchange(begin_, 0));
        looked_at_ = buffer_.size();
        if (!read_more()) break;
        end = buffer_.find('\n', looked_at_);
      }
      if (end == std::string::npos) {
        if (begin_ == buffer_.size()) return false;
        end = buffer_.size();
      }
      std::string line = buffer_.substr(begin_, end - begin_);
      begin_ = looked_at_ = std::min(end + 1, buffer_.size());
      ++line_;
      if (std::all_of(line.begin(), line.end(), is_white)) continue;
      batch.push_back({std::move(line), line_});
      return true;
    }
  }

  bool next_piece(std::vector<TextWork>& batch) {
    if (ended_) return false;
    for (;;) {
      const bool more = read_more();
      if (!more) {
        ended_ = true;
        if (buffer_.empty() && !began_) return false;
        batch.push_back({std::exchange(buffer_, {}), 0, !std::exchange(began_, true), true});
        return true;
      }
      const std::size_t cut = seam();
      if (cut == 0) continue;
      batch.push_back({buffer_.substr(0, cut), 0, !std::exchange(began_, true), false});
      buffer_.erase(0, cut);
      return true;
    }
  }

  // The last place where the tokens of the text before and after it are those of both together; 0: none. At
  // an end of a line after a word and before a letter: tokenizers that split text into words first split it
  // there. Of a text that grows nothing is looked at twice.
  std::size_t seam() {
    int tries = 0;
    const std::size_t until = std::max<std::size_t>(2, std::exchange(looked_at_, buffer_.size() - 1));
    for (std::size_t at = buffer_.size() - 1; at > until && most_refused_ > 0 && tries < 8; --at) {
      if (buffer_[at - 1] != '\n' || is_white(buffer_[at - 2]) ||
          !begins_with_letter(std::string_view(buffer_).substr(at)))
        continue;
      ++tries;
      if (is_seam(at)) {
        looked_at_ = 0;
        return at;
      }
      --most_refused_;
    }
    return 0;
  }
  // By the words around it, or, where these are long, as much of them.
  bool is_seam(std::size_t at) const {
    constexpr std::size_t most = 256;
    const std::string_view text = buffer_;
    std::size_t first = at > most ? at - most : 0;
    while (first > 0 && is_inside_character(text[first])) ++first;
    std::size_t word = first;
    while (word > 0 && word < at - 1 && !is_white(text[word - 1])) ++word;
    if (word < at - 1) first = word;
    std::size_t last = std::min(text.size(), at + most);
    while (last < text.size() && is_inside_character(text[last])) --last;
    word = last;
    while (word < text.size() && word > at + 1 && !is_white(text[word])) --word;
    if (word > at + 1) last = word;
    auto apart = tokenizer_->encode(text.substr(first, at - first));
    const auto after = tokenizer_->encode(text.substr(at, last - at));
    apart.insert(apart.end(), after.begin(), after.end());
    return apart == tokenizer_->encode(text.substr(first, last - first));
  }

  const OpenFile* file_;
  const Tokenizer* tokenizer_;
  bool records_;
  std::unique_ptr<TextInput> input_;
  std::string buffer_;
  std::size_t begin_ = 0;  // of records
  std::size_t looked_at_ = 0;
  std::int64_t line_ = 0;
  bool began_ = false, ended_ = false;
  int most_refused_ = 32;  // places; a tokenizer that has none is not asked at every line
};

// The parts of one text: its tokens, of which those count that have something of a part that does.
void append_as_one(Ids& to, const Tokenizer& tokenizer, const std::vector<TextPart>& parts) {
  std::string text;
  Ids apart, whole;
  for (const TextPart& part : parts) {
    text += part.text;
    append(apart, tokenizer.encode(part.text), part.counted);
  }
  append(whole, tokenizer.encode(text), false);
  const auto same_id = [](std::uint32_t a, std::uint32_t b) { return ((a ^ b) & ~not_counted) == 0; };
  if (std::equal(apart.begin(), apart.end(), whole.begin(), whole.end(), same_id)) {
    to.insert(to.end(), apart.begin(), apart.end());
    return;
  }
  // How many tokens of the text are those of its first `size` bytes alone, and whether these end with one.
  const auto tokens_of_first = [&](std::size_t size) {
    Ids first;
    append(first, tokenizer.encode(text.substr(0, size)), false);
    const auto end = std::mismatch(first.begin(), first.end(), whole.begin(), whole.end(), same_id).first;
    return std::pair{end - first.begin(), end == first.end()};
  };
  std::size_t at = 0;
  for (const TextPart& part : parts) {
    const std::size_t end = at + part.text.size();
    if (part.counted) {
      const auto [inside, is_end] = tokens_of_first(end);
      const auto last =
          std::min(end == text.size() ? std::ssize(whole) : inside + !is_end, std::ssize(whole));
      for (auto i = tokens_of_first(at).first; i < last; ++i)
        whole[static_cast<std::size_t>(i)] &= ~not_counted;
    }
    at = end;
  }
  to.insert(to.end(), whole.begin(), whole.end());
}

void encode(TextWork& work, const OpenFile& file, const TextTokens& text, const Surroundings& around,
            bool records) {
  const Tokenizer& tokenizer = *text.tokenizer;
  Record record;
  if (records)
    record = read_record(work.text, fmt::format("--data {}: line {}", file.path(), work.line), *text.chat);
  else
    record.parts.push_back({std::move(work.text), true});
  const bool all =
      std::all_of(record.parts.begin(), record.parts.end(), [](const TextPart& p) { return p.counted; });
  if (work.begins && !record.begun) append(work.ids, around.before, all);
  const std::size_t nothing = work.ids.size();
  if (record.is_one)
    append_as_one(work.ids, tokenizer, record.parts);
  else
    for (const TextPart& part : record.parts) append(work.ids, tokenizer.encode(part.text), part.counted);
  if (records && work.ids.size() == nothing) {
    work.ids.clear();
    return;
  }
  if (work.ends) append(work.ids, around.after, record.end_counted);
}

constexpr const char *cache_lock = ".lock", *cached_end = ".tokens", *half_made = ".tokens.tmp-";

// Whether a cache's files have such names.
bool is_of_cache(const std::string& name) {
  constexpr std::size_t digits = 16;
  if (name == cache_lock || name == cache_owner) return true;
  if (name.find_first_not_of("0123456789abcdef") != digits) return false;
  const std::string end = name.substr(digits);
  return end == cached_end || end.starts_with(half_made);
}

// Held while one makes what others wait for. A file system that locks nothing does no harm: each then makes
// it.
class WaitingLock {
 public:
  explicit WaitingLock(const std::string& path)
      : fd_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
    if (fd_ < 0)
      refuse("--data-cache {}: cannot be written: {}; legal: a directory where files can be made", path,
             std::strerror(errno));
    while (!(holds_ = ::flock(fd_, LOCK_EX) == 0) && errno == EINTR) {
    }
  }
  ~WaitingLock() { ::close(fd_); }
  WaitingLock(const WaitingLock&) = delete;
  WaitingLock& operator=(const WaitingLock&) = delete;
  bool holds() const { return holds_; }

 private:
  int fd_;
  bool holds_ = false;
};

}  // namespace

bool holds_records(const std::string& path) {
  const std::string name = uncompressed_name(path);
  return name.ends_with(".jsonl") || name.ends_with(".ndjson");
}

TokenStoreInfo tokenize_file(const OpenFile& file, const std::string& out, const TextTokens& text,
                             int threads, const Progress& progress) {
  const Tokenizer& tokenizer = *text.tokenizer;
  const Surroundings around = surroundings(tokenizer);
  WorkReader reader(file, tokenizer);
  const bool records = reader.records();
  TokenStoreWriter writer(out, records || tokenizer.vocab() > 65536 ? 4 : 2, text.identity);
  const auto much = batch_bytes * static_cast<std::size_t>(std::max(threads, 1));
  for (;;) {
    report(progress, reader.done(), "tokenising " + file.path());
    std::vector<TextWork> batch = reader.next(much);
    if (batch.empty()) break;
    in_parallel("tokenising", threads, batch.size(),
                [&](std::size_t i) { encode(batch[i], file, text, around, records); });
    for (const TextWork& work : batch) {
      if (work.ids.empty() && (records || !work.begins)) continue;
      if (work.begins) writer.begin_document();
      writer.write(work.ids);
    }
  }
  writer.commit();
  return writer.info();
}

std::string cached_tokens(const OpenFile& file, const std::string& directory, const TextTokens& text,
                          int threads, const Progress& progress) {
  std::error_code error;
  fs::create_directories(directory, error);
  if (error)
    refuse("--data-cache {}: cannot be made: {}; legal: a directory where files can be made", directory,
           error.message());
  report(progress, -1, "reading " + file.path());
  const bool records = holds_records(file.path());
  const std::array<std::uint64_t, 7> facts{
      recipe_version, checksum(file), static_cast<std::uint64_t>(file.size()), text.identity,
      // Which a file beside the tokenizer's own may say.
      static_cast<std::uint64_t>(text.tokenizer->end_of_text().value_or(-1)),
      records ? text.chat->identity() : 0,
      // What the bytes are of: the same may be a text and a compressed one by another name.
      static_cast<std::uint64_t>(records) | (is_compressed(file.path()) ? 2u : 0u)};
  const fs::path path =
      fs::path(directory) / fmt::format("{:016x}{}", checksum(std::as_bytes(std::span(facts))), cached_end);
  // What is damaged, as by a full disk or a machine that lost its power, is made again: all of it is read.
  const auto is_there = [&] {
    std::error_code none;
    if (!fs::exists(path, none)) return false;
    try {
      const OpenFile made(path.string(), "--data-cache");
      const auto info = token_store_info(made);
      if (!info || info->tokenizer != text.identity) return false;
      check_token_store(made, *info);
      return true;
    } catch (const RequestError&) {
      return false;
    }
  };
  if (is_there()) return path.string();
  const WaitingLock lock((fs::path(directory) / cache_lock).string());
  if (is_there()) return path.string();
  if (lock.holds())  // what others were making when they were ended
    for (const auto& entry : fs::directory_iterator(directory, error))
      if (entry.path().filename().string().find(half_made) != std::string::npos)
        fs::remove(entry.path(), error);
  tokenize_file(file, path.string(), text, threads, progress);
  return path.string();
}

std::string find_stranger_in_cache(const std::string& directory) {
  std::string first;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename().string();
    const bool is_ours = is_of_cache(name) && entry.symlink_status().type() == fs::file_type::regular;
    if (!is_ours && (first.empty() || name < first)) first = name;
  }
  return first;
}

void remove_token_cache(const std::string& directory) {
  std::error_code error;
  std::vector<fs::path> ours;
  for (const auto& entry : fs::directory_iterator(directory, error))
    if (is_of_cache(entry.path().filename().string())) ours.push_back(entry.path());
  for (const fs::path& path : ours) fs::remove(path, error);
  (void)::rmdir(directory.c_str());
}

}  // namespace echelon

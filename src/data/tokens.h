// Training text as one long sequence of token ids, and which part of it each training sample is.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/open_file.h"
#include "base/philox.h"
#include "base/progress.h"
#include "base/split.h"
#include "data/text_tokens.h"
#include "text/tokenizer.h"

namespace echelon {

// What is said of the files of --data beside their paths.
struct DataReading {
  TextTokens text{};
  // Where the tokens of text are kept that is not read as bytes as it is: cached_tokens(). Empty: such is
  // refused.
  std::string cache_directory{};
  int raw_width =
      0;  // of the ids of .bin files without a header, in bytes: 2 or 4; 0: they are not said to be any
  int threads = 1;
  Progress progress{};
};

// The files of --data, one after the other. Read by the bytes tokenizer, files of text are what they are.
// Other tokenizers, records of JSON (.jsonl, record.h) and compressed text (.gz, .zst) are read once
// (tokenize.h), and from then on the tokens that they gave (token_store.h). Token files are those of llm.c
// (https://github.com/karpathy/llm.c): 256 int32 of header (magic, version, count), then the ids,
// little-endian; magic 20240520, version 1: uint16; magic 20240801, version 7: uint32; a .bin of Megatron
// beside its .idx; a .bin of uint16 alone, of nanoGPT, beside a meta.pkl or where `raw_width` says so; and
// .tokens. What is neither, such as a picture, is passed over in a directory, and refused where it is named.
// Nothing is kept of the files but where they are: what is asked for is read then (RunError where a file has
// become shorter since). Safe to share by threads.
class TokenData {
 public:
  enum class Kind { text, tokens };

  // Each path is a text file, a token file, or a directory: the regular files below it in the order of their
  // paths, without symbolic links to files that are read anyway, without empty files and without the cache.
  // All must be text, or all tokens. Every id is checked to be below `vocab` here, once. Throws RequestError
  // naming the file.
  TokenData(const std::vector<std::string>& paths, std::int64_t vocab, const DataReading& reading = {});

  // Whose ids they are: those of bytes, or of another tokenizer.
  Kind kind() const { return from_text_ && reads_bytes_ ? Kind::text : Kind::tokens; }
  bool from_text() const { return from_text_; }
  // Whether the loss leaves out some of the tokens.
  bool is_masked() const;
  std::int64_t size() const { return size_; }
  std::int64_t vocab() const { return vocab_; }  // that its ids are below
  // What lies in the directories and is not read, and which tokens are of another tokenizer than text is read
  // by: lines for people; "" where there is nothing of the kind.
  const std::string& notes() const { return notes_; }
  // 16 hexadecimal digits of the kind, the number and the sizes of the files, and their bytes: XXH3-64 of all
  // of them up to 64 MiB, and beyond that of 1024 blocks of 64 KiB spread evenly from the first byte to the
  // last. What files are called does not count.
  const std::string& fingerprint() const { return fingerprint_; }
  // RunError naming a file that was written to since it was opened, as far as reads have seen, if
  // `fingerprint` is no longer that of the bytes. (What was only added to a file is not read.)
  void check_unchanged() const;
  std::int64_t num_files() const { return static_cast<std::int64_t>(parts_.size()); }
  std::int32_t token(std::int64_t i) const;
  // out[i] = token(begin + i) for i in [0, count); the range must lie inside [0, size()) (InvariantError).
  void copy(std::int64_t begin, std::int64_t count, std::int32_t* out) const;
  // The same; one that the loss does not count has its highest bit set too (it is negative).
  void copy_marked(std::int64_t begin, std::int64_t count, std::int32_t* out) const;

  // A file as it is read.
  struct File {
    std::string path, kind;
    std::int64_t tokens = 0, documents = 0, counted = 0;  // documents 0: not known
  };
  const std::vector<File>& files() const { return files_; }
  // The first token of each document, of the files that know theirs.
  std::vector<std::int64_t> document_starts() const;
  // From now on samples say where documents begin, if all files know it; whether they do.
  bool cut_documents();

 private:
  friend class Sampler;
  struct Part {
    OpenFile file;
    std::int64_t begin = 0;  // of its first token in the whole
    std::int64_t count = 0;  // tokens, the end of text included
    int width = 1;           // bytes of a stored id
    std::int64_t ids = 0;    // where they begin in the file
  };
  // Why it is not read, in a word or two; empty where it is.
  std::string add_file(const std::string& path, bool named_by_user, std::int64_t vocab,
                       const DataReading& reading);
  std::string add_text(OpenFile file, bool named_by_user, std::int64_t vocab, const DataReading& reading);
  void add_part(Part part, File file, bool is_text);

  std::string fingerprint_of_files() const;
  void read_bytes(std::int64_t begin, std::span<std::byte> out) const;  // of all files, one after the other

  std::string notes_, fingerprint_;
  bool from_text_ = true, reads_bytes_ = true;
  std::vector<Part> parts_;  // none empty
  std::vector<File> files_;  // of the same
  std::vector<std::int64_t> cuts_;  // where documents begin, that samples say
  std::int64_t size_ = 0, vocab_ = 0;
};

// Ids of `width` 2 (uint16) or 4 (uint32) bytes in the format above; RequestError where an id or the count
// does not fit, RunError where the file cannot be written.
void write_token_file(const std::string& path, std::span<const std::int32_t> tokens, int width);

struct Split {
  Range train, validation;
};

// Holds the last `validation_fraction` out of training; nothing when that is shorter than one sequence and
// its next token. Throws RequestError when the rest is.
Split split_tokens(std::int64_t num_tokens, double validation_fraction, std::int64_t seq_len);

// The first tokens of `range` from which a sample of text goes on, `most` of them at most and at least one:
// of text whole words where the range has any, else from the range's beginning.
std::vector<std::int32_t> sample_prompt(const TokenData& data, Range range, std::int64_t most);

// The first token of the range that the loss counts; its end where there is none.
std::int64_t next_counted(const TokenData& data, Range range);

// Training samples: windows that start anywhere in `range`, chosen by (seed, step, index) alone.
class Sampler {
 public:
  // `data` must outlive the sampler.
  Sampler(const TokenData& data, Range range, std::uint64_t seed)
      : data_(&data), range_(range), seed_(seed) {}

  // Sample `index` of the global batch of step `step`: tokens[t] and the token that follows it, targets[t], t
  // < seq_len; -1 where the loss does not count it. There is one that it counts: a window without goes on to
  // the next (after the last: the first).
  void sample(std::int64_t step, std::int64_t index, std::int64_t seq_len, std::int32_t* tokens,
              std::int32_t* targets) const;
  std::int64_t start(std::int64_t step, std::int64_t index, std::int64_t seq_len) const;  // of that window
  // The window that begins at `first`, whatever it has.
  void window(std::int64_t first, std::int64_t seq_len, std::int32_t* tokens, std::int32_t* targets) const;
  // Where the first `most` windows begin, one behind the other, in which the loss counts something.
  std::vector<std::int64_t> windows(std::int64_t seq_len, std::int64_t most) const;

 private:
  const TokenData* data_;
  Range range_;
  std::uint64_t seed_;
};

}  // namespace echelon

// Training text as one long sequence of token ids, and which part of it each training sample is.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/open_file.h"
#include "base/philox.h"
#include "base/split.h"
#include "text/tokenizer.h"

namespace echelon {

// The files of --data, one after the other. Text files are read by the bytes tokenizer. Token files are those
// of llm.c (https://github.com/karpathy/llm.c): 256 int32 of header (magic, version, count), then the ids,
// little-endian; magic 20240520, version 1: uint16; magic 20240801, version 7: uint32. What is neither, such
// as a picture, is passed over in a directory, and refused where it is named. Nothing is kept of the files
// but where they are: what is asked for is read then (RunError where a file has become shorter since). Safe
// to share by threads.
class TokenData {
 public:
  enum class Kind { text, tokens };

  // Each path is a text file, a token file, or a directory: the regular files below it in the order of their
  // paths, without symbolic links to files that are read anyway and without empty files. All must be of one
  // kind. Every id is checked to be below `vocab` here, once. Throws RequestError naming the file.
  TokenData(const std::vector<std::string>& paths, std::int64_t vocab);

  Kind kind() const { return kind_; }
  std::int64_t size() const { return size_; }
  // What lies in the directories and is not read: lines for people; "" where there is nothing of the kind.
  const std::string& skipped() const { return skipped_; }
  // 16 hexadecimal digits of the kind, the number and the sizes of the files, and their bytes: XXH3-64 of all
  // of them up to 64 MiB, and beyond that of 1024 blocks of 64 KiB spread evenly from the first byte to the
  // last. What files are called does not count.
  const std::string& fingerprint() const { return fingerprint_; }
  std::int64_t num_files() const { return static_cast<std::int64_t>(parts_.size()); }
  std::int32_t token(std::int64_t i) const;
  // out[i] = token(begin + i) for i in [0, count); the range must lie inside [0, size()) (InvariantError).
  void copy(std::int64_t begin, std::int64_t count, std::int32_t* out) const;

 private:
  struct Part {
    OpenFile file;
    std::int64_t begin = 0;  // of its first token in the whole
    std::int64_t count = 0;  // tokens, the end of text included
    int width = 1;           // bytes of a stored id
  };
  // Why it is not read, in a word or two; empty where it is.
  std::string add_file(const std::string& path, bool named_by_user, std::int64_t vocab);

  void take_fingerprint();
  void read_bytes(std::int64_t begin, std::span<std::byte> out) const;  // of all files, one after the other

  std::string skipped_, fingerprint_;
  Kind kind_ = Kind::text;
  std::vector<Part> parts_;  // none empty
  std::int64_t size_ = 0;
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

// Training samples: windows that start anywhere in `range`, chosen by (seed, step, index) alone.
class Sampler {
 public:
  // `data` must outlive the sampler.
  Sampler(const TokenData& data, Range range, std::uint64_t seed)
      : data_(&data), range_(range), seed_(seed) {}

  // Sample `index` of the global batch of step `step`: tokens[t] and the token that follows it, targets[t], t
  // < seq_len.
  void sample(std::int64_t step, std::int64_t index, std::int64_t seq_len, std::int32_t* tokens,
              std::int32_t* targets) const;
  std::int64_t start(std::int64_t step, std::int64_t index, std::int64_t seq_len) const;  // of that window

 private:
  const TokenData* data_;
  Range range_;
  std::uint64_t seed_;
};

}  // namespace echelon

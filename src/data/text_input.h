// Files of text as streams: as they are, or what is compressed in them.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "base/open_file.h"

namespace echelon {

class TextInput {
 public:
  virtual ~TextInput() = default;
  // Fills the beginning of `out` and returns how many bytes that were; 0 at the end alone. RequestError
  // naming the file where what is compressed in it is damaged or cut short, RunError where it cannot be read.
  virtual std::size_t read(std::span<std::byte> out) = 0;
  // How much of the file has been read, for people.
  virtual double done() const = 0;
};

bool is_compressed(const std::string& path);             // by its name: .gz, .zst
std::string uncompressed_name(const std::string& path);  // a.jsonl of a.jsonl.gz

// The file must outlive it.
std::unique_ptr<TextInput> open_text(const OpenFile& file);

// Of the file's bytes as they are compressed in it. A build for planning alone refuses.
std::unique_ptr<TextInput> open_gzip(const OpenFile& file);
std::unique_ptr<TextInput> open_zstd(const OpenFile& file);

}  // namespace echelon

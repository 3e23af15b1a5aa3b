#include "data/tokens.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include <sys/stat.h>

#include "base/atomic_file.h"
#include "base/begins_document.h"
#include "base/error.h"
#include "base/units.h"
#include "base/utf8.h"
#include "data/checksum.h"
#include "data/megatron_index.h"
#include "data/text_input.h"
#include "data/token_store.h"
#include "data/tokenize.h"

namespace echelon {

namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

constexpr std::int32_t magic_u16 = 20240520, version_u16 = 1;
constexpr std::int32_t magic_u32 = 20240801, version_u32 = 7;
constexpr std::size_t header_ints = 256, header_bytes = header_ints * 4;

// Where a token file has its ids.
struct StoredIds {
  const char* kind;
  int width = 2;
  std::int64_t count = 0, at = 0;
  std::int64_t documents = 0, counted = 0;
  // Where the file says it: TextTokens::identity, and one above the largest id.
  std::optional<std::uint64_t> tokenizer{};
  std::optional<std::int64_t> vocab{};
};

constexpr std::size_t read_at_once = 64 * 1024;
// The first files stay open; those that come after are opened when they are read. (OpenFile::close())
constexpr std::size_t most_open = 256;

std::int32_t header_word(std::span<const std::byte> bytes, std::size_t i) {
  std::int32_t word = 0;
  std::memcpy(&word, bytes.data() + 4 * i, 4);
  return word;
}

// `bytes` is how the file begins. Nothing when that is with none of the magic numbers.
std::optional<StoredIds> llm_c_ids(const OpenFile& file, std::span<const std::byte> bytes) {
  const char* path = file.path().c_str();
  const std::int64_t size = file.size();
  if (bytes.size() < 4) return {};
  const std::int32_t magic = header_word(bytes, 0);
  if (magic != magic_u16 && magic != magic_u32) return {};
  if (bytes.size() < header_bytes)
    refuse("--data {}: truncated token file: {} bytes, its header alone has {}", path, size, header_bytes);
  const std::int32_t version = magic == magic_u16 ? version_u16 : version_u32;
  if (header_word(bytes, 1) != version) {
    refuse("--data {}: token file of version {}; with magic {} only version {} is known", path,
           header_word(bytes, 1), magic, version);
  }
  const std::int64_t count = header_word(bytes, 2);
  const StoredIds header{"llm.c", magic == magic_u16 ? 2 : 4, count, header_bytes, 0, count};
  if (header.count < 0) refuse("--data {}: token file with a count of {} tokens", path, header.count);
  const std::int64_t expected = static_cast<std::int64_t>(header_bytes) + header.count * header.width;
  if (size != expected) {
    refuse("--data {}: {} token file: {} bytes, but {} tokens of {} bytes make {}", path,
           size < expected ? "truncated" : "damaged", size, header.count, header.width, expected);
  }
  return header;
}

// Nothing where the file is none of tokens.
std::optional<StoredIds> stored_ids(const OpenFile& file, std::span<const std::byte> beginning,
                                    int raw_width) {
  namespace fs = std::filesystem;
  if (const auto info = token_store_info(file)) {
    check_token_store(file, *info);
    return StoredIds{"tokens",        info->width,   info->tokens,    info->offset,
                     info->documents, info->counted, info->tokenizer, info->vocab};
  }
  if (auto ids = llm_c_ids(file, beginning)) return ids;
  if (!file.path().ends_with(".bin")) return {};
  std::error_code none;
  if (has_megatron_index(file.path())) {
    const MegatronIndex index = read_megatron_index(file);
    return StoredIds{"Megatron", index.width, index.tokens, 0, std::ssize(index.documents), index.tokens};
  }
  if (raw_width == 0 && fs::exists(fs::path(file.path()).parent_path() / "meta.pkl", none)) raw_width = 2;
  if (raw_width == 0) return {};
  const std::int64_t count = file.size() / raw_width;
  if (file.size() % raw_width != 0)
    refuse("--data {}: {} bytes are no number of ids of {} bytes", file.path(), file.size(), raw_width);
  return StoredIds{"ids alone", raw_width, count, 0, 0, count};
}

template <class Id>
Id id_at(const std::byte* bytes, std::int64_t i) {
  Id id = 0;
  std::memcpy(&id, bytes + static_cast<std::size_t>(i) * sizeof(Id), sizeof(Id));
  return id;
}

// In pieces, so that a file needs no more memory than another.
template <class Id>
void check_ids(const OpenFile& file, std::int64_t at, std::int64_t count, std::int64_t vocab, Id mark) {
  constexpr auto width = static_cast<std::int64_t>(sizeof(Id));
  std::vector<std::byte> piece(read_at_once);
  for (std::int64_t begin = 0; begin < count;) {
    const std::int64_t here = std::min(count - begin, std::ssize(piece) / width);
    file.read(at + begin * width, std::span(piece).first(static_cast<std::size_t>(here * width)));
    Id largest = 0;  // a loop without a branch runs at the speed of memory
    for (std::int64_t i = 0; i < here; ++i)
      largest = std::max<Id>(largest, id_at<Id>(piece.data(), i) & static_cast<Id>(~mark));
    for (std::int64_t i = 0; static_cast<std::int64_t>(largest) >= vocab && i < here; ++i)
      if (const Id id = id_at<Id>(piece.data(), i) & static_cast<Id>(~mark);
          static_cast<std::int64_t>(id) >= vocab)
        refuse("--data {}: token {} is id {}, and the model's vocabulary ends at {}", file.path(), begin + i,
               id, vocab - 1);
    begin += here;
  }
}

template <class Id>
void copy_ids(const OpenFile& file, std::int64_t at, std::int64_t count, std::int32_t* out) {
  constexpr auto width = static_cast<std::int64_t>(sizeof(Id));
  std::array<std::byte, 16384> piece;  // a whole sample, mostly
  while (count > 0) {
    const std::int64_t here = std::min(count, std::ssize(piece) / width);
    file.read(at, std::span(piece).first(static_cast<std::size_t>(here * width)));
    for (std::int64_t i = 0; i < here; ++i) out[i] = static_cast<std::int32_t>(id_at<Id>(piece.data(), i));
    at += here * width;
    count -= here;
    out += here;
  }
}

struct Candidate {
  std::string path;
  bool link = false;           // a symbolic link found in a directory
  bool named_by_user = false;  // rather than found in a directory
};

constexpr const char* binary = "binary";

bool is_hidden(const std::filesystem::path& path) { return path.filename().string().starts_with('.'); }

// Judged by its beginning, `bytes`: text has no NUL, and no other control characters unless it is UTF-8.
bool is_binary(std::span<const std::byte> bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const auto is_control = [](char c) {  // but white space, backspace and escape
    const auto code = static_cast<unsigned char>(c);
    return code < 0x08 || (code > 0x0d && code < 0x20 && code != 0x1b);
  };
  if (text.find('\0') != std::string_view::npos) return true;
  return std::any_of(text.begin(), text.end(), is_control) && !is_utf8(text);
}

using FileId = std::pair<dev_t, ino_t>;

FileId file_id(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) refuse("--data {}: {}", path, std::strerror(errno));
  return {status.st_dev, status.st_ino};
}

using LeftOut = std::map<std::string, std::vector<std::string>>;  // paths in directories, by why

// Without `cache`, which is none of the data where it lies among them. What is hidden belongs to a program
// (.git, .cache) rather than to the text.
void list_directory(const std::string& directory, const std::string& cache, std::vector<Candidate>& out,
                    LeftOut& left_out) {
  namespace fs = std::filesystem;
  std::vector<Candidate> found;
  bool is_empty = true;
  std::vector<fs::path> left{directory};
  while (!left.empty()) {
    const fs::path at = std::move(left.back());
    left.pop_back();
    std::error_code error;
    for (fs::directory_iterator entry(at, error); !error && entry != fs::directory_iterator();
         entry.increment(error)) {
      std::error_code gone;  // a link that leads nowhere is neither
      const std::string path = entry->path().string();
      const bool is_directory = entry->is_directory(gone);
      if (is_directory && fs::equivalent(entry->path(), cache, gone)) continue;
      const bool is_searched = is_directory && !entry->is_symlink(gone) && !is_hidden(entry->path());
      is_empty = is_empty && is_searched;
      if (is_searched)
        left.push_back(entry->path());
      else if (is_hidden(entry->path()))
        left_out["hidden"].push_back(path);
      else if (is_directory)
        left_out["a link to a directory"].push_back(path);
      else if (entry->is_regular_file(gone))
        found.push_back({path, entry->is_symlink(), false});
      else
        left_out["not a regular file"].push_back(path);
    }
    if (error) refuse("--data {}: cannot be read: {}", at.string(), error.message());
  }
  if (is_empty) refuse("--data {}: the directory holds no files", directory);
  // By bytes, so that the order is the same everywhere.
  std::sort(found.begin(), found.end(),
            [](const Candidate& a, const Candidate& b) { return a.path < b.path; });
  out.insert(out.end(), found.begin(), found.end());
}

// All files of --data in their final order.
std::vector<Candidate> list_files(const std::vector<std::string>& paths, const std::string& cache,
                                  LeftOut& left_out) {
  namespace fs = std::filesystem;
  if (paths.empty()) refuse("--data: no path is given; give text files, directories or token files");
  std::vector<Candidate> all;
  for (const std::string& path : paths) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    if (status.type() == fs::file_type::not_found) refuse("--data {}: no such file or directory", path);
    if (status.type() == fs::file_type::none) refuse("--data {}: {}", path, error.message());
    if (status.type() == fs::file_type::directory) {
      list_directory(path, cache, all, left_out);
    } else {
      all.push_back({path, false, true});
    }
  }
  std::set<FileId> seen;
  for (const Candidate& file : all) {
    if (!file.link) seen.insert(file_id(file.path));
  }
  std::erase_if(
      all, [&seen](const Candidate& file) { return file.link && !seen.insert(file_id(file.path)).second; });
  return all;
}

}  // namespace

TokenData::TokenData(const std::vector<std::string>& paths, std::int64_t vocab, const DataReading& reading)
    : reads_bytes_(reading.text.reads_bytes()), vocab_(vocab) {
  constexpr int most_shown = 3;
  LeftOut left_out;
  for (const Candidate& file : list_files(paths, reading.cache_directory, left_out))
    if (const std::string why = add_file(file.path, file.named_by_user, vocab, reading); !why.empty())
      left_out[why].push_back(file.path);
  for (auto& [why, files] : left_out) {
    std::sort(files.begin(), files.end());
    const std::size_t more = files.size() - std::min<std::size_t>(files.size(), most_shown);
    files.resize(files.size() - more);
    notes_ += fmt::format("skipped {}{}: {}\n", fmt::join(files, ", "),
                          more > 0 ? fmt::format(" and {} more", more) : "", why);
  }
  if (!parts_.empty()) {
    fingerprint_ = fingerprint_of_files();
    return;
  }
  std::string why = notes_.empty() ? "" : "; " + notes_.substr(0, notes_.size() - 1);
  std::replace(why.begin(), why.end(), '\n', ';');
  refuse("--data {}: {}{}", paths.front(),
         why.empty() ? "nothing but empty files" : "holds no text and no tokens", why);
}

std::string TokenData::add_file(const std::string& path, bool named_by_user, std::int64_t vocab,
                                const DataReading& reading) {
  OpenFile file(path, "--data");
  std::vector<std::byte> beginning(std::min(static_cast<std::size_t>(file.size()), read_at_once));
  file.read(0, beginning);
  const std::optional<StoredIds> ids = stored_ids(file, beginning, reading.raw_width);
  if (!ids && named_by_user && path.ends_with(".bin")) {
    refuse(
        "--data {}: not a token file: it begins with neither {} nor {} (llm.c), and has no .idx (Megatron) "
        "and no "
        "meta.pkl (nanoGPT) beside it; with --raw-tokens it is ids alone; rename it if it is text",
        path, magic_u16, magic_u32);
  }
  std::error_code none;
  if (!ids && path.ends_with(".idx") &&
      std::filesystem::exists(path.substr(0, path.size() - 4) + ".bin", none)) {
    if (!named_by_user) return "";  // read with its .bin
    refuse("--data {}: the index of a .bin; name that", path);
  }
  if (!ids) return file.size() == 0 ? "" : add_text(std::move(file), named_by_user, vocab, reading);
  if (ids->count == 0) return "";
  if (ids->tokenizer && !reading.text.reads_bytes() && *ids->tokenizer != reading.text.identity)
    notes_ += fmt::format("{}: its tokens are those of {}, not of {}\n", path,
                          *ids->tokenizer == 0 ? "bytes" : "another tokenizer's file",
                          reading.text.tokenizer->name());
  const bool has_marks = std::string_view(ids->kind) == "tokens" && ids->width == 4;
  if (!ids->vocab || *ids->vocab > vocab)
    ids->width == 2 ? check_ids<std::uint16_t>(file, ids->at, ids->count, vocab, 0)
                    : check_ids<std::uint32_t>(file, ids->at, ids->count, vocab, has_marks ? not_counted : 0);
  add_part({std::move(file), size_, ids->count, ids->width, ids->at},
           {path, ids->kind, ids->count, ids->documents, ids->counted}, false);
  return "";
}

std::string TokenData::add_text(OpenFile file, bool named_by_user, std::int64_t vocab,
                                const DataReading& reading) {
  const std::string path = file.path();
  const bool records = holds_records(path), as_it_is = reads_bytes_ && !records && !is_compressed(path);
  std::vector<std::byte> beginning(read_at_once);
  beginning.resize(open_text(file)->read(beginning));
  if (beginning.empty()) return "";
  if (is_binary(beginning)) {
    if (!named_by_user) return binary;
    refuse("--data {}: {}: neither text nor a token file{}", path, binary,
           path.ends_with(".gz") || path.ends_with(".zst") ? ", as far as it is compressed" : "");
  }
  const std::int64_t needed = reading.text.tokenizer->vocab();
  if (vocab < needed) {
    if (reads_bytes_)
      refuse("--data {}: text needs a vocabulary of {} (bytes and end of text); the model's is {}", path,
             needed, vocab);
    refuse(
        "--tokenizer {}: has {} tokens, and the model's vocabulary is {}; legal: the tokenizer of the model",
        reading.text.tokenizer->name(), needed, vocab);
  }
  if (as_it_is) {
    const std::int64_t count = file.size() + 1;
    add_part({std::move(file), size_, count, 1, 0}, {path, "text", count, 1, count}, true);
    return "";
  }
  if (reading.cache_directory.empty())
    refuse("--data {}: its tokens need a place to be kept; give one with --data-cache DIR", path);
  OpenFile made(cached_tokens(file, reading.cache_directory, reading.text, reading.threads, reading.progress),
                "--data");
  const auto info = token_store_info(made);
  check(info.has_value(), "what was made of a text is a file of tokens");
  if (info->tokens == 0) return "";
  if (info->vocab > vocab)
    refuse("--data {}: has id {}, and the model's vocabulary ends at {}", made.path(), info->vocab - 1,
           vocab - 1);
  add_part({std::move(made), size_, info->tokens, info->width, info->offset},
           {path, records ? "records" : "text", info->tokens, info->documents, info->counted}, true);
  return "";
}

void TokenData::add_part(Part part, File file, bool is_text) {
  if (!parts_.empty() && is_text != from_text_) {
    const std::string& first = files_.front().path;
    refuse("--data {} is a token file and {} is text: all files must be of one kind",
           is_text ? first : file.path, is_text ? file.path : first);
  }
  from_text_ = is_text;
  size_ += part.count;
  if (parts_.size() >= most_open) part.file.close();
  parts_.push_back(std::move(part));
  files_.push_back(std::move(file));
}

std::vector<std::int64_t> TokenData::document_starts() const {
  std::vector<std::int64_t> all;
  for (const Part& part : parts_) {
    std::vector<std::int64_t> here;
    if (part.width == 1) {
      here.push_back(0);
    } else if (const auto info = token_store_info(part.file)) {
      here = echelon::document_starts(part.file, *info);
    } else if (part.ids == 0 && has_megatron_index(part.file.path())) {
      here = read_megatron_index(part.file).documents;
    }
    for (const std::int64_t start : here) all.push_back(part.begin + start);
  }
  return all;
}

bool TokenData::cut_documents() {
  const bool all_know =
      std::all_of(files_.begin(), files_.end(), [](const File& file) { return file.documents > 0; });
  if (all_know) cuts_ = document_starts();
  return all_know;
}

bool TokenData::is_masked() const {
  return std::any_of(files_.begin(), files_.end(),
                     [](const File& file) { return file.counted < file.tokens; });
}

void TokenData::read_bytes(std::int64_t begin, std::span<std::byte> out) const {
  for (const Part& part : parts_) {
    if (out.empty()) return;
    if (begin < part.file.size()) {
      const auto here =
          static_cast<std::size_t>(std::min<std::int64_t>(part.file.size() - begin, std::ssize(out)));
      part.file.read(begin, out.first(here));
      out = out.subspan(here);
    }
    begin = std::max<std::int64_t>(begin - part.file.size(), 0);
  }
}

void TokenData::check_unchanged() const {
  const auto changed =
      std::find_if(parts_.begin(), parts_.end(), [](const Part& part) { return part.file.was_written_to(); });
  if (changed == parts_.end() || fingerprint_of_files() == fingerprint_) return;
  fail_for_good("--data {}: was changed while it was read; what was trained since is of other data",
                changed->file.path());
}

std::string TokenData::fingerprint_of_files() const {
  constexpr std::int64_t block = read_at_once, most_blocks = 1024;
  std::vector<std::uint64_t> facts{kind() == Kind::tokens, parts_.size()};
  std::int64_t bytes = 0;
  for (const Part& part : parts_) {
    facts.push_back(static_cast<std::uint64_t>(part.file.size()));
    bytes += part.file.size();
  }
  std::vector<std::byte> piece(read_at_once);
  const std::int64_t blocks = std::min((bytes + block - 1) / block, most_blocks);
  const bool all = blocks * block >= bytes;
  for (std::int64_t i = 0; i < blocks; ++i) {
    // In floating point: the product of the two may be beyond 63 bits, and a byte to and fro does not matter.
    const auto spread = static_cast<std::int64_t>(static_cast<double>(bytes - block) *
                                                  static_cast<double>(i) / static_cast<double>(blocks - 1));
    const std::int64_t begin = all ? i * block : spread;
    const auto here = std::span(piece).first(static_cast<std::size_t>(std::min(block, bytes - begin)));
    read_bytes(begin, here);
    facts.push_back(checksum(here));
  }
  return fmt::format("{:016x}", checksum(std::as_bytes(std::span(facts))));
}

std::int32_t TokenData::token(std::int64_t i) const {
  std::int32_t id = 0;
  copy(i, 1, &id);
  return id;
}

void TokenData::copy(std::int64_t begin, std::int64_t count, std::int32_t* out) const {
  copy_marked(begin, count, out);
  for (std::int64_t i = 0; i < count; ++i) out[i] &= std::numeric_limits<std::int32_t>::max();
}

void TokenData::copy_marked(std::int64_t begin, std::int64_t count, std::int32_t* out) const {
  check(begin >= 0 && count >= 0 && begin <= size_ && count <= size_ - begin, "tokens outside the data");
  if (count == 0) return;
  auto part = std::upper_bound(parts_.begin(), parts_.end(), begin,
                               [](std::int64_t at, const Part& p) { return at < p.begin; });
  for (--part; count > 0; ++part) {
    const std::int64_t first = begin - part->begin, here = std::min(count, part->count - first);
    if (part->width == 2) {
      copy_ids<std::uint16_t>(part->file, part->ids + 2 * first, here, out);
    } else if (part->width == 4) {
      copy_ids<std::uint32_t>(part->file, part->ids + 4 * first, here, out);
    } else {
      const bool to_the_end = first + here == part->count;
      copy_ids<std::uint8_t>(part->file, first, here - (to_the_end ? 1 : 0), out);
      if (to_the_end) out[here - 1] = end_of_text;
    }
    begin += here;
    count -= here;
    out += here;
  }
}

void write_token_file(const std::string& path, std::span<const std::int32_t> tokens, int width) {
  if (width != 2 && width != 4) refuse("{}: token ids of {} bytes; legal: 2 or 4", path, width);
  constexpr std::size_t most = std::numeric_limits<std::int32_t>::max();
  if (tokens.size() > most) refuse("{}: {} tokens; a token file holds at most {}", path, tokens.size(), most);
  const std::int32_t largest = width == 2 ? 65535 : std::numeric_limits<std::int32_t>::max();
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] > largest) {
      refuse("{}: token {} is id {}; {} bytes hold 0 to {}", path, i, tokens[i], width, largest);
    }
  }
  std::array<std::int32_t, header_ints> header{};
  header[0] = width == 2 ? magic_u16 : magic_u32;
  header[1] = width == 2 ? version_u16 : version_u32;
  header[2] = static_cast<std::int32_t>(tokens.size());
  AtomicFile file(path);
  file.write(header.data(), header_bytes);
  for (const std::int32_t id : tokens) file.write(&id, static_cast<std::size_t>(width));  // its low bytes
  file.commit();
}

Split split_tokens(std::int64_t num_tokens, double validation_fraction, std::int64_t seq_len) {
  if (!(validation_fraction >= 0 && validation_fraction < 1)) {
    refuse("--val-fraction {}: must be a number from 0 to below 1", validation_fraction);
  }
  if (seq_len < 1) refuse("--seq-len {}: must be at least 1", seq_len);
  // Written without seq_len + 1, which can overflow.
  if (num_tokens <= seq_len) {
    refuse("--data: text of {} is shorter than one sequence of {} + 1{}", counted(num_tokens, "token"),
           seq_len,
           num_tokens > 1 ? fmt::format("; legal: more text, or --seq-len up to {}", num_tokens - 1) : "");
  }
  auto held_out =
      static_cast<std::int64_t>(std::floor(static_cast<double>(num_tokens) * validation_fraction));
  if (held_out <= seq_len) held_out = 0;
  const std::int64_t cut = num_tokens - held_out;
  if (cut <= seq_len) {
    refuse(
        "--data: text of {} tokens, {} of them left for training after a --val-fraction of {}, is shorter "
        "than one sequence of {} + 1",
        num_tokens, cut, validation_fraction, seq_len);
  }
  return {{0, cut}, {cut, num_tokens}};
}

std::vector<std::int32_t> sample_prompt(const TokenData& data, Range range, std::int64_t most) {
  constexpr std::int64_t longest_word = 64;
  const auto tokens = [&](std::int64_t begin, std::int64_t count) {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
    data.copy(begin, count, ids.data());
    return ids;
  };
  const auto plain = [&] { return tokens(range.begin, std::min(most, range.size())); };
  if (data.kind() == TokenData::Kind::tokens) return plain();
  const auto is_space = [](std::int32_t id) {
    return id == end_of_text || id == ' ' || (id >= 9 && id <= 13);
  };
  // A word begins after a space, or where the text does.
  const bool is_mid_text = range.begin > 0 && !is_space(data.token(range.begin - 1));
  std::vector<std::int32_t> ids = tokens(range.begin, std::min(range.size(), longest_word + most));
  auto first = ids.begin();
  if (is_mid_text) first = std::find_if(first, ids.end(), is_space);
  first = std::find_if_not(first, ids.end(), is_space);
  auto last = first + std::min<std::int64_t>(most, ids.end() - first);
  last = std::find(first, last, end_of_text);
  if (last != ids.end() && !is_space(*last)) {  // in the middle of a word
    const auto space =
        std::find_if(std::make_reverse_iterator(last), std::make_reverse_iterator(first), is_space);
    if (space.base() != first) last = space.base() - 1;
  }
  if (first == last) return plain();
  return {first, last};
}

std::int64_t Sampler::start(std::int64_t step, std::int64_t index, std::int64_t seq_len) const {
  const std::int64_t num_starts = range_.size() - seq_len;  // the last token is a target only
  check(seq_len > 0 && num_starts > 0, "the sampler's range is shorter than one sequence");
  const Philox random(seed_, Stream::data_order, static_cast<std::uint64_t>(step));
  const std::uint64_t at =
      random.below(static_cast<std::uint64_t>(index), static_cast<std::uint64_t>(num_starts));
  return range_.begin + static_cast<std::int64_t>(at);
}

void Sampler::sample(std::int64_t step, std::int64_t index, std::int64_t seq_len, std::int32_t* tokens,
                     std::int32_t* targets) const {
  const std::int64_t first = start(step, index, seq_len);
  window(first, seq_len, tokens, targets);
  const auto none_counts = [&] {
    return std::all_of(targets, targets + seq_len, [](std::int32_t id) { return id < 0; });
  };
  if (!none_counts()) return;
  std::int64_t target = next_counted(*data_, {first + 1, range_.end});
  if (target == range_.end) target = next_counted(*data_, {range_.begin + 1, range_.end});
  // In the middle of its window, so that it has something before it.
  window(std::clamp(target - 1 - seq_len / 2, range_.begin, range_.end - seq_len - 1), seq_len, tokens,
         targets);
  check(!none_counts(), "a sampler of a range where the loss counts something");
}

void Sampler::window(std::int64_t first, std::int64_t seq_len, std::int32_t* tokens,
                     std::int32_t* targets) const {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(seq_len + 1));  // read at once
  data_->copy_marked(first, seq_len + 1, ids.data());
  for (std::int64_t t = 0; t < seq_len; ++t) {
    const auto at = static_cast<std::size_t>(t);
    tokens[t] = ids[at] & std::numeric_limits<std::int32_t>::max();
    targets[t] = std::max(ids[at + 1], -1);
  }
  const std::vector<std::int64_t>& cuts = data_->cuts_;
  if (cuts.empty()) return;
  tokens[0] |= begins_document;
  for (auto cut = std::upper_bound(cuts.begin(), cuts.end(), first);
       cut != cuts.end() && *cut < first + seq_len; ++cut)
    tokens[*cut - first] |= begins_document;
}

std::vector<std::int64_t> Sampler::windows(std::int64_t seq_len, std::int64_t most) const {
  std::vector<std::int64_t> begin;
  for (std::int64_t first = range_.begin; std::ssize(begin) < most && first + seq_len < range_.end;
       first += seq_len) {
    const Range targets{first + 1, first + seq_len + 1};
    if (next_counted(*data_, targets) < targets.end) begin.push_back(first);
  }
  return begin;
}

std::int64_t next_counted(const TokenData& data, Range range) {
  std::vector<std::int32_t> ids(16384);
  for (std::int64_t at = range.begin; at < range.end;) {
    const std::int64_t here = std::min(range.end - at, std::ssize(ids));
    data.copy_marked(at, here, ids.data());
    const auto found = std::find_if(ids.begin(), ids.begin() + here, [](std::int32_t id) { return id >= 0; });
    if (found != ids.begin() + here) return at + (found - ids.begin());
    at += here;
  }
  return range.end;
}

}  // namespace echelon

#include "data/megatron_index.h"

#include <array>
#include <cstring>
#include <filesystem>

#include "base/error.h"

namespace echelon {
namespace {

constexpr std::array<char, 9> index_magic{'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};
constexpr std::int64_t index_header_bytes = 34;

template <class T>
std::vector<T> read_list(const OpenFile& file, std::int64_t at, std::int64_t count) {
  std::vector<T> list(static_cast<std::size_t>(count));
  file.read(at, std::as_writable_bytes(std::span(list)));
  return list;
}

std::string index_path(const std::string& bin) { return bin.substr(0, bin.size() - 4) + ".idx"; }

}  // namespace

bool has_megatron_index(const std::string& bin) {
  std::error_code none;
  return bin.ends_with(".bin") && std::filesystem::exists(index_path(bin), none);
}

MegatronIndex read_megatron_index(const OpenFile& bin) {
  const OpenFile file(index_path(bin.path()), "--data");
  const std::string& path = file.path();
  std::array<std::byte, index_header_bytes> header{};
  if (file.size() < index_header_bytes)
    refuse("--data {}: truncated index of Megatron: {} bytes", path, file.size());
  file.read(0, header);
  if (std::memcmp(header.data(), index_magic.data(), index_magic.size()) != 0)
    refuse("--data {}: not an index of Megatron: it does not begin with MMIDIDX", path);
  const auto word = [&](std::size_t at) {
    std::uint64_t value = 0;
    std::memcpy(&value, header.data() + at, 8);
    return value;
  };
  if (word(9) != 1) refuse("--data {}: an index of version {}; legal: 1", path, word(9));
  const int code = std::to_integer<int>(header[17]);
  if (code != 4 && code != 8) refuse("--data {}: ids of type {}; legal: 4 (int32), 8 (uint16)", path, code);
  MegatronIndex index;
  index.width = code == 8 ? 2 : 4;
  const auto most = static_cast<std::uint64_t>(file.size());  // each takes bytes of the file
  if (word(18) > most || word(26) > most || word(26) < 1)
    refuse("--data {}: damaged index: {} sequences and {} documents in {} bytes", path, word(18), word(26),
           most);
  const auto sequences = static_cast<std::int64_t>(word(18)), bounds = static_cast<std::int64_t>(word(26));
  if (const std::int64_t expected = index_header_bytes + 12 * sequences + 8 * bounds; file.size() != expected)
    refuse("--data {}: damaged index: {} bytes, but {} sequences and {} documents make {}", path, file.size(),
           sequences, bounds - 1, expected);
  const auto lengths = read_list<std::int32_t>(file, index_header_bytes, sequences);
  const auto places = read_list<std::int64_t>(file, index_header_bytes + 4 * sequences, sequences);
  const auto firsts = read_list<std::int64_t>(file, index_header_bytes + 12 * sequences, bounds);
  std::vector<std::int64_t> begins{0};
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] < 0 || places[i] != begins.back() * index.width)
      refuse("--data {}: sequence {} of {} tokens at byte {} does not lie behind the one before", path, i,
             lengths[i], places[i]);
    begins.push_back(begins.back() + lengths[i]);
  }
  index.tokens = begins.back();
  if (bin.size() != index.tokens * index.width)
    refuse("--data {}: {} bytes, but its index has {} tokens of {} bytes", bin.path(), bin.size(),
           index.tokens, index.width);
  if (firsts.front() != 0 || firsts.back() != sequences)
    refuse("--data {}: damaged index: its documents do not cover its sequences", path);
  for (std::size_t i = 0; i + 1 < firsts.size(); ++i) {
    if (firsts[i] < 0 || firsts[i] > firsts[i + 1] || firsts[i] > sequences)
      refuse("--data {}: damaged index: document {} begins at sequence {}", path, i, firsts[i]);
    index.documents.push_back(begins[static_cast<std::size_t>(firsts[i])]);
  }
  return index;
}

}  // namespace echelon

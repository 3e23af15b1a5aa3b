// Byte-pair encoding (Sennrich 2016): of all neighbours that may become one token, those of the lowest rank
// do first, the leftmost of them before the others.
#include <algorithm>
#include <array>
#include <bit>

#include "text/byte_characters.h"
#include "text/json_fields.h"
#include "text/token_model.h"
#include "text/unicode.h"

namespace echelon {
namespace {

using nlohmann::json;

constexpr std::uint32_t no_rank = ~0u;

// Open addressing; an entry is 16 bytes, so that a look-up is one line of cache as a rule.
class PairTable {
 public:
  explicit PairTable(const std::vector<BpePair>& pairs)
      : entries_(std::bit_ceil(pairs.size() * 2 + 2)), mask_(entries_.size() - 1) {
    for (const BpePair& pair : pairs) {
      Entry& entry = entries_[place(pair.left, pair.right)];
      entry = {pair.left, pair.right, pair.rank, pair.id};  // of two alike the last counts
    }
  }
  std::uint32_t find(std::int32_t left, std::int32_t right, std::int32_t& id) const {
    const Entry& entry = entries_[place(left, right)];
    id = entry.id;
    return entry.rank;
  }

 private:
  struct Entry {
    std::int32_t left = -1, right = -1;
    std::uint32_t rank = no_rank;
    std::int32_t id = 0;
  };
  std::size_t place(std::int32_t left, std::int32_t right) const {
    const std::uint64_t key = static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 |
                              static_cast<std::uint32_t>(right);
    std::size_t at = (key * 0x9e3779b97f4a7c15u >> 24) & mask_;
    while (entries_[at].left >= 0 && (entries_[at].left != left || entries_[at].right != right))
      at = (at + 1) & mask_;
    return at;
  }
  std::vector<Entry> entries_;
  std::size_t mask_;
};

class Bpe final : public TokenModel {
 public:
  Bpe(TokenIds ids, const std::vector<BpePair>& pairs, BpeOptions options, bool raw_bytes)
      : ids_(std::move(ids)), pairs_(pairs), options_(std::move(options)), raw_bytes_(raw_bytes) {
    byte_ids_.fill(-1);
    for (int b = 0; b < 256; ++b) {
      const std::string name =
          raw_bytes ? std::string(1, static_cast<char>(b)) : fmt::format("<0x{:02X}>", b);
      if (const auto found = ids_.find(name); found != ids_.end())
        byte_ids_[static_cast<std::size_t>(b)] = found->second;
    }
    const std::string metaspace = "\u2581";
    if (raw_bytes || !ids_.contains(metaspace) || !options_.prefix.empty() || !options_.suffix.empty() ||
        options_.ignore_merges)
      return;
    // No token goes on with the mark after another character: then none is made over such a place.
    for (const auto& [name, id] : ids_) {
      bool other = false;
      for (std::size_t i = 0; i < name.size();) {
        const bool is_mark = next_character(name, i) == U'\u2581';
        if (is_mark && other) return;
        other = other || !is_mark;
      }
    }
    mark_ = metaspace;
  }

  std::string_view mark() const override { return mark_; }

  void encode(std::string_view piece, ModelScratch& scratch, std::vector<std::int32_t>& ids) const override {
    if (options_.ignore_merges)
      if (const auto found = ids_.find(piece); found != ids_.end()) return ids.push_back(found->second);
    scratch.symbols.clear();
    if (raw_bytes_)
      start_with_bytes(piece, scratch);
    else
      start_with_characters(piece, scratch);
    if (scratch.symbols.size() <= 48)
      merge_few(scratch);
    else
      merge_many(scratch);
    for (const auto& symbol : scratch.symbols)
      if (symbol.length > 0) ids.push_back(symbol.id);
  }

 private:
  static void add(ModelScratch& scratch, std::int32_t id, std::size_t length) {
    scratch.symbols.push_back({id, -1, -1, static_cast<std::uint32_t>(length)});
  }

  void start_with_bytes(std::string_view piece, ModelScratch& scratch) const {
    for (const char c : piece) {
      const std::int32_t id = byte_ids_[static_cast<unsigned char>(c)];
      if (id >= 0)
        add(scratch, id, 1);
      else
        add_unknown(scratch, 1);
    }
  }

  void start_with_characters(std::string_view piece, ModelScratch& scratch) const {
    std::string dressed;
    std::size_t unknown = 0;  // bytes of unknown characters that are not in yet
    const auto flush = [&] {
      if (unknown > 0) add(scratch, options_.unknown, unknown);
      unknown = 0;
    };
    for (std::size_t i = 0; i < piece.size();) {
      const std::size_t begin = i;
      next_character(piece, i);
      std::string_view character = piece.substr(begin, i - begin);
      if ((begin > 0 && !options_.prefix.empty()) || (i == piece.size() && !options_.suffix.empty())) {
        dressed = (begin > 0 ? options_.prefix : "") + std::string(character) +
                  (i == piece.size() ? options_.suffix : "");
        character = dressed;
      }
      if (const auto found = ids_.find(character); found != ids_.end()) {
        flush();
        add(scratch, found->second, i - begin);
        continue;
      }
      if (options_.byte_fallback && std::all_of(character.begin(), character.end(), [&](char c) {
            return byte_ids_[static_cast<unsigned char>(c)] >= 0;
          })) {
        for (const char c : character) add(scratch, byte_ids_[static_cast<unsigned char>(c)], 1);
        continue;
      }
      if (options_.unknown < 0) continue;  // as in `tokenizers`: nothing stands for it
      if (!options_.fuse_unknown) flush();
      unknown += i - begin;
    }
    flush();
  }

  void add_unknown(ModelScratch& scratch, std::size_t length) const {
    if (options_.unknown < 0) return;
    if (options_.fuse_unknown && !scratch.symbols.empty() && scratch.symbols.back().id == options_.unknown)
      scratch.symbols.back().length += static_cast<std::uint32_t>(length);
    else
      add(scratch, options_.unknown, length);
  }

  // Ranks beside the symbols, of each with its right neighbour; the smallest is looked for each time.
  void merge_few(ModelScratch& scratch) const {
    auto& symbols = scratch.symbols;
    auto& ranks = scratch.ranks;
    auto count = symbols.size();
    if (count < 2) return;
    ranks.resize(count);
    std::int32_t id = 0;
    for (std::size_t i = 0; i + 1 < count; ++i) ranks[i] = pairs_.find(symbols[i].id, symbols[i + 1].id, id);
    while (count > 1) {
      std::size_t best = 0;
      for (std::size_t i = 1; i + 1 < count; ++i)
        if (ranks[i] < ranks[best]) best = i;
      if (ranks[best] == no_rank) break;
      pairs_.find(symbols[best].id, symbols[best + 1].id, id);
      symbols[best].id = id;
      symbols[best].length += symbols[best + 1].length;
      for (std::size_t i = best + 1; i + 1 < count; ++i) {
        symbols[i] = symbols[i + 1];
        ranks[i] = ranks[i + 1];
      }
      --count;
      if (best + 1 < count) ranks[best] = pairs_.find(symbols[best].id, symbols[best + 1].id, id);
      if (best > 0) ranks[best - 1] = pairs_.find(symbols[best - 1].id, symbols[best].id, id);
    }
    symbols.resize(count);
  }

  // A heap of what may be merged; what a merge has overtaken is passed over when it comes up.
  void merge_many(ModelScratch& scratch) const {
    auto& symbols = scratch.symbols;
    auto& merges = scratch.merges;
    merges.clear();
    const auto later = [](const ModelScratch::Merge& a, const ModelScratch::Merge& b) {
      return a.rank != b.rank ? a.rank > b.rank : a.at > b.at;
    };
    const auto candidate = [&](std::int32_t at, ModelScratch::Merge& merge) {
      const auto& left = symbols[static_cast<std::size_t>(at)];
      if (left.next < 0) return false;
      const auto& right = symbols[static_cast<std::size_t>(left.next)];
      merge = {pairs_.find(left.id, right.id, merge.id), at, merge.id, left.length, right.length};
      return merge.rank != no_rank;
    };
    const auto count = static_cast<std::int32_t>(symbols.size());
    ModelScratch::Merge merge;
    for (std::int32_t i = 0; i < count; ++i) {
      symbols[static_cast<std::size_t>(i)].previous = i - 1;
      symbols[static_cast<std::size_t>(i)].next = i + 1 < count ? i + 1 : -1;
    }
    for (std::int32_t i = 0; i < count; ++i)
      if (candidate(i, merge)) merges.push_back(merge);
    std::make_heap(merges.begin(), merges.end(), later);
    const auto push = [&](std::int32_t at) {
      if (at < 0 || !candidate(at, merge)) return;
      merges.push_back(merge);
      std::push_heap(merges.begin(), merges.end(), later);
    };
    while (!merges.empty()) {
      std::pop_heap(merges.begin(), merges.end(), later);
      const ModelScratch::Merge top = merges.back();
      merges.pop_back();
      auto& left = symbols[static_cast<std::size_t>(top.at)];
      if (left.length != top.left || left.next < 0) continue;
      auto& right = symbols[static_cast<std::size_t>(left.next)];
      if (right.length != top.right) continue;
      left.id = top.id;
      left.length += right.length;
      left.next = right.next;
      right.length = 0;
      if (left.next >= 0) symbols[static_cast<std::size_t>(left.next)].previous = top.at;
      push(left.previous);
      push(top.at);
    }
  }

  TokenIds ids_;
  PairTable pairs_;
  BpeOptions options_;
  bool raw_bytes_;
  std::array<std::int32_t, 256> byte_ids_{};
  std::string mark_;
};

std::int32_t id_of(const TokenIds& ids, const std::string& token, const std::string& where) {
  const auto found = ids.find(token);
  if (found == ids.end())
    refuse("{}: {} is not in the vocabulary; legal: a token of model.vocab", where, token);
  return found->second;
}

std::unique_ptr<const TokenModel> read_bpe(const json& described, const std::string& where, bool raw_bytes,
                                           TokenIds& ids) {
  const JsonFields f(described, where,
                     {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
                      "byte_fallback", "ignore_merges", "vocab", "merges"});
  if (f.has("dropout") && f.at("dropout") != 0.0)
    refuse("{}.dropout: {}: the tokens would be drawn by lot; legal: null", where,
           JsonFields::shortened(f.at("dropout")));
  ids = read_token_ids(f.at("vocab"), where + ".vocab");
  BpeOptions options;
  if (f.has("unk_token")) {  // where every byte has a token none is unknown, and the name may be anything
    const auto found = ids.find(f.text("unk_token"));
    if (found != ids.end())
      options.unknown = found->second;
    else if (!raw_bytes)
      id_of(ids, f.text("unk_token"), where + ".unk_token");
  }
  options.fuse_unknown = f.flag("fuse_unk", false);
  options.byte_fallback = f.flag("byte_fallback", false);
  options.ignore_merges = f.flag("ignore_merges", false);
  options.prefix = f.text("continuing_subword_prefix", "");
  options.suffix = f.text("end_of_word_suffix", "");
  const json& merges = f.list("merges");
  std::vector<BpePair> pairs;
  pairs.reserve(merges.size());
  std::string joined;
  for (const json& merge : merges) {
    const std::string at = fmt::format("{}.merges[{}]", where, pairs.size());
    std::string left, right;
    if (merge.is_string()) {
      const auto& both = merge.get_ref<const std::string&>();
      const std::size_t gap = both.find(' ');
      if (gap == std::string::npos || both.find(' ', gap + 1) != std::string::npos)
        refuse("{}: {} is no pair; legal: two tokens with a space between them", at,
               JsonFields::shortened(merge));
      left = both.substr(0, gap);
      right = both.substr(gap + 1);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      left = merge[0].get<std::string>();
      right = merge[1].get<std::string>();
    } else {
      refuse("{}: {} is no pair; legal: \"A B\" or [\"A\", \"B\"]", at, JsonFields::shortened(merge));
    }
    if (right.size() < options.prefix.size())
      refuse("{}: {} is shorter than continuing_subword_prefix", at, right);
    joined = left + right.substr(options.prefix.size());
    pairs.push_back({id_of(ids, left, at), id_of(ids, right, at), static_cast<std::uint32_t>(pairs.size()),
                     id_of(ids, joined, at)});
  }
  if (!raw_bytes) return make_bpe(ids, pairs, std::move(options), false);
  TokenIds of_bytes;
  of_bytes.reserve(ids.size());
  for (const auto& [token, id] : ids)
    if (const auto bytes = characters_as_bytes(token)) of_bytes.emplace(*bytes, id);
  return make_bpe(std::move(of_bytes), pairs, std::move(options), true);
}

}  // namespace

std::unique_ptr<const TokenModel> make_bpe(TokenIds ids, const std::vector<BpePair>& pairs,
                                           BpeOptions options, bool raw_bytes) {
  return std::make_unique<Bpe>(std::move(ids), pairs, std::move(options), raw_bytes);
}

TokenIds read_token_ids(const json& vocab, const std::string& where) {
  if (!vocab.is_object()) refuse("{}: is no object of tokens and ids", where);
  TokenIds ids;
  ids.reserve(vocab.size());
  for (const auto& [token, id] : vocab.items()) {
    if (!id.is_number_unsigned() || id.get<std::uint64_t>() > JsonFields::largest_id)
      refuse("{}: the token {} has the id {}; legal: 0 to {}", where, token, JsonFields::shortened(id),
             JsonFields::largest_id);
    ids.emplace(token, id.get<std::int32_t>());
  }
  return ids;
}

std::unique_ptr<const TokenModel> make_token_model(const json& described, const std::string& where,
                                                   bool raw_bytes, TokenIds& ids) {
  const JsonFields f(described, where);
  const std::string type = f.text("type", f.has("merges") ? "BPE" : "");
  if (type == "BPE") {
    for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"})
      if (raw_bytes && !f.text(name, "").empty())
        refuse("{}.{}: {} after the pre-tokenizer ByteLevel; legal: \"\"", where, name, f.text(name));
    return read_bpe(described, where, raw_bytes, ids);
  }
  if (raw_bytes && (type == "Unigram" || type == "WordPiece" || type == "WordLevel"))
    refuse("{}: the model {} after the pre-tokenizer ByteLevel; legal: BPE", where, type);
  if (type == "Unigram") return make_unigram(described, where, ids);
  if (type == "WordPiece" || type == "WordLevel") return make_word_model(described, where, ids);
  refuse("{}: the model {} is not known; legal: BPE, Unigram, WordPiece, WordLevel", where,
         type.empty() ? "without a type" : type);
}

}  // namespace echelon

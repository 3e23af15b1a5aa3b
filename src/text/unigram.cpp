// The most likely way to make a piece of tokens that are drawn independently (Kudo 2018), by Viterbi.
#include <algorithm>
#include <array>
#include <cmath>

#include "text/json_fields.h"
#include "text/token_model.h"
#include "text/token_trie.h"
#include "text/unicode.h"

namespace echelon {
namespace {

using nlohmann::json;

class Unigram final : public TokenModel {
 public:
  Unigram(TokenIds ids, std::vector<double> scores, std::int32_t unknown, bool byte_fallback)
      : ids_(std::move(ids)),
        trie_(ids_),
        scores_(std::move(scores)),
        unknown_(unknown),
        byte_fallback_(byte_fallback) {
    unknown_score_ = *std::min_element(scores_.begin(), scores_.end()) - 10;
    for (int b = 0; b < 256; ++b) {
      const auto found = ids_.find(fmt::format("<0x{:02X}>", b));
      byte_ids_[static_cast<std::size_t>(b)] = found == ids_.end() ? -1 : found->second;
    }
  }

  void encode(std::string_view piece, ModelScratch& scratch, std::vector<std::int32_t>& ids) const override {
    auto& best = scratch.best;
    best.assign(piece.size() + 1, {});
    for (std::size_t at = 0; at < piece.size();) {
      const double score = best[at].score;
      std::size_t next = at;
      next_character(piece, next);
      const auto offer = [&](std::size_t end, double token_score, std::int32_t id) {
        const double candidate = score + token_score;
        if (best[end].from < 0 || candidate > best[end].score)
          best[end] = {candidate, static_cast<std::int64_t>(at), id};
      };
      bool whole = false;
      std::uint32_t node = 0;
      for (std::size_t i = at; i < piece.size(); ++i) {
        node = trie_.step(node, piece[i]);
        if (node == 0) break;
        const std::int32_t id = trie_.end(node);
        if (id < 0) continue;
        offer(i + 1, scores_[static_cast<std::size_t>(id)], id);
        whole = whole || i + 1 == next;
      }
      if (!whole) {
        if (unknown_ < 0)
          fail("the vocabulary has no token for {} and none for what is unknown",
               piece.substr(at, next - at));
        offer(next, unknown_score_, unknown_);
      }
      at = next;
    }
    // From the end back; neighbours that are unknown are one.
    const std::size_t first = ids.size();
    std::vector<std::int32_t> parts;
    for (std::size_t end = piece.size(); end > 0;) {
      std::size_t begin = static_cast<std::size_t>(best[end].from);
      if (best[end].id != unknown_) {
        ids.push_back(best[end].id);
        end = begin;
        continue;
      }
      while (begin > 0 && best[begin].id == unknown_) begin = static_cast<std::size_t>(best[begin].from);
      append_unknown(piece.substr(begin, end - begin), ids);
      end = begin;
    }
    std::reverse(ids.begin() + static_cast<std::ptrdiff_t>(first), ids.end());
  }

 private:
  // Backwards, since the whole is turned round.
  void append_unknown(std::string_view text, std::vector<std::int32_t>& ids) const {
    if (const auto found = ids_.find(text); found != ids_.end()) return ids.push_back(found->second);
    const bool bytes = byte_fallback_ && std::all_of(text.begin(), text.end(), [&](char c) {
                         return byte_ids_[static_cast<unsigned char>(c)] >= 0;
                       });
    if (!bytes) return ids.push_back(unknown_);
    for (auto c = text.rbegin(); c != text.rend(); ++c)
      ids.push_back(byte_ids_[static_cast<unsigned char>(*c)]);
  }

  TokenIds ids_;
  TokenTrie trie_;
  std::vector<double> scores_;
  std::int32_t unknown_;
  bool byte_fallback_;
  double unknown_score_ = 0;
  std::array<std::int32_t, 256> byte_ids_{};
};

// The number that Hugging Face's library reads (serde_json without its feature float_roundtrip): the digits
// as a whole number, rounded once, divided by a power of ten, rounded again. One in ten differs in the last
// bit from what was written, and of sums that are equal but for it another one is the largest.
double score_as_read(double written) {
  const std::string digits = fmt::format("{}", std::abs(written));  // the fewest that mean it
  const std::size_t point = digits.find('.');
  if (point == std::string::npos || digits.find('e') != std::string::npos) return written;
  const double whole = std::stod(digits.substr(0, point) + digits.substr(point + 1));
  return std::copysign(whole / std::pow(10.0, static_cast<double>(digits.size() - point - 1)), written);
}

}  // namespace

std::unique_ptr<const TokenModel> make_unigram(const json& described, const std::string& where,
                                               TokenIds& ids) {
  const JsonFields f(described, where, {"unk_id", "vocab", "byte_fallback"});
  std::vector<double> scores;
  for (const json& entry : f.list("vocab")) {
    if (!entry.is_array() || entry.size() != 2 || !entry[0].is_string() || !entry[1].is_number() ||
        !std::isfinite(entry[1].get<double>()))
      refuse("{}.vocab[{}]: {}; legal: [token, score]", where, scores.size(), JsonFields::shortened(entry));
    ids[entry[0].get<std::string>()] = static_cast<std::int32_t>(scores.size());
    scores.push_back(score_as_read(entry[1].get<double>()));
  }
  if (scores.empty() || std::ssize(scores) > JsonFields::largest_id)
    refuse("{}.vocab: has {} tokens; legal: 1 to {}", where, scores.size(), JsonFields::largest_id);
  const std::int32_t unknown =
      f.has("unk_id") ? static_cast<std::int32_t>(f.number("unk_id", 0, std::ssize(scores) - 1)) : -1;
  return std::make_unique<Unigram>(ids, std::move(scores), unknown, f.flag("byte_fallback", false));
}

}  // namespace echelon

#include "text/pipeline.h"

#include <algorithm>

#include "base/error.h"
#include "text/piece_cache.h"
#include "text/unicode.h"

namespace echelon {

struct PipelineTokenizer::Workspace {
  Pieces pieces;
  ModelScratch scratch;
  PieceCache cache;
};

namespace {

TokenIds as_ids(const std::vector<std::pair<std::string, std::size_t>>& texts) {
  TokenIds ids;
  for (const auto& [text, index] : texts) ids[text] = static_cast<std::int32_t>(index);
  return ids;
}

// An added token as it stands in a text that may be normalised.
std::string as_found(const PipelineParts& parts, const AddedToken& token) {
  bool begins = true;
  if (!token.normalized || parts.normalizer == nullptr) return token.content;
  return parts.normalizer->apply(token.content, begins);
}

std::vector<std::pair<std::string, std::size_t>> texts_of(const PipelineParts& parts, bool normal) {
  std::vector<std::pair<std::string, std::size_t>> texts;
  for (std::size_t i = 0; i < parts.added.size(); ++i) {
    const AddedToken& token = parts.added[i];
    if (token.normalized != normal || token.content.empty()) continue;
    std::string text = as_found(parts, token);
    if (!text.empty()) texts.emplace_back(std::move(text), i);
  }
  return texts;
}

// The beginning of the last character before `at`.
std::size_t character_before(std::string_view text, std::size_t at) {
  do --at;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xc0u) == 0x80u);
  return at;
}

bool word_before(std::string_view text, std::size_t at) {
  if (at == 0) return false;
  std::size_t i = character_before(text, at);
  return is_word_character(next_character(text, i));
}

bool word_after(std::string_view text, std::size_t at) {
  return at < text.size() && is_word_character(next_character(text, at));
}

}  // namespace

PipelineTokenizer::Finder::Finder(const std::vector<std::pair<std::string, std::size_t>>& texts)
    : trie(as_ids(texts)), any(!texts.empty()) {
  for (const auto& [text, index] : texts) begins[static_cast<unsigned char>(text.front())] = true;
}

PipelineTokenizer::PipelineTokenizer(PipelineParts parts)
    : parts_(std::move(parts)), raw_(texts_of(parts_, false)), normal_(texts_of(parts_, true)) {
  for (const AddedToken& token : parts_.added) {
    parts_.names[token.id] = as_found(parts_, token);
    if (token.special) special_.insert(token.id);
  }
  for (const auto& [id, name] : parts_.names) vocab_ = std::max<std::int64_t>(vocab_, id + 1);
}

PipelineTokenizer::~PipelineTokenizer() = default;

template <class Found, class Text>
void PipelineTokenizer::split_added(const Finder& finder, std::string_view text, const Found& found,
                                    const Text& between) const {
  std::size_t done = 0;
  for (std::size_t at = 0; finder.any && at < text.size();) {
    if (!finder.begins[static_cast<unsigned char>(text[at])]) {
      ++at;
      continue;
    }
    std::uint32_t node = 0;
    std::size_t end = at;
    std::int32_t index = -1;
    for (std::size_t i = at; i < text.size() && (node = finder.trie.step(node, text[i])) != 0; ++i)
      if (finder.trie.end(node) >= 0) {
        index = finder.trie.end(node);
        end = i + 1;
      }
    if (index < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = parts_.added[static_cast<std::size_t>(index)];
    std::size_t begin = at;
    at = end;
    if (token.single_word && (word_before(text, begin) || word_after(text, end))) continue;
    if (token.lstrip)
      while (begin > done) {
        std::size_t before = character_before(text, begin), next = before;
        if (!is_space(next_character(text, next))) break;
        begin = before;
      }
    if (token.rstrip)
      for (std::size_t next = end; next < text.size() && is_space(next_character(text, next));) end = next;
    if (begin > done) between(text.substr(done, begin - done), done == 0);
    found(token.id);
    at = done = end;
  }
  if (done < text.size()) between(text.substr(done), done == 0);
}

void PipelineTokenizer::encode_piece(std::string_view piece, Workspace& work,
                                     std::vector<std::int32_t>& ids) const {
  if (piece.size() > PieceCache::longest_piece) return parts_.model->encode(piece, work.scratch, ids);
  PieceCache::Slot& slot = work.cache.slot(piece);
  if (PieceCache::holds(slot, piece)) {
    ids.insert(ids.end(), slot.ids.begin(), slot.ids.begin() + slot.count);
    return;
  }
  const std::size_t before = ids.size();
  parts_.model->encode(piece, work.scratch, ids);
  PieceCache::put(slot, piece, std::span(ids).subspan(before));
}

void PipelineTokenizer::encode_part(std::string_view text, bool begins_text, Workspace& work,
                                    std::vector<std::int32_t>& ids) const {
  Pieces& pieces = work.pieces;
  pieces.text = text;
  pieces.ranges = {{0, text.size()}};
  pieces.begins_text = begins_text;
  if (parts_.pre_tokenizer != nullptr) parts_.pre_tokenizer->split(pieces);
  const std::string_view mark = parts_.model->mark();
  for (const TextRange& range : pieces.ranges) {
    std::string_view piece = std::string_view(pieces.text).substr(range.begin, range.end - range.begin);
    while (!mark.empty()) {
      std::size_t at = 0;
      while (piece.substr(at).starts_with(mark)) at += mark.size();
      at = piece.find(mark, at);
      if (at == std::string_view::npos) break;
      encode_piece(piece.substr(0, at), work, ids);
      piece.remove_prefix(at);
    }
    encode_piece(piece, work, ids);
  }
}

std::vector<std::int32_t> PipelineTokenizer::encode(std::string_view given) const {
  std::string replaced;
  std::string_view text = given;
  if (!is_whole_utf8(given)) text = replaced = replace_broken(given);
  std::unique_ptr<Workspace> work;
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      work = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (work == nullptr) work = std::make_unique<Workspace>();
  std::vector<std::int32_t> ids;
  ids.reserve(text.size() / 4 + 4);
  const auto found = [&](std::int32_t id) { ids.push_back(id); };
  split_added(raw_, text, found, [&](std::string_view part, bool first) {
    std::string normal;
    bool begins = first;
    if (parts_.normalizer != nullptr) part = normal = parts_.normalizer->apply(part, begins);
    split_added(normal_, part, found, [&](std::string_view inner, bool inner_first) {
      encode_part(inner, begins && inner_first, *work, ids);
    });
  });
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(work));
  return ids;
}

std::vector<std::int32_t> PipelineTokenizer::encode_whole(std::string_view text) const {
  std::vector<std::int32_t> ids = encode(text);
  ids.insert(ids.begin(), parts_.prefix.begin(), parts_.prefix.end());
  ids.insert(ids.end(), parts_.suffix.begin(), parts_.suffix.end());
  return ids;
}

std::string PipelineTokenizer::decode(std::span<const std::int32_t> ids, Special special) const {
  std::vector<std::string> tokens;
  tokens.reserve(ids.size());
  for (const std::int32_t id : ids) {
    const auto found = parts_.names.find(id);
    if (found == parts_.names.end())
      refuse("token {}: {} has no such token; legal: the ids of its {} tokens, the last {}", id, parts_.name,
             parts_.names.size(), vocab_ - 1);
    if (special == Special::shown || !special_.contains(id)) tokens.push_back(found->second);
  }
  if (parts_.decoder != nullptr) parts_.decoder->apply(tokens);
  std::string text;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (parts_.decoder == nullptr && i > 0) text += ' ';
    text += tokens[i];
  }
  return text;
}

}  // namespace echelon

// Documents with the lengths of a data set, packed one after the other into sequences. Under a document mask
// a token sees only its own document, so sequences of equal length differ in work.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace echelon {

// A histogram of document lengths in tokens, lengths rising.
struct DocumentLengths {
  struct Entry {
    std::int64_t length = 0;
    double count = 0;
  };
  std::vector<Entry> entries;

  bool empty() const { return entries.empty(); }
  double mean() const;  // of a document
};

// Parses lines of a length, or of a length and a count, separated by blanks or commas; # starts a comment.
// RequestError naming `where` and the line.
DocumentLengths read_document_lengths(const std::string& text, const std::string& where);

// Positions where the documents of a sequence begin, rising; the first is 0.
using DocumentStarts = std::vector<std::int64_t>;

// Sequences as this trainer packs them: documents of these lengths in random order, one after the other, cut
// where a sequence ends. Deterministic: equal arguments give equal results.
std::vector<DocumentStarts> pack_documents(const DocumentLengths& lengths, std::int64_t seq_len,
                                           std::int64_t sequences);

}  // namespace echelon

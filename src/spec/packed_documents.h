// Documents of the lengths that a data set has, packed one behind the other into sequences. Under a document
// mask a token sees those of its own document alone, so sequences of as many tokens are not as much work.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace echelon {

// A histogram: so many documents of each length in tokens, lengths rising.
struct DocumentLengths {
  struct Entry {
    std::int64_t length = 0;
    double count = 0;
  };
  std::vector<Entry> entries;

  bool empty() const { return entries.empty(); }
  double mean() const;  // of a document
};

// From lines of a length, or of a length and how many documents have it, between blanks or commas; what
// follows # is a comment. RequestError naming `where` and the line.
DocumentLengths read_document_lengths(const std::string& text, const std::string& where);

// Where the documents of a sequence begin, in rising order; the first at 0.
using DocumentStarts = std::vector<std::int64_t>;

// Sequences as this trainer's data has them: documents of these lengths in a random order, one behind the
// other, and cut where a sequence ends. The same for the same arguments.
std::vector<DocumentStarts> pack_documents(const DocumentLengths& lengths, std::int64_t seq_len,
                                           std::int64_t sequences);

}  // namespace echelon

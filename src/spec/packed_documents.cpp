#include "spec/packed_documents.h"

#include <algorithm>
#include <map>
#include <sstream>

#include "base/error.h"
#include "base/parse_number.h"
#include "base/philox.h"
#include "base/real.h"

namespace echelon {

double DocumentLengths::mean() const {
  double tokens = 0, documents = 0;
  for (const Entry& e : entries) tokens += real(e.length) * e.count, documents += e.count;
  return tokens / documents;
}

DocumentLengths read_document_lengths(const std::string& text, const std::string& where) {
  constexpr std::int64_t most_length = 1'000'000'000;
  constexpr double most_count = 1e15;
  std::map<std::int64_t, double> counts;
  std::istringstream lines(text);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    const std::string at = fmt::format("{}, line {}", where, ++number);
    line = line.substr(0, line.find('#'));
    std::replace(line.begin(), line.end(), ',', ' ');
    std::istringstream in(line);
    std::string length, count, more;
    if (!(in >> length)) continue;
    const bool has_count = static_cast<bool>(in >> count);
    if (in >> more) refuse("{} {}: must be a length, or a length and a count", at, line);
    const auto tokens = parse_number<std::int64_t>(at, length);
    if (tokens < 1 || tokens > most_length)
      refuse("{}: a length of {}: must be from 1 to {}", at, length, most_length);
    const double documents = has_count ? parse_number<double>(at, count) : 1;
    if (!(documents >= 0 && documents <= most_count))
      refuse("{}: a count of {}: must be from 0 to {}", at, count, most_count);
    if (documents > 0) counts[tokens] += documents;
  }
  if (counts.empty())
    refuse("{}: has no documents; legal: lines of a length, or of a length and a count", where);
  DocumentLengths lengths;
  for (const auto& [length, count] : counts) lengths.entries.push_back({length, count});
  return lengths;
}

std::vector<DocumentStarts> pack_documents(const DocumentLengths& lengths, std::int64_t seq_len,
                                           std::int64_t sequences) {
  check(!lengths.empty() && seq_len > 0, "sequences are packed of documents");
  std::vector<double> up_to;  // documents that are no longer than an entry's
  double all = 0;
  for (const DocumentLengths::Entry& e : lengths.entries) up_to.push_back(all += e.count);
  const Philox draw(0, Stream::document_lengths, 0);
  std::uint64_t drawn = 0;
  std::vector<DocumentStarts> packed(static_cast<std::size_t>(sequences));
  std::int64_t rest = 0;  // of the document that the sequence before ended in
  for (DocumentStarts& starts : packed)
    for (std::int64_t at = 0; at < seq_len;) {
      if (rest == 0) {
        const double one = draw.uniform(drawn++) * all;
        const auto found = std::upper_bound(up_to.begin(), up_to.end() - 1, one);
        rest = lengths.entries[static_cast<std::size_t>(found - up_to.begin())].length;
      }
      starts.push_back(at);
      const std::int64_t here = std::min(rest, seq_len - at);
      at += here;
      rest -= here;
    }
  return packed;
}

}  // namespace echelon

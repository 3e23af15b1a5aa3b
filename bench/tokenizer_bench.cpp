// How fast a tokenizer encodes on one core, and what it makes of a text: bench/compare_tokenizers.py holds
// both against Hugging Face's.
//
//   tokenizer_bench TOKENIZER TEXT [IDS DECODED]
//
// TEXT holds documents, each ending with a zero byte. IDS gets, as int32, the number of ids of each and they;
// DECODED what they are as text, each ending with a zero byte.
#include <fmt/core.h>

#include <chrono>
#include <fstream>
#include <sstream>

#include "text/tokenizer.h"

int main(int argc, char** argv) {
  using namespace echelon;
  if (argc != 3 && argc != 5) return 2;
  const auto started = std::chrono::steady_clock::now();
  const auto tokenizer = read_tokenizer(argv[1]);
  const auto loaded = std::chrono::steady_clock::now();
  std::stringstream all;
  all << std::ifstream(argv[2], std::ios::binary).rdbuf();
  const std::string text = all.str();
  std::vector<std::vector<std::int32_t>> documents;
  const auto before = std::chrono::steady_clock::now();
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\0', at), text.size());
    documents.push_back(tokenizer->encode(std::string_view(text).substr(at, end - at)));
    at = end + 1;
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - before,
                                      load = loaded - started;
  std::size_t tokens = 0;
  for (const auto& ids : documents) tokens += ids.size();
  fmt::print("{:.2f} MB/s ({:.1f} MB, {} tokens), read in {:.2f} s\n",
             static_cast<double>(text.size()) / 1e6 / seconds.count(), static_cast<double>(text.size()) / 1e6,
             tokens, load.count());
  if (argc < 5) return 0;
  std::ofstream ids_file(argv[3], std::ios::binary), decoded(argv[4], std::ios::binary);
  for (const auto& ids : documents) {
    const auto count = static_cast<std::int32_t>(ids.size());
    ids_file.write(reinterpret_cast<const char*>(&count), sizeof count);
    ids_file.write(reinterpret_cast<const char*>(ids.data()),
                   count * static_cast<std::int64_t>(sizeof count));
    decoded << tokenizer->decode(ids) << '\0';
  }
  return 0;
}

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "apps/data_flags.h"
#include "apps/flags.h"
#include "apps/help.h"
#include "apps/progress_line.h"
#include "base/error.h"
#include "base/json_text.h"
#include "base/output_file.h"
#include "base/units.h"
#include "base/utf8.h"
#include "checkpoint/directory_lock.h"
#include "data/token_store.h"
#include "data/tokenize.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr std::int64_t any_vocab = std::numeric_limits<std::int32_t>::max();

struct DataVerbFlags {
  std::vector<std::string> paths;
  std::string tokenizer, out;
  int threads = 0;
  std::int64_t samples = 3;
  bool json = false;
  DataFlags reading;
  CLI::App* info = nullptr;
};

struct Counts {
  std::int64_t tokens = 0, documents = 0, counted = 0;
  double masked() const {
    return tokens == 0 ? 0 : 1 - static_cast<double>(counted) / static_cast<double>(tokens);
  }
};
Counts counts_of(const TokenData& data) {
  Counts all;
  for (const TokenData::File& file : data.files()) {
    all.tokens += file.tokens;
    all.documents += file.documents;
    all.counted += file.counted;
  }
  return all;
}

// In messages, removes --data: this verb has the path as a positional.
template <class Read>
auto without_flag(const Read& read) {
  constexpr std::string_view flag = "--data ";
  try {
    return read();
  } catch (const RequestError& error) {
    const std::string said = error.what();
    if (!said.starts_with(flag)) throw;
    throw RequestError(said.substr(flag.size()));
  }
}

void refuse_to_replace(const std::string& prefix, const std::string& path) {
  std::error_code error;
  if (fs::exists(path, error)) refuse("--out {}: {} is there already; name another", prefix, path);
}

// Writes all files as one, document by document.
TokenStoreInfo write_all(const TokenData& data, const TextTokens& text, const std::string& prefix,
                         const std::string& path) {
  TokenStoreWriter writer(path, data.is_masked() || text.tokenizer->vocab() > 65536 ? 4 : 2, text.identity);
  std::vector<std::int64_t> ends = data.document_starts();
  ends.push_back(data.size());
  std::vector<std::int32_t> ids(1 << 16);
  std::int64_t at = 0;
  for (std::size_t i = 0; i + 1 < ends.size(); ++i) {
    writer.begin_document();
    while (at < ends[i + 1]) {
      const std::int64_t here = std::min(std::ssize(ids), ends[i + 1] - at);
      data.copy_marked(at, here, ids.data());
      const auto* const marked = reinterpret_cast<const std::uint32_t*>(ids.data());
      writer.write({marked, static_cast<std::size_t>(here)});
      at += here;
    }
  }
  refuse_to_replace(prefix, path);  // another program may have created it since
  writer.commit();
  return writer.info();
}

// PREFIX.parts, locked by one run. If the run ends early, finished parts stay there.
class Parts {
 public:
  Parts(const std::string& prefix, std::string path) : path_(std::move(path)) {
    if (const std::string stranger = find_stranger_in_cache(path_); !stranger.empty())
      refuse("--out {}: {} holds {}, which is not of data tokenize; name another", prefix, path_,
             printable(stranger));
    std::error_code error;
    fs::create_directory(path_, error);
    if (error) refuse("--out {}: {} cannot be made: {}", prefix, path_, error.message());
    lock_.emplace(path_, "--out", cache_owner);
    lock_->leave_no_trace();
  }
  ~Parts() {
    lock_.reset();
    std::error_code not_empty;
    fs::remove(path_, not_empty);
  }
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  const std::string& path() const { return path_; }

 private:
  const std::string path_;
  std::optional<DirectoryLock> lock_;
};

int run_tokenize(const DataVerbFlags& f) {
  const std::string path = f.out + ".tokens";
  refuse_to_replace(f.out, path);
  check_output("--out", path);
  const Parts parts(f.out, f.out + ".parts");
  refuse_to_replace(f.out, path);  // the run before may have ended with it
  DataReading reading;
  reading.text = text_tokens(f.tokenizer);
  reading.cache_directory = parts.path();
  reading.threads = f.threads;
  const auto [made, skipped, files] = with_progress("data tokenize", false, [&](const Progress& progress) {
    reading.progress = progress;
    const TokenData data = without_flag([&] { return TokenData(f.paths, any_vocab, reading); });
    if (!data.from_text()) refuse("{}: has tokens already", data.files().front().path);
    report(progress, -1, "writing " + path);
    return std::tuple{write_all(data, reading.text, f.out, path), data.notes(), data.num_files()};
  });
  remove_token_cache(parts.path());  // also removes that of a run that ended early
  fmt::print("{}written to {}: {} of {} in {}, {:.1f}% of them not counted in the loss\n", skipped, path,
             counted(made.tokens, "token"), counted(made.documents, "document"), counted(files, "file"),
             100 * Counts{made.tokens, made.documents, made.counted}.masked());
  return 0;
}

// Beginnings of documents, spread over the data.
ordered_json samples_of(const TokenData& data, const Tokenizer& tokenizer, std::int64_t count) {
  constexpr std::int64_t most_tokens = 200;
  std::vector<std::int64_t> starts = data.document_starts();
  if (starts.empty()) starts.push_back(0);
  const auto documents = std::ssize(starts);
  starts.push_back(data.size());
  ordered_json all = ordered_json::array();
  for (std::int64_t i = 0; i < std::min(count, documents); ++i) {
    const auto document = static_cast<std::size_t>(i * documents / std::min(count, documents));
    std::vector<std::int32_t> marked(
        static_cast<std::size_t>(std::min(most_tokens, starts[document + 1] - starts[document])));
    data.copy_marked(starts[document], std::ssize(marked), marked.data());
    std::vector<std::int32_t> ids, learned;
    for (const std::int32_t id : marked) {
      ids.push_back(id & std::numeric_limits<std::int32_t>::max());
      if (id >= 0) learned.push_back(id);
    }
    all.push_back({{"document", document},
                   {"tokens", ids},
                   {"text", printable(tokenizer.decode(ids))},
                   {"counted", printable(tokenizer.decode(learned))}});
  }
  return all;
}

int run_info(const DataVerbFlags& f) {
  const bool decodes = is_given(*f.info, "--tokenizer");
  if (f.samples < 0) refuse("--samples {}: must be at least 0", f.samples);
  DataReading reading;
  const TokenData data = with_progress("data info", f.json, [&](const Progress& progress) {
    reading = f.reading.reading({}, progress);
    return without_flag(
        [&] { return TokenData(f.paths, decodes ? reading.text.tokenizer->vocab() : any_vocab, reading); });
  });
  std::vector<FlagNeed> needs = f.reading.needs(data);
  std::erase_if(needs, [](const FlagNeed& need) { return need.flag == "--tokenizer"; });  // it shows samples
  const bool reads = decodes || data.kind() == TokenData::Kind::text;
  needs.push_back({"--samples",
                   reads || f.samples == 0,
                   "with token files and no --tokenizer",
                   {advice("--tokenizer", "PATH")}});
  refuse_idle(*f.info, needs);
  const Counts all = counts_of(data);
  const ordered_json samples =
      reads ? samples_of(data, *reading.text.tokenizer, f.samples) : ordered_json::array();
  if (f.json) {
    ordered_json files = ordered_json::array();
    for (const TokenData::File& file : data.files())
      files.push_back({{"path", file.path},
                       {"kind", file.kind},
                       {"tokens", file.tokens},
                       {"documents", file.documents},
                       {"counted", file.counted}});
    fmt::print("{}\n", json_text(ordered_json{{"files", files},
                                              {"tokens", all.tokens},
                                              {"documents", all.documents},
                                              {"masked", all.masked()},
                                              {"fingerprint", data.fingerprint()},
                                              {"samples", samples}}));
    return 0;
  }
  for (const TokenData::File& file : data.files())
    fmt::print("{}: {}, {}{}\n", file.path, file.kind, counted(file.tokens, "token"),
               file.documents > 0 ? ", " + counted(file.documents, "document") : "");
  fmt::print("{}{} in {}, {:.1f}% of them not counted in the loss; fingerprint {}\n", data.notes(),
             counted(all.tokens, "token"), counted(data.num_files(), "file"), 100 * all.masked(),
             data.fingerprint());
  for (const ordered_json& sample : samples) {
    fmt::print("document {}: {}\n", sample["document"].get<std::int64_t>(),
               sample["text"].get<std::string>());
    if (data.is_masked()) fmt::print("  counted: {}\n", sample["counted"].get<std::string>());
  }
  return 0;
}

}  // namespace

void add_data(CLI::App& program, int& status) {
  auto flags = std::make_shared<DataVerbFlags>();
  flags->threads = available_cores();
  CLI::App& app = *program.add_subcommand("data", "Tokenize text, and inspect token files");
  app.require_subcommand(0, 1);
  CLI::App& tokenize = *app.add_subcommand("tokenize", "Turn text into one file of tokens");
  heading(tokenize, common_flags);
  tokenize.add_option("in", flags->paths, "Text, .jsonl, either as .gz or .zst, or directories of them")
      ->type_name("PATH")
      ->required();
  tokenize.add_option("--tokenizer", flags->tokenizer, "bytes, a file, or a directory with one")
      ->type_name("bytes|PATH")
      ->required();
  tokenize
      .add_option("--out", flags->out,
                  "Writes PREFIX.tokens; PREFIX.parts keeps what is done when it is ended before")
      ->type_name("PREFIX")
      ->required();
  add_number(tokenize, "--threads", flags->threads, "Threads (default: the cores)");
  tokenize.callback([flags, &status] {
    if (flags->threads < 1 || flags->threads > 4096)
      refuse("--threads {}: must be from 1 to 4096", flags->threads);
    status = run_tokenize(*flags);
  });
  CLI::App& info = *app.add_subcommand("info", "What files of text or tokens hold");
  flags->info = &info;
  heading(info, common_flags);
  info.add_option("path", flags->paths, "What --data of train takes")->type_name("PATH")->required();
  info.add_flag("--json", flags->json, "One JSON object on standard output");
  add_number(info, "--samples", flags->samples, "Documents whose beginnings are shown");
  flags->reading.add_to(info);
  info.callback([flags, &status] { status = run_info(*flags); });
  app.callback([&app] {
    if (app.get_subcommands().empty()) refuse("data: a verb is missing; legal: tokenize, info");
  });
}

}  // namespace echelon

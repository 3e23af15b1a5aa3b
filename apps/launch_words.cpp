#include "apps/launch_words.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <utility>

#include "base/start_thread.h"

namespace echelon {
namespace {

constexpr char record_separator = '\x1e';
constexpr const char *here = "here", *lasts = "lasts", *ended = "ended ";

std::string mark_of(std::string_view token) { return fmt::format("{}{} ", record_separator, token); }

// Written in one piece, so that no other process's text comes in between.
void tell(std::string_view word) {
  const char* const address = std::getenv(launch_variable);
  if (address == nullptr) return;
  const std::string_view all = address;
  const std::size_t colon = all.find(':');
  if (colon == std::string_view::npos) return;
  const std::string line = fmt::format("{}{}\n", mark_of(all.substr(colon + 1)), word);
  (void)!::write(std::atoi(address), line.data(), line.size());
}

}  // namespace

void tell_launch_end(int status) { tell(fmt::format("{}{}", ended, status)); }
void tell_launch_it_lasts() { tell(lasts); }

LaunchBeat::LaunchBeat() {
  if (std::getenv(launch_variable) == nullptr) return;
  thread_ = start_thread("what tells launch that the training is there", [this] {
    std::unique_lock lock(mutex_);
    do tell(here);
    while (!ending_.wait_for(lock, std::chrono::seconds(2), [this] { return ends_; }));
  });
}

LaunchBeat::~LaunchBeat() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  ending_.notify_one();
  thread_.join();
}

LaunchWords::LaunchWords(std::string token, std::function<void(std::string_view)> text,
                         std::function<void(Word, int)> word)
    : mark_(mark_of(token)), text_(std::move(text)), word_(std::move(word)) {}

void LaunchWords::read(std::string_view bytes) {
  constexpr std::size_t longest_word = 32;
  held_ += bytes;
  std::string_view rest = held_;
  const auto pass = [&](std::size_t count) {
    if (count > 0) text_(rest.substr(0, count));
    rest.remove_prefix(count);
  };
  for (;;) {
    pass(std::min(rest.find(record_separator), rest.size()));
    if (rest.empty() || mark_.starts_with(rest)) break;  // a mark may continue in the next text
    const std::string_view after = rest.substr(std::min(mark_.size(), rest.size()));
    const std::size_t end = after.find('\n');
    if (rest.starts_with(mark_) && end == std::string_view::npos && after.size() < longest_word) break;
    if (rest.starts_with(mark_) && end < longest_word && read_word(after.substr(0, end)))
      rest.remove_prefix(mark_.size() + end + 1);
    else
      pass(1);
  }
  held_ = std::string(rest);
}

bool LaunchWords::read_word(std::string_view word) {
  if (word == here) return word_(Word::here, 0), true;
  if (word == lasts) return word_(Word::lasts, 0), true;
  if (!word.starts_with(ended)) return false;
  word_(Word::ended, std::atoi(std::string(word.substr(std::string_view(ended).size())).c_str()));
  return true;
}

void LaunchWords::end() {
  if (!held_.empty()) text_(held_);
  held_.clear();
}

}  // namespace echelon

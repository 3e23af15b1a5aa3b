// What a training reports to the `launch` that started it: that it is alive, that it has ended, and how.
// mpirun's exit status says little of that, and a lost host may keep mpirun from ending at all.
//
// The words go to a descriptor that launch reads: a separate one, or standard error, which mpirun forwards
// from every host. The environment variable ECHELON_LAUNCH=DESCRIPTOR:TOKEN names the descriptor, and a token
// that no other text contains.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

namespace echelon {

inline constexpr const char* launch_variable = "ECHELON_LAUNCH";

// Does nothing unless launch started this process.
void tell_launch_end(int status);
// The failure depends only on the request and the data, so it would come again.
void tell_launch_it_lasts();

// Reports every two seconds that the training is alive, from a separate thread.
class LaunchBeat {
 public:
  LaunchBeat();
  ~LaunchBeat();
  LaunchBeat(const LaunchBeat&) = delete;
  LaunchBeat& operator=(const LaunchBeat&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable ending_;
  bool ends_ = false;
  std::thread thread_;
};

// Finds the words in what launch reads, among other text.
class LaunchWords {
 public:
  enum class Word { here, ended, lasts };
  // `text` gets everything that is not a word, in order; `word` gets each word, with the status of `ended`.
  LaunchWords(std::string token, std::function<void(std::string_view)> text,
              std::function<void(Word, int status)> word);
  void read(std::string_view bytes);
  // The input has ended: an incomplete word is text.
  void end();

 private:
  bool read_word(std::string_view word);

  std::string mark_, held_;
  std::function<void(std::string_view)> text_;
  std::function<void(Word, int)> word_;
};

}  // namespace echelon

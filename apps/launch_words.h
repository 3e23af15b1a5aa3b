// What a training tells the `launch` that started it: that it is there, that it has ended and how. mpirun's
// own exit status says little of that, and a host that is gone keeps mpirun from ending at all.
//
// The words go over a descriptor that launch reads: one of their own, or standard error, which mpirun brings
// back from every host. The environment's ECHELON_LAUNCH=DESCRIPTOR:TOKEN names it, and a token that no other
// text holds.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

namespace echelon {

inline constexpr const char* launch_variable = "ECHELON_LAUNCH";

// Each does nothing where no launch started this process.
void tell_launch_end(int status);
// The failure is a function of the request and the data, so the same would come again.
void tell_launch_it_lasts();

// Says every two seconds that the training is there, from a thread of its own.
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

// What launch reads: words among other text.
class LaunchWords {
 public:
  enum class Word { here, ended, lasts };
  // `text` gets what is none of the words, in order; `word` each of them, with the status of `ended`.
  LaunchWords(std::string token, std::function<void(std::string_view)> text,
              std::function<void(Word, int status)> word);
  void read(std::string_view bytes);
  // No more comes: what looked like the beginning of a word is text.
  void end();

 private:
  bool read_word(std::string_view word);

  std::string mark_, held_;
  std::function<void(std::string_view)> text_;
  std::function<void(Word, int)> word_;
};

}  // namespace echelon

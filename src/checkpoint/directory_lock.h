// One writer at a time: a lock on a directory that dies with its holder, and says who that is.
#pragma once

#include <string>

namespace echelon {

class DirectoryLock {
 public:
  // Of a directory that is there, by a file in it; `what` names it in messages ("--checkpoint"). RequestError
  // naming process, host and time where another holds it, or where no file can be made there. Works between
  // the hosts of a shared file system that hands locks on, as NFS does.
  DirectoryLock(const std::string& directory, const char* what, const char* file = ".lock");
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

  // Why this file system locks nothing; else empty.
  const std::string& warning() const { return warning_; }
  // The lock's file goes too if this made it.
  void leave_no_trace() { keeps_file_ = false; }

 private:
  void open_file(const char* what);
  bool is_at_its_path() const;
  [[noreturn]] void refuse_second(const char* what) const;
  void write_record() const;

  std::string directory_, path_, warning_;
  int fd_ = -1;
  bool was_there_ = true, keeps_file_ = true;
};

}  // namespace echelon

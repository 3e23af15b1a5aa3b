// One writer at a time: a lock on a directory that ends with its holder, and says who that is.
#pragma once

#include <string>

namespace echelon {

// Whether the open file is the one that has this path now.
bool is_still_at(int fd, const std::string& path);

class DirectoryLock {
 public:
  // Locks an existing directory by a file in it; `what` names it in messages ("--checkpoint"). RequestError
  // naming process, host and time if another process holds the lock, or if no file can be made there. Works
  // between hosts of a shared file system that supports locks, such as NFS.
  DirectoryLock(const std::string& directory, const char* what, const char* file = ".lock");
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

  // Why this file system cannot lock; else empty.
  const std::string& warning() const { return warning_; }
  // Also removes the lock's file at the end, if this created it.
  void leave_no_trace() { keeps_file_ = false; }

 private:
  void open_file(const char* what);
  [[noreturn]] void refuse_second(const char* what) const;
  void write_record() const;

  std::string directory_, path_, warning_;
  int fd_ = -1;
  bool was_there_ = true, keeps_file_ = true;
};

}  // namespace echelon

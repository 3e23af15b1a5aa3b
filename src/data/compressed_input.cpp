// The one file that knows zlib and Zstandard.
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "data/text_input.h"

namespace echelon {
namespace {

// The compressed bytes, piece by piece.
class Source {
 public:
  explicit Source(const OpenFile& file) : file_(&file), piece_(1 << 16) {}
  std::span<std::byte> next() {
    const auto here =
        static_cast<std::size_t>(std::min<std::int64_t>(std::ssize(piece_), file_->size() - at_));
    const auto bytes = std::span(piece_).first(here);
    file_->read(at_, bytes);
    at_ += static_cast<std::int64_t>(here);
    return bytes;
  }
  double done() const {
    return static_cast<double>(at_) / static_cast<double>(std::max<std::int64_t>(1, file_->size()));
  }
  [[noreturn]] void refuse_damaged(const char* format, const char* why) const {
    refuse("--data {}: damaged {} file: {} near byte {}", file_->path(), format, why, at_);
  }

 private:
  const OpenFile* file_;
  std::vector<std::byte> piece_;
  std::int64_t at_ = 0;
};

class GzipInput final : public TextInput {
 public:
  explicit GzipInput(const OpenFile& file) : source_(file) {
    constexpr int gzip_alone = 15 + 16;
    if (inflateInit2(&stream_, gzip_alone) != Z_OK) throw std::bad_alloc();
  }
  ~GzipInput() override { inflateEnd(&stream_); }
  GzipInput(const GzipInput&) = delete;
  GzipInput& operator=(const GzipInput&) = delete;

  std::size_t read(std::span<std::byte> out) override {
    stream_.next_out = reinterpret_cast<Bytef*>(out.data());
    stream_.avail_out = static_cast<uInt>(out.size());
    while (stream_.avail_out == out.size()) {
      if (stream_.avail_in == 0) {
        const auto bytes = source_.next();
        if (bytes.empty()) {
          if (!between_) source_.refuse_damaged("gzip", "it ends in the middle");
          return 0;
        }
        stream_.next_in = reinterpret_cast<Bytef*>(bytes.data());
        stream_.avail_in = static_cast<uInt>(bytes.size());
      }
      // A file may hold several, one after the other (RFC 1952).
      if (between_ && inflateReset(&stream_) != Z_OK) throw std::bad_alloc();
      between_ = false;
      const int result = inflate(&stream_, Z_NO_FLUSH);
      if (result == Z_MEM_ERROR) throw std::bad_alloc();
      if (result == Z_STREAM_END)
        between_ = true;
      else if (result != Z_OK)
        source_.refuse_damaged("gzip", stream_.msg != nullptr ? stream_.msg : "it is no gzip");
    }
    return out.size() - stream_.avail_out;
  }
  double done() const override { return source_.done(); }

 private:
  Source source_;
  z_stream stream_{};
  bool between_ = false;  // members
};

class ZstdInput final : public TextInput {
 public:
  explicit ZstdInput(const OpenFile& file) : source_(file), stream_(ZSTD_createDStream()) {
    if (!stream_) throw std::bad_alloc();
  }

  std::size_t read(std::span<std::byte> out) override {
    ZSTD_outBuffer to{out.data(), out.size(), 0};
    while (to.pos == 0) {
      if (in_.pos == in_.size && !has_more_) {
        const auto bytes = source_.next();
        if (bytes.empty()) {
          if (wanted_ != 0) source_.refuse_damaged("zstd", "it ends in the middle");
          return 0;
        }
        in_ = {bytes.data(), bytes.size(), 0};
      }
      wanted_ = ZSTD_decompressStream(stream_.get(), &to, &in_);
      if (ZSTD_isError(wanted_)) source_.refuse_damaged("zstd", ZSTD_getErrorName(wanted_));
      has_more_ = wanted_ != 0 && to.pos == to.size;  // what did not fit
    }
    return to.pos;
  }
  double done() const override { return source_.done(); }

 private:
  struct Free {
    void operator()(ZSTD_DStream* stream) const { ZSTD_freeDStream(stream); }
  };
  Source source_;
  std::unique_ptr<ZSTD_DStream, Free> stream_;
  ZSTD_inBuffer in_{nullptr, 0, 0};
  std::size_t wanted_ = 1;  // 0: at the end of a frame; an empty file is none
  bool has_more_ = false;
};

}  // namespace

std::unique_ptr<TextInput> open_gzip(const OpenFile& file) { return std::make_unique<GzipInput>(file); }
std::unique_ptr<TextInput> open_zstd(const OpenFile& file) { return std::make_unique<ZstdInput>(file); }

}  // namespace echelon

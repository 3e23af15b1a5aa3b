// checkpoint.json: a checkpoint's description, with the checksums of every tensor in it and of itself.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "base/error.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_file.h"

namespace echelon {

inline constexpr const char* manifest_name = "checkpoint.json";

// The file's text; `json` has no checksum of itself, or an old one.
std::string seal_manifest(const std::string& json);
std::string manifest_text(const CheckpointInfo& info, const Checksums& checksums);

struct Manifest {
  CheckpointInfo info;
  Checksums checksums;
};
// The format is of another version; the checkpoint may well be intact.
struct ForeignFormat : RequestError {
  using RequestError::RequestError;
};

// RequestError naming the file and the field if it is missing or damaged.
Manifest read_manifest(const std::filesystem::path& checkpoint);

// RequestError: a directory, named by `field`, holds no checkpoint.
[[noreturn]] void refuse_without_checkpoint(std::string_view field, const std::string& path);

std::string checksums_text(const Checksums& checksums);
// RequestError if the text is not from checksums_text().
Checksums parse_checksums(const std::string& text, const std::string& where);

}  // namespace echelon

// checkpoint.json: what a checkpoint is, and the checksum of every tensor in it and of itself.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "base/error.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_file.h"

namespace echelon {

inline constexpr const char* manifest_name = "checkpoint.json";

// The file's text; `json` without its seal, or with an old one.
std::string seal_manifest(const std::string& json);
std::string manifest_text(const CheckpointInfo& info, const Checksums& checksums);

struct Manifest {
  CheckpointInfo info;
  Checksums checksums;
};
// In a format of another version: whole, for all that is known.
struct ForeignFormat : RequestError {
  using RequestError::RequestError;
};

// RequestError naming the file and the field where it is missing or damaged.
Manifest read_manifest(const std::filesystem::path& checkpoint);

// RequestError: a directory, named by `field`, holds no checkpoint.
[[noreturn]] void refuse_without_checkpoint(std::string_view field, const std::string& path);

std::string checksums_text(const Checksums& checksums);
// RequestError where the text is not checksums_text()'s.
Checksums parse_checksums(const std::string& text, const std::string& where);

}  // namespace echelon

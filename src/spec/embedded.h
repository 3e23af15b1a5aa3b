// The files of configs/ that are compiled into the binary (cmake/embed.cmake generates the definitions).
#pragma once

#include <cstddef>

namespace echelon {

struct EmbeddedFile {
  const char* name;  // the file's name without its last extension
  const char* text;
};

extern const EmbeddedFile embedded_models[];
extern const std::size_t num_embedded_models;
extern const EmbeddedFile embedded_machines[];
extern const std::size_t num_embedded_machines;
extern const EmbeddedFile embedded_software[];
extern const std::size_t num_embedded_software;

}  // namespace echelon

// The .idx beside a .bin of Megatron-LM (https://github.com/NVIDIA/Megatron-LM, indexed_dataset):
// "MMIDIDX\0\0", uint64 version 1, uint8 type of the ids, uint64 sequences, uint64 documents + 1; int32
// lengths and int64 first bytes of the sequences, int64 first sequences of the documents.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/open_file.h"

namespace echelon {

struct MegatronIndex {
  int width = 2;  // bytes of an id in the .bin: uint16, or int32
  std::int64_t tokens = 0;
  std::vector<std::int64_t> documents;  // the first token of each
};

// Whether a.idx lies beside a.bin.
bool has_megatron_index(const std::string& bin);
// RequestError naming the file where it is damaged, is of ids that are not read, or the .bin is not what it
// says.
MegatronIndex read_megatron_index(const OpenFile& bin);

}  // namespace echelon

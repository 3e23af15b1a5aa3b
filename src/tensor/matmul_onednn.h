// f32 matrix products by oneDNN (2.6 or later). Nothing else in the library knows of it.
#pragma once

#include "tensor/matmul.h"

namespace echelon {

// Whether what an element of a product is the sum of is added in an order that depends on its size alone.
// Found by trying: with AVX-512 it is, up to a depth at which products are cut here; with AVX2 it is not.
bool onednn_adds_in_one_order();

// It computes by OpenMP, whose regions in the calling thread have one thread from now on.
void keep_onednn_to_its_thread();

// Before the first product, in a thread that is kept to itself. oneDNN writes its code when it is first
// called, without a look at whether it got the memory, so this is done while there is some. RunError where
// there is not.
void prepare_onednn();

// All of it f32, none of its sizes zero. On the calling thread, provided that it is inside an OpenMP region
// of several threads or its own OpenMP thread count is 1. False when oneDNN fails (no memory left).
bool multiply_by_onednn(const Product& product);

}  // namespace echelon

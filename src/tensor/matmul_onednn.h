// f32 matrix products by oneDNN (2.6 or later). Only this file knows of oneDNN.
#pragma once

#include "tensor/matmul_product.h"

namespace echelon {

// Whether the order in which an element is summed depends only on k. Found by experiment: with AVX-512 it
// does, up to a depth at which products are cut here; with AVX2 it does not.
bool onednn_adds_in_one_order();

// oneDNN uses OpenMP; from now on OpenMP regions in the calling thread have one thread.
void keep_onednn_to_its_thread();

// Call before the first product, in a thread after keep_onednn_to_its_thread(). oneDNN generates code at its
// first call without checking that it got the memory, so this is done while there is memory. RunError if
// there is not.
void prepare_onednn();

// All operands f32, and no size zero. Runs on the calling thread, provided that it is inside an OpenMP region
// of several threads, or its own OpenMP thread count is 1. False if oneDNN fails (out of memory).
bool multiply_by_onednn(const Product& product);

}  // namespace echelon

// The CUDA sources' arithmetic compiled for the host; test_kernel_arithmetic.py compares it with the references.
#include "../csrc/router.cuh"

extern "C" {

void sqrt_softplus(const float* x, float* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) y[i] = bi::moe::sqrt_softplus(x[i]);
}

void float_order(const float* x, int32_t* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) y[i] = bi::moe::float_order(x[i]);
}
}

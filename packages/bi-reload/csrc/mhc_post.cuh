// mHC after a layer: kernel and raw-pointer launcher. Every operation is the reference's, so every bit is.
#pragma once

#include <cstdint>

#include "bi/dependent_launch.cuh"
#include "bi/numerics.cuh"

namespace bi {

constexpr int kMhcPostThreads = 128;

struct MhcPostArgs {
    const uint16_t* x;         // bfloat16 [rows, hidden]
    const uint16_t* residual;  // bfloat16 [rows, 4, hidden]
    const float* post_mix;     // [rows, 4]
    const float* comb_mix;     // [rows, 4, 4]
    uint16_t* out;             // bfloat16 [rows, 4, hidden]
    int64_t rows, hidden;
};

#ifdef __CUDACC__
// NaN becomes 0x7fff in the conversion and the only half word above 0x7fc0, as a signed number.
BI_FN uint32_t mhc_post_round(float lo, float hi) { return __vmins2(pack_bf16(lo, hi), 0x7fc07fc0u); }

// post * x, then each old stream's product added, ascending; no fma.
template <class Comb>
__device__ __forceinline__ float mhc_post_mix(float post, float x, const Comb& comb, const float (&residual)[4]) {
    float total = mul_rn(post, x);
#pragma unroll
    for (int j = 0; j < 4; ++j) total = add_rn(total, mul_rn(comb[j], residual[j]));
    return total;
}

// kWords words of two columns per thread and stream; 0: one column, for rows that are no whole 16-byte vectors.
template <int kWords>
__global__ void __launch_bounds__(kMhcPostThreads) mhc_post_kernel(const __grid_constant__ MhcPostArgs a) {
    dependent_wait();
    dependent_start();
    const int64_t row = blockIdx.x;
    const int64_t at = int64_t{blockIdx.y} * kMhcPostThreads + threadIdx.x;
    constexpr int kColumns = kWords == 0 ? 1 : 2 * kWords;
    if (at * kColumns >= a.hidden) return;
    float post[4], comb[4][4];  // comb[new stream][old stream]
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        post[k] = a.post_mix[row * 4 + k];
#pragma unroll
        for (int j = 0; j < 4; ++j) comb[k][j] = a.comb_mix[row * 16 + j * 4 + k];
    }
    if constexpr (kWords == 0) {
        float residual[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) residual[j] = bf16_lo(a.residual[(row * 4 + j) * a.hidden + at]);
        const float x = bf16_lo(a.x[row * a.hidden + at]);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const uint32_t y = mhc_post_round(mhc_post_mix(post[k], x, comb[k], residual), 0.0f);
            a.out[(row * 4 + k) * a.hidden + at] = static_cast<uint16_t>(y);
        }
    } else {
        static_assert(kWords == 4);
        const int64_t vectors = a.hidden / 8;
        const uint4 x = __ldcs(reinterpret_cast<const uint4*>(a.x) + row * vectors + at);
        uint4 residual[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            residual[j] = __ldcs(reinterpret_cast<const uint4*>(a.residual) + (row * 4 + j) * vectors + at);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const auto mixed = [&](uint32_t xw, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
                const float lo[4] = {bf16_lo(r0), bf16_lo(r1), bf16_lo(r2), bf16_lo(r3)};
                const float hi[4] = {bf16_hi(r0), bf16_hi(r1), bf16_hi(r2), bf16_hi(r3)};
                return mhc_post_round(mhc_post_mix(post[k], bf16_lo(xw), comb[k], lo),
                                      mhc_post_mix(post[k], bf16_hi(xw), comb[k], hi));
            };
            uint4 y;
            y.x = mixed(x.x, residual[0].x, residual[1].x, residual[2].x, residual[3].x);
            y.y = mixed(x.y, residual[0].y, residual[1].y, residual[2].y, residual[3].y);
            y.z = mixed(x.z, residual[0].z, residual[1].z, residual[2].z, residual[3].z);
            y.w = mixed(x.w, residual[0].w, residual[1].w, residual[2].w, residual[3].w);
            reinterpret_cast<uint4*>(a.out)[(row * 4 + k) * vectors + at] = y;
        }
    }
}

template <int kWords>
cudaError_t launch_mhc_post(const MhcPostArgs& a, cudaStream_t stream) {
    const int64_t threads = kWords == 0 ? a.hidden : a.hidden / (2 * kWords);
    const dim3 grid(static_cast<unsigned>(a.rows),
                    static_cast<unsigned>((threads + kMhcPostThreads - 1) / kMhcPostThreads));
    return launch_dependent(mhc_post_kernel<kWords>, grid, kMhcPostThreads, 0, 1, stream, a);
}
#endif

}  // namespace bi

// Ordered combine: each token's expert rows added in the order of its top-k slots. Kernel and raw-pointer launcher.
//
// A thread owns eight columns of one token and walks the slots in ascending order: acc = fma(weight, row, acc) from +0,
// one rounding at the end. Nothing is shared between tokens, so nothing of the batch can show.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "bi/numerics.cuh"

namespace bi::moe {

constexpr int kColumns = 8;  // per thread: 16 bytes of bfloat16
constexpr int kCombineThreads = 256;
constexpr int kSlotsAhead = 8;  // rows on their way at once; enough for every top_k in use, and a loop for others

struct CombineArgs {
    const uint16_t* rows;  // bfloat16 [num_rows, hidden], contiguous
    const int32_t* slots;  // [tokens, top_k], contiguous: rows, or -1
    const int32_t* ids;    // [tokens, top_k], contiguous: a slot with a negative one is skipped; or null
    const float* weights;  // [tokens, top_k], contiguous
    void* out;             // bfloat16 or float32 [tokens, hidden]
    int64_t out_row;       // elements
    int64_t tokens, hidden, num_rows;
    int top_k;
};

// float32 with torch's NaN; two of them as bfloat16.
BI_FN float with_torch_nan(float x) { return x == x ? x : bits_float(kNaNBits); }
BI_FN uint32_t to_bf16_pair(float lo, float hi) {
    uint32_t pair = pack_bf16(lo, hi);
    if (lo != lo) pair = (pair & 0xffff0000u) | 0x7fc0u;
    if (hi != hi) pair = (pair & 0x0000ffffu) | 0x7fc00000u;
    return pair;
}

template <bool kFloat>
__global__ void __launch_bounds__(kCombineThreads) combine_ordered_kernel(const __grid_constant__ CombineArgs a) {
    const int64_t token = blockIdx.x;
    const int64_t column = (int64_t{blockIdx.y} * kCombineThreads + threadIdx.x) * kColumns;
    if (column >= a.hidden) return;
    const int32_t* slots = a.slots + token * a.top_k;
    const int32_t* ids = a.ids == nullptr ? slots : a.ids + token * a.top_k;  // a negative slot is skipped anyway
    const float* weights = a.weights + token * a.top_k;

    float acc[kColumns] = {};
    for (int first = 0; first < a.top_k; first += kSlotsAhead) {
        uint4 rows[kSlotsAhead];
        float weight[kSlotsAhead];
        bool used[kSlotsAhead];
#pragma unroll
        for (int i = 0; i < kSlotsAhead; ++i) {
            const bool inside = first + i < a.top_k;
            const int64_t slot = inside ? slots[first + i] : -1;
            const int32_t id = inside ? ids[first + i] : -1;
            used[i] = slot >= 0 && slot < a.num_rows && id >= 0;
            weight[i] = used[i] ? weights[first + i] : 0.0f;
            rows[i] = used[i] ? __ldg(reinterpret_cast<const uint4*>(a.rows + slot * a.hidden + column)) : uint4{};
        }
#pragma unroll
        for (int i = 0; i < kSlotsAhead; ++i) {
            if (!used[i]) continue;  // not fma(0, ...): that would turn a -0 into +0
            const uint32_t pairs[kColumns / 2] = {rows[i].x, rows[i].y, rows[i].z, rows[i].w};
#pragma unroll
            for (int j = 0; j < kColumns / 2; ++j) {
                acc[2 * j] = fma_rn(bf16_lo(pairs[j]), weight[i], acc[2 * j]);
                acc[2 * j + 1] = fma_rn(bf16_hi(pairs[j]), weight[i], acc[2 * j + 1]);
            }
        }
    }
    const int64_t offset = token * a.out_row + column;
    if constexpr (kFloat) {
        float4* out = reinterpret_cast<float4*>(static_cast<float*>(a.out) + offset);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) acc[j] = with_torch_nan(acc[j]);
        out[0] = make_float4(acc[0], acc[1], acc[2], acc[3]);
        out[1] = make_float4(acc[4], acc[5], acc[6], acc[7]);
    } else {
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(a.out) + offset) =
            make_uint4(to_bf16_pair(acc[0], acc[1]), to_bf16_pair(acc[2], acc[3]), to_bf16_pair(acc[4], acc[5]),
                       to_bf16_pair(acc[6], acc[7]));
    }
}

// Launches on `stream`. Does nothing where there is nothing to do.
inline void combine_ordered(const CombineArgs& a, bool to_float, cudaStream_t stream) {
    if (a.tokens == 0 || a.hidden == 0) return;
    const int64_t per_block = kCombineThreads * kColumns;
    const dim3 grid(static_cast<unsigned>(a.tokens), static_cast<unsigned>((a.hidden + per_block - 1) / per_block));
    to_float ? combine_ordered_kernel<true><<<grid, kCombineThreads, 0, stream>>>(a)
             : combine_ordered_kernel<false><<<grid, kCombineThreads, 0, stream>>>(a);
}

}  // namespace bi::moe

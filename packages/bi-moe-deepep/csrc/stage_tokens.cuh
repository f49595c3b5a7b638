// Staging: tokens copied to the rows of their local experts, in token order. Kernels and raw-pointer launcher.
//
// A token's row within an expert is the number of earlier tokens that chose the expert. One block per expert counts
// them in token order, by ballots and a prefix over warps: no atomics, so no run has another order.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace bi::moe {

constexpr int kPlaceThreads = 1024;
constexpr int kCopyThreads = 256;
constexpr int kWarp = 32;

// Strides count elements.
template <typename Id>
struct StageArgs {
    const uint16_t* x;  // bfloat16 [tokens, hidden]
    const Id* ids;      // [tokens, top_k]
    uint16_t* staged;   // bfloat16 [experts, capacity, hidden]
    int32_t* counts;    // [experts]
    int32_t* slots;     // [tokens, top_k], contiguous
    int64_t x_row, ids_row, staged_expert, staged_row;
    int64_t tokens, hidden, capacity, first_expert;
    int experts, top_k;
};

// Block e: rows of expert first_expert + e. Slots of experts that live elsewhere are -1; the blocks share that work.
template <typename Id>
__global__ void __launch_bounds__(kPlaceThreads) place_tokens_kernel(const __grid_constant__ StageArgs<Id> a) {
    __shared__ int32_t before[kPlaceThreads / kWarp];  // tokens of this expert in the warps before
    __shared__ int32_t total;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int64_t expert = a.first_expert + blockIdx.x;
    int32_t placed = 0;
    for (int64_t first = 0; first < a.tokens; first += kPlaceThreads) {
        const int64_t token = first + threadIdx.x;
        bool mine = false;
        if (token < a.tokens) {
            for (int i = 0; i < a.top_k; ++i) mine |= int64_t{a.ids[token * a.ids_row + i]} == expert;
        }
        const unsigned votes = __ballot_sync(0xffffffffu, mine);
        if (lane == 0) before[warp] = __popc(votes);
        __syncthreads();
        if (warp == 0) {
            const int32_t own = before[lane];
            int32_t sum = own;
#pragma unroll
            for (int step = 1; step < kWarp; step *= 2) {
                const int32_t other = __shfl_up_sync(0xffffffffu, sum, step);
                if (lane >= step) sum += other;
            }
            before[lane] = sum - own;
            if (lane == kWarp - 1) total = sum;
        }
        __syncthreads();
        if (mine) {
            const int64_t row = placed + before[warp] + __popc(votes & ((1u << lane) - 1u));
            for (int i = 0; i < a.top_k; ++i) {
                if (int64_t{a.ids[token * a.ids_row + i]} == expert) {
                    a.slots[token * a.top_k + i] = static_cast<int32_t>(blockIdx.x * a.capacity + row);
                }
            }
        }
        placed += total;
        __syncthreads();
    }
    if (threadIdx.x == 0) a.counts[blockIdx.x] = placed;

    const int64_t step = int64_t{gridDim.x} * kPlaceThreads;
    for (int64_t i = int64_t{blockIdx.x} * kPlaceThreads + threadIdx.x; i < a.tokens * a.top_k; i += step) {
        const int64_t local = int64_t{a.ids[i / a.top_k * a.ids_row + i % a.top_k]} - a.first_expert;
        if (local < 0 || local >= a.experts) a.slots[i] = -1;
    }
}

// Block t: token t, read once and written to each of its rows.
template <typename Id>
__global__ void __launch_bounds__(kCopyThreads) copy_tokens_kernel(const __grid_constant__ StageArgs<Id> a) {
    const int64_t token = blockIdx.x;
    const int32_t* slots = a.slots + token * a.top_k;
    const int64_t vectors = a.hidden / 8;
    bool any = false;
    for (int i = 0; i < a.top_k; ++i) any |= slots[i] >= 0;
    if (!any) return;
    for (int64_t v = threadIdx.x; v < vectors; v += kCopyThreads) {
        const uint4 part = __ldg(reinterpret_cast<const uint4*>(a.x + token * a.x_row) + v);
        for (int i = 0; i < a.top_k; ++i) {
            const int64_t slot = slots[i];
            if (slot < 0) continue;
            const int64_t expert = slot / a.capacity, row = slot % a.capacity;
            reinterpret_cast<uint4*>(a.staged + expert * a.staged_expert + row * a.staged_row)[v] = part;
        }
    }
}

// Launches on `stream`. The caller has made sure that no expert can get more than `capacity` tokens.
template <typename Id>
void stage_tokens(const StageArgs<Id>& a, cudaStream_t stream) {
    if (a.experts == 0) return;
    place_tokens_kernel<<<static_cast<unsigned>(a.experts), kPlaceThreads, 0, stream>>>(a);
    if (a.tokens == 0 || a.top_k == 0 || a.hidden == 0) return;
    copy_tokens_kernel<<<static_cast<unsigned>(a.tokens), kCopyThreads, 0, stream>>>(a);
}

}  // namespace bi::moe

// Packing: quantised tokens copied to rows sorted by expert, without padding. Kernels and raw-pointer launcher.
//
// The row of a slot is the number of slots of lower experts, plus the earlier slots of the same one. That is a count,
// which no order of additions moves, so each block counts what it needs itself: no atomics, and nothing to wait for. An
// id that names no expert counts as one past the last, which sorts behind all rows and gets none.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace bi::moe {

constexpr int kPackThreads = 256;
constexpr int kPackWarps = kPackThreads / 32;
constexpr int kCounted = 8;  // slots, or experts, that a block counts in one pass over the ids
// Up to this many slots every token's block counts its own rows: one launch, and work that grows with the square.
// Beyond, a launch with one block per expert counts, and a second copies.
constexpr int64_t kPackAtOnce = 4096;
constexpr int kPackPlaceThreads = 1024;

// Strides count elements.
template <typename Id>
struct PackArgs {
    const uint8_t* q;   // codes [tokens, hidden]
    const uint32_t* s;  // bits of float32 [tokens, hidden / 128]
    const Id* ids;      // [tokens, top_k]
    uint8_t* packed_q;  // [tokens * top_k, hidden]
    uint32_t* packed_s;
    int32_t* offsets;    // [experts + 1]
    int32_t* m_indices;  // [tokens * top_k]
    int32_t* slots;      // [tokens, top_k], contiguous
    int64_t q_row, s_row, s_column, ids_row, packed_q_row, packed_s_row, packed_s_column;
    int64_t tokens, hidden;
    int experts, top_k;
};

// The expert of a slot, or `experts` where there is none.
template <typename Id>
__device__ __forceinline__ int expert_of(const PackArgs<Id>& a, int64_t token, int slot) {
    const int64_t id = a.ids[token * a.ids_row + slot];
    return id >= 0 && id < a.experts ? static_cast<int>(id) : a.experts;
}

// total[j] = slots of experts below expert[j], plus those of expert[j] that belong to tokens before `token`. By the
// whole block; every thread gets all totals.
template <typename Id>
__device__ __forceinline__ void count_before(const PackArgs<Id>& a, int64_t token, const int (&expert)[kCounted],
                                             int (&total)[kCounted]) {
    __shared__ int shared[kPackWarps][kCounted];
    int count[kCounted] = {};
    for (int64_t other = threadIdx.x; other < a.tokens; other += kPackThreads) {
        const int earlier = other < token ? 1 : 0;
        for (int i = 0; i < a.top_k; ++i) {
            const int found = expert_of(a, other, i) - earlier;
#pragma unroll
            for (int j = 0; j < kCounted; ++j) count[j] += found < expert[j] ? 1 : 0;
        }
    }
    __syncthreads();  // `shared` may still be read from the last call
#pragma unroll
    for (int j = 0; j < kCounted; ++j) {
        const int sum = __reduce_add_sync(0xffffffffu, count[j]);
        if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32][j] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kCounted; ++j) {
        total[j] = 0;
#pragma unroll
        for (int warp = 0; warp < kPackWarps; ++warp) total[j] += shared[warp][j];
    }
}

// Codes and scales of one token to up to kCounted rows; -1 is none. `first` holds this thread's first 16 codes.
template <typename Id>
__device__ __forceinline__ void copy_token(const PackArgs<Id>& a, int64_t token, const int (&row)[kCounted],
                                           uint4 first) {
    const int64_t vectors = a.hidden / 16;
    for (int64_t v = threadIdx.x; v < vectors; v += kPackThreads) {
        const uint4 part = v < kPackThreads ? first : __ldg(reinterpret_cast<const uint4*>(a.q + token * a.q_row) + v);
#pragma unroll
        for (int j = 0; j < kCounted; ++j) {
            if (row[j] >= 0) reinterpret_cast<uint4*>(a.packed_q + row[j] * a.packed_q_row)[v] = part;
        }
    }
    for (int64_t group = threadIdx.x; group < a.hidden / 128; group += kPackThreads) {
        const uint32_t scale = __ldg(a.s + token * a.s_row + group * a.s_column);
#pragma unroll
        for (int j = 0; j < kCounted; ++j) {
            if (row[j] >= 0) a.packed_s[row[j] * a.packed_s_row + group * a.packed_s_column] = scale;
        }
    }
}

template <typename Id>
__device__ __forceinline__ uint4 first_codes(const PackArgs<Id>& a, int64_t token) {
    const bool mine = threadIdx.x < a.hidden / 16;
    return mine ? __ldg(reinterpret_cast<const uint4*>(a.q + token * a.q_row) + threadIdx.x) : uint4{};
}

// Block t < tokens: places token t and copies it. The blocks behind: kCounted offsets each.
template <typename Id>
__global__ void __launch_bounds__(kPackThreads) pack_at_once_kernel(const __grid_constant__ PackArgs<Id> a) {
    int expert[kCounted], row[kCounted];
    const int64_t token = blockIdx.x;
    if (token >= a.tokens) {
        const int first = static_cast<int>(token - a.tokens) * kCounted;
#pragma unroll
        for (int j = 0; j < kCounted; ++j) expert[j] = first + j;
        count_before(a, 0, expert, row);
#pragma unroll
        for (int j = 0; j < kCounted; ++j) {
            if (threadIdx.x == 0 && expert[j] <= a.experts) a.offsets[expert[j]] = row[j];
        }
        return;
    }
    const uint4 codes = first_codes(a, token);  // on their way while the block counts
    for (int first = 0; first < a.top_k; first += kCounted) {
#pragma unroll
        for (int j = 0; j < kCounted; ++j) expert[j] = first + j < a.top_k ? expert_of(a, token, first + j) : -1;
        count_before(a, token, expert, row);
#pragma unroll
        for (int j = 0; j < kCounted; ++j) {
            const int slot = first + j;
            // A token that names one expert twice has two rows.
#pragma unroll
            for (int i = 0; i < j; ++i) row[j] += expert[i] == expert[j] ? 1 : 0;
            for (int i = 0; i < first; ++i) row[j] += expert_of(a, token, i) == expert[j] ? 1 : 0;
            const bool used = expert[j] >= 0 && expert[j] < a.experts;
            if (threadIdx.x == 0 && slot < a.top_k) {
                a.m_indices[row[j]] = used ? expert[j] : -1;
                a.slots[token * a.top_k + slot] = used ? row[j] : -1;
            }
            row[j] = used ? row[j] : -1;
        }
        copy_token(a, token, row, codes);
    }
}

// Block e: offset and rows of expert e; the last block has the slots of none. A thread owns neighbouring slots, so that
// one prefix over the threads orders all of them.
template <typename Id>
__global__ void __launch_bounds__(kPackPlaceThreads) pack_place_kernel(const __grid_constant__ PackArgs<Id> a) {
    constexpr int kWarps = kPackPlaceThreads / 32;
    __shared__ int below_of[kWarps], equal_of[kWarps];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, expert = static_cast<int>(blockIdx.x);
    const int total = static_cast<int>(a.tokens) * a.top_k;
    const int each = (total + kPackPlaceThreads - 1) / kPackPlaceThreads;
    const int64_t from = int64_t{each} * threadIdx.x, stop = from + each;
    const int begin = static_cast<int>(from < total ? from : total),
              end = static_cast<int>(stop < total ? stop : total);
    int below = 0, equal = 0;
    for (int i = begin; i < end; ++i) {
        const int found = expert_of(a, i / a.top_k, i % a.top_k);
        below += found < expert ? 1 : 0;
        equal += found == expert ? 1 : 0;
    }
    int before = equal;  // an inclusive prefix over the warp, made exclusive below
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, before, step);
        if (lane >= step) before += other;
    }
    below = __reduce_add_sync(0xffffffffu, below);
    if (lane == 31) {
        below_of[warp] = below;
        equal_of[warp] = before;
    }
    __syncthreads();
    int offset = 0;
    before -= equal;
    for (int i = 0; i < kWarps; ++i) {
        offset += below_of[i];
        if (i < warp) before += equal_of[i];
    }
    if (threadIdx.x == 0) a.offsets[expert] = offset;
    int row = offset + before;
    const bool used = expert < a.experts;
    for (int i = begin; i < end && equal > 0; ++i) {
        if (expert_of(a, i / a.top_k, i % a.top_k) != expert) continue;
        a.m_indices[row] = used ? expert : -1;
        a.slots[i] = used ? row : -1;
        ++row;
        --equal;
    }
}

// Block t: token t, read once and written to each of its rows.
template <typename Id>
__global__ void __launch_bounds__(kPackThreads) pack_copy_kernel(const __grid_constant__ PackArgs<Id> a) {
    const int64_t token = blockIdx.x;
    const uint4 codes = first_codes(a, token);
    for (int first = 0; first < a.top_k; first += kCounted) {
        int row[kCounted];
#pragma unroll
        for (int j = 0; j < kCounted; ++j) row[j] = first + j < a.top_k ? a.slots[token * a.top_k + first + j] : -1;
        copy_token(a, token, row, codes);
    }
}

// Launches on `stream`. The choice between the two ways moves no bit: both give the one order.
template <typename Id>
void pack_tokens(const PackArgs<Id>& a, cudaStream_t stream) {
    const unsigned tokens = static_cast<unsigned>(a.tokens), offsets = static_cast<unsigned>(a.experts) + 1;
    if (a.tokens * a.top_k <= kPackAtOnce) {
        pack_at_once_kernel<<<tokens + (offsets + kCounted - 1) / kCounted, kPackThreads, 0, stream>>>(a);
        return;
    }
    pack_place_kernel<<<offsets, kPackPlaceThreads, 0, stream>>>(a);
    pack_copy_kernel<<<tokens, kPackThreads, 0, stream>>>(a);
}

}  // namespace bi::moe

// Choice of experts by DeepSeek-V4's sqrtsoftplus rule. Kernel and raw-pointer launcher.
//
// One warp per token. A key orders experts by (biased score, lower expert) and no two are equal, so the warp's maximum
// has no order, however the lanes are combined.
#pragma once

#ifdef __CUDACC__
#include <cuda_runtime.h>
#endif

#include <cstdint>

#include "bi/numerics.cuh"

namespace bi::moe {

constexpr int kSelectWarps = 4;
constexpr int kMaxExperts = 512;
constexpr int kPerLane = kMaxExperts / 32;

BI_FN float sqrt_rn(float x) {
#ifdef __CUDACC__
    return __fsqrt_rn(x);
#else
    return std::sqrt(x);
#endif
}

// ln(1 + u) for 0 <= u <= 1.
BI_FN float log1p_unit(float u) {
    const float s = div_rn(u, add_rn(2.0f, u));
    const float q = mul_rn(s, s);
    float p = static_cast<float>(1.0 / 15.0);
    p = fma_rn(p, q, static_cast<float>(1.0 / 13.0));
    p = fma_rn(p, q, static_cast<float>(1.0 / 11.0));
    p = fma_rn(p, q, static_cast<float>(1.0 / 9.0));
    p = fma_rn(p, q, static_cast<float>(1.0 / 7.0));
    p = fma_rn(p, q, static_cast<float>(1.0 / 5.0));
    p = fma_rn(p, q, static_cast<float>(1.0 / 3.0));
    return mul_rn(2.0f, fma_rn(mul_rn(p, q), s, s));
}

// sqrt(softplus(x)); NaN for NaN.
BI_FN float sqrt_softplus(float x) {
    if (x != x) return bits_float(kNaNBits);
    const float magnitude = bits_float(float_bits(x) & 0x7fffffffu);
    return sqrt_rn(add_rn(max_f(x, 0.0f), log1p_unit(exp_negative(-magnitude))));
}

// Orders as the float does: -0 with +0, NaN below -inf.
BI_FN int32_t float_order(float x) {
    if (x != x) return -2147483647;
    const int32_t bits = static_cast<int32_t>(float_bits(add_rn(x, 0.0f)));
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}

// Strides count elements. With a table, `ids` of a token are table[token_id], else the greatest biased scores.
struct SelectArgs {
    const float* logits;  // [tokens, experts]
    const float* bias;    // [experts] or null
    const void* token_ids;
    const void* table;  // [vocab, top_k] or null
    float* weights;     // [tokens, top_k]
    int32_t* ids;       // [tokens, top_k]
    int64_t logits_row, logits_column, table_row, table_column, bias_stride, token_id_stride;
    int64_t weights_row, weights_column, ids_row, ids_column;
    int64_t tokens, vocab;
    int experts, top_k;
    float scale;
    bool renormalize, wide_token_ids, wide_table;
};

#ifdef __CUDACC__
__device__ __forceinline__ int64_t integer_at(const void* base, int64_t index, bool wide) {
    return wide ? static_cast<const int64_t*>(base)[index] : int64_t{static_cast<const int32_t*>(base)[index]};
}

__global__ void __launch_bounds__(32 * kSelectWarps) select_experts_kernel(const __grid_constant__ SelectArgs a) {
    __shared__ float all_scores[kSelectWarps][kMaxExperts];
    const int lane = threadIdx.x % 32;
    const int64_t token = int64_t{blockIdx.x} * kSelectWarps + threadIdx.x / 32;
    if (token >= a.tokens) return;  // whole warps
    float* scores = all_scores[threadIdx.x / 32];
    constexpr int64_t kTaken = INT64_MIN;
    int64_t keys[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const int expert = i * 32 + lane;
        keys[i] = kTaken;
        if (expert < a.experts) {
            const float score = sqrt_softplus(a.logits[token * a.logits_row + expert * a.logits_column]);
            scores[expert] = score;
            const float biased = a.bias == nullptr ? score : add_rn(score, a.bias[expert * a.bias_stride]);
            keys[i] = int64_t{float_order(biased)} * (int64_t{1} << 32) + (a.experts - 1 - expert);
        }
    }
    __syncwarp();

    int64_t row = -1;
    if (a.table != nullptr) row = integer_at(a.token_ids, token * a.token_id_stride, a.wide_token_ids);
    float total = 0.0f;
    for (int slot = 0; slot < a.top_k; ++slot) {
        int64_t expert = -1;
        if (a.table != nullptr) {
            if (row >= 0 && row < a.vocab) {
                expert = integer_at(a.table, row * a.table_row + slot * a.table_column, a.wide_table);
            }
            if (expert >= a.experts) expert = -1;
        } else {
            int64_t best = keys[0];
#pragma unroll
            for (int i = 1; i < kPerLane; ++i) best = keys[i] > best ? keys[i] : best;
#pragma unroll
            for (int step = 16; step > 0; step /= 2) {
                const int64_t other = __shfl_xor_sync(0xffffffffu, best, step);
                best = other > best ? other : best;
            }
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) {
                if (keys[i] == best) keys[i] = kTaken;
            }
            expert = a.experts - 1 - (best & 0xffffffff);
        }
        const float score = expert >= 0 ? scores[expert] : bits_float(kNaNBits);
        total = add_rn(total, score);  // in slot order, the same on every lane
        if (lane == 0) {
            a.ids[token * a.ids_row + slot * a.ids_column] = static_cast<int32_t>(expert >= 0 ? expert : -1);
            a.weights[token * a.weights_row + slot * a.weights_column] = score;
        }
    }
    __syncwarp();
    const float divisor = add_rn(total, 1e-20f);
    for (int slot = lane; slot < a.top_k; slot += 32) {
        float* weight = a.weights + token * a.weights_row + slot * a.weights_column;
        const float score = a.renormalize ? div_rn(*weight, divisor) : *weight;
        const float scaled = mul_rn(score, a.scale);
        *weight = scaled == scaled ? scaled : bits_float(kNaNBits);
    }
}

// Launches on `stream`. Does nothing where there is nothing to do.
inline void select_experts(const SelectArgs& a, cudaStream_t stream) {
    if (a.tokens == 0) return;
    const int64_t blocks = (a.tokens + kSelectWarps - 1) / kSelectWarps;
    select_experts_kernel<<<static_cast<unsigned>(blocks), 32 * kSelectWarps, 0, stream>>>(a);
}
#endif

}  // namespace bi::moe

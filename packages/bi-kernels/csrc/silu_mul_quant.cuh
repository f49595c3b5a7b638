// Fused SiLU(gate) * up and 128-element group quantisation to e4m3: kernel and raw-pointer launcher.
//
// One pass. Eight lanes own one group of one row: each loads sixteen gates and sixteen ups, and the group's largest
// magnitude is found by three shuffles. A maximum has no order, no value crosses a row, and every row runs the same
// instructions wherever it lies, so the bits of a row cannot depend on the batch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "bi/device_arch.cuh"
#include "bi/fp8.cuh"
#include "bi/launch.cuh"

namespace bi {

// Strides count elements. All offsets are int64: inputs and outputs may exceed 2**31 elements.
struct SiluMulQuantArgs {
    const uint16_t* x;        // bfloat16 [experts, rows, 2 * intermediate], gate half first
    const int32_t* masked_m;  // [experts] rows in use, or null: all
    uint8_t* q;               // e4m3 [experts, rows, intermediate]
    void* s;                  // float32 [experts, rows, groups] or int32 [experts, rows, ceil(groups / 4)]
    int64_t x_expert, x_row;
    int64_t q_expert, q_row;
    int64_t s_expert, s_row, s_group;
    int64_t experts, rows;
    int groups;
    float clamp_limit;
    const int32_t* m_indices;  // [rows] negative: nobody's row, left alone; or null. Not by expert
};

// All 32 lanes call this; `group` is the caller's own, `first_lane` whether it is the first of that group's lanes.
template <ScaleFormat kFormat>
__device__ __forceinline__ void store_scale(const SiluMulQuantArgs& a, int64_t row_offset, int group, bool first_lane,
                                            float scale, bool finite) {
    const bool active = group < a.groups;
    if constexpr (kFormat == ScaleFormat::kUe8m0) {
        // Byte j of word w belongs to group 4 w + j; a warp holds the four groups of one word. Bytes past the last
        // group are 0.
        const uint32_t exponent = finite ? float_bits(scale) >> 23 : kNaNExponent;
        uint32_t word = active ? exponent << (8 * (group % kGroupsPerWarp)) : 0;
        word |= __shfl_xor_sync(0xffffffffu, word, kLanesPerGroup);
        word |= __shfl_xor_sync(0xffffffffu, word, 2 * kLanesPerGroup);
        if (first_lane && active && group % kGroupsPerWarp == 0) {
            static_cast<uint32_t*>(a.s)[row_offset + group / kGroupsPerWarp * a.s_group] = word;
        }
    } else if (first_lane && active) {
        static_cast<float*>(a.s)[row_offset + group * a.s_group] = finite ? scale : bits_float(kNaNBits);
    }
}

template <ScaleFormat kFormat, bool kClamp, bool kExperts>
__global__ void __launch_bounds__(kMaxGroupsPerBlock* kLanesPerGroup, 5)
    silu_mul_quant_kernel(const __grid_constant__ SiluMulQuantArgs a) {
#ifdef __CUDA_ARCH__
    constexpr int kPairs = kGroupSize / kLanesPerGroup / 2;
    constexpr int kLoads = kPairs / 4;  // of 16 bytes; the lanes of a group read 128 contiguous bytes each time
    const int lane = threadIdx.x % kLanesPerGroup;
    const int group = (blockIdx.y * blockDim.x + threadIdx.x) / kLanesPerGroup;
    const bool active = group < a.groups;  // the last warp of a row may hold fewer than four groups
    const int64_t column = int64_t{group} * kGroupSize + lane * 8;
    const int64_t up_offset = int64_t{a.groups} * kGroupSize;

    const int64_t experts = kExperts ? a.experts : 1;
    for (int64_t expert = kExperts ? blockIdx.z : 0; expert < experts; expert += gridDim.z) {
        int64_t rows = a.rows;
        if (kExperts && a.masked_m != nullptr) rows = min(rows, int64_t{a.masked_m[expert]});
        for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
            if (!kExperts && a.m_indices != nullptr && a.m_indices[row] < 0) continue;  // for the whole block
            const uint16_t* x = a.x + expert * a.x_expert + row * a.x_row + column;
            uint32_t gate[kPairs] = {}, up[kPairs] = {}, y[kPairs];
            if (active) {
#pragma unroll
                for (int i = 0; i < kLoads; ++i) {
                    const uint4 g = __ldcs(reinterpret_cast<const uint4*>(x) + i * kLanesPerGroup);
                    const uint4 u = __ldcs(reinterpret_cast<const uint4*>(x + up_offset) + i * kLanesPerGroup);
                    gate[4 * i] = g.x, gate[4 * i + 1] = g.y, gate[4 * i + 2] = g.z, gate[4 * i + 3] = g.w;
                    up[4 * i] = u.x, up[4 * i + 1] = u.y, up[4 * i + 2] = u.z, up[4 * i + 3] = u.w;
                }
            }

            uint32_t largest = 0;  // per half word, the largest magnitude as an integer: NaN > inf > finite
            if constexpr (kClamp) {
                // A clamp makes an infinity an ordinary number. Without one, infinite inputs give infinite or NaN y.
#pragma unroll
                for (int i = 0; i < kPairs; ++i) largest = poison_bf16x2(gate[i], poison_bf16x2(up[i], largest));
            }
            DeviceArch::silu_mul<kClamp>(gate, up, a.clamp_limit, y);
#pragma unroll
            for (int i = 0; i < kPairs; ++i) largest = max_abs_bf16x2(largest, y[i]);
            largest &= 0x7fff7fffu;
#pragma unroll
            for (int step = kLanesPerGroup / 2; step > 0; step /= 2) {
                largest = max_u16x2(largest, __shfl_xor_sync(0xffffffffu, largest, step));
            }
            const float amax = bits_float(max(largest << 16, largest & 0xffff0000u));
            const bool finite = float_bits(amax) < kInfBits;
            const float scale = group_scale<kFormat>(amax);
            const float inverse = pow2_inverse(scale);

            uint32_t codes[kPairs];
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                float lo, hi;
                scaled<kFormat>(y[i], scale, inverse, lo, hi);
                codes[i] = pack_e4m3(lo, hi);
            }
            if (active) {
                uint8_t* q = a.q + expert * a.q_expert + row * a.q_row + column;
#pragma unroll
                for (int i = 0; i < kLoads; ++i) {
                    uint2 packed = {codes[4 * i] | codes[4 * i + 1] << 16, codes[4 * i + 2] | codes[4 * i + 3] << 16};
                    if (!finite) packed = {kNaNCode * 0x01010101u, kNaNCode * 0x01010101u};
                    reinterpret_cast<uint2*>(q)[i * kLanesPerGroup] = packed;
                }
            }
            store_scale<kFormat>(a, expert * a.s_expert + row * a.s_row, group, lane == 0, scale, finite);
        }
    }
#endif
}

template <ScaleFormat kFormat, bool kClamp, bool kExperts>
void launch_silu_mul_quant(const SiluMulQuantArgs& a, cudaStream_t stream) {
    const SiluMulQuantPlan plan = silu_mul_quant_plan(a.groups);
    // Only the number of blocks follows the number of rows; a block that gets several rows treats them one by one.
    const int64_t row_blocks = kExperts ? plan.expert_row_blocks : kMaxGridX;
    const dim3 grid(static_cast<unsigned>(a.rows < row_blocks ? a.rows : row_blocks), plan.blocks_per_row,
                    static_cast<unsigned>(a.experts < kMaxGridZ ? a.experts : kMaxGridZ));
    silu_mul_quant_kernel<kFormat, kClamp, kExperts><<<grid, plan.threads, 0, stream>>>(a);
}

// Launches on `stream`. Does nothing where there is nothing to do. `by_expert`: x is [experts, rows, ...].
template <ScaleFormat kFormat>
void silu_mul_quant(const SiluMulQuantArgs& a, bool clamp, bool by_expert, cudaStream_t stream) {
    if (a.experts == 0 || a.rows == 0 || a.groups == 0) return;
    if (by_expert) {
        clamp ? launch_silu_mul_quant<kFormat, true, true>(a, stream)
              : launch_silu_mul_quant<kFormat, false, true>(a, stream);
    } else {
        clamp ? launch_silu_mul_quant<kFormat, true, false>(a, stream)
              : launch_silu_mul_quant<kFormat, false, false>(a, stream);
    }
}

}  // namespace bi

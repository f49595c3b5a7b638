// mHC after the projection: gates, Sinkhorn, the mix of the streams, and the norm. Kernel and raw-pointer launcher.
//
// Everything up to the mixed streams repeats the reference operation by operation, so that it has the reference's bits
// wherever the projection has. One launch has two kinds of thread blocks: some write post_mix and comb_mix, half a warp
// per token, since twenty Sinkhorn iterations are one long chain of divisions; the others, one per token, need four
// gates only and do not wait for that chain.
#pragma once

#include <cstdint>

#include "bi/dependent_launch.cuh"
#include "bi/numerics.cuh"
#include "mhc_projection.cuh"

namespace bi {

constexpr int kMhcVectors = 2;  // of eight columns, per thread
constexpr int kMhcMaxHidden = 1024 * 8 * kMhcVectors;

struct MhcGatesArgs {
    const float* partial;         // [rows, splits, kMhcPartialStride]
    const uint16_t* residual;     // bfloat16 [rows, 4, hidden]; broadcast: [rows, hidden]
    const float* scale;           // [3]; head: [1]
    const float* base;            // [24]; head: [4]
    const uint16_t* norm_weight;  // bfloat16 [hidden], or null
    uint16_t* layer_input;        // bfloat16 [rows, hidden]
    float* post_mix;              // [rows, 4]
    float* comb_mix;              // [rows, 4, 4]
    uint16_t* residual_out;       // broadcast: bfloat16 [rows, 4, hidden]
    int64_t rows;
    int hidden, splits, sinkhorn_iters;
    float count;  // of the squares
    float rms_eps, hc_eps, norm_eps, post_mult;
};

#ifdef __CUDACC__
// The reference's exp (bi_kernels.reference.numerics), for every float.
BI_FN float mhc_exp(float x) {
    float shifted;
    float p = exp_mantissa(max_f(min_f(x, 89.0f), -105.0f), shifted);
    // Two steps, so that a subnormal result is rounded once.
    const int whole = __float2int_rn(add_rn(shifted, -kRoundToInteger)), half = whole >> 1;
    p = mul_rn(p, bits_float(static_cast<uint32_t>(half + 127) << 23));
    p = mul_rn(p, bits_float(static_cast<uint32_t>(whole - half + 127) << 23));
    return x == x ? p : x;
}
BI_FN float mhc_sigmoid(float x) { return div_rn(1.0f, add_rn(1.0f, mhc_exp(-x))); }
BI_FN float mhc_inverse_rms(float squares, float count, float eps) {
    return div_rn(1.0f, __fsqrt_rn(add_rn(div_rn(squares, count), eps)));
}
BI_FN float mhc_canonical(float x) { return x == x ? x : bits_float(kNaNBits); }
// A word of bfloat16 whose NaN, if any, is what the conversion writes, 0x7fff; as a signed number it is the only one
// above 0x7fc0, which the reference writes.
BI_FN uint32_t mhc_canonical_pair(uint32_t pair) { return __vmins2(pair, 0x7fc07fc0u); }
BI_FN uint32_t mhc_round_pair(float lo, float hi) { return mhc_canonical_pair(pack_bf16(lo, hi)); }

// One column of the projection: its pieces, ascending. From the L2 cache, past lines that this multiprocessor may hold.
// -0 changes nothing that it is added to.
BI_FN float mhc_add_pieces(const float* partial, int64_t row, int splits, int column) {
    constexpr int kAtOnce = 16;
    const float* p = partial + row * splits * kMhcPartialStride + column;
    float total = -0.0f;
    for (int first = 0; first < splits; first += kAtOnce, p += kAtOnce * kMhcPartialStride) {
        float piece[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) piece[i] = first + i < splits ? __ldcg(p + i * kMhcPartialStride) : -0.0f;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) total = add_rn(total, piece[i]);
    }
    return total;
}

// ((v0 + v1) + v2) + v3 of the lanes first, first + step, ...
BI_FN float mhc_sum4(float value, int first, int step) {
    constexpr uint32_t kAll = 0xffffffffu;
    const float v0 = __shfl_sync(kAll, value, first), v1 = __shfl_sync(kAll, value, first + step);
    const float v2 = __shfl_sync(kAll, value, first + 2 * step), v3 = __shfl_sync(kAll, value, first + 3 * step);
    return add_rn(add_rn(add_rn(v0, v1), v2), v3);
}

// x / s, correctly rounded, for normal numbers whose quotient is far from both ends of the range: the compiler's own
// sequence without its test for the others, which is a third of Sinkhorn's time.
BI_FN float mhc_div_normal(float x, float s) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(s));
    y = fma_rn(fma_rn(-s, y, 1.0f), y, y);
    float q = mul_rn(x, y);
    q = fma_rn(fma_rn(-s, q, x), y, q);
    return fma_rn(fma_rn(-s, q, x), y, q);
}

// All half steps but the first two. An element is at most 1, and one half step divides it by at most 4 + eps; so with
// eps of at least 2**-24 twenty iterations leave it above 2**-110, and every sum lies between eps and 5.
template <bool kNormal>
__device__ __forceinline__ float mhc_sinkhorn(float comb, int old_stream, int new_stream, int iters, float eps) {
    for (int i = 1; i < iters; ++i) {
        const float row = add_rn(mhc_sum4(comb, old_stream, 1), eps);
        comb = kNormal ? mhc_div_normal(comb, row) : div_rn(comb, row);
        const float column = add_rn(mhc_sum4(comb, new_stream, 4), eps);
        comb = kNormal ? mhc_div_normal(comb, column) : div_rn(comb, column);
    }
    return comb;
}

// Half a warp per token: lane 4 j + k of it has comb[j, k]; lanes 0 to 3 also have post[lane].
__device__ __forceinline__ void mhc_write_gates(const MhcGatesArgs& a) {
    constexpr uint32_t kAll = 0xffffffffu;
    const int lane = threadIdx.x % 32, half = lane & 16, element = lane & 15;
    const int64_t token = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 16;
    const int64_t row = min(token, a.rows - 1);  // a half without a token takes part in the shuffles
    float comb = mhc_add_pieces(a.partial, row, a.splits, 8 + element);
    float other = 0.0f;
    if (element <= 4) other = mhc_add_pieces(a.partial, row, a.splits, element < 4 ? 4 + element : kMhcSquares);
    const float inverse = mhc_inverse_rms(__shfl_sync(kAll, other, half + 4), a.count, a.rms_eps);
    if (element < 4 && token < a.rows) {
        const float logit = add_rn(mul_rn(mul_rn(other, inverse), a.scale[1]), a.base[4 + element]);
        a.post_mix[token * 4 + element] = mhc_canonical(mul_rn(mhc_sigmoid(logit), a.post_mult));
    }
    comb = add_rn(mul_rn(mul_rn(comb, inverse), a.scale[2]), a.base[8 + element]);
    const int old_stream = lane & ~3, new_stream = half + (lane & 3);
    float largest = __shfl_sync(kAll, comb, old_stream);
#pragma unroll
    for (int i = 1; i < 4; ++i) largest = max_nan(largest, __shfl_sync(kAll, comb, old_stream + i));
    comb = mhc_exp(add_rn(comb, -largest));
    comb = add_rn(div_rn(comb, mhc_sum4(comb, old_stream, 1)), a.hc_eps);
    comb = div_rn(comb, add_rn(mhc_sum4(comb, new_stream, 4), a.hc_eps));
    const bool normal = a.hc_eps >= 0x1p-24f && a.sinkhorn_iters <= 20;
    comb = normal ? mhc_sinkhorn<true>(comb, old_stream, new_stream, a.sinkhorn_iters, a.hc_eps)
                  : mhc_sinkhorn<false>(comb, old_stream, new_stream, a.sinkhorn_iters, a.hc_eps);
    if (token < a.rows) a.comb_mix[token * 16 + element] = mhc_canonical(comb);
}

enum class MhcForm { kStreams, kBroadcast, kHead };

// ((pre0 * x0 + pre1 * x1) + pre2 * x2) + pre3 * x3 of both halves of a word.
__device__ __forceinline__ uint32_t mhc_mix_pair(const float (&pre)[4], uint32_t x0, uint32_t x1, uint32_t x2,
                                                 uint32_t x3) {
    float lo = mul_rn(pre[0], bf16_lo(x0)), hi = mul_rn(pre[0], bf16_hi(x0));
    lo = add_rn(lo, mul_rn(pre[1], bf16_lo(x1))), hi = add_rn(hi, mul_rn(pre[1], bf16_hi(x1)));
    lo = add_rn(lo, mul_rn(pre[2], bf16_lo(x2))), hi = add_rn(hi, mul_rn(pre[2], bf16_hi(x2)));
    lo = add_rn(lo, mul_rn(pre[3], bf16_lo(x3))), hi = add_rn(hi, mul_rn(pre[3], bf16_hi(x3)));
    return mhc_round_pair(lo, hi);
}

// One block per token; a thread has kMhcVectors vectors of eight columns, blockDim.x apart.
template <MhcForm kForm, bool kNorm>
__global__ void __launch_bounds__(1024, 1) mhc_gates_kernel(const __grid_constant__ MhcGatesArgs a, int gate_blocks) {
    constexpr int kStreams = kForm == MhcForm::kBroadcast ? 1 : 4;
    __shared__ float pre_shared[4];
    __shared__ float squares_shared[32];
    if (kForm != MhcForm::kHead && static_cast<int>(blockIdx.x) < gate_blocks) {
        dependent_wait();
        mhc_write_gates(a);
        return;
    }
    const int64_t row = int64_t{blockIdx.x} - gate_blocks;
    const int vectors = a.hidden / 8;
    // Complete since the projection kernel ended its own wait, and this one cannot start before that.
    uint4 x[kMhcVectors][kStreams], w[kMhcVectors];
#pragma unroll
    for (int i = 0; i < kMhcVectors; ++i) {
        const int v = threadIdx.x + i * blockDim.x;
        if (v < vectors) {
            const uint4* from = reinterpret_cast<const uint4*>(a.residual) + row * kStreams * vectors + v;
#pragma unroll
            for (int j = 0; j < kStreams; ++j) x[i][j] = __ldcg(from + j * vectors);
            if constexpr (kNorm) w[i] = __ldcg(reinterpret_cast<const uint4*>(a.norm_weight) + v);
        } else {
#pragma unroll
            for (int j = 0; j < kStreams; ++j) x[i][j] = {};
            w[i] = {};
        }
    }
    dependent_wait();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 0) {
        float total = 0.0f;
        if (lane <= 4) total = mhc_add_pieces(a.partial, row, a.splits, lane < 4 ? lane : kMhcSquares);
        const float inverse = mhc_inverse_rms(__shfl_sync(0xffffffffu, total, 4), a.count, a.rms_eps);
        if (lane < 4) {
            const float logit = add_rn(mul_rn(mul_rn(total, inverse), a.scale[0]), a.base[lane]);
            pre_shared[lane] = add_rn(mhc_sigmoid(logit), a.hc_eps);
        }
    }
    __syncthreads();
    const float pre[4] = {pre_shared[0], pre_shared[1], pre_shared[2], pre_shared[3]};

    uint4 y[kMhcVectors];
#pragma unroll
    for (int i = 0; i < kMhcVectors; ++i) {
        const uint4 &x0 = x[i][0], &x1 = x[i][1 % kStreams], &x2 = x[i][2 % kStreams], &x3 = x[i][3 % kStreams];
        y[i].x = mhc_mix_pair(pre, x0.x, x1.x, x2.x, x3.x), y[i].y = mhc_mix_pair(pre, x0.y, x1.y, x2.y, x3.y);
        y[i].z = mhc_mix_pair(pre, x0.z, x1.z, x2.z, x3.z), y[i].w = mhc_mix_pair(pre, x0.w, x1.w, x2.w, x3.w);
    }
    if constexpr (kNorm) {
        // A tree over the row: a thread's own vectors (zero past the end), the warp, the warps ascending.
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < kMhcVectors; ++i) {
            const bool exists = static_cast<int>(threadIdx.x + i * blockDim.x) < vectors;
            if (exists) squares = mhc_add_squares(y[i], squares);
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) squares = add_rn(squares, __shfl_xor_sync(0xffffffffu, squares, step));
        if (lane == 0) squares_shared[warp] = squares;
        __syncthreads();
        squares = squares_shared[0];
        for (int i = 1; i < static_cast<int>(blockDim.x / 32); ++i) squares = add_rn(squares, squares_shared[i]);
        const float inverse = mhc_inverse_rms(squares, static_cast<float>(a.hidden), a.norm_eps);
        const auto scaled = [&](uint32_t value, uint32_t weight) {
            return mhc_round_pair(mul_rn(mul_rn(bf16_lo(value), inverse), bf16_lo(weight)),
                                  mul_rn(mul_rn(bf16_hi(value), inverse), bf16_hi(weight)));
        };
#pragma unroll
        for (int i = 0; i < kMhcVectors; ++i) {
            y[i] = {scaled(y[i].x, w[i].x), scaled(y[i].y, w[i].y), scaled(y[i].z, w[i].z), scaled(y[i].w, w[i].w)};
        }
    }
#pragma unroll
    for (int i = 0; i < kMhcVectors; ++i) {
        const int v = threadIdx.x + i * blockDim.x;
        if (v < vectors) {
            reinterpret_cast<uint4*>(a.layer_input)[row * vectors + v] = y[i];
            if constexpr (kForm == MhcForm::kBroadcast) {
                uint4* const to = reinterpret_cast<uint4*>(a.residual_out) + row * 4 * vectors + v;
#pragma unroll
                for (int j = 0; j < 4; ++j) to[j * vectors] = x[i][0];
            }
        }
    }
}

template <MhcForm kForm>
cudaError_t launch_mhc_gates(const MhcGatesArgs& a, cudaStream_t stream) {
    // From the hidden size alone: the order of the norm's sum follows it.
    const int vectors = a.hidden / 8;
    const int threads = ((vectors + kMhcVectors - 1) / kMhcVectors + 31) / 32 * 32;
    const int64_t gate_blocks = kForm == MhcForm::kHead ? 0 : (a.rows * 16 + threads - 1) / threads;
    const dim3 grid(static_cast<unsigned>(a.rows + gate_blocks));
    const int first_token_block = static_cast<int>(gate_blocks);
    if constexpr (kForm != MhcForm::kHead) {
        if (a.norm_weight != nullptr) {
            return launch_dependent(mhc_gates_kernel<kForm, true>, grid, threads, 0, 1, stream, a, first_token_block);
        }
    }
    return launch_dependent(mhc_gates_kernel<kForm, false>, grid, threads, 0, 1, stream, a, first_token_block);
}
#endif

}  // namespace bi

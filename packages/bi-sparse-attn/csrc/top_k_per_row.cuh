// Top-k of every row by a total order, in ascending order of index. Kernel and launcher; no torch.
//
// The order (score, then the lower index) is total, so the answer is unique. How many blocks share a row, which of the
// ways below a row takes, and in which order atomics arrive can therefore change the time and nothing else; that is why
// the split may look at the number of rows, which no bounded op may. Everything that orders the output, and everything
// that cuts a plateau of equal scores, is a prefix sum in index order.
//
// A row is cut into slices, one per block of a cluster, kept on chip as order-preserving integers:
//   1. The largest of every few keys is counted by its leading 12 bits. Where the k-th largest of those lies, at least
//      k keys are at or above: a lower bound of the k-th score that costs a fraction of a histogram of all keys.
//   2. Keys at or above the bound go, in index order, to a list in the first block's shared memory.
//   3. Radix selection (12, 10, 10 bits) on the list, and one pass that writes it out in order.
// If the list would overflow (plateaus, sorted rows, large k), 3 runs on the slices. A row of up to 8,192 keys stays in
// the registers of one block: one histogram, then the few keys of its k-th bin are ranked against one another.
#pragma once

#ifdef __CUDACC__
#include <cooperative_groups.h>
#include <cuda_runtime.h>
#else
#include "host_cuda.h"  // tests/: blocks and clusters on a CPU
#endif

#include <algorithm>

#include "bi/numerics.cuh"

namespace bi {

constexpr int kTopKThreads = 512;
constexpr int kTopKWarps = kTopKThreads / 32;
constexpr int kTopKBins = 4096;
constexpr uint32_t kTopKList = 4096;      // keys
constexpr uint32_t kTopKRanked = 192;     // keys that are ranked against one another
constexpr uint32_t kTopKAlone = 8192;     // keys of a row that one block takes
constexpr int kTopKMaxSplit = 8;          // blocks of a cluster that every GPU launches
constexpr int64_t kTopKHeld = 4096;       // vectors of four keys that let two blocks share a multiprocessor
constexpr int64_t kTopKMostHeld = 11264;  // and that one block has room for
constexpr int kTopKFixedBytes = kTopKBins * 4 + kTopKList * 8;
constexpr uint32_t kNoBin = ~0u;
static_assert(kTopKFixedBytes + kTopKMostHeld * 16 + 1024 <= 232448);

struct TopKArgs {
    const float* logits;
    const int32_t* starts;
    const int32_t* ends;
    int32_t* out;
    int64_t logits_row, logits_column, starts_stride, ends_stride, out_row, out_column, width;
    uint32_t top_k;
    uint32_t held;  // vectors of a slice for which there is shared memory
};

// A row's range in vectors of four keys. Vector v holds the keys of columns 4 v - skew + {0..3} of the range, so that
// whole vectors are aligned in memory wherever the range starts.
struct TopKRow {
    const float* base;
    int64_t stride;
    uint32_t length, skew;
    bool contiguous;

    __device__ uint32_t vectors() const { return (length + skew + 3) / 4; }
    __device__ uint32_t index(uint32_t v) const { return 4 * v - skew; }
    // The unsigned index of a column before the range is huge, hence not below the length.
    __device__ bool whole(uint32_t v) const {
        const uint32_t i = index(v);
        return contiguous && i < length && i + 3 < length;
    }
    __device__ float4 load(uint32_t v) const { return __ldg(reinterpret_cast<const float4*>(base) + v); }

    // As unsigned integers, keys are ordered as scores are. -0 has the key of +0, and NaN, like a column outside the
    // range, has 0, which is below -inf's.
    __device__ static uint32_t key(float x) {
        const uint32_t b = float_bits(add_rn(x, 0.0f));
        const uint32_t ordered = b ^ (static_cast<uint32_t>(static_cast<int32_t>(b) >> 31) | 0x80000000u);
        return x == x ? ordered : 0;
    }
    __device__ static uint4 keys(float4 x) { return make_uint4(key(x.x), key(x.y), key(x.z), key(x.w)); }
    __device__ uint32_t key_at(uint32_t i) const {
        if (i >= length) return 0;
        return key(__ldg(base + (contiguous ? int64_t{i} + skew : int64_t{i} * stride)));
    }
    __device__ uint4 edge(uint32_t v) const {
        const uint32_t i = index(v);
        return make_uint4(key_at(i), key_at(i + 1), key_at(i + 2), key_at(i + 3));
    }
};

struct TopKShared {
    uint32_t above[kTopKWarps], equal[kTopKWarps];
    uint32_t bin, bin_above, bin_count, listed;
    uint32_t split_above[kTopKMaxSplit], split_equal[kTopKMaxSplit];
};

// What a block works with.
struct TopKBlock {
    TopKShared* shared;
    uint32_t* histogram;
    uint32_t rank, split;  // of the blocks that share the row
};

// An ordered run of keys: a slice of the row, or (kList) the list, which has its indices beside it.
template <bool kList>
struct TopKKeys {
    const uint4* held;
    const uint32_t* indices;
    uint32_t num_held, first, count;  // vectors; first: of the row
    TopKRow row;

    __device__ uint4 at(uint32_t v) const {
        if (v >= count) return make_uint4(0, 0, 0, 0);
        if (kList || v < num_held) return held[v];
        return row.whole(first + v) ? TopKRow::keys(row.load(first + v)) : row.edge(first + v);
    }
    __device__ uint32_t index(uint32_t v, int i) const { return kList ? indices[4 * v + i] : row.index(first + v) + i; }
};

__device__ __forceinline__ uint32_t inclusive_scan(uint32_t x) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const uint32_t below = __shfl_up_sync(~0u, x, d);
        if (lane >= d) x += below;
    }
    return x;
}

__device__ __forceinline__ uint32_t largest(uint4 k) { return max(max(k.x, k.y), max(k.z, k.w)); }

// Counts one digit per thread of a warp. Lanes that agree with the first one are added together: scores after relu are
// zero more often than not, and shared memory takes additions to one address one at a time.
__device__ __forceinline__ void tally(uint32_t* histogram, uint32_t digit, bool counts) {
    const uint32_t lanes = __ballot_sync(~0u, counts);
    if (lanes == 0) return;
    const int leader = __ffs(lanes) - 1;
    const uint32_t its = __shfl_sync(~0u, digit, leader);  // by all lanes, hence outside the condition
    const bool same = counts && digit == its;
    const uint32_t agree = __ballot_sync(~0u, same);
    if (threadIdx.x % 32 == leader) {
        atomicAdd(histogram + digit, __popc(agree));
    } else if (counts && !same) {
        atomicAdd(histogram + digit, 1u);
    }
}

__device__ __forceinline__ void clear(uint32_t* histogram) {
    for (int i = threadIdx.x; i < kTopKBins / 4; i += kTopKThreads) {
        reinterpret_cast<uint4*>(histogram)[i] = make_uint4(0, 0, 0, 0);
    }
}

// Leaves in shared memory the bin of the need-th largest of the counted keys, how many lie in higher bins and how many
// in it; kNoBin where fewer were counted. All threads of the block.
__device__ __forceinline__ void find_bin(const uint32_t* histogram, int bins, uint32_t need, TopKShared& shared) {
    constexpr int kEach = kTopKBins / kTopKThreads;
    static_assert(kEach == 8);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = bins - kEach * (static_cast<int>(threadIdx.x) + 1);  // bins are dealt from the highest down
    uint32_t h[kEach] = {};
    if (first >= 0) {
        const uint4 a = *reinterpret_cast<const uint4*>(histogram + first);
        const uint4 b = *reinterpret_cast<const uint4*>(histogram + first + 4);
        h[0] = a.x, h[1] = a.y, h[2] = a.z, h[3] = a.w, h[4] = b.x, h[5] = b.y, h[6] = b.z, h[7] = b.w;
    }
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum += h[i];
    const uint32_t inclusive = inclusive_scan(sum);
    if (lane == 31) shared.above[warp] = inclusive;
    if (threadIdx.x == 0) shared.bin = kNoBin;
    __syncthreads();
    uint32_t before = __reduce_add_sync(~0u, lane < warp ? shared.above[lane] : 0) + inclusive - sum;
    if (before < need && need <= before + sum) {
#pragma unroll
        for (int i = kEach - 1; i >= 0; --i) {
            if (before < need && need <= before + h[i]) {
                shared.bin = first + i, shared.bin_above = before, shared.bin_count = h[i];
            }
            before += h[i];
        }
    }
    __syncthreads();
}

struct TopKBin {
    uint32_t bin, above, count;
};

// The same over all blocks of the row, whose histograms are added up in the first one's; clears them afterwards.
__device__ __forceinline__ TopKBin find_bin_of_row(const TopKBlock& block, int bins, uint32_t need) {
    namespace cg = cooperative_groups;
    TopKShared& shared = *block.shared;
    __syncthreads();
    if (block.split > 1) {
        if (block.rank != 0) {
            uint32_t* there = cg::this_cluster().map_shared_rank(block.histogram, 0);
            for (int i = threadIdx.x; i < bins; i += kTopKThreads) {
                const uint32_t count = block.histogram[i];
                if (count != 0) atomicAdd(there + i, count);
            }
        }
        cg::this_cluster().sync();
    }
    if (block.rank == 0) find_bin(block.histogram, bins, need, shared);
    clear(block.histogram);
    if (block.split > 1) {
        if (block.rank == 0 && threadIdx.x > 0 && threadIdx.x < block.split) {
            TopKShared* there = cg::this_cluster().map_shared_rank(&shared, threadIdx.x);
            there->bin = shared.bin, there->bin_above = shared.bin_above, there->bin_count = shared.bin_count;
        }
        cg::this_cluster().sync();
    } else {
        __syncthreads();
    }
    return {shared.bin, shared.bin_above, shared.bin_count};
}

// Keys above `high`, and those from `low` to `high`: before this warp's part of the run, and in the row.
struct TopKCounts {
    uint32_t above, equal, all_above, all_equal;
};

// Each warp has a contiguous part, in steps of 32 vectors.
__device__ __forceinline__ void warp_part(uint32_t count, uint32_t& begin, uint32_t& end) {
    const uint32_t part = (count + kTopKThreads - 1) / kTopKThreads * 32;
    begin = min(threadIdx.x / 32 * part, count), end = min(begin + part, count);
}

template <bool kList>
__device__ __forceinline__ TopKCounts count_ranges(const TopKKeys<kList>& keys, uint32_t low, uint32_t high,
                                                   const TopKBlock& block) {
    namespace cg = cooperative_groups;
    TopKShared& shared = *block.shared;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t begin, end;
    warp_part(keys.count, begin, end);
    uint32_t above = 0, equal = 0;
#pragma unroll 4
    for (uint32_t v = begin + lane; v < end; v += 32) {
        const uint4 k = keys.at(v);
        above += (k.x > high) + (k.y > high) + (k.z > high) + (k.w > high);
        equal += (k.x >= low) + (k.y >= low) + (k.z >= low) + (k.w >= low);
    }
    above = __reduce_add_sync(~0u, above);
    equal = __reduce_add_sync(~0u, equal) - above;
    if (lane == 0) shared.above[warp] = above, shared.equal[warp] = equal;
    __syncthreads();
    const uint32_t a = lane < kTopKWarps ? shared.above[lane] : 0, e = lane < kTopKWarps ? shared.equal[lane] : 0;
    TopKCounts counts{__reduce_add_sync(~0u, lane < warp ? a : 0), __reduce_add_sync(~0u, lane < warp ? e : 0),
                      __reduce_add_sync(~0u, a), __reduce_add_sync(~0u, e)};
    if (block.split > 1) {
        if (threadIdx.x < block.split) {
            TopKShared* there = cg::this_cluster().map_shared_rank(&shared, threadIdx.x);
            there->split_above[block.rank] = counts.all_above, there->split_equal[block.rank] = counts.all_equal;
        }
        cg::this_cluster().sync();
        counts.all_above = counts.all_equal = 0;
        for (uint32_t r = 0; r < block.split; ++r) {
            if (r == block.rank) counts.above += counts.all_above, counts.equal += counts.all_equal;
            counts.all_above += shared.split_above[r], counts.all_equal += shared.split_equal[r];
        }
    }
    return counts;
}

// Calls emit(position, key, index) for every key above `high` and for the first `need` of those from `low` to `high`;
// positions count the selected keys of the row in the order of their indices.
template <bool kList, class Emit>
__device__ __forceinline__ void place(const TopKKeys<kList>& keys, uint32_t low, uint32_t high, uint32_t need,
                                      const TopKCounts& counts, Emit emit) {
    uint32_t begin, end;
    warp_part(keys.count, begin, end);
    uint32_t above = counts.above, equal = counts.equal;
    for (uint32_t step = begin; step < end; step += 32) {
        const uint32_t v = step + threadIdx.x % 32;
        const uint4 four = v < end ? keys.at(v) : make_uint4(0, 0, 0, 0);
        if (!__any_sync(~0u, largest(four) >= low)) continue;
        const uint32_t k[4] = {four.x, four.y, four.z, four.w};
        uint32_t mine = 0;  // both counts, at most 128 each
#pragma unroll
        for (int i = 0; i < 4; ++i) mine += k[i] > high ? 1u : k[i] >= low ? 1u << 16 : 0u;
        const uint32_t inclusive = inclusive_scan(mine);
        const uint32_t before = inclusive - mine, all = __shfl_sync(~0u, inclusive, 31);
        uint32_t a = above + (before & 0xffff), e = equal + (before >> 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (k[i] > high) {
                emit(a + min(e, need), k[i], keys.index(v, i));
                ++a;
            } else if (k[i] >= low) {
                if (e < need) emit(a + e, k[i], keys.index(v, i));
                ++e;
            }
        }
        above += all & 0xffff, equal += all >> 16;
    }
}

// Selects from the run and writes the row of `out`. `counted`: the histogram of all keys' first digit is there already.
template <bool kList>
__device__ __forceinline__ void select(const TopKArgs& args, const TopKKeys<kList>& keys, uint32_t length,
                                       const TopKBlock& block, int32_t* out, bool counted) {
    // The k-th key lies in [low, high], `need` keys of which are selected. 0 is the key of what is never selected.
    uint32_t low = 0, high = 0, need = 0;
    if (args.top_k == 0) {
        low = high = ~0u;
    } else if (length > args.top_k) {
        low = 1, high = ~0u, need = args.top_k;
#pragma unroll 1
        for (int shift = 20; shift >= 0; shift -= 10) {
            const int bins = shift == 20 ? 4096 : 1024;
            if (!counted) {
                for (uint32_t base = 0; base < keys.count; base += kTopKThreads) {
                    const uint4 four = keys.at(base + threadIdx.x);
                    const uint32_t k[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        tally(block.histogram, k[i] >> shift & (bins - 1), k[i] >= low && k[i] <= high);
                    }
                }
            }
            counted = false;
            const TopKBin found = find_bin_of_row(block, bins, need);
            if (found.bin == kNoBin) {  // NaN left fewer than top_k
                low = high = need = 0;
                break;
            }
            low = (shift == 20 ? 0 : low) | found.bin << shift;
            high = low | ((1u << shift) - 1);
            need -= found.above;
            if (found.count == need) break;
        }
    }
    const TopKCounts counts = count_ranges(keys, low, high, block);
    place(keys, low, high, need, counts, [&](uint32_t position, uint32_t, uint32_t index) {
        out[position * args.out_column] = static_cast<int32_t>(index);
    });
    const int64_t selected = counts.all_above + min(counts.all_equal, need);
    const int64_t stride = block.split * kTopKThreads;
    for (int64_t i = selected + block.rank * kTopKThreads + threadIdx.x; i < args.width; i += stride) {
        out[i * args.out_column] = -1;
    }
}

// Reads a slice once, keeps the keys that fit, and counts the first digit of the largest key of every `group` vectors
// of a thread; of every key where `group` is 0.
__device__ __forceinline__ void load_slice(const TopKRow& row, uint32_t first, uint32_t count, uint4* held,
                                           uint32_t num_held, uint32_t group, uint32_t* histogram) {
    constexpr int kAhead = 4;
    uint32_t best = 0, taken = 0;
    for (uint32_t base = threadIdx.x; base - threadIdx.x < count; base += kAhead * kTopKThreads) {
        float4 x[kAhead];
        bool whole[kAhead];
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
            const uint32_t v = base + u * kTopKThreads;
            whole[u] = v < count && row.whole(first + v);
            if (whole[u]) x[u] = row.load(first + v);
        }
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
            const uint32_t v = base + u * kTopKThreads;
            uint4 k = make_uint4(0, 0, 0, 0);
            if (whole[u]) {
                k = TopKRow::keys(x[u]);
            } else if (v < count) {
                k = row.edge(first + v);
            }
            if (v < count && v < num_held) held[v] = k;
            if (group == 0) {
                tally(histogram, k.x >> 20, k.x != 0);
                tally(histogram, k.y >> 20, k.y != 0);
                tally(histogram, k.z >> 20, k.z != 0);
                tally(histogram, k.w >> 20, k.w != 0);
            } else {
                best = max(best, largest(k));
                if (++taken == group) {
                    tally(histogram, best >> 20, best != 0);
                    best = taken = 0;
                }
            }
        }
    }
    if (group != 0) tally(histogram, best >> 20, best != 0);
}

// Counts a digit of all keys from `low` to `high` that a warp holds. The digits of two lanes are added together first:
// scores after relu are zero more often than not, and shared memory takes additions to one address one at a time.
template <int kKeys>
__device__ __forceinline__ void tally_all(uint32_t* histogram, const uint32_t (&keys)[kKeys], int shift, uint32_t mask,
                                          uint32_t low, uint32_t high) {
    uint32_t digit = 0;
    bool any = false;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
        if (keys[i] >= low && keys[i] <= high) digit = keys[i] >> shift & mask, any = true;
    }
    const uint32_t lanes = __ballot_sync(~0u, any);
    if (lanes == 0) return;
    const uint32_t one = __shfl_sync(~0u, digit, __ffs(lanes) - 1);
    const uint32_t other = __shfl_sync(~0u, digit, 31 - __clz(lanes));
    uint32_t same = 0;  // as one, and, from bit 16, as the other: at most 512 keys
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
        if (keys[i] < low || keys[i] > high) continue;
        digit = keys[i] >> shift & mask;
        if (digit == one) {
            same += 1;
        } else if (digit == other) {
            same += 1u << 16;
        } else {
            atomicAdd(histogram + digit, 1u);
        }
    }
    same = __reduce_add_sync(~0u, same);
    if (threadIdx.x % 32 != 0) return;
    if ((same & 0xffff) != 0) atomicAdd(histogram + one, same & 0xffff);
    if (same >> 16 != 0) atomicAdd(histogram + other, same >> 16);
}

// The need-th largest of at most kTopKRanked keys of a list with room for three more. All threads of the block.
__device__ __forceinline__ uint32_t ranked(uint32_t* list, uint32_t count, uint32_t need, TopKShared& shared) {
    if (threadIdx.x < 3) list[count + threadIdx.x] = 0;  // below every key
    __syncthreads();
    const uint32_t parts = count <= kTopKThreads / 4 ? 4 : 2;  // neighbouring threads that share a key
    const uint32_t i = threadIdx.x / parts;
    const uint32_t key = i < count ? list[i] : 0;
    uint32_t before = 0;
    if (i < count) {
        for (uint32_t v = threadIdx.x % parts; v < (count + 3) / 4; v += parts) {
            const uint4 k = reinterpret_cast<const uint4*>(list)[v];
            const uint32_t j = 4 * v;  // of equal keys those before this one count as larger; no key is 0
            before += (k.x > key - (j < i)) + (k.y > key - (j + 1 < i));
            before += (k.z > key - (j + 2 < i)) + (k.w > key - (j + 3 < i));
        }
    }
    before += __shfl_xor_sync(~0u, before, 1);
    const uint32_t opposite = __shfl_xor_sync(~0u, before, 2);
    if (parts == 4) before += opposite;
    if (i < count && threadIdx.x % parts == 0 && before == need - 1) shared.bin = key;
    __syncthreads();
    return shared.bin;
}

// Selects from a row of at most kSteps vectors per thread, which stays in registers, and writes it out. Each warp has
// kSteps * 32 vectors that follow one another.
template <int kSteps>
__device__ __forceinline__ void select_held(const TopKArgs& args, const TopKRow& row, TopKShared& shared,
                                            uint32_t* histogram, uint32_t* list, int32_t* out) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t first = warp * kSteps * 32 + lane;
    float4 x[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
        if (row.whole(first + 32 * s)) x[s] = row.load(first + 32 * s);
    }
    clear(histogram);  // while the row is on its way
    if (threadIdx.x == 0) shared.listed = 0;
    __syncthreads();
    uint32_t keys[4 * kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
        const uint32_t v = first + 32 * s;
        const uint4 k = row.whole(v) ? TopKRow::keys(x[s]) : row.edge(v);
        keys[4 * s] = k.x, keys[4 * s + 1] = k.y, keys[4 * s + 2] = k.z, keys[4 * s + 3] = k.w;
    }

    // Selected are the keys above `bound`, and the first of those equal to it while there is room. 0 is the key of what
    // is never selected.
    uint32_t bound = 0;
    if (args.top_k == 0) {
        bound = ~0u;
    } else if (row.length > args.top_k) {
        uint32_t low = 1, high = ~0u, need = args.top_k;
#pragma unroll 1
        for (int shift = 20;; shift -= 10) {
            const int bins = shift == 20 ? 4096 : 1024;
            tally_all(histogram, keys, shift, bins - 1, low, high);
            __syncthreads();
            find_bin(histogram, bins, need, shared);
            if (shared.bin == kNoBin) break;  // NaN left fewer than top_k
            low = (shift == 20 ? 0 : low) | shared.bin << shift, high = low | ((1u << shift) - 1);
            need -= shared.bin_above;
            const uint32_t count = shared.bin_count;
            bound = low - 1;  // the keys of -inf and above leave room below
            if (count == need) break;
            bound = low;
            if (shift == 0) break;
            if (count <= kTopKRanked) {
#pragma unroll
                for (int i = 0; i < 4 * kSteps; ++i) {
                    if (keys[i] >= low && keys[i] <= high) list[atomicAdd(&shared.listed, 1u)] = keys[i];
                }
                bound = ranked(list, count, need, shared);
                break;
            }
            clear(histogram);
            __syncthreads();
        }
    }

    uint32_t before[kSteps], mine[kSteps];  // keys above the bound, and, from bit 16, equal to it
    uint32_t total = 0;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
        mine[s] = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t k = keys[4 * s + i];
            mine[s] += k > bound ? 1u : k == bound ? 1u << 16 : 0u;
        }
        const uint32_t inclusive = inclusive_scan(mine[s]);
        before[s] = total + inclusive - mine[s];
        total += __shfl_sync(~0u, inclusive, 31);
    }
    if (lane == 0) shared.above[warp] = total;
    __syncthreads();
    const uint32_t its = lane < kTopKWarps ? shared.above[lane] : 0;
    const uint32_t offset = __reduce_add_sync(~0u, lane < warp ? its : 0), all = __reduce_add_sync(~0u, its);
    const uint32_t need = bound == 0 ? 0 : args.top_k - (all & 0xffff);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
        uint32_t a = (offset + before[s]) & 0xffff, e = (offset + before[s]) >> 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t k = keys[4 * s + i];
            if (k > bound || (k == bound && e < need)) {
                out[(a + min(e, need)) * args.out_column] = static_cast<int32_t>(row.index(first + 32 * s) + i);
            }
            a += k > bound, e += k == bound;
        }
    }
    for (int64_t i = (all & 0xffff) + min(all >> 16, need) + threadIdx.x; i < args.width; i += kTopKThreads) {
        out[i * args.out_column] = -1;
    }
}

__global__ void __launch_bounds__(kTopKThreads, 2) top_k_per_row_kernel(const TopKArgs args) {
    namespace cg = cooperative_groups;
#ifdef __CUDACC__
    extern __shared__ uint4 memory[];
    __shared__ TopKShared shared;
#else
    uint4* memory = host::shared_memory();
    TopKShared& shared = *reinterpret_cast<TopKShared*>(memory + kTopKFixedBytes / 16 + args.held);
#endif
    uint32_t* histogram = reinterpret_cast<uint32_t*>(memory);
    uint32_t* list_keys = histogram + kTopKBins;
    uint32_t* list_indices = list_keys + kTopKList;
    uint4* held = reinterpret_cast<uint4*>(list_indices + kTopKList);

    const uint32_t blocks = cg::this_cluster().num_blocks(), rank = cg::this_cluster().block_rank();
    const int64_t r = blockIdx.x / blocks;
    const int32_t start = args.starts[r * args.starts_stride];
    const uint32_t length = max(args.ends[r * args.ends_stride] - start, 0);
    TopKBlock block{&shared, histogram, rank, length <= kTopKAlone ? 1 : blocks};
    if (rank >= block.split) return;
    int32_t* out = args.out + r * args.out_row;

    const float* base = args.logits + r * args.logits_row + start * args.logits_column;
    const bool contiguous = args.logits_column == 1;
    const uint32_t skew = contiguous ? reinterpret_cast<uintptr_t>(base) / sizeof(float) % 4 : 0;
    const TopKRow row{base - skew, args.logits_column, length, skew, contiguous};
    if (row.vectors() <= 2 * kTopKThreads) {
        select_held<2>(args, row, shared, histogram, list_keys, out);
        return;
    }
    if (row.vectors() <= 4 * kTopKThreads) {
        select_held<4>(args, row, shared, histogram, list_keys, out);
        return;
    }
    const uint32_t part = (row.vectors() + block.split - 1) / block.split;
    const uint32_t first = min(rank * part, row.vectors()), count = min(part, row.vectors() - first);
    const TopKKeys<false> slice{held, nullptr, args.held, first, count, row};

    clear(histogram);
    if (block.split > 1) cg::this_cluster().barrier_arrive();  // waited for before anything is added from outside
    __syncthreads();
    const bool by_list = length > args.top_k && args.top_k - 1 < kTopKList / 2;
    // At least 4 k groups, so that few keys besides the k best lie above the bound.
    const uint32_t group = by_list ? min(length / 16 / args.top_k, 16) : 0;
    load_slice(row, first, count, held, args.held, group, histogram);
    __syncthreads();
    if (block.split > 1) cg::this_cluster().barrier_wait();
    if (!by_list) {
        select(args, slice, length, block, out, true);
        return;
    }
    const TopKBin found = find_bin_of_row(block, kTopKBins, args.top_k);
    const uint32_t below = (found.bin == kNoBin ? 1 : found.bin << 20) - 1;
    const TopKCounts counts = count_ranges(slice, below, below, block);
    if (counts.all_above > kTopKList) {
        select(args, slice, length, block, out, false);
        return;
    }
    uint32_t* keys_there = cg::this_cluster().map_shared_rank(list_keys, 0);
    uint32_t* indices_there = cg::this_cluster().map_shared_rank(list_indices, 0);
    place(slice, below, below, 0, counts, [&](uint32_t position, uint32_t key, uint32_t index) {
        keys_there[position] = key, indices_there[position] = index;
    });
    if (rank == 0 && threadIdx.x < -counts.all_above % 4) list_keys[counts.all_above + threadIdx.x] = 0;
    if (block.split > 1) {
        cg::this_cluster().sync();
        if (rank != 0) return;
    } else {
        __syncthreads();
    }
    const TopKKeys<true> list{
        reinterpret_cast<const uint4*>(list_keys), list_indices, kTopKList / 4, 0, (counts.all_above + 3) / 4, row};
    block.split = 1;
    select(args, list, counts.all_above, block, out, false);
}

// Blocks per row: enough to hold the row on chip, and more while each would have a multiprocessor to itself.
inline int top_k_split(int64_t rows, int64_t columns, int processors) {
    int split = 1;
    while (split < kTopKMaxSplit && columns > 4 * kTopKHeld * split) split *= 2;
    while (split < kTopKMaxSplit && columns > int64_t{kTopKAlone} && rows * split * 2 <= processors) split *= 2;
    return split;
}

// Vectors of a slice to keep on chip; others are read again from memory.
inline uint32_t top_k_held(int64_t columns, int split) {
    // A range that does not start at a multiple of four columns takes a vector more.
    const int64_t part = ((columns + 3) / 4 + split) / split;
    const int64_t need = split > 1 ? std::max(part, int64_t{kTopKAlone} / 4 + 1) : part;
    return static_cast<uint32_t>(std::min(need, need <= kTopKHeld + 1 ? kTopKHeld : kTopKMostHeld));
}

#ifdef __CUDACC__
inline cudaError_t top_k_per_row(TopKArgs args, int64_t rows, int64_t columns, int processors, cudaStream_t stream) {
    if (rows == 0) return cudaSuccess;
    const int split = top_k_split(rows, columns, processors);
    args.held = top_k_held(columns, split);
    const int bytes = kTopKFixedBytes + static_cast<int>(args.held) * 16;

    const auto kernel = top_k_per_row_kernel;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute[1];
    attribute[0].id = cudaLaunchAttributeClusterDimension;
    attribute[0].val.clusterDim = {static_cast<unsigned>(split), 1, 1};
    cudaLaunchConfig_t launch = {};
    launch.gridDim = dim3(static_cast<unsigned>(rows * split));
    launch.blockDim = dim3(kTopKThreads);
    launch.dynamicSmemBytes = bytes;
    launch.stream = stream;
    launch.attrs = attribute;
    launch.numAttrs = split > 1 ? 1 : 0;
    return cudaLaunchKernelEx(&launch, kernel, args);
}
#endif

}  // namespace bi

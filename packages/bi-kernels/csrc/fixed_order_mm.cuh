// x[M, K] times weight[N, K] transposed, bfloat16 to float32, with an order of summation that K alone decides.
//
// K is cut into kSplits equal pieces. Within a piece every output element is one chain of wgmma steps of sixteen
// products, k ascending; the pieces are added in float32, ascending, starting from +0. That is the whole arithmetic,
// and it is the same in every instantiation: tile sizes, and whether one block walks all pieces or the blocks of a
// cluster take some each, decide where an element is computed, never how. Rows of a tile do not meet in wgmma, and rows
// past M are zeros that nothing stores.
//
// Only few rows leave most multiprocessors idle without a split; with many rows the split costs a reduction through
// shared memory that they do not need. So which instantiation runs may follow M.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "bi/dependent_launch.cuh"
#include "bi/numerics.cuh"
#include "bi/sm90.cuh"
#include "bi/tensor_map.cuh"

namespace bi {

constexpr int kSplits = 8;   // blocks of a portable cluster; bi_kernels.split_k for every supported K
constexpr int kBlockK = 64;  // 128 bytes: one row of the swizzle

struct FixedOrderMmArgs {
    void* out;           // [m, n] float32 or bfloat16
    int64_t out_stride;  // elements between rows
    int64_t m;
    int n, k;
    int x_rows;  // that one block copies per tile: fewer than a tile has where m is small
    int tiles_m, tiles_n, tiles;
    int band;  // rows of tiles that walk the columns together
};

// kCut blocks of a cluster take equally many pieces of a tile each. With two of them the first adds up its pieces and
// sends the sum, to which the second adds its own; with more, each adds up some of the columns, for which all send it
// their pieces. kShare neighbouring column tiles, of a cluster too, share the copies of x.
template <int kWarpgroups_, int kTileN_, int kCut_, int kShare_ = 1, int kExchange_ = 0, int kBlocks_ = 0>
struct FixedOrderMmConfig {
    static constexpr int kWarpgroups = kWarpgroups_;  // 64 rows each
    static constexpr int kTileM = 64 * kWarpgroups_;
    static constexpr int kTileN = kTileN_;
    static constexpr int kCut = kCut_, kShare = kShare_;
    static constexpr bool kWhole = kCut == 1, kPair = kCut == 2;
    static constexpr int kPieces = kSplits / kCut;
    static constexpr int kCluster = kCut * kShare;
    static constexpr int kExchange = kExchange_;
    static constexpr int kConsumers = 128 * kWarpgroups;
    // And those that feed them: a warpgroup where it gives up registers, else a warp.
    static constexpr int kThreads = kConsumers + (kWhole ? 128 : 32);
    static constexpr int kStageBytes = (kTileM + kTileN) * kBlockK * 2;
    // What is sent is float4 [column / 8][thread]: each thread's registers, in its order.
    static constexpr int kFragmentBytes = 16 * kConsumers;
    static constexpr int kOwners = kPair ? 1 : std::min(kCut, kTileN / 8);
    static constexpr int kSlice = kTileN / 8 / kOwners;  // fragments of one owner
    static constexpr int kSliceBytes = kSlice * kFragmentBytes;
    static constexpr int kArriving = kPair ? 1 : kExchange == 2 ? kSplits - kPieces : kSplits;
    static constexpr int kInboxBytes = kWhole ? 0 : kArriving * kSliceBytes;
    static constexpr int kBlocks = kBlocks_ ? kBlocks_ : kCut == kSplits && kWarpgroups == 1 ? 2 : 1;
    // A multiprocessor has 228 KiB, of which each block takes one besides its own, and a block at most 227.
    static constexpr int kBudget = kBlocks == 2 ? 115712 : 232448;
    static constexpr int kStages = std::min(8, (kBudget - 16 * 8 - 8 - kInboxBytes) / kStageBytes);
    static constexpr int kInboxAt = kStages * kStageBytes;
    static constexpr int kTileBytes = kInboxAt + kInboxBytes;
    static constexpr int kSharedBytes = kTileBytes + 16 * kStages + 8;  // barriers
    static_assert(kStages >= 2);
    static_assert(kExchange != 2 || kPair || kPieces * kOwners * kSliceBytes <= kInboxAt);
};

struct TileAt {
    int row, column;  // in tiles
};

// Where tile number `tile` lies: band after band; in a band column after column, each through all rows of the band;
// kShare neighbouring columns count as one. So blocks that run at once read few columns of the weight.
template <int kShare>
__device__ __forceinline__ TileAt tile_at(const FixedOrderMmArgs& a, unsigned tile) {
    const unsigned in_band = a.band * a.tiles_n;
    const unsigned first_row = tile / in_band * a.band, rest = tile % in_band;
    const unsigned column_tiles = min(static_cast<unsigned>(a.band), a.tiles_m - first_row) * kShare;
    const unsigned in_column = rest % column_tiles;
    return {static_cast<int>(first_row + in_column / kShare),
            static_cast<int>(rest / column_tiles * kShare + in_column % kShare)};
}

template <bool kBf16>
__device__ __forceinline__ void store_pair(const FixedOrderMmArgs& a, int64_t row, int column, float v0, float v1) {
    // A GPU's own NaN is 0x7fffffff; out's is the one that torch writes.
    v0 = isnan(v0) ? bits_float(kNaNBits) : v0, v1 = isnan(v1) ? bits_float(kNaNBits) : v1;
    const int64_t at = row * a.out_stride + column;
    if constexpr (kBf16) {
        uint32_t pair = pack_bf16(v0, v1);
        if (isnan(v0)) pair = (pair & 0xffff0000u) | 0x7fc0u;
        if (isnan(v1)) pair = (pair & 0xffffu) | 0x7fc00000u;
        *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(a.out) + at) = pair;
    } else {
        *reinterpret_cast<float2*>(static_cast<float*>(a.out) + at) = make_float2(v0, v1);
    }
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
// The ring of stages as the thread sees it that fills it.
template <class Config>
struct Producer {
    uint32_t tiles, full, empty;
    int rank, bytes;
    int stage = 0;
    uint32_t parity = 1;  // the first round finds every stage empty

    __device__ __forceinline__ void copy(const CUtensorMap& x_map, const CUtensorMap& w_map, int k, int row,
                                         int column) {
        using namespace sm90;
        constexpr int kShare = Config::kShare;
        const uint32_t x_tile = tiles + stage * Config::kStageBytes;
        barrier_wait(empty + 8 * stage, parity);
        barrier_arrive_expect(full + 8 * stage, bytes);
        copy_box(x_tile + Config::kTileM * kBlockK * 2, w_map, full + 8 * stage, k, column);
        if constexpr (kShare > 1) {
            copy_box_to_all(x_tile + rank % kShare * (Config::kTileM / kShare) * kBlockK * 2, x_map, full + 8 * stage,
                            k, row, ((1 << kShare) - 1) << rank / kShare * kShare);
        } else {
            copy_box(x_tile, x_map, full + 8 * stage, k, row);
        }
        if (++stage == Config::kStages) stage = 0, parity ^= 1;
    }
};

template <int kCount>
__device__ __forceinline__ void add_piece(float (&total)[kCount], float (&piece)[kCount]) {
    sm90::wgmma_pin(piece);
#pragma unroll
    for (int i = 0; i < kCount; ++i) total[i] = add_rn(total[i], piece[i]);
}

// What a consuming warpgroup knows of the ring.
template <class Config>
struct Consumer {
    static constexpr int kRegisters = Config::kTileN / 2;
    uint32_t tiles, full, empty;
    int rank, warpgroup, thread;
    int steps;     // of one piece
    int releases;  // that the producer waits for
    int stage = 0;
    uint32_t parity = 0;

    // One step of a chain: sixty-four products, the first or more of them. On return the step before it is complete.
    // (`sum` must not be touched in between, or ptxas makes every product wait for the one before.)
    template <bool kFirst>
    __device__ __forceinline__ void step(float (&sum)[kRegisters]) {
        using namespace sm90;
        barrier_wait(full + 8 * stage, parity);
        const uint32_t x_tile = tiles + stage * Config::kStageBytes;
        const uint64_t x_at = wgmma_tile(x_tile + warpgroup * 64 * kBlockK * 2);
        const uint64_t w_at = wgmma_tile(x_tile + Config::kTileM * kBlockK * 2);
        wgmma_fence();
        Wgmma<Config::kTileN>::template run<!kFirst>(sum, x_at, w_at);
#pragma unroll
        for (int i = 1; i < kBlockK / 16; ++i)
            Wgmma<Config::kTileN>::template run<true>(sum, x_at + 2 * i, w_at + 2 * i);
        wgmma_commit();
        wgmma_wait<1>();
        if (++stage == Config::kStages) stage = 0, parity ^= 1;
    }

    // Hands back the stage of the last step but `back`, unless nothing more is copied there: its blocks may have ended.
    __device__ __forceinline__ void release(int back) {
        if (--releases < 0) return;
        const int which = stage >= back ? stage - back : stage - back + Config::kStages;
        if constexpr (Config::kShare > 1) {
            constexpr int kShare = Config::kShare;
            if (thread < kShare) sm90::barrier_arrive_at(empty + 8 * which, rank / kShare * kShare + thread);
        } else {
            if (thread == 0) sm90::barrier_arrive(empty + 8 * which);
        }
    }
    // The steps of a piece but the first.
    __device__ __forceinline__ void rest(float (&sum)[kRegisters]) {
        for (int i = 1; i < steps; ++i) step<false>(sum), release(2);
    }
    // All steps are complete.
    __device__ __forceinline__ void finish() {
        sm90::wgmma_wait<0>();
        release(1);
    }

    // The sum of kCount pieces. A piece is added while the first products of the next one run.
    template <int kCount>
    __device__ __forceinline__ void add_up(float (&total)[kRegisters]) {
        float even[kRegisters], odd[kRegisters];
#pragma unroll
        for (int i = 0; i < kRegisters; ++i) total[i] = 0.0f;
        step<true>(even), rest(even);
#pragma unroll
        for (int p = 1; p < kCount - 1; p += 2) {
            step<true>(odd), add_piece(total, even), release(2), rest(odd);
            step<true>(even), add_piece(total, odd), release(2), rest(even);
        }
        step<true>(odd), add_piece(total, even), release(2), rest(odd);
        finish();
        add_piece(total, odd);
    }

    // kCount pieces, one by one.
    template <int kCount>
    __device__ __forceinline__ void keep(float (&piece)[kCount][kRegisters]) {
#pragma unroll
        for (int p = 0; p < kCount; ++p) {
            step<true>(piece[p]);
            if (p > 0) release(2);
            rest(piece[p]);
        }
        finish();
#pragma unroll
        for (int p = 0; p < kCount; ++p) sm90::wgmma_pin(piece[p]);
    }
};
#endif

template <class Config, bool kBf16>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    fixed_order_mm_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                          const __grid_constant__ FixedOrderMmArgs a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
    using namespace sm90;
    constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kStages = Config::kStages;
    constexpr int kShare = Config::kShare, kPieces = Config::kPieces;
    constexpr int kRegisters = kTileN / 2;
    constexpr int kFragmentBytes = Config::kFragmentBytes, kSliceBytes = Config::kSliceBytes;
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t tiles = shared_address(shared);
    const uint32_t full = tiles + Config::kTileBytes, empty = full + 8 * kStages;
    const uint32_t inbox = tiles + Config::kInboxAt, arrived = empty + 8 * kStages;
    const int rank = Config::kCluster > 1 ? static_cast<int>(cluster_rank()) : 0;
    const int part = rank / kShare;             // which pieces
    const int steps = a.k / kSplits / kBlockK;  // of one piece
    const int first_tile = blockIdx.x / Config::kCluster * kShare + rank % kShare;
    const int tile_stride = gridDim.x / Config::kCut;
    const TileAt first = tile_at<kShare>(a, first_tile);
    const int rows = static_cast<int>(min(int64_t{kTileM}, a.m - int64_t{first.row} * kTileM));
    const int sending = (rows + 15) / 16;  // warps of a block

    if (threadIdx.x == 0) {
        prefetch_map(x_map), prefetch_map(w_map);
        for (int i = 0; i < kStages; ++i) {
            barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, Config::kWarpgroups * kShare);
        }
        if constexpr (!Config::kWhole) {
            barrier_init(arrived, Config::kExchange == 1 ? sending * (Config::kPair ? 1 : Config::kCut) : 1);
        }
        barrier_init_fence();
        if constexpr (!Config::kWhole && Config::kExchange != 1) {
            const int part_bytes =
                Config::kPair || Config::kExchange == 2 ? kSliceBytes : Config::kSlice * sending * 512;
            barrier_arrive_expect(arrived, Config::kArriving * part_bytes);
        }
    }
    if constexpr (Config::kCluster > 1) {
        cluster_sync();
    } else {
        __syncthreads();
    }
    dependent_wait();
    dependent_start();

    if (threadIdx.x >= Config::kConsumers) {
        if constexpr (Config::kWhole) give_registers<40>();
        if (threadIdx.x < Config::kConsumers + 32 && elected()) {
            Producer<Config> producer{tiles, full, empty, rank, (a.x_rows * kShare + kTileN) * kBlockK * 2};
            const auto produce = [&](const TileAt& at) {
                const int row = at.row * kTileM + rank % kShare * a.x_rows;
                for (int step = 0; step < kPieces * steps; ++step) {
                    producer.copy(x_map, w_map, (part * kPieces * steps + step) * kBlockK, row, at.column * kTileN);
                }
            };
            produce(first);
            if constexpr (Config::kWhole) {
                for (int tile = first_tile + tile_stride; tile < a.tiles; tile += tile_stride) {
                    produce(tile_at<kShare>(a, tile));
                }
            }
        }
    } else {
        if constexpr (Config::kWhole) take_registers<232>();
        const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
        const int fragment_row = warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
        const int fragment_column = thread % 4 * 2;
        const int all_steps =
            (Config::kWhole ? (a.tiles - first_tile + tile_stride - 1) / tile_stride : 1) * kPieces * steps;
        Consumer<Config> consumer{tiles, full, empty, rank, warpgroup, thread, steps, all_steps - kStages};
        const auto store = [&](const TileAt& at, int i, float v0, float v1, float v2, float v3) {
            const int64_t row = int64_t{at.row} * kTileM + fragment_row;
            const int column = at.column * kTileN + fragment_column + 8 * i;
            if (row < a.m) store_pair<kBf16>(a, row, column, v0, v1);
            if (row + 8 < a.m) store_pair<kBf16>(a, row + 8, column, v2, v3);
        };
        const auto store_all = [&](const TileAt& at, const float (&total)[kRegisters]) {
#pragma unroll
            for (int i = 0; i < kTileN / 8; ++i) {
                store(at, i, total[4 * i], total[4 * i + 1], total[4 * i + 2], total[4 * i + 3]);
            }
        };
        // Fragment `i` of `v` to its place in a slice of `to`, another block or this one.
        const auto send = [&](uint32_t to, int i, const float (&v)[kRegisters], uint32_t signal) {
            const uint32_t at = to + i % Config::kSlice * kFragmentBytes + 16 * threadIdx.x;
            if constexpr (Config::kExchange == 0) {
                cluster_send(at, v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3], signal);
            } else {
                cluster_store(at, v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
            }
        };
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if constexpr (Config::kWhole) {
            float total[kRegisters];
            consumer.template add_up<kPieces>(total);
            store_all(first, total);
            for (int tile = first_tile + tile_stride; tile < a.tiles; tile += tile_stride) {
                consumer.template add_up<kPieces>(total);
                store_all(tile_at<kShare>(a, tile), total);
            }
        } else if constexpr (Config::kPair) {
            if (part == 0) {
                float total[kRegisters];
                consumer.template add_up<kPieces>(total);
                const uint32_t to = cluster_address(inbox, rank + kShare),
                               signal = cluster_address(arrived, rank + kShare);
                if constexpr (Config::kExchange == 2) {
                    bar_sync(1, Config::kConsumers);
#pragma unroll
                    for (int i = 0; i < kTileN / 8; ++i) {
                        shared_store(tiles + i * kFragmentBytes + 16 * threadIdx.x, total[4 * i], total[4 * i + 1],
                                     total[4 * i + 2], total[4 * i + 3]);
                    }
                    fence_proxy();
                    bar_sync(1, Config::kConsumers);
                    if (threadIdx.x == 0) cluster_copy(to, tiles, kSliceBytes, signal);
                } else {
                    if (warp < sending) {
#pragma unroll
                        for (int i = 0; i < kTileN / 8; ++i) send(to, i, total, signal);
                    }
                    if constexpr (Config::kExchange == 1) {
                        __syncwarp();
                        if (lane == 0 && warp < sending) barrier_arrive_release(signal);
                    }
                }
            } else {
                float piece[kPieces][kRegisters], total[kRegisters];
                consumer.keep(piece);
                barrier_wait_cluster(arrived, 0);
#pragma unroll
                for (int i = 0; i < kTileN / 8; ++i) {
                    const float4 v = shared_quad(inbox + i * kFragmentBytes + 16 * threadIdx.x);
                    total[4 * i] = v.x, total[4 * i + 1] = v.y, total[4 * i + 2] = v.z, total[4 * i + 3] = v.w;
                }
#pragma unroll
                for (int p = 0; p < kPieces; ++p) {
#pragma unroll
                    for (int i = 0; i < kRegisters; ++i) total[i] = add_rn(total[i], piece[p][i]);
                }
                store_all(first, total);
            }
        } else {
            if constexpr (Config::kExchange == 2) {
                float piece[kPieces][kRegisters];
                consumer.keep(piece);
                bar_sync(1, Config::kConsumers);
#pragma unroll
                for (int p = 0; p < kPieces; ++p) {
#pragma unroll
                    for (int i = 0; i < kTileN / 8; ++i) {
                        const float* v = piece[p] + 4 * i;
                        shared_store(tiles + (p * kTileN / 8 + i) * kFragmentBytes + 16 * threadIdx.x, v[0], v[1], v[2],
                                     v[3]);
                    }
                }
                fence_proxy();
                bar_sync(1, Config::kConsumers);
                if (threadIdx.x < kPieces * Config::kOwners) {
                    const int p = threadIdx.x / Config::kOwners, owner = threadIdx.x % Config::kOwners;
                    const int to = owner * kShare + rank % kShare;
                    if (owner != part) {
                        cluster_copy(
                            cluster_address(inbox, to) + ((part < owner ? part : part - 1) * kPieces + p) * kSliceBytes,
                            tiles + (p * Config::kOwners + owner) * kSliceBytes, kSliceBytes,
                            cluster_address(arrived, to));
                    }
                }
            } else {
                float piece[1][kRegisters];
#pragma unroll 1
                for (int p = 0; p < kPieces; ++p) {
                    consumer.keep(piece);
                    if (warp < sending) {
#pragma unroll
                        for (int owner = 0; owner < Config::kOwners; ++owner) {
                            const int to = owner * kShare + rank % kShare;
                            const uint32_t at = cluster_address(inbox, to) + (part * kPieces + p) * kSliceBytes;
                            const uint32_t signal = cluster_address(arrived, to);
#pragma unroll
                            for (int i = 0; i < Config::kSlice; ++i)
                                send(at, owner * Config::kSlice + i, piece[0], signal);
                        }
                    }
                }
                if constexpr (Config::kExchange == 1) {
                    __syncwarp();
                    if (lane < Config::kOwners && warp < sending) {
                        barrier_arrive_release(cluster_address(arrived, lane * kShare + rank % kShare));
                    }
                }
            }
            if (part < Config::kOwners && warp < sending) {
                barrier_wait_cluster(arrived, 0);
#pragma unroll
                for (int i = 0; i < Config::kSlice; ++i) {
                    float4 piece[kSplits];
#pragma unroll
                    for (int p = 0; p < kSplits; ++p) {
                        uint32_t at = inbox + p * kSliceBytes;
                        if constexpr (Config::kExchange == 2) {
                            const int from = p / kPieces;
                            if (from == part) at = tiles + (p % kPieces * Config::kOwners + part) * kSliceBytes;
                            if (from > part) at -= kPieces * kSliceBytes;
                        }
                        piece[p] = shared_quad(at + i * kFragmentBytes + 16 * threadIdx.x);
                    }
                    float4 sum = {};
#pragma unroll
                    for (int p = 0; p < kSplits; ++p) {
                        sum.x = add_rn(sum.x, piece[p].x), sum.y = add_rn(sum.y, piece[p].y);
                        sum.z = add_rn(sum.z, piece[p].z), sum.w = add_rn(sum.w, piece[p].w);
                    }
                    store(first, part * Config::kSlice + i, sum.x, sum.y, sum.z, sum.w);
                }
            }
        }
    }
    if constexpr (Config::kExchange == 2 && !Config::kWhole) {
        if (Config::kPair ? part == 1 : part < Config::kOwners) {
            barrier_wait_cluster(arrived, 0);
        }
        __syncwarp();
        cluster_sync();  // what a block sends lives until it has arrived
    }
#endif
}

// Few rows. The rows of one matrix product are the pieces of kColumns columns of the weight, its columns the pieces of
// kRows rows of x; what is asked for lies on the diagonal of each 8 x 8 square. So one block has all pieces, and a warp
// adds them up.
template <int kRows, int kColumns>
struct FewRowsConfig {
    static constexpr int kThreads = 128;
    static constexpr int kMaxSteps = 16;
    static constexpr int kStageBytes = (kRows + kColumns) * 1024;
    static constexpr int kPadBytes = kStageBytes < 8192 ? 8192 - kStageBytes : 0;
    static constexpr int shared_bytes(int k) { return k / kSplits / kBlockK * kStageBytes + kPadBytes; }
};

template <int kRows, int kColumns, bool kBf16>
__global__ void __launch_bounds__(128)
    few_rows_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                    const __grid_constant__ FixedOrderMmArgs a) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
    using namespace sm90;
    using Config = FewRowsConfig<kRows, kColumns>;
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ uint64_t barriers[Config::kMaxSteps];
    const uint32_t tiles = shared_address(shared), full = shared_address(barriers);
    __shared__ __align__(16) float diagonal[kColumns / 2][2 * kRows][kSplits];
    const int steps = a.k / kSplits / kBlockK, column0 = blockIdx.x * kColumns, row0 = blockIdx.y * kRows;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        prefetch_map(x_map), prefetch_map(w_map);
        for (int i = 0; i < steps; ++i) barrier_init(full + 8 * i, 1);
        barrier_init_fence();
    }
    __syncthreads();
    dependent_wait();
    dependent_start();
    if (warp < 2 && elected()) {
        for (int i = 0; i < steps; ++i) {
            const uint32_t at = tiles + i * Config::kStageBytes;
            if (warp == 0) {
                barrier_arrive_expect(full + 8 * i, Config::kStageBytes);
                copy_box(at, w_map, full + 8 * i, i * kBlockK, 0, column0);
            } else {
                copy_box(at + kColumns * 1024, x_map, full + 8 * i, i * kBlockK, 0, row0);
            }
        }
    }
    __syncwarp();
    float piece[4 * kRows];
    const auto step = [&]<bool kFirst>(int i) {
        barrier_wait(full + 8 * i, 0);
        // The product takes sixty-four rows: past the weight's it reads whatever lies there, for sums that nobody
        // reads.
        const uint64_t w_at = wgmma_tile(tiles + i * Config::kStageBytes);
        const uint64_t x_at = wgmma_tile(tiles + i * Config::kStageBytes + kColumns * 1024);
        wgmma_fence();
        Wgmma<8 * kRows>::template run<!kFirst>(piece, w_at, x_at);
#pragma unroll
        for (int j = 1; j < kBlockK / 16; ++j) Wgmma<8 * kRows>::template run<true>(piece, w_at + 2 * j, x_at + 2 * j);
        wgmma_commit();
        wgmma_wait<1>();
    };
    step.template operator()<true>(0);
    for (int i = 1; i < steps; ++i) step.template operator()<false>(i);
    wgmma_wait<0>();
    wgmma_pin(piece);
    if (warp >= kColumns / 2) return;
    if (lane % 4 == lane / 8) {
        const int p = lane / 4;
#pragma unroll
        for (int i = 0; i < 2 * kRows; ++i) diagonal[warp][i][p] = p % 2 ? piece[2 * i + 1] : piece[2 * i];
    }
    __syncwarp();
    if (lane < min(int64_t{kRows}, a.m - row0)) {
        float sum[2] = {};
#pragma unroll
        for (int p = 0; p < kSplits; ++p) {
#pragma unroll
            for (int h = 0; h < 2; ++h) sum[h] = add_rn(sum[h], diagonal[warp][2 * lane + h][p]);
        }
        store_pair<kBf16>(a, row0 + lane, column0 + 2 * warp, sum[0], sum[1]);
    }
#endif
}

// A weight with more elements than this does not stay in L2 beside x. It should come from memory once, so x is walked
// in bands of rows that do stay there.
constexpr int64_t kResident = int64_t{1} << 23;
constexpr int kBandRows = 1024;

struct FixedOrderMmProblem {
    const void* x;
    const void* w;
    int64_t x_stride, w_stride;
    FixedOrderMmArgs args;
};

template <class Config, bool kBf16>
cudaError_t launch_fixed_order_mm(const FixedOrderMmProblem& problem, int processors, cudaStream_t stream) {
    const auto kernel = fixed_order_mm_kernel<Config, kBf16>;
    FixedOrderMmArgs args = problem.args;
    args.tiles_m = static_cast<int>((args.m + Config::kTileM - 1) / Config::kTileM);
    args.tiles_n = args.n / Config::kTileN;
    args.tiles = args.tiles_m * args.tiles_n;
    args.band = int64_t{args.n} * args.k > kResident ? kBandRows / Config::kTileM : 1;
    // Rows that no copy brings hold what shared memory held; their sums are not stored.
    args.x_rows = Config::kShare > 1 ? Config::kTileM / Config::kShare
                                     : static_cast<int>(std::min<int64_t>(Config::kTileM, (args.m + 7) / 8 * 8));
    CUtensorMap x_map, w_map;
    constexpr auto kType = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    cudaError_t error = encode_rows(&x_map, kType, 2, problem.x, args.m, args.k, problem.x_stride, args.x_rows);
    if (error != cudaSuccess) return error;
    error = encode_rows(&w_map, kType, 2, problem.w, args.n, args.k, problem.w_stride, Config::kTileN);
    if (error != cudaSuccess) return error;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes);
    if (error != cudaSuccess) return error;
    // A whole block takes tile after tile, so that copies of the next one run under the stores of this one.
    const int blocks =
        Config::kWhole ? std::min(args.tiles, processors / Config::kShare * Config::kShare) : args.tiles * Config::kCut;
    return launch_dependent(kernel, dim3(static_cast<unsigned>(blocks)), Config::kThreads, Config::kSharedBytes,
                            Config::kCluster, stream, x_map, w_map, args);
}

template <int kRows, int kColumns, bool kBf16>
cudaError_t launch_few_rows(const FixedOrderMmProblem& problem, cudaStream_t stream) {
    using Config = FewRowsConfig<kRows, kColumns>;
    const auto kernel = few_rows_kernel<kRows, kColumns, kBf16>;
    const FixedOrderMmArgs& args = problem.args;
    CUtensorMap x_map, w_map;
    constexpr auto kType = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    cudaError_t error = encode_pieces(&x_map, kType, 2, problem.x, args.m, args.k, problem.x_stride, kSplits, kRows);
    if (error != cudaSuccess) return error;
    error = encode_pieces(&w_map, kType, 2, problem.w, args.n, args.k, problem.w_stride, kSplits, kColumns);
    if (error != cudaSuccess) return error;
    const int shared_bytes = Config::shared_bytes(args.k);
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
    const dim3 grid(args.n / kColumns, static_cast<unsigned>((args.m + kRows - 1) / kRows));
    return launch_dependent(kernel, grid, Config::kThreads, shared_bytes, 1, stream, x_map, w_map, args);
}

// Which tiles a call gets: any choice gives the same bits, so this may weigh rows against idle multiprocessors. The
// limits are where the curves measured on an H200 cross; 132 blocks fill it.
template <bool kBf16>
cudaError_t fixed_order_mm(const FixedOrderMmProblem& problem, int processors, cudaStream_t stream) {
    const int64_t m = problem.args.m, n = problem.args.n;
    const auto tiles = [&](int64_t tile_m, int64_t tile_n) { return (m + tile_m - 1) / tile_m * (n / tile_n); };
    const auto run = [&]<class Config>(Config) {
        return launch_fixed_order_mm<Config, kBf16>(problem, processors, stream);
    };
    if (tiles(64, 64) <= 8) return run(FixedOrderMmConfig<1, 64, 8>{});
    // An odd number of column tiles: none of 128 columns fits, and not every one has a neighbour to share x with.
    const bool narrow = n % 128 != 0;
    if (!narrow && tiles(64, 128) <= 12) return run(FixedOrderMmConfig<1, 128, 8>{});
    // The shortest K is read as fast by one block as its sum is put together from several.
    const bool long_k = problem.args.k > 2048;
    if (!narrow && (long_k || m <= 32) && tiles(64, 128) <= 16) return run(FixedOrderMmConfig<1, 128, 4>{});
    if (long_k && tiles(64, 64) <= 64) return run(FixedOrderMmConfig<1, 64, 2>{});
    if (tiles(64, 64) <= 132) {
        return !narrow && tiles(64, 64) > 96 && m > n ? run(FixedOrderMmConfig<1, 64, 1, 2>{})
                                                      : run(FixedOrderMmConfig<1, 64, 1>{});
    }
    // A vocabulary. Few rows wait for its weights alone.
    if (m <= 64) return narrow ? run(FixedOrderMmConfig<1, 64, 1>{}) : run(FixedOrderMmConfig<1, 128, 1>{});
    if (narrow) return run(FixedOrderMmConfig<2, 64, 1>{});
    if (tiles(128, 64) <= 132) {
        if (m > 4 * n && n % 256 == 0) return run(FixedOrderMmConfig<1, 128, 1, 2>{});
        return m >= n ? run(FixedOrderMmConfig<2, 64, 1, 2>{}) : run(FixedOrderMmConfig<2, 64, 1>{});
    }
    return n % 256 == 0 ? run(FixedOrderMmConfig<2, 128, 1, 2>{}) : run(FixedOrderMmConfig<2, 128, 1>{});
}

}  // namespace bi

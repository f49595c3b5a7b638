// The part of CUDA that csrc/top_k_per_row.cuh uses, on a CPU: every thread of a cluster is a coroutine.
//
// A thread runs until it meets the others (warp intrinsics, __syncthreads, cluster barriers); which of those that can
// go on goes first is random. What a GPU leaves undefined is an error here: lanes that meet at different intrinsics,
// and threads that wait for one that never comes.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace host {

struct Cluster;

struct Warp {
    int arrived = 0, turn = 0, place = 0;
    uint32_t values[2][32];
};

struct Block {
    Cluster* cluster;
    uint32_t id, rank;
    int alive, arrived = 0, turn = 0;
    std::vector<uint4> shared;
    std::vector<Warp> warps;
};

struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    Block* block;
    int id, cluster_turn = 0;
    bool done = false;
    std::function<bool()> ready;
};

struct Cluster {
    std::vector<Block> blocks;
    std::vector<Thread> threads;
    size_t alive, arrived = 0;
    int turn = 0;
    std::string error;

    void meet() {
        if (alive != 0 && arrived == alive) arrived = 0, ++turn;
    }
};

inline Thread* current;
inline ucontext_t scheduler;

inline void pause(std::function<bool()> ready) {
    if (ready()) return;
    current->ready = std::move(ready);
    swapcontext(&current->context, &scheduler);
}

// What all lanes of the warp brought to this line.
inline const uint32_t* exchange(uint32_t value, int place) {
    Warp& warp = current->block->warps[current->id / 32];
    const int turn = warp.turn;
    if (warp.arrived == 0) warp.place = place;
    if (warp.place != place) {
        current->block->cluster->error =
            "lanes of a warp at lines " + std::to_string(warp.place) + " and " + std::to_string(place);
        pause([] { return false; });
    }
    warp.values[turn % 2][current->id % 32] = value;
    if (++warp.arrived == 32) {
        warp.arrived = 0, ++warp.turn;
    } else {
        pause([&warp, turn] { return warp.turn > turn; });
    }
    return warp.values[turn % 2];
}

inline uint32_t ballot(bool value, int place) {
    const uint32_t* values = exchange(value, place);
    uint32_t lanes = 0;
    for (int i = 0; i < 32; ++i) lanes |= values[i] << i;
    return lanes;
}
inline uint32_t sum(uint32_t value, int place) {
    const uint32_t* values = exchange(value, place);
    uint32_t total = 0;
    for (int i = 0; i < 32; ++i) total += values[i];
    return total;
}
inline uint32_t from_below(uint32_t value, int distance, int place) {
    const uint32_t* values = exchange(value, place);
    const int lane = current->id % 32;
    return values[lane < distance ? lane : lane - distance];
}

inline void sync_block() {
    Block& block = *current->block;
    const int turn = block.turn;
    if (++block.arrived == block.alive) {
        block.arrived = 0, ++block.turn;
    } else {
        pause([&block, turn] { return block.turn > turn; });
    }
}

inline uint4* shared_memory() { return current->block->shared.data(); }

// Runs `kernel` in every thread of one cluster; what went wrong, or nothing.
inline std::string run(uint32_t first_block, int blocks, int threads, size_t shared_bytes, uint32_t seed,
                       const std::function<void()>& kernel) {
    static std::function<void()> body;
    body = kernel;
    Cluster cluster;
    cluster.blocks.resize(blocks);
    cluster.threads.resize(static_cast<size_t>(blocks) * threads);
    cluster.alive = cluster.threads.size();
    for (int b = 0; b < blocks; ++b) {
        cluster.blocks[b] = {&cluster, first_block + b, static_cast<uint32_t>(b), threads};
        cluster.blocks[b].shared.assign(shared_bytes / 16 + 1, make_uint4(~0u, 7, ~0u, 7));
        cluster.blocks[b].warps.resize(threads / 32);
    }
    std::vector<size_t> order;
    for (size_t i = 0; i < cluster.threads.size(); ++i) {
        Thread& thread = cluster.threads[i];
        constexpr size_t kStack = 32768;
        thread.stack = std::make_unique<char[]>(kStack);
        thread.block = &cluster.blocks[i / threads], thread.id = static_cast<int>(i % threads);
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get(), thread.context.uc_stack.ss_size = kStack;
        makecontext(
            &thread.context,
            [] {
                body();
                current->done = true, --current->block->alive;
                --current->block->cluster->alive, current->block->cluster->meet();
                swapcontext(&current->context, &scheduler);
            },
            0);
        order.push_back(i);
    }
    std::mt19937 random(seed);
    for (bool any = true; any && cluster.alive != 0 && cluster.error.empty();) {
        any = false;
        std::shuffle(order.begin(), order.end(), random);
        for (size_t i : order) {
            Thread& thread = cluster.threads[i];
            if (thread.done || (thread.ready && !thread.ready()) || !cluster.error.empty()) continue;
            thread.ready = nullptr, current = &thread, any = true;
            swapcontext(&scheduler, &thread.context);
        }
    }
    if (cluster.alive != 0 && cluster.error.empty()) cluster.error = "threads wait for one another";
    return cluster.error;
}

}  // namespace host

#define threadIdx host::Index(host::current->id)
#define blockIdx host::Index(host::current->block->id)
namespace host {
struct Index {
    uint32_t x;
    explicit Index(uint32_t i) : x(i) {}
};
}  // namespace host

#define __ballot_sync(mask, value) host::ballot(value, __LINE__)
#define __any_sync(mask, value) (host::ballot(value, __LINE__) != 0)
#define __shfl_sync(mask, value, lane) host::exchange(value, __LINE__)[lane]
#define __shfl_up_sync(mask, value, distance) host::from_below(value, distance, __LINE__)
#define __shfl_xor_sync(mask, value, bits) host::exchange(value, __LINE__)[(threadIdx.x % 32) ^ (bits)]
#define __reduce_add_sync(mask, value) host::sum(value, __LINE__)
#define __syncthreads() host::sync_block()
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __clz(uint32_t x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
template <class T>
T __ldg(const T* p) {
    return *p;
}
inline uint32_t atomicAdd(uint32_t* p, uint32_t value) { return std::exchange(*p, *p + value); }
using std::max;
using std::min;
inline uint32_t min(uint32_t a, int b) { return std::min(a, static_cast<uint32_t>(b)); }

namespace cooperative_groups {
struct ThisCluster {
    uint32_t num_blocks() const { return static_cast<uint32_t>(host::current->block->cluster->blocks.size()); }
    uint32_t block_rank() const { return host::current->block->rank; }
    void barrier_arrive() const {
        host::Cluster& cluster = *host::current->block->cluster;
        host::current->cluster_turn = cluster.turn, ++cluster.arrived, cluster.meet();
    }
    void barrier_wait() const {
        host::Cluster& cluster = *host::current->block->cluster;
        const int turn = host::current->cluster_turn;
        host::pause([&cluster, turn] { return cluster.turn > turn; });
    }
    void sync() const { barrier_arrive(), barrier_wait(); }
    template <class T>
    T* map_shared_rank(T* p, uint32_t rank) const {
        const auto here = reinterpret_cast<char*>(host::current->block->shared.data());
        const auto there = reinterpret_cast<char*>(host::current->block->cluster->blocks[rank].shared.data());
        return reinterpret_cast<T*>(there + (reinterpret_cast<char*>(p) - here));
    }
};
inline ThisCluster this_cluster() { return {}; }
}  // namespace cooperative_groups

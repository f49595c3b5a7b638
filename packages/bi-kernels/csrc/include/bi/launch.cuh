// Launch geometry. Mirrors bi_kernels.launch; like there, nothing here can see the batch.
#pragma once

namespace bi {

constexpr int kGroupSize = 128;
constexpr int kLanesPerGroup = 8;       // 128 elements, sixteen per lane
constexpr int kGroupsPerWarp = 4;       // hence one packed UE8M0 word per warp
constexpr int kMaxGroupsPerBlock = 32;  // 256 threads
constexpr int kMaxGridX = 0x7fffffff;
constexpr int kMaxGridZ = 65535;
constexpr int kExpertRowBlocks = 128;  // blocks that share one expert's rows

struct SiluMulQuantPlan {
    int groups_per_block;
    int blocks_per_row;
    int threads;
};

// `groups` = intermediate / 128. The blocks of a row are equally wide, in whole warps.
constexpr SiluMulQuantPlan silu_mul_quant_plan(int groups) {
    if (groups == 0) return {0, 0, 0};
    const int blocks = (groups + kMaxGroupsPerBlock - 1) / kMaxGroupsPerBlock;
    const int even = (groups + blocks - 1) / blocks;
    const int width = (even + kGroupsPerWarp - 1) / kGroupsPerWarp * kGroupsPerWarp;
    return {width, blocks, width * kLanesPerGroup};
}

}  // namespace bi

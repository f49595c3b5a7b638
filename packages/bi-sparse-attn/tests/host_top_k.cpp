// csrc/top_k_per_row.cuh on a CPU, for test_top_k_per_row_kernel.py.
#include "top_k_per_row.cuh"

#include <cstring>

// `held` 0: as the launcher would choose. Strides are those of contiguous memory. Returns what went wrong.
extern "C" const char* top_k_per_row(const float* logits, const int32_t* starts, const int32_t* ends, int32_t* out,
                                     int64_t rows, int64_t columns, int64_t top_k, int64_t width, int split, int held,
                                     uint32_t seed) {
    static std::string error;
    const bi::TopKArgs args{
        .logits = logits,
        .starts = starts,
        .ends = ends,
        .out = out,
        .logits_row = columns,
        .logits_column = 1,
        .starts_stride = 1,
        .ends_stride = 1,
        .out_row = width,
        .out_column = 1,
        .width = width,
        .top_k = static_cast<uint32_t>(top_k),
        .held = held != 0 ? static_cast<uint32_t>(held) : bi::top_k_held(columns, split),
    };
    error.clear();
    for (int64_t row = 0; row < rows && error.empty(); ++row) {
        error = host::run(static_cast<uint32_t>(row * split), split, bi::kTopKThreads,
                          bi::kTopKFixedBytes + size_t{args.held} * 16 + sizeof(bi::TopKShared),
                          seed + static_cast<uint32_t>(row), [&] { bi::top_k_per_row_kernel(args); });
    }
    return error.c_str();
}

extern "C" int top_k_split(int64_t rows, int64_t columns, int processors) {
    return bi::top_k_split(rows, columns, processors);
}

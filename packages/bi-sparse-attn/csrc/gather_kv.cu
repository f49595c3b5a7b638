// Checks and registration of the paged FP8 caches' ops. The schemas are declared in Python.
#include "gather_kv.cuh"

#include <optional>

#include "bi/torch_stable.h"

namespace {

using bi::Tensor;
using Type = torch::headeronly::ScalarType;

constexpr int64_t kGridLimit = int64_t{1} << 31;

bi::PagedCache paged_cache(const Tensor& cache, const char* name, int64_t block_size, int64_t entry_bytes,
                           int64_t alignment, int32_t device) {
    bi::check_tensor(cache, name, Type::Byte, "uint8", 2, device);
    STD_TORCH_CHECK(block_size > 0 && block_size < kGridLimit, "block_size: expected a positive int32, got ",
                    block_size);
    STD_TORCH_CHECK(cache.size(1) >= block_size * entry_bytes, name, ": expected pages of ", block_size * entry_bytes,
                    " bytes or more, got ", cache.size(1));
    bi::check_rows_aligned(cache, name, alignment);
    return {static_cast<uint8_t*>(const_cast<void*>(cache.const_data_ptr())), cache.stride(0),
            static_cast<int>(block_size)};
}

bi::InsertArgs insert_args(const Tensor& rows, const char* name, int64_t width, const Tensor& slots, int32_t device) {
    bi::check_tensor(rows, name, Type::BFloat16, "bfloat16", 2, device);
    bi::check_size(rows, name, 1, width);
    bi::check_tensor(slots, "slots", Type::Long, "int64", 1, device);
    bi::check_size(slots, "slots", 0, rows.size(0));
    STD_TORCH_CHECK(rows.size(0) < kGridLimit, name, ": expected fewer than 2**31 rows, got ", rows.size(0));
    return {.cache = {},
            .rows = static_cast<const uint16_t*>(rows.const_data_ptr()),
            .slots = static_cast<const int64_t*>(slots.const_data_ptr()),
            .rows_row = rows.stride(0),
            .rows_column = rows.stride(1),
            .slots_stride = slots.stride(0),
            .count = rows.size(0)};
}

void quantize_and_insert_kv(const Tensor& cache, const Tensor& kv, const Tensor& slots, int64_t block_size) {
    const int32_t device = cache.get_device_index();
    bi::InsertArgs args = insert_args(kv, "kv", bi::kHeadDim, slots, device);
    args.cache = paged_cache(cache, "cache", block_size, bi::kKvData + bi::kKvScales, 8, device);
    if (args.count == 0) return;
    const torch::stable::accelerator::DeviceGuard guard(device);
    bi::insert_kv_kernel<<<bi::blocks_for(args.count, bi::kKvWarps), bi::kKvThreads, 0, bi::current_stream(device)>>>(
        args);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void quantize_and_insert_index_k(const Tensor& cache, const Tensor& k, const Tensor& slots, int64_t block_size) {
    const int32_t device = cache.get_device_index();
    bi::InsertArgs args = insert_args(k, "k", bi::kIndexDim, slots, device);
    args.cache = paged_cache(cache, "cache", block_size, bi::kIndexDim + bi::kIndexScales, 4, device);
    if (args.count == 0) return;
    const torch::stable::accelerator::DeviceGuard guard(device);
    bi::insert_index_k_kernel<<<bi::blocks_for(args.count, bi::kKvWarps), bi::kKvThreads, 0,
                                bi::current_stream(device)>>>(args);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
}

int64_t check_slots(const Tensor& slots, int32_t device) {
    bi::check_tensor(slots, "slots", Type::Long, "int64", 1, device);
    STD_TORCH_CHECK(slots.size(0) < kGridLimit, "slots: expected fewer than 2**31, got ", slots.size(0));
    return slots.size(0);
}

void gather_kv(const Tensor& cache, const Tensor& slots, const Tensor& out, int64_t block_size) {
    const int32_t device = cache.get_device_index();
    const int64_t count = check_slots(slots, device);
    const bi::PagedCache pages = paged_cache(cache, "cache", block_size, bi::kKvData + bi::kKvScales, 8, device);
    bi::check_tensor(out, "out", Type::BFloat16, "bfloat16", 2, device);
    bi::check_size(out, "out", 0, count);
    bi::check_size(out, "out", 1, bi::kHeadDim);
    bi::check_rows_aligned(out, "out", 16);
    if (count == 0) return;
    const torch::stable::accelerator::DeviceGuard guard(device);
    bi::gather_kv_kernel<<<bi::blocks_for(count, bi::kKvWarps), bi::kKvThreads, 0, bi::current_stream(device)>>>(
        pages, static_cast<const int64_t*>(slots.const_data_ptr()), slots.stride(0), count,
        static_cast<uint4*>(out.mutable_data_ptr()), out.stride(0) / 8);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void gather_index_k(const Tensor& cache, const Tensor& slots, const Tensor& q, const Tensor& scale,
                    int64_t block_size) {
    const int32_t device = cache.get_device_index();
    const int64_t count = check_slots(slots, device);
    const bi::PagedCache pages = paged_cache(cache, "cache", block_size, bi::kIndexDim + bi::kIndexScales, 4, device);
    bi::check_tensor(q, "q", Type::Float8_e4m3fn, "float8_e4m3fn", 2, device);
    bi::check_size(q, "q", 0, count);
    bi::check_size(q, "q", 1, bi::kIndexDim);
    bi::check_rows_aligned(q, "q", 4);
    bi::check_tensor(scale, "scale", Type::Float, "float32", 1, device);
    bi::check_size(scale, "scale", 0, count);
    if (count == 0) return;
    const torch::stable::accelerator::DeviceGuard guard(device);
    bi::gather_index_k_kernel<<<bi::blocks_for(count, bi::kKvWarps), bi::kKvThreads, 0, bi::current_stream(device)>>>(
        pages, static_cast<const int64_t*>(slots.const_data_ptr()), slots.stride(0), count,
        static_cast<uint32_t*>(q.mutable_data_ptr()), q.stride(0) / 4, static_cast<float*>(scale.mutable_data_ptr()),
        scale.stride(0));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void gather_decode_kv(const std::optional<Tensor>& compressed_cache, const Tensor& window_cache,
                      const Tensor& compressed_slots, const Tensor& window_slots, const Tensor& workspace,
                      const Tensor& indices, const Tensor& lengths, int64_t compressed_block_size,
                      int64_t window_block_size) {
    const int32_t device = window_cache.get_device_index();
    const int64_t tokens = compressed_slots.size(0);
    const bool wide = compressed_slots.scalar_type() == Type::Long;
    const Type type = wide ? Type::Long : Type::Int;
    const char* type_name = wide ? "int64" : "int32 or int64";
    bi::check_tensor(compressed_slots, "compressed_slots", type, type_name, 2, device);
    bi::check_tensor(window_slots, "window_slots", type, type_name, 2, device);
    bi::check_size(window_slots, "window_slots", 0, tokens);
    bi::check_tensor(workspace, "workspace", Type::BFloat16, "bfloat16", 3, device);
    bi::check_size(workspace, "workspace", 0, tokens);
    bi::check_size(workspace, "workspace", 2, bi::kHeadDim);
    const int64_t width = workspace.size(1), top_k = compressed_slots.size(1), window = window_slots.size(1);
    STD_TORCH_CHECK(width >= top_k + window, "workspace: expected ", top_k + window, " rows per token, got ", width);
    STD_TORCH_CHECK(tokens * width < kGridLimit, "workspace: expected fewer than 2**31 rows, got ", tokens * width);
    bi::check_rows_aligned(workspace, "workspace", 16);
    if (workspace.numel() != 0) {
        STD_TORCH_CHECK((width == 1 || workspace.stride(1) == bi::kHeadDim) &&
                            (tokens == 1 || workspace.stride(0) == width * bi::kHeadDim),
                        "workspace: expected contiguous memory");
    }
    bi::check_tensor(indices, "indices", Type::Int, "int32", 2, device);
    bi::check_size(indices, "indices", 0, tokens);
    bi::check_size(indices, "indices", 1, width);
    bi::check_tensor(lengths, "lengths", Type::Int, "int32", 1, device);
    bi::check_size(lengths, "lengths", 0, tokens);
    constexpr int64_t kEntry = bi::kKvData + bi::kKvScales;
    STD_TORCH_CHECK(compressed_cache.has_value() || top_k == 0, "compressed_cache: expected a cache, got none");
    bi::DecodeGatherArgs args{
        .compressed = {},
        .window = paged_cache(window_cache, "window_cache", window_block_size, kEntry, 8, device),
        .compressed_slots = compressed_slots.const_data_ptr(),
        .window_slots = window_slots.const_data_ptr(),
        .workspace = static_cast<uint4*>(workspace.mutable_data_ptr()),
        .indices = static_cast<int32_t*>(indices.mutable_data_ptr()),
        .lengths = static_cast<int32_t*>(lengths.mutable_data_ptr()),
        .compressed_row = compressed_slots.stride(0),
        .compressed_column = compressed_slots.stride(1),
        .window_row = window_slots.stride(0),
        .window_column = window_slots.stride(1),
        .indices_row = indices.stride(0),
        .indices_column = indices.stride(1),
        .lengths_stride = lengths.stride(0),
        .tokens = tokens,
        .top_k = static_cast<int>(top_k),
        .window_size = static_cast<int>(window),
        .width = static_cast<int>(width),
        .compressed_blocks = 0,
    };
    if (compressed_cache.has_value()) {
        args.compressed = paged_cache(*compressed_cache, "compressed_cache", compressed_block_size, kEntry, 8, device);
    }
    if (tokens == 0) return;
    const torch::stable::accelerator::DeviceGuard guard(device);
    bi::gather_decode_kv(args, wide, bi::current_stream(device));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ds4_bi, CUDA, m) {
    m.impl("quantize_and_insert_kv", TORCH_BOX(&quantize_and_insert_kv));
    m.impl("gather_kv", TORCH_BOX(&gather_kv));
    m.impl("quantize_and_insert_index_k", TORCH_BOX(&quantize_and_insert_index_k));
    m.impl("gather_index_k", TORCH_BOX(&gather_index_k));
    m.impl("gather_decode_kv", TORCH_BOX(&gather_decode_kv));
}

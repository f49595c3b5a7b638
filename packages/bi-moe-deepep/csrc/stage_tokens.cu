// Checks and registration of bi_moe_deepep::stage_tokens. The schema is declared in Python.
#include "stage_tokens.cuh"

#include "bi/torch_stable.h"

namespace {

using bi::Tensor;

template <typename Id>
void launch(const Tensor& staged_x, const Tensor& counts, const Tensor& slots, const Tensor& x, const Tensor& topk_ids,
            int64_t first_expert) {
    const int32_t device = x.get_device_index();
    const bi::moe::StageArgs<Id> args{
        .x = static_cast<const uint16_t*>(x.const_data_ptr()),
        .ids = static_cast<const Id*>(topk_ids.const_data_ptr()),
        .staged = static_cast<uint16_t*>(staged_x.mutable_data_ptr()),
        .counts = static_cast<int32_t*>(counts.mutable_data_ptr()),
        .slots = static_cast<int32_t*>(slots.mutable_data_ptr()),
        .x_row = x.stride(0),
        .ids_row = topk_ids.stride(0),
        .staged_expert = staged_x.stride(0),
        .staged_row = staged_x.stride(1),
        .tokens = x.size(0),
        .hidden = x.size(1),
        .capacity = staged_x.size(1),
        .first_expert = first_expert,
        .experts = static_cast<int>(staged_x.size(0)),
        .top_k = static_cast<int>(topk_ids.size(1)),
    };
    const torch::stable::accelerator::DeviceGuard guard(device);
    bi::moe::stage_tokens(args, bi::current_stream(device));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void stage_tokens(const Tensor& staged_x, const Tensor& counts, const Tensor& slots, const Tensor& x,
                  const Tensor& topk_ids, int64_t num_experts, int64_t first_expert) {
    using Type = torch::headeronly::ScalarType;
    const int32_t device = x.get_device_index();
    const bool wide = topk_ids.scalar_type() == Type::Long;
    bi::check_tensor(x, "x", Type::BFloat16, "bfloat16", 2, device);
    bi::check_tensor(topk_ids, "topk_ids", wide ? Type::Long : Type::Int, "int32 or int64", 2, device);
    bi::check_tensor(staged_x, "staged_x", Type::BFloat16, "bfloat16", 3, device);
    bi::check_tensor(counts, "counts", Type::Int, "int32", 1, device);
    bi::check_tensor(slots, "slots", Type::Int, "int32", 2, device);
    const int64_t tokens = x.size(0), hidden = x.size(1), top_k = topk_ids.size(1);
    const int64_t experts = staged_x.size(0), capacity = staged_x.size(1);
    bi::check_size(topk_ids, "topk_ids", 0, tokens);
    bi::check_size(staged_x, "staged_x", 2, hidden);
    bi::check_size(counts, "counts", 0, experts);
    bi::check_size(slots, "slots", 0, tokens);
    bi::check_size(slots, "slots", 1, top_k);
    STD_TORCH_CHECK(first_expert >= 0 && first_expert + experts <= num_experts, "first_expert: expected ", experts,
                    " experts within ", num_experts, ", got them from ", first_expert);
    // A token names an expert at most once, so this is what keeps every row inside; nobody looks at the data.
    STD_TORCH_CHECK(tokens <= capacity, "capacity: expected at least as many rows per expert as tokens, ", tokens,
                    ", got ", capacity);
    STD_TORCH_CHECK(hidden % 8 == 0, "x: expected hidden a multiple of 8, got ", hidden);
    STD_TORCH_CHECK(experts * capacity < int64_t{1} << 31 && top_k < int64_t{1} << 15,
                    "staged_x: expected fewer than 2**31 rows, got ", experts, " x ", capacity);
    STD_TORCH_CHECK(counts.is_contiguous() && slots.is_contiguous(), "counts, slots: expected contiguous memory");
    bi::check_rows_aligned(topk_ids, "topk_ids", wide ? 8 : 4);
    bi::check_rows_aligned(x, "x", 16);
    bi::check_rows_aligned(staged_x, "staged_x", 16);
    wide ? launch<int64_t>(staged_x, counts, slots, x, topk_ids, first_expert)
         : launch<int32_t>(staged_x, counts, slots, x, topk_ids, first_expert);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bi_moe_deepep, CUDA, m) { m.impl("stage_tokens", TORCH_BOX(&stage_tokens)); }

// Checks and registration of bi_moe_deepep::combine_ordered. The schema is declared in Python.
#include "combine_ordered.cuh"

#include <optional>

#include "bi/torch_stable.h"

namespace {

using bi::Tensor;

void combine_ordered(const Tensor& out, const Tensor& expert_out, const Tensor& slots, const Tensor& topk_weights,
                     const std::optional<Tensor>& topk_ids) {
    using Type = torch::headeronly::ScalarType;
    const int32_t device = expert_out.get_device_index();
    const bool to_float = out.scalar_type() == Type::Float;
    bi::check_tensor(expert_out, "expert_out", Type::BFloat16, "bfloat16", 3, device);
    bi::check_tensor(slots, "slots", Type::Int, "int32", 2, device);
    bi::check_tensor(topk_weights, "topk_weights", Type::Float, "float32", 2, device);
    bi::check_tensor(out, "out", to_float ? Type::Float : Type::BFloat16, "bfloat16 or float32", 2, device);
    const int64_t tokens = slots.size(0), top_k = slots.size(1), hidden = expert_out.size(2);
    bi::check_size(topk_weights, "topk_weights", 0, tokens);
    bi::check_size(topk_weights, "topk_weights", 1, top_k);
    bi::check_size(out, "out", 0, tokens);
    bi::check_size(out, "out", 1, hidden);
    STD_TORCH_CHECK(hidden % bi::moe::kColumns == 0, "expert_out: expected hidden a multiple of ", bi::moe::kColumns,
                    ", got ", hidden);
    STD_TORCH_CHECK(expert_out.is_contiguous() && slots.is_contiguous() && topk_weights.is_contiguous(),
                    "expert_out, slots, topk_weights: expected contiguous memory");
    if (topk_ids.has_value()) {
        bi::check_tensor(*topk_ids, "topk_ids", Type::Int, "int32", 2, device);
        bi::check_size(*topk_ids, "topk_ids", 0, tokens);
        bi::check_size(*topk_ids, "topk_ids", 1, top_k);
        STD_TORCH_CHECK(topk_ids->is_contiguous(), "topk_ids: expected contiguous memory");
    }
    STD_TORCH_CHECK(tokens < int64_t{1} << 31 && top_k < int64_t{1} << 15 && hidden < int64_t{1} << 26,
                    "slots: expected fewer tokens or slots");
    bi::check_rows_aligned(expert_out, "expert_out", 16);
    bi::check_rows_aligned(out, "out", 16);

    const bi::moe::CombineArgs args{
        .rows = static_cast<const uint16_t*>(expert_out.const_data_ptr()),
        .slots = static_cast<const int32_t*>(slots.const_data_ptr()),
        .ids = topk_ids.has_value() ? static_cast<const int32_t*>(topk_ids->const_data_ptr()) : nullptr,
        .weights = static_cast<const float*>(topk_weights.const_data_ptr()),
        .out = out.mutable_data_ptr(),
        .out_row = out.stride(0),
        .tokens = tokens,
        .hidden = hidden,
        .num_rows = expert_out.size(0) * expert_out.size(1),
        .top_k = static_cast<int>(top_k),
    };
    const torch::stable::accelerator::DeviceGuard guard(device);
    bi::moe::combine_ordered(args, to_float, bi::current_stream(device));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bi_moe_deepep, CUDA, m) { m.impl("combine_ordered", TORCH_BOX(&combine_ordered)); }

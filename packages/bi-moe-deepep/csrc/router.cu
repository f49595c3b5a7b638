// Checks and registration of bi_moe_deepep::select_experts. The schema is declared in Python.
#include "router.cuh"

#include <optional>

#include "bi/torch_stable.h"

namespace {

using bi::Tensor;
using Type = torch::headeronly::ScalarType;

bool check_integers(const Tensor& t, const char* name, int64_t dim, int32_t device) {
    const bool wide = t.scalar_type() == Type::Long;
    bi::check_tensor(t, name, wide ? Type::Long : Type::Int, "int32 or int64", dim, device);
    return wide;
}

void select_experts(const Tensor& weights, const Tensor& ids, const Tensor& logits, const std::optional<Tensor>& bias,
                    const std::optional<Tensor>& token_ids, const std::optional<Tensor>& tid2eid, bool renormalize,
                    double routed_scaling_factor) {
    const int32_t device = logits.get_device_index();
    bi::check_tensor(logits, "logits", Type::Float, "float32", 2, device);
    bi::check_tensor(weights, "weights", Type::Float, "float32", 2, device);
    bi::check_tensor(ids, "ids", Type::Int, "int32", 2, device);
    const int64_t tokens = logits.size(0), experts = logits.size(1), top_k = weights.size(1);
    for (const auto& [t, name] : {std::pair{&weights, "weights"}, std::pair{&ids, "ids"}}) {
        bi::check_size(*t, name, 0, tokens);
        bi::check_size(*t, name, 1, top_k);
    }
    STD_TORCH_CHECK(experts <= bi::moe::kMaxExperts, "logits: expected at most ", bi::moe::kMaxExperts,
                    " experts, got ", experts);
    STD_TORCH_CHECK(top_k >= 1 && top_k <= experts, "top_k: expected 1 to ", experts, ", got ", top_k);
    STD_TORCH_CHECK(tokens < int64_t{1} << 31, "logits: expected fewer than 2**31 tokens");
    STD_TORCH_CHECK(token_ids.has_value() == tid2eid.has_value(), "token_ids and tid2eid: expected both or neither");
    bi::moe::SelectArgs args{
        .logits = static_cast<const float*>(logits.const_data_ptr()),
        .bias = nullptr,
        .token_ids = nullptr,
        .table = nullptr,
        .weights = static_cast<float*>(weights.mutable_data_ptr()),
        .ids = static_cast<int32_t*>(ids.mutable_data_ptr()),
        .logits_row = logits.stride(0),
        .logits_column = logits.stride(1),
        .weights_row = weights.stride(0),
        .weights_column = weights.stride(1),
        .ids_row = ids.stride(0),
        .ids_column = ids.stride(1),
        .tokens = tokens,
        .vocab = 0,
        .experts = static_cast<int>(experts),
        .top_k = static_cast<int>(top_k),
        .scale = static_cast<float>(routed_scaling_factor),
        .renormalize = renormalize,
    };
    if (bias.has_value()) {
        bi::check_tensor(*bias, "bias", Type::Float, "float32", 1, device);
        bi::check_size(*bias, "bias", 0, experts);
        args.bias = static_cast<const float*>(bias->const_data_ptr());
        args.bias_stride = bias->stride(0);
    }
    if (tid2eid.has_value()) {
        args.wide_token_ids = check_integers(*token_ids, "token_ids", 1, device);
        args.wide_table = check_integers(*tid2eid, "tid2eid", 2, device);
        bi::check_size(*token_ids, "token_ids", 0, tokens);
        bi::check_size(*tid2eid, "tid2eid", 1, top_k);
        args.token_ids = token_ids->const_data_ptr();
        args.token_id_stride = token_ids->stride(0);
        args.table = tid2eid->const_data_ptr();
        args.table_row = tid2eid->stride(0);
        args.table_column = tid2eid->stride(1);
        args.vocab = tid2eid->size(0);
    }
    const torch::stable::accelerator::DeviceGuard guard(device);
    bi::moe::select_experts(args, bi::current_stream(device));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bi_moe_deepep, CUDA, m) { m.impl("select_experts", TORCH_BOX(&select_experts)); }

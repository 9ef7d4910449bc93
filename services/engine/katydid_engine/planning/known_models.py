"""Models that can be planned for without their folder."""

from __future__ import annotations

from katydid_engine.model_config import ModelConfig, MoeConfig, RopeConfig

__all__ = ["KNOWN_MODELS"]

KNOWN_MODELS = {
    "hy3": ModelConfig(
        architecture="hy_v3",
        vocab_size=120_832,
        hidden_size=4096,
        intermediate_size=13_312,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=11_158_840.0),
        max_positions=262_144,
        tie_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        qk_norm=True,
        moe=MoeConfig(
            num_experts=192,
            top_k=8,
            intermediate_size=1536,
            scoring="sigmoid",
            renormalise=True,
            routed_scale=2.826,
            shared_intermediate_size=1536,
        ),
        sparse_layers=(False, *([True] * 79)),
        num_mtp_layers=1,
        lm_head_fp32=True,
        bos_token_id=None,
        eos_token_ids=(),
        checkpoint_dtype="bfloat16",
    )
}

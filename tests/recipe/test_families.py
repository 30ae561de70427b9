"""The defaults and limits of each family, against what the models of `transformers` have."""

import pytest

from tests.recipe.hf import FAMILIES, section_of, tiny_hf
from tests.recipe.small import problems, small
from truestep.recipe.load import load


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family):
    model, section = tiny_hf(family), section_of(family)
    block, config = model.model.layers[0], model.config
    names = {name for name, _ in block.named_parameters()}
    assert section.attention_bias == ("self_attn.q_proj.bias" in names) == ("self_attn.v_proj.bias" in names)
    assert section.attention_out_bias == ("self_attn.o_proj.bias" in names)
    assert section.mlp_bias == ("mlp.up_proj.bias" in names)
    activation = config.to_dict().get("hidden_act") or config.to_dict()["hidden_activation"]
    assert {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[str(section.activation)] == activation
    q_norm = dict(block.named_parameters()).get("self_attn.q_norm.weight")
    sizes = {"none": None, "head": 8, "full": 32}
    assert sizes[str(section.qk_norm)] == (None if q_norm is None else q_norm.numel())
    norms = {name.removesuffix("_layernorm.weight") for name in names if name.endswith("_layernorm.weight")}
    placement = {
        "pre": {"input", "post_attention"},
        "post": {"post_attention", "post_feedforward"},
        "sandwich": {"input", "post_attention", "pre_feedforward", "post_feedforward"},
    }
    assert norms == placement[str(section.norm_placement)]
    assert section.embed_scale == hasattr(model.model.embed_tokens, "embed_scale")
    assert section.norm_offset == (float(model.model.norm.weight.detach().mean()) == 0.0)
    assert section.query_scale == 8.0
    if family == "gemma3":
        assert section.rope_local_theta == config.rope_parameters["sliding_attention"]["rope_theta"]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_configuration_can_hold(family):
    config = tiny_hf(family).config.to_dict()
    extra = FAMILIES[family].extra
    assert ("mlp_bias" in extra) == ("mlp_bias" in config)
    assert ("sliding_window" in extra) == ("sliding_window" in config)
    assert ("full_attention_every" in extra) == ("layer_types" in config)
    assert ("query_scale" in extra) == ("query_pre_attn_scalar" in config)
    assert ("logit_softcap" in extra) == ("final_logit_softcapping" in config)
    assert (FAMILIES[family].bias == "flag") == ("attention_bias" in config)


@pytest.mark.parametrize(
    "family, options, says",
    [
        ("llama", ["qk_norm=head"], 'model.qk_norm is "head", but the family \'llama\' has "none"; remove it.'),
        ("qwen3", ["norm_placement=post"], "but the family 'qwen3' has \"pre\"; remove it."),
        ("llama", ["norm_offset=true"], "model.norm_offset is true, but the family 'llama' has false; remove it."),
        ("gemma2", ["embed_scale=false"], "model.embed_scale is false, but the family 'gemma2' has true; remove it."),
        (
            "llama",
            ["sliding_window=64"],
            "which the family 'llama' cannot hold (only mistral, qwen2, qwen3, gemma2, gemma3)",
        ),
        ("mistral", ["sliding_window=64", "full_attention_every=2"], "model.full_attention_every is 2, which"),
        (
            "qwen2",
            ["mlp_bias=true"],
            "model.mlp_bias is true, which the family 'qwen2' cannot hold (only llama); remove it.",
        ),
        ("gemma3", ["attention_softcap=50"], "model.attention_softcap is 50.0, which the family 'gemma3' cannot hold"),
        (
            "llama",
            ["query_scale=4"],
            "model.query_scale is 4.0, which the family 'llama' cannot hold (only gemma2, gemma3)",
        ),
        (
            "gemma2",
            ["sliding_window=8", "rope_local_theta=4"],
            "model.rope_local_theta is 4.0, which the family 'gemma2' cannot hold",
        ),
        (
            "qwen2",
            ["attention_bias=false"],
            "model.attention_bias is false, but the family 'qwen2' has biases on q, k, v",
        ),
        ("qwen2", ["attention_out_bias=true"], "the family 'qwen2' has biases on q, k, v only; remove it."),
        ("mistral", ["attention_bias=true"], "model.attention_bias is true, but the family 'mistral' has no biases"),
        ("llama", ["attention_bias=true"], "has one switch: set attention_out_bias too."),
    ],
)
def test_an_option_that_the_family_cannot_hold_is_refused(family, options, says):
    (sentence,) = problems(small(), f"model.family={family}", *(f"model.{option}" for option in options))
    assert says in sentence, sentence


@pytest.mark.parametrize("family", FAMILIES)
def test_options_that_only_repeat_the_family_are_welcome(family):
    recipe = load(small(), [f"model.family={family}"])
    assert recipe.model is not None
    resolved = recipe.model.resolved(257)
    given = {name: getattr(resolved, name) for name in FAMILIES[family].structure}
    assert load(small(model=small()["model"] | {"family": family, "attention_bias": resolved.attention_bias} | given))

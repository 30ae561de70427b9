"""The defaults and limits of each family, against what the models of `transformers` have."""

from copy import deepcopy

import pytest

from tests.recipe.hf import FAMILIES, OURS, section_of, tiny_hf
from tests.recipe.small import problems, small
from truestep.recipe.load import load


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family):
    latent = family == "deepseek_v3"
    model, section = tiny_hf(family), section_of(family)
    block, config = model.model.layers[0], model.config
    names = {name for name, _ in block.named_parameters()}
    inner = ("q_a_proj", "kv_a_proj_with_mqa") if latent else ("q_proj", "v_proj")
    assert section.attention_bias == (f"self_attn.{inner[0]}.bias" in names) == (f"self_attn.{inner[1]}.bias" in names)
    assert section.attention_out_bias == ("self_attn.o_proj.bias" in names)
    assert section.mlp_bias == ("mlp.up_proj.bias" in names)
    activation = config.to_dict().get("hidden_act") or config.to_dict()["hidden_activation"]
    assert {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[str(section.activation)] == activation
    q_norm = dict(block.named_parameters()).get("self_attn.q_norm.weight")
    sizes = {"none": None, "head": 8, "full": 32}
    assert sizes[str(section.qk_norm)] == (None if q_norm is None else q_norm.numel())
    norms = {name.removesuffix("_layernorm.weight") for name in names if name.endswith("_layernorm.weight")}
    norms = {name for name in norms if "self_attn" not in name}
    placement = {
        "pre": {"input", "post_attention"},
        "post": {"post_attention", "post_feedforward"},
        "sandwich": {"input", "post_attention", "pre_feedforward", "post_feedforward"},
    }
    assert norms == placement[str(section.norm_placement)]
    assert section.embed_scale == hasattr(model.model.embed_tokens, "embed_scale")
    assert section.norm_offset == (float(model.model.norm.weight.detach().mean()) == 0.0)
    assert section.query_scale == (12.0 if latent else 8.0)
    if (moe := section.moe) is not None:
        last = model.model.layers[-1].mlp
        shared = dict(last.named_parameters()).get("shared_experts.up_proj.weight")
        assert moe.shared_size == (0 if shared is None else shared.shape[0])
        has_bias = "gate.e_score_correction_bias" in dict(last.named_buffers())
        assert (moe.scoring, moe.balance) == (("sigmoid", "bias") if has_bias else ("softmax", "aux"))
        kinds = [hasattr(layer.mlp, "experts") for layer in model.model.layers]
        assert kinds == [section.has_experts(layer) for layer in range(3)]
    if family == "gemma3":
        assert section.rope_local_theta == config.rope_parameters["sliding_attention"]["rope_theta"]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_configuration_can_hold(family):
    config = tiny_hf(family).config.to_dict()
    extra, experts = FAMILIES[family].extra, FAMILIES[family].experts
    assert (experts is not None) == ("num_experts_per_tok" in config)
    assert FAMILIES[family].latent == ("kv_lora_rank" in config)
    if experts is not None:
        held = {"shared_size": "n_shared_experts", "groups": "n_group", "scale": "routed_scaling_factor"}
        for ours, theirs in held.items():
            assert (ours in experts.extra) == (theirs in config)
        assert ("normalise" in experts.structure) == ("norm_topk_prob" not in config)
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
            "which the family 'llama' cannot hold (only mistral, qwen2, qwen3, gemma2, gemma3, mixtral, qwen3_moe)",
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
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_layers": 3, "family": family}
    below = deepcopy(OURS.get(family, {}))
    recipe = load(small(model=sizes | below))
    assert recipe.model is not None
    resolved = recipe.model.resolved(257)
    given = {name: getattr(resolved, name) for name in FAMILIES[family].structure}
    if resolved.moe is not None:
        below["moe"] |= {name: getattr(resolved.moe, name) for name in ("scoring", "normalise", "balance")}
    assert load(small(model=sizes | below | {"attention_bias": resolved.attention_bias} | given))


EXPERTS = "model.moe={num_experts = 8, top_k = 2}"
LATENT = "model.mla={kv_rank = 16, nope_dim = 8, rope_dim = 4, v_dim = 8}"
DEEPSEEK = ["family=deepseek_v3", "moe.shared_size=704", "intermediate_size=704"]


@pytest.mark.parametrize(
    "options, says",
    [
        (["moe.top_k=9"], "model.moe.top_k is 9, more than the 8 experts; take 8 or fewer."),
        (["moe.top_k=1"], "model.moe.normalise is true with top_k = 1: the weight of the one expert would always be 1"),
        (["moe.scale=2.5"], "is 2.5, which the family 'mixtral' cannot hold (only deepseek_v3); remove it."),
        (["moe.every=2"], "is 2, which the family 'mixtral' cannot hold (only qwen3_moe); remove it."),
        (["moe.normalise=false"], "is false, but the family 'mixtral' has true; remove it."),
        (["moe.scoring=sigmoid"], 'is "sigmoid", but the family \'mixtral\' has "softmax"; remove it.'),
        (["moe.balance=bias"], "which the family 'mixtral' cannot hold (only deepseek_v3); take \"aux\"."),
        (["moe.expert_size=32", "intermediate_size=64"], "is 32, but mixtral has one size"),
        (["family=llama"], "the family 'llama' has no experts (only mixtral, qwen3_moe, deepseek_v3); remove it"),
        (["family=qwen3_moe", "moe.dense_layers=4"], "is 4, so none of the 2 blocks has experts; lower it."),
        (["family=qwen3_moe", "moe.every=3"], "is 3, so none of the 2 blocks has experts; lower it."),
        (["moe.bias_rate=1e-2", "moe.balance=aux"], 'is set but will not be used: it needs balance = "bias"; remove'),
    ],
)
def test_experts_that_cannot_be(options, says):
    (sentence,) = problems(small(), "model.family=mixtral", EXPERTS, *(f"model.{option}" for option in options))
    assert says in sentence, sentence


@pytest.mark.parametrize(
    "options, says",
    [
        (["moe.groups=3"], "model.moe.groups is 3, which does not divide num_experts 8; 2 does."),
        (["moe.groups=8"], "a group is chosen by its two best experts, so 8 make 4 at most."),
        (["moe.groups=4", "moe.top_groups=5"], "is 5, more than the 4 groups; take 4 or fewer."),
        (["moe.groups=4", "moe.top_k=4"], "is 1, whose 2 experts are fewer than top_k 4; take 2."),
        (["moe.top_groups=1"], "will not be used: it needs groups above 1; remove it."),
        (["moe.shared_size=100"], "one shared expert or more of expert_size; take a multiple of that, such as 704."),
        (["mla.rope_dim=3"], "model.mla.rope_dim is 3: rotary positions need an even size."),
        (["head_dim=8"], "model.head_dim is set but will not be used: it needs plain attention, without [model.mla]"),
    ],
)
def test_deepseek_that_cannot_be(options, says):
    (sentence,) = problems(small(), EXPERTS, LATENT, *(f"model.{option}" for option in DEEPSEEK + options))
    assert says in sentence, sentence


def test_families_say_which_sections_they_need():
    first, second = problems(small(), "model.family=deepseek_v3")
    assert "model.moe is missing, but the family 'deepseek_v3' has experts" in first
    assert "model.mla is missing, but the family 'deepseek_v3' has latent attention" in second
    (sentence,) = problems(small(), LATENT)
    assert "the family 'llama' has plain attention (only deepseek_v3 has latent); remove it." in sentence
    assert not problems(small(), EXPERTS, LATENT, *(f"model.{option}" for option in DEEPSEEK))
    assert not problems(small(), "model.family=qwen3_moe", EXPERTS, "model.moe.top_k=1", "model.moe.normalise=false")

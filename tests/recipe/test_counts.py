"""Case C86: parameters and FLOPs, against enumerations by hand and against torch's own counter on plain models."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests.recipe.hf import FAMILIES, NAMES, section_of, tiny_hf
from truestep.errors import ModelError
from truestep.recipe.model import COUNTING_RULE, ModelSection, ParamCounts, attention_pairs

SECTION = ModelSection(hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=96)


def _enumerated(section: ModelSection, context: int, causal: bool) -> int:
    """Forward FLOPs of a row: every matrix product (m, k) x (k, n) as 2 m k n, every attention pair by itself."""
    width, dim = section.hidden_size, section.head_dim
    flops = 2 * context * width * section.vocab_size
    for layer in range(section.num_layers):
        shapes = [(width, section.num_heads * dim)] + 2 * [(width, section.num_kv_heads * dim)]
        shapes += [(section.num_heads * dim, width)]
        shapes += [(width, section.intermediate_size)] * 2 + [(section.intermediate_size, width)]
        flops += sum(2 * context * rows * columns for rows, columns in shapes)
        window = section.window_of(layer) or context
        for query in range(context):
            for key in range(context):
                seen = key <= query and query - key < window
                if seen or not causal:
                    flops += section.num_heads * 2 * (2 * dim)  # one score, one weighted value
    return flops


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_c86_flops_are_those_of_an_enumeration(data):
    section = ModelSection(
        family="gemma2",
        hidden_size=16,
        num_layers=data.draw(st.integers(1, 4)),
        num_heads=4,
        num_kv_heads=data.draw(st.sampled_from([0, 1, 2, 4])),
        head_dim=data.draw(st.sampled_from([0, 2, 8])),
        sliding_window=data.draw(st.none() | st.integers(1, 9)),
        full_attention_every=data.draw(st.integers(0, 3)),
    ).resolved(data.draw(st.integers(1, 50)))
    context, causal = data.draw(st.integers(1, 8)), data.draw(st.booleans())
    assert section.flops_per_row(context, causal) == _enumerated(section, context, causal)


@pytest.mark.parametrize("tied", [True, False])
def test_c86a_look_up_is_free_and_the_head_counts_tied_or_not(tied):
    section = ModelSection(hidden_size=64, tie_embeddings=tied).resolved(1000)
    smaller = ModelSection(hidden_size=64, tie_embeddings=tied).resolved(1)
    head = section.flops_per_token(8) - smaller.flops_per_token(8) + 2 * 64
    assert head == 128_000
    assert section.counts().head == (0 if tied else 64_000) and section.counts().embedding == 64_000


def test_c86b_pairs_of_a_window():
    assert attention_pairs(8, window=4) == 26
    assert attention_pairs(8) == 36 and attention_pairs(8, window=100) == 36
    assert attention_pairs(8, window=4, causal=False) == 64


@given(st.integers(1, 40), st.integers(1, 50))
def test_c86b_pairs_are_those_of_a_count(context, window):
    counted = sum(1 for q in range(context) for k in range(q + 1) if q - k < window)
    assert attention_pairs(context, window) == counted


def test_c86c_every_parameter_of_a_dense_model_is_active():
    counts = SECTION.resolved(500).counts()
    assert counts.active == counts.total


def test_c86c_a_token_is_active_in_the_experts_that_it_goes_to():
    """Shared 50 parameters, 8 experts of 100, top-2: 250 active, 850 stored."""
    counts = ParamCounts(0, 0, 0, 50, 0, experts=800, active_experts=200)
    assert (counts.active, counts.total) == (250, 850)
    section = section_of("deepseek_v3")  # two blocks with experts of 3 x 32 x 20, and with shared ones twice as large
    counts, moe = section.counts(), section.moe
    assert moe is not None
    assert (counts.experts, counts.active_experts) == (2 * 6 * 1920, 2 * 3 * 1920)
    assert counts.mlp == 3 * 32 * 48 + 2 * 3840 and counts.router == 2 * 6 * 32
    assert counts.total - counts.active == 2 * 3 * 1920
    more = section.model_copy(update={"moe": moe.model_copy(update={"num_experts": 12})})
    assert more.flops_per_row(8) - section.flops_per_row(8) == 2 * 8 * 2 * 6 * 32  # the router's products only


def test_c86_training_is_three_times_forward_and_the_rule_is_named():
    section = SECTION.resolved(500)
    assert section.train_flops(640, 64) == 3 * 10 * section.flops_per_row(64)
    assert section.flops_per_token(64) == section.flops_per_row(64) / 64
    for word in ("matmul-2", "head", "look-up 0", "twice forward"):
        assert word in COUNTING_RULE


@pytest.mark.parametrize("family", FAMILIES)
def test_c86_flops_are_those_that_torch_counts(family):
    """Forward and backward of a plain `transformers` model with eager (full) attention. Rotary tables, made by
    a matrix product there, do not count."""
    model, section = tiny_hf(family, attn_implementation="eager", experts_implementation="eager"), section_of(family)
    tokens_BT = torch.arange(2 * 12).reshape(2, 12) % section.vocab_size
    with FlopCounterMode(display=False) as forward:
        logits = model(tokens_BT, use_cache=False).logits
    rotary = sum(sum(ops.values()) for name, ops in forward.get_flop_counts().items() if name.endswith("rotary_emb"))
    assert forward.get_total_flops() - rotary == 2 * section.flops_per_row(12, causal=False)
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    assert forward.get_total_flops() - rotary + backward.get_total_flops() == section.train_flops(24, 12, causal=False)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_transformers(family, tied):
    model, section = tiny_hf(family, tie_word_embeddings=tied), section_of(family, tie_embeddings=tied)
    sizes = dict.fromkeys(NAMES, 0)
    for name, parameter in model.named_parameters():
        sizes[next(kind for kind, words in NAMES.items() if any(word in name for word in words))] += parameter.numel()
    counts = section.counts()
    assert {kind: getattr(counts, kind) for kind in sizes} == sizes
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("biases", [{"attention_bias": True, "mlp_bias": True}, {"attention_bias": True}])
def test_biases_count(biases):
    ours = {"attention_out_bias": True, "mlp_bias": biases.get("mlp_bias", False)}
    model, section = tiny_hf("llama", **biases), section_of("llama", **ours)
    assert section.attention_bias is True
    assert section.counts().total == sum(parameter.numel() for parameter in model.parameters())


def test_what_cannot_be_counted_says_so():
    with pytest.raises(ValueError, match="resolved"):
        ModelSection().counts()
    own = ModelSection(module="my.module:Model").resolved(100)
    assert own.vocab_size == 100
    with pytest.raises(ModelError, match="cannot count a model of your own"):
        own.flops_per_row(8)


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused():
    with pytest.raises(ModelError) as error:
        ModelSection(vocab_size=100).resolved(257)
    assert str(error.value) == (
        "model.vocab_size is 100, but the tokenizer has 257 ids; "
        "set it to 257 or more, or to 0 to take the tokenizer's."
    )
    assert ModelSection(vocab_size=300).resolved(257).vocab_size == 300


def test_open_sizes_are_filled_in():
    section = ModelSection(hidden_size=256, num_heads=8).resolved(257)
    assert (section.vocab_size, section.intermediate_size) == (257, 704)
    assert (section.num_kv_heads, section.head_dim, section.query_scale) == (8, 32, 32.0)
    assert section.resolved(257) == section


def test_windows_of_layers():
    section = ModelSection(sliding_window=16, full_attention_every=3)
    assert [section.window_of(layer) for layer in range(6)] == [16, 16, None, 16, 16, None]
    assert ModelSection(sliding_window=16).window_of(2) == 16 and ModelSection().window_of(0) is None

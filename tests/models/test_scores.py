"""Reward models: what `transformers` makes of a saved one, and a score that depends on nothing but its sample."""

import json
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.dist import run_ranks
from truestep.errors import ModelError
from truestep.models.build import build_model, init_weights
from truestep.models.decoder import Decoder
from truestep.models.hf import load_hf, read_section
from truestep.models.hf_save import save_hf
from truestep.models.load import load_model, tensors_of
from truestep.numerics.axis import Axes, Axis
from truestep.recipe.families import FAMILIES
from truestep.recipe.mla import Mla
from truestep.recipe.model import ModelSection
from truestep.recipe.moe import Moe
from truestep.rollout.score import score, score_rows

EOS = 7
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}


def section(family: str = "llama", **changes) -> ModelSection:
    given = SIZES | {"family": family, "max_context": 64} | changes
    if FAMILIES[family].experts is not None:
        shared = 16 if family == "deepseek_v3" else 0
        given["moe"] = Moe(num_experts=4, top_k=2, expert_size=16, shared_size=shared)
    if FAMILIES[family].latent:
        del given["num_kv_heads"]
        given["mla"] = Mla(q_rank=16, kv_rank=16, nope_dim=8, rope_dim=8, v_dim=8)
    return ModelSection(**given).resolved(24)


def built(given: ModelSection, seed: int = 0) -> Decoder:
    model = build_model(given, 24).to_empty(device="cpu")
    init_weights(model, seed)
    assert isinstance(model, Decoder)
    if given.scores:
        nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(seed))
    return model.eval()


def samples(count: int = 5) -> list[list[int]]:
    """Of uneven length; end-of-text inside of them and at their end."""
    g = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, 24, (n,), generator=g).tolist() for n in (3, 11, 1, 7, 9)][:count]
    drawn[1][4] = EOS
    return [[*ids, EOS] for ids in drawn]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_property_53_transformers_gives_the_same_scores(tmp_path, family):
    """posttraining-anchors, section 4, properties 16 and 53. Right-padded with the configuration's own token."""
    transformers = pytest.importorskip("transformers")
    model = built(section(family).scoring())
    save_hf(tmp_path / "m", tensors_of(model), model.section, generation={"eos_token_id": EOS, "pad_token_id": 5})
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    assert theirs.config.num_labels == 1 and type(theirs).__name__.endswith("ForSequenceClassification")
    rows = samples()
    width = max(map(len, rows)) + 2
    ids_BT = torch.tensor([ids + [5] * (width - len(ids)) for ids in rows])
    mask_BT = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in rows])
    with torch.no_grad():
        wanted = theirs(ids_BT, attention_mask=mask_BT).logits[:, 0]
    torch.testing.assert_close(torch.tensor(score(model, rows)), wanted, rtol=1e-4, atol=2e-5)
    again = load_model(tmp_path / "m").eval()
    assert isinstance(again, Decoder) and again.section.scores and not again.section.tie_embeddings
    assert score(again, rows) == score(model, rows)


@dataclass(frozen=True)
class Padding:
    left: int
    right: int
    token: int


@pytest.mark.parametrize("padding", [Padding(0, 0, 0), Padding(3, 0, EOS), Padding(0, 5, EOS), Padding(2, 9, 0)])
def test_properties_16_to_19_a_score_depends_on_its_sample_alone(padding):
    """posttraining-anchors, section 4: batch mates, amount, side and token of padding, end-of-text inside and at the
    end; huggingface/trl's reward models took the token before the padding token instead."""
    model = built(section("qwen3").scoring())
    alone = [score(model, [ids])[0] for ids in samples()]
    assert len(set(alone)) == len(alone)
    for mates in (1, 2, 5):
        together = score(model, samples(), rows=mates)
        assert together == pytest.approx(alone, abs=1e-5)
    for ids, wanted in zip(samples(), alone):
        rest = [padding.token] * padding.left, [padding.token] * padding.right
        tokens_BT = torch.tensor([[*rest[0], *ids, *rest[1]]])
        real_BT = torch.tensor([[False] * padding.left + [True] * len(ids) + [False] * padding.right])
        assert score_rows(model, tokens_BT, real_BT).item() == pytest.approx(wanted, abs=1e-5)


def test_property_18_positions_begin_at_the_first_real_token():
    """posttraining-anchors, section 4, property 18. Rotary scores hardly tell: what the model is given does."""
    model, given = built(section().scoring()), []
    model.register_forward_pre_hook(lambda _, args: given.append(args[1:]))
    score_rows(model, torch.zeros(1, 5, dtype=torch.int64), torch.tensor([[False, False, True, True, True]]))
    positions_BT, documents_BT = given[0]
    assert positions_BT.tolist() == [[0, 0, 0, 1, 2]] and documents_BT.tolist() == [[-1, -1, 0, 0, 0]]


def test_property_20_a_fresh_head_scores_0(tmp_path):
    """posttraining-anchors, section 4, property 20: a model of text becomes one of scores; its own head is left out."""
    for tied in (False, True):
        model = built(section(tie_embeddings=tied))
        save_hf(tmp_path / f"{tied}", tensors_of(model), model.section)
        reward = build_model(model.section.scoring(), 24).to_empty(device="cpu")
        load_hf(tmp_path / f"{tied}", tensors_of(reward))
        assert isinstance(reward, Decoder) and score(reward.eval(), samples()) == [0.0] * 5
        trunk = {name: x for name, x in tensors_of(model).items() if name != "head.weight"}
        assert all(torch.equal(x, tensors_of(reward)[name]) for name, x in trunk.items())


def test_a_reward_model_gives_no_text(tmp_path):
    model = built(section().scoring())
    with pytest.raises(ModelError, match="gives scores and no logits"):
        model(torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ModelError, match="no scores"):
        score(built(section()), samples())
    with pytest.raises(ModelError, match="without a token"):
        score_rows(model, torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.bool))


def test_a_classifier_of_two_labels_is_refused(tmp_path):
    model = built(section().scoring())
    save_hf(tmp_path / "m", tensors_of(model), model.section)
    file = tmp_path / "m" / "config.json"
    config = json.loads(file.read_text()) | {"id2label": {"0": "bad", "1": "good"}}
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match="must have one label"):
        read_section(tmp_path / "m")


def test_counts_are_those_of_the_built_model():
    given = section().scoring()
    assert given.counts().total == sum(p.numel() for p in built(given).parameters())


def _split(rank: int, world: int) -> None:
    """The sequence cut over ranks: all of them have all scores, and each its share of the gradient."""
    model, weights_T = built(section().scoring()), torch.linspace(-1, 1, 12)
    hidden_BTD = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(0))
    axis = Axis("tp", world, rank, torch.distributed.group.WORLD)
    model.axes = Axes(tp=axis)
    scores_BT = model._scores(axis.part(hidden_BTD, 1)).scores_BT
    torch.testing.assert_close(scores_BT, (hidden_BTD @ model.score.weight.T)[..., 0])
    (scores_BT * weights_T).sum().backward()
    share = model.score.weight.grad
    assert share is not None
    torch.distributed.all_reduce(share)
    torch.testing.assert_close(share, (hidden_BTD[0] * weights_T[:, None]).sum(0, keepdim=True))


def test_property_22_a_split_sequence_has_the_same_scores_and_gradient():
    """posttraining-anchors, section 4, property 22."""
    run_ranks(_split, 2)

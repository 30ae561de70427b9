"""Adapters against PEFT: what it reads of ours, what we read of its own, and what both compute, gradients included."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.models.sections import VOCAB, small
from truestep.adapters.add import Shape, add_adapters, first_values, freeze, put, scale_of
from truestep.adapters.merge import Merged
from truestep.adapters.peft import CONFIG, WEIGHTS, Factors, write_adapter
from truestep.adapters.switch import choose, off
from truestep.cli import register
from truestep.errors import ModelError, UserError
from truestep.models.build import build_model, init_weights
from truestep.models.decoder import Decoder
from truestep.models.hf_names import hf_parts
from truestep.models.hf_save import save_hf
from truestep.models.layers import Linear
from truestep.models.load import load_model
from truestep.models.sites import of_map
from truestep.numerics.digest import files_digest
from truestep.numerics.low_rank import is_adapter
from truestep.numerics.pieces import pieces_of
from truestep.recipe.model import ModelSection
from truestep.recipe.moe import Moe
from truestep.recipe.posttrain import Lora
from truestep.rollout.adapted import load_adapters
from truestep.stages.merge import merge

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

LINEAR = ["attention", "mlp"]
SECTIONS = {
    "plain": small(),
    "biased": small(attention_bias=True, mlp_bias=True, attention_out_bias=True),
    "tied": small(tie_embeddings=True),
    "mixtral": small(family="mixtral", moe=Moe(num_experts=4, top_k=2, expert_size=16)),
    "qwen3_moe": small(family="qwen3_moe", qk_norm="head", moe=Moe(num_experts=4, top_k=2, expert_size=16)),
}


def made(tmp_path: Path, section: ModelSection, lora: Lora, name: str = "adapter") -> tuple[Path, Path, Decoder]:
    """A base and an adapter on disk, and the model with both in memory."""
    base = tmp_path / "base"
    model = build_model(section, VOCAB)
    assert isinstance(model, Decoder)
    sites = add_adapters(model, model.sites(), lora)
    model.to_empty(device="cpu")
    init_weights(model, 1, pieces_of({n: p for n, p in model.state_dict(keep_vars=True).items() if not is_adapter(n)}))
    torch.manual_seed(len(name))
    with torch.no_grad():
        adapters = {n: p for n, p in model.named_parameters() if is_adapter(n)}
        for parameter in adapters.values():
            parameter.normal_(std=0.3)
    if not base.exists():
        save_hf(base, {n: p for n, p in model.state_dict().items() if not is_adapter(n)}, section)
    write_adapter(
        tmp_path / name,
        {n.replace(".default.", "."): p.detach() for n, p in adapters.items()},
        sites,
        model.sites(),
        partial(hf_parts, section=section),
        lora,
        base=files_digest(base),
        base_name=str(base),
        head={},
        tied=section.tie_embeddings,
    )
    return base, tmp_path / name, model


@pytest.mark.parametrize(
    "name, lora",
    [
        ("plain", Lora(rank=4, alpha=6, targets=LINEAR)),
        ("biased", Lora(rank=4, alpha=6, targets=LINEAR, rslora=True)),
        ("plain", Lora(rank=1, alpha=3, targets=["blocks.1.*.q", "blocks.*.down.weight"])),
        ("plain", Lora(rank=3, alpha=6, targets=[*LINEAR, "embeddings", "head"])),
        ("tied", Lora(rank=3, alpha=6, targets=[*LINEAR, "embeddings"])),
        ("mixtral", Lora(rank=4, alpha=6, targets=["attention", "experts"])),
        ("qwen3_moe", Lora(rank=4, alpha=6, targets=["attention", "experts"])),
    ],
    ids=str,
)
def test_peft_computes_the_same(tmp_path, name, lora):
    base, adapter, model = made(tmp_path, SECTIONS[name], lora)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, adapter, is_trainable=True)
    tokens = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    ours = model(tokens)
    want = theirs(tokens).logits
    assert (ours - want).abs().max() < 2e-5 * want.abs().max()
    with off(model):
        plain = model(tokens)
    assert (plain - want).abs().max() > 0.01 * want.abs().max()
    torch.nn.functional.cross_entropy(ours.flatten(0, 1), tokens.flatten()).backward()
    torch.nn.functional.cross_entropy(want.flatten(0, 1), tokens.flatten()).backward()
    assert all((parameter.grad is None) != is_adapter(key) for key, parameter in model.named_parameters())
    if "experts" in lora.targets:
        return  # PEFT makes the factors of two maps one
    found = {key: p.grad for key, p in theirs.named_parameters() if p.grad is not None}
    for site in model.sites():
        if site.adapted is None:
            continue
        module = f"base_model.model.{hf_parts(site.weight, model.section)[0][0].removesuffix('.weight')}"
        for key, theirs_key in (("a", "lora_A"), ("b", "lora_B")):
            table = f"{module}.{theirs_key.replace('lora', 'lora_embedding')}.default"
            grad = found.pop(table if site.kind == "table" else f"{module}.{theirs_key}.default.weight")
            if name == "tied" and site.kind == "table":  # the second use has parameters of its own in the same memory
                grad = (
                    grad
                    + found.pop(f"base_model.model.lm_head.{'lora_B' if key == 'a' else 'lora_A'}.default.weight").T
                )
            mine = site.adapted["default"].get_parameter(key).grad
            assert mine is not None and (mine - grad).abs().max() < 1e-4 * grad.abs().max()
    assert not found


@pytest.mark.parametrize("rslora", [False, True])
def test_we_read_what_peft_writes(tmp_path, rslora):
    base, _, _ = made(tmp_path, SECTIONS["plain"], Lora())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(
        r=4, lora_alpha=10, target_modules="all-linear", use_rslora=rslora, init_lora_weights=False,
        rank_pattern={"q_proj": 2}, alpha_pattern={"layers.1.mlp.up_proj": 3},
    )  # fmt: skip
    theirs = peft.get_peft_model(theirs, config)
    theirs.save_pretrained(tmp_path / "theirs")
    model = load_model(base)
    load_adapters(model, base, {"talk": tmp_path / "theirs"})
    tokens = torch.randint(0, VOCAB, (2, 9))
    want = theirs(tokens).logits
    assert (model(tokens) - want).abs().max() < 2e-5 * want.abs().max()


def test_b_is_zero_at_the_start():
    """Section 4, property 48: the logits of step 0 are those of the base, bit for bit."""
    for section in SECTIONS.values():
        model = build_model(section, VOCAB)
        plain = build_model(section, VOCAB)
        assert isinstance(model, Decoder)
        lora = Lora(targets=["*.weight", "*.experts.*"] if section.moe else ["*.weight"])
        sites = add_adapters(model, model.sites(), lora)
        for one in (model, plain):
            one.to_empty(device="cpu")
            init_weights(
                one, 1, pieces_of({n: p for n, p in one.state_dict(keep_vars=True).items() if not is_adapter(n)})
            )
        first_values(pieces_of(model.state_dict(keep_vars=True)), [s.path for s in sites if s.kind == "table"], 3)
        tokens = torch.randint(0, VOCAB, (2, 9))
        assert torch.equal(model(tokens), plain(tokens))


@pytest.mark.parametrize("rank, alpha, rslora, scale", [(16, 16, True, 4.0), (8, 16, False, 2.0), (1, 3, False, 3.0)])
def test_c70_the_scale_factor(rank, alpha, rslora, scale):
    assert scale_of(rank, alpha, rslora) == scale


def test_c70_train_merge_and_serve_give_the_same():
    """A = [[1, 1]], B = [[2], [0]], alpha 3, W = 0, x = [1, 2] gives [18, 0]; merging and unmerging gives W back."""
    linear = Linear(2, 2, bias=False)
    site = of_map("map", linear, "mlp")
    put([site], "default", {site.path: Shape(1, 3.0)}, "cpu")
    a, b, x = torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0], [0.0]]), torch.tensor([[1.0, 2.0]])
    with torch.no_grad():
        linear.weight.zero_()
        linear.lora["default"].a.copy_(a)
        linear.lora["default"].b.copy_(b)
    merged = Merged().add("map", linear.weight.detach(), Factors(a, b, 3.0), torch.float32, table=False)
    assert linear(x).tolist() == (x @ merged.T).tolist() == [[18.0, 0.0]]
    assert torch.equal(merged - Factors(a, b, 3.0).delta(), linear.weight)


@pytest.mark.parametrize("name", ["plain", "tied", "mixtral"])
def test_merged_equals_unmerged(tmp_path, name):
    """Section 4, property 50, and C72 (b): a tied table stays tied, with the change in both of its uses."""
    targets = {"mixtral": ["attention", "experts"]}.get(name, [*LINEAR, "embeddings"])
    base, adapter, model = made(tmp_path, SECTIONS[name], Lora(rank=4, alpha=6, targets=targets))
    merging = merge(base, {adapter: 1.0}, tmp_path / "merged")
    assert merging.merged.error < 1e-6
    tokens = torch.randint(0, VOCAB, (2, 9))
    found, want = load_model(tmp_path / "merged"), model(tokens)
    assert found.section.tie_embeddings == (name == "tied")
    assert (found(tokens) - want).abs().max() < 2e-5 * want.abs().max()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert (theirs(tokens).logits - want).abs().max() < 2e-5 * want.abs().max()


def test_the_cast_of_a_merge_is_measured(tmp_path):
    """Section 4, property 50: a weak adapter loses the most to bfloat16."""
    base, adapter, _ = made(tmp_path, SECTIONS["plain"], Lora(rank=4, alpha=6))
    losses = []
    for step, factor in enumerate((1e-3, 1.0)):
        tensors = load_file(adapter / WEIGHTS)
        weak = tmp_path / f"weak{step}"
        weak.mkdir()
        save_file({n: x * (factor if "lora_B" in n else 1.0) for n, x in tensors.items()}, weak / WEIGHTS)
        (weak / CONFIG).write_text((adapter / CONFIG).read_text())
        losses.append(merge(base, {weak: 1.0}, tmp_path / f"merged{step}", torch.bfloat16).merged.error)
    assert losses[0] > 5 * losses[1] > 0


def test_several_adapters(tmp_path):
    base, one, _ = made(tmp_path, SECTIONS["plain"], Lora(rank=4, alpha=6), "one")
    _, other, _ = made(tmp_path, SECTIONS["plain"], Lora(rank=2, alpha=6, targets=["mlp"]), "another")
    model, tokens = load_model(base), torch.randint(0, VOCAB, (2, 9))
    plain = model(tokens)
    load_adapters(model, base, {"one": one, "other": other})
    both = model(tokens)
    choose({"one": 1.0}, model)
    alone = load_model(base)
    load_adapters(alone, base, {"x": one})
    assert torch.equal(model(tokens), alone(tokens)) and not torch.equal(both, alone(tokens))
    choose({}, model)
    assert torch.equal(model(tokens), plain)
    with pytest.raises(UserError, match="no adapter 'two'; the model has one, other"):
        choose({"two": 1.0}, model)
    choose({"one": 0.5, "other": -2.0}, model)
    mixed = model(tokens)
    merge(base, {one: 0.5, other: -2.0}, tmp_path / "weighted")
    assert (load_model(tmp_path / "weighted")(tokens) - mixed).abs().max() < 2e-5 * mixed.abs().max()


def test_an_exact_load(tmp_path):
    """C72 (a) and section 4, property 49: every tensor has its place, and there is an effect; else one sentence."""
    base, adapter, _ = made(tmp_path, SECTIONS["plain"], Lora(rank=4, alpha=6))
    tensors, number = load_file(adapter / WEIGHTS), iter(range(99))

    def changed(values: dict[str, torch.Tensor], metadata: dict[str, str] | None = None, **config) -> Path:
        folder = tmp_path / f"changed{next(number)}"
        folder.mkdir()
        save_file(values, folder / WEIGHTS, metadata)
        (folder / CONFIG).write_text(json.dumps(json.loads((adapter / CONFIG).read_text()) | config))
        return folder

    def refused(folder: Path, words: str, model_dir: Path = base) -> None:
        with pytest.raises(ModelError, match=words) as error:
            load_adapters(load_model(model_dir), model_dir, {"x": folder})
        assert "\n" not in str(error.value)

    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    load_adapters(load_model(base), base, {"x": changed(tensors)})
    refused(changed({n.replace("self_attn.q_proj", "q"): x for n, x in tensors.items()}), r"model.layers.0.q.lora_A")
    refused(
        changed({n.replace("base_model.model.", "net."): x for n, x in tensors.items()}), "for which the model has no"
    )
    refused(changed({n: x for n, x in tensors.items() if n != key}), "lacks model.layers.0.self_attn.q_proj.lora_A")
    refused(
        changed({n: x for n, x in tensors.items() if "layers.1.mlp.up" not in n}),
        r"lacks the tensors of blocks.1.mlp.up",
    )
    refused(changed({n: torch.zeros_like(x) if "lora_B" in n else x for n, x in tensors.items()}), "changes nothing")
    refused(changed({**tensors, key: tensors[key][:, :-1].contiguous()}), "belongs to another model")
    refused(changed(tensors, use_dora=True), "use_dora = True")
    refused(changed(tensors, init_lora_weights="pissa"), "changed the base's weights too")
    refused(tmp_path / "base", "is no adapter")
    tied, table, _ = made(tmp_path / "tied", SECTIONS["tied"], Lora(targets=["embeddings"]))
    config = json.loads((table / CONFIG).read_text())
    (table / CONFIG).write_text(json.dumps(config | {"ensure_weight_tying": False}))
    refused(table, "the head of this model is the same table", tied)
    other = tmp_path / "other"
    model = load_model(base)
    with torch.no_grad():
        model.get_parameter("norm.weight").mul_(2)
    save_hf(other, model.state_dict(), SECTIONS["plain"])
    refused(adapter, "was trained beside weights of digest", other)


def test_targets_that_are_not_there():
    model = build_model(SECTIONS["tied"], VOCAB)
    assert isinstance(model, Decoder)
    for target, words in {
        "atention": r"'atention', which matches no weight; the model has attention, mlp, embeddings, and the weights",
        "experts": "of which it has none",
        "head": "write embeddings to adapt both",
    }.items():
        with pytest.raises(UserError, match=words):
            add_adapters(model, model.sites(), Lora(targets=["mlp", target]))
    with pytest.raises(UserError, match="cannot be the name"):
        put(model.sites(), "items", {})
    moe = build_model(SECTIONS["mixtral"], VOCAB)
    assert isinstance(moe, Decoder)
    with pytest.raises(UserError, match="set it to 0"):
        add_adapters(moe, moe.sites(), Lora(targets=["experts"], dropout=0.1))
    freeze(moe)
    assert not any(p.requires_grad for p in moe.parameters())


def test_truestep_merge(tmp_path):
    base, adapter, _ = made(tmp_path, SECTIONS["plain"], Lora(rank=4, alpha=6))
    app = typer.Typer()
    register.verbs(app)
    runner = CliRunner()
    said = runner.invoke(app, ["merge", str(base), f"{adapter}=0.5", str(tmp_path / "out"), "--dtype", "bfloat16"])
    assert said.exit_code == 0, said
    assert "merged 21 weights in float32, written in bfloat16: rounding took" in said.stdout
    assert load_model(tmp_path / "out").get_parameter("norm.weight").dtype == torch.bfloat16
    for wrong, words in {f"{adapter}=x": "is no number", str(base): "is no adapter"}.items():
        error = runner.invoke(app, ["merge", str(base), wrong, str(tmp_path / "none")]).exception
        assert isinstance(error, UserError) and words in str(error)

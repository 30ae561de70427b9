"""Directories that must be refused: each in one sentence, before any weight changes; and what saving leaves behind."""

import errno
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.models.sections import VOCAB, small
from truestep.errors import ModelError
from truestep.models import hf_save
from truestep.models.build import build_model, init_weights
from truestep.models.decoder import Decoder
from truestep.models.hf import INDEX, load_hf, read_generation, read_section
from truestep.models.hf_config import config_from_section, section_from_config
from truestep.models.hf_save import save_hf
from truestep.models.load import load_model

SECTION = small()
LAST_LAYERS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
WEIGHT = "model.layers.0.mlp.up_proj.weight"


def made(section=SECTION) -> Decoder:
    model = build_model(section, VOCAB).to_empty(device="cpu")
    init_weights(model, 0)
    assert isinstance(model, Decoder)
    return model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_hf(tmp_path / "model", dict(made().named_parameters()), SECTION, shard_bytes=20_000)
    return tmp_path / "model"


def change_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    index = json.loads((directory / INDEX).read_text())["weight_map"]
    file = directory / index[WEIGHT]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def refused(directory: Path, *words: str) -> None:
    """Loading fails with a sentence that has the words, and no weight was touched."""
    target = made()
    before = {name: p.detach().clone() for name, p in target.named_parameters()}
    with pytest.raises(ModelError) as error:
        load_hf(directory, dict(target.named_parameters()))
    assert all(word in str(error.value) for word in (*words, str(directory))), str(error.value)
    assert "\n" not in str(error.value)
    assert all(torch.equal(p, before[name]) for name, p in target.named_parameters())


def test_missing_shard(directory: Path):
    shard = sorted(directory.glob("*.safetensors"))[1]
    shard.unlink()
    refused(directory, shard.name, "missing", INDEX)


def test_missing_directory(tmp_path: Path):
    refused(tmp_path / "nothing", "config.json", "does not exist")


def test_no_weights(directory: Path):
    for file in [*directory.glob("*.safetensors"), directory / INDEX]:
        file.unlink()
    refused(directory, "model.safetensors", "does not exist")


def test_missing_tensor(directory: Path):
    change_tensors(directory, lambda tensors: tensors.pop(WEIGHT))
    refused(directory, WEIGHT, "lacks")


def test_unexpected_tensor(directory: Path):
    change_tensors(directory, lambda tensors: tensors.update({"model.layers.9.extra": torch.zeros(2)}))
    refused(directory, "model.layers.9.extra", "no place")


def test_wrong_shape(directory: Path):
    change_tensors(directory, lambda tensors: tensors.update({WEIGHT: torch.zeros(3, 5)}))
    refused(directory, WEIGHT, "[3, 5]", "[48, 32]")


def test_unsupported_dtype(directory: Path):
    quantised = torch.zeros(48, 32).to(torch.float8_e4m3fn)
    change_tensors(directory, lambda tensors: tensors.update({WEIGHT: quantised}))
    refused(directory, WEIGHT, "F8_E4M3")


def test_truncated_shard(directory: Path):
    shard = sorted(directory.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    refused(directory, shard.name, "damaged")


def test_broken_json(directory: Path):
    (directory / "config.json").write_text('{"model_type": ')
    refused(directory, "config.json", "JSON")


def test_derived_tables_of_old_files_are_ignored(directory: Path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(directory, lambda tensors: tensors.update({name: torch.zeros(4)}))
    load_hf(directory, dict(Decoder(SECTION).named_parameters()))


def test_tied_head_that_differs(tmp_path: Path):
    section = small(tie_embeddings=True)
    tensors = {
        "model.embed_tokens.weight" if n == "embed.weight" else n: p for n, p in made(section).named_parameters()
    }
    save_hf(tmp_path / "model", {n: p for n, p in made(section).named_parameters()}, section)
    file = tmp_path / "model" / "model.safetensors"
    for head, same in ((tensors["model.embed_tokens.weight"].detach().clone(), True), (torch.zeros(VOCAB, 32), False)):
        save_file(load_file(file) | {"lm_head.weight": head}, file, {"format": "pt"})
        target = Decoder(section)
        if same:
            load_hf(tmp_path / "model", dict(target.named_parameters()))
            continue
        with pytest.raises(ModelError, match="tie_word_embeddings, but lm_head"):
            load_hf(tmp_path / "model", dict(target.named_parameters()))


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "LlamaForCausalLM"]),
        ("llama", {"architectures": None}, ["architectures"]),
        ("llama", {"residual_multiplier": 0.2}, ["residual_multiplier", "0.2"]),
        ("llama", {"attention_dropout": 0.1}, ["attention_dropout", "0.1"]),
        ("llama", {"hidden_act": "relu"}, ["hidden_act", "relu", "silu"]),
        ("llama", {"hidden_size": None}, ["hidden_size"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["dynamic", "yarn"]),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale": 0.7}}, ["mscale", "0.7"]),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, ["truncate"]),
        ("qwen2", {**LAST_LAYERS, "layer_types": None}, ["max_window_layers"]),
        ("gemma3", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}, ["layer_types"]),
        ("gemma3", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ("gemma3", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
    ],
)  # fmt: skip
def test_configurations_that_we_would_not_obey(family: str, changes: dict[str, Any], words: list[str]):
    window = {"sliding_window": 4, "full_attention_every": 3} if family == "gemma3" else {}
    config = config_from_section(small(family=family, **window)) | changes
    with pytest.raises(ModelError) as error:
        section_from_config(config, "somewhere/config.json")
    assert all(word in str(error.value) for word in (*words, "somewhere/config.json")), str(error.value)


EXPERTS = {"num_experts": 6, "top_k": 2, "expert_size": 16}
SPARSE: dict[str, dict[str, Any]] = {
    "mixtral": {"moe": EXPERTS},
    "qwen3_moe": {"moe": EXPERTS},
    "deepseek_v3": {
        "moe": EXPERTS | {"shared_size": 16, "groups": 3, "top_groups": 2},
        "mla": {"q_rank": 12, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "v_dim": 10},
    },
}


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, ["router_jitter_noise", "0.1"]),
        ("mixtral", {"num_experts_per_tok": 1}, ["num_experts_per_tok", "the router could not learn"]),
        ("qwen3_moe", {"mlp_only_layers": [1]}, ["mlp_only_layers", "only the first blocks"]),
        ("qwen3_moe", {"num_experts": None}, ["num_experts"]),
        ("qwen3_moe", {"shared_expert_intermediate_size": 32}, ["shared_expert_intermediate_size"]),
        ("deepseek_v3", {"n_shared_experts": None}, ["n_shared_experts", "one or more"]),
        ("deepseek_v3", {"scoring_func": "softmax"}, ["scoring_func", "softmax", "sigmoid"]),
        ("deepseek_v3", {"topk_method": "greedy"}, ["topk_method", "greedy"]),
        ("deepseek_v3", {"moe_layer_freq": 2}, ["moe_layer_freq", "2"]),
        ("deepseek_v3", {"num_key_value_heads": 2}, ["num_key_value_heads", "2", "4"]),
        ("deepseek_v3", {"head_dim": 8}, ["head_dim", "8", "qk_rope_head_dim"]),
        ("deepseek_v3", {"kv_lora_rank": None}, ["kv_lora_rank"]),
    ],
)  # fmt: skip
def test_experts_and_latent_attention_that_we_would_not_obey(family: str, changes: dict[str, Any], words: list[str]):
    config = config_from_section(small(family=family, **SPARSE[family])) | changes
    with pytest.raises(ModelError) as error:
        section_from_config(config, "somewhere/config.json")
    assert all(word in str(error.value) for word in (*words, "somewhere/config.json")), str(error.value)


def test_how_a_router_is_trained_survives_the_configuration():
    """transformers has no words for it; a stage that goes on from a model directory trains as the one before."""
    moe = EXPERTS | {"balance": "aux", "balance_coefficient": 0.5, "counts": "pre-pass", "z_loss": 1e-3}
    section = small(family="mixtral", moe=moe)
    assert section_from_config(json.loads(json.dumps(config_from_section(section)))) == section.model_copy(
        update={"intermediate_size": 16}
    )
    plain = config_from_section(section)
    del plain["truestep_router"]
    found = section_from_config(plain).moe
    assert found is not None and (found.balance, found.counts, found.z_loss) == ("aux", "previous", 0.0)


def test_dense_blocks_of_qwen_survive_the_configuration():
    section = small(family="qwen3_moe", moe=EXPERTS | {"dense_layers": 1, "every": 2}, num_layers=5)
    config = config_from_section(section)
    assert (config["mlp_only_layers"], config["decoder_sparse_step"]) == ([0], 2)
    assert section_from_config(config) == section
    released = config | {"mlp_only_layers": [], "decoder_sparse_step": 1, "num_local_experts": 6}
    del released["num_experts"]
    moe = section_from_config(released).moe
    assert moe is not None and (moe.num_experts, moe.dense_layers, moe.every) == (6, 0, 1)


def test_tokenizer_larger_than_the_vocabulary(directory: Path):
    vocab = {f"t{i}": i for i in range(VOCAB + 1)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"}
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": []}))
    refused(directory, "tokenizer.json", str(VOCAB), "vocab_size")


class Marker:
    """A pickle that leaves a file behind when it is loaded."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return (Path.touch, (self.file,))


def test_c89_pickled_weights_are_refused(directory: Path, tmp_path: Path):
    for file in [*directory.glob("*.safetensors"), directory / INDEX]:
        file.unlink()
    marker = tmp_path / "marker"
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Marker(marker)))
    refused(directory, "pytorch_model.bin", "pickle")
    assert not marker.exists()


def test_c89_code_named_by_a_directory_does_not_run(tmp_path: Path):
    marker = tmp_path / "marker"
    folder = tmp_path / "model"
    folder.mkdir()
    own = {"module": "pathlib:Path.touch", "options": {"self": str(marker)}, "vocab_size": 8, "max_context": 8}
    (folder / "config.json").write_text(json.dumps({"model_type": "truestep_module", "truestep": own}))
    with pytest.raises(ModelError, match="needs the code of pathlib:Path"):
        load_model(folder)
    assert not marker.exists()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight


def test_c41_aliases_are_recorded_and_come_back(tmp_path: Path):
    """embed and head are one 3 x 2 tensor: one is stored, both are restored, and they still share memory."""
    own = small().model_copy(update={"module": "somewhere:Tied"})
    model = Tied()
    model.embed.weight.data.copy_(torch.tensor([[1.0, 2], [3, 4], [5, 6]]))
    save_hf(tmp_path / "model", dict(model.named_parameters(remove_duplicate=False)), own)
    assert list(load_file(tmp_path / "model" / "model.safetensors")) == ["embed.weight"]
    again = Tied()
    load_hf(tmp_path / "model", dict(again.named_parameters(remove_duplicate=False)))
    assert again.head.weight.tolist() == [[1, 2], [3, 4], [5, 6]]
    again.embed.weight.data[0, 0] = 9
    assert again.head.weight[0, 0] == 9
    apart = {"embed.weight": torch.zeros(3, 2), "head.weight": torch.zeros(3, 2)}
    with pytest.raises(ModelError, match="one tensor, but the model holds two"):
        load_hf(tmp_path / "model", apart)
    assert not apart["embed.weight"].any()


def test_c41_an_alias_without_target_raises(tmp_path: Path):
    own = small().model_copy(update={"module": "somewhere:Tied"})
    save_hf(tmp_path / "model", dict(Tied().named_parameters(remove_duplicate=False)), own)
    metadata = {"format": "pt", "truestep.aliases": json.dumps({"head.weight": "embed.weight"})}
    save_file({"other": torch.zeros(1)}, tmp_path / "model" / "model.safetensors", metadata)
    with pytest.raises(ModelError, match=r"head\.weight is embed\.weight, which it lacks"):
        load_hf(tmp_path / "model", dict(Tied().named_parameters(remove_duplicate=False)))


def test_c41_overlapping_views_are_separate_copies(tmp_path: Path):
    buffer = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    own = small().model_copy(update={"module": "somewhere:Views"})
    save_hf(tmp_path / "model", {"a": buffer[:2], "b": buffer[1:]}, own)
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert found["a"].tolist() == [[1, 2], [3, 4]] and found["b"].tolist() == [[3, 4], [5, 6]]


def test_nothing_is_overwritten(directory: Path):
    before = {file.name: file.read_bytes() for file in directory.iterdir()}
    with pytest.raises(ModelError, match="exists already"):
        save_hf(directory, dict(made().named_parameters()), SECTION)
    assert {file.name: file.read_bytes() for file in directory.iterdir()} == before
    assert [p.name for p in directory.parent.iterdir()] == ["model"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written = []

    def fail_on_second(tensors, file, metadata):
        written.append(file)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, file, metadata)

    monkeypatch.setattr(hf_save, "save_file", fail_on_second)
    with pytest.raises(ModelError, match=r"cannot be written: .*No space left"):
        save_hf(tmp_path / "model", dict(made().named_parameters()), SECTION, shard_bytes=20_000)
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_and_generation_are_carried(tmp_path: Path, directory: Path):
    (directory / "tokenizer_config.json").write_text("{}")
    save_hf(
        tmp_path / "again",
        dict(made().named_parameters()),
        SECTION,
        dtype=torch.bfloat16,
        tokenizer_dir=directory,
        generation={"eos_token_id": 2, "temperature": 0.7},
    )
    assert (tmp_path / "again" / "tokenizer_config.json").exists()
    assert read_generation(tmp_path / "again") == {"eos_token_id": 2, "temperature": 0.7}
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["eos_token_id"] == 2 and config["torch_dtype"] == "bfloat16"
    assert read_section(tmp_path / "again") == SECTION
    assert next(load_model(tmp_path / "again").parameters()).dtype == torch.bfloat16
    (tmp_path / "again" / "generation_config.json").unlink()
    assert read_generation(tmp_path / "again") == {"eos_token_id": 2}
    shutil.rmtree(tmp_path / "again")

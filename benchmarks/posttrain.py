"""Supervised fine-tuning, low-rank fine-tuning and DPO of truestep's whole run beside TRL and PEFT.

    python benchmarks/posttrain.py                   30M parameters, vocabulary 32,000
    python benchmarks/posttrain.py --shape 30m-4k    a small vocabulary
    python benchmarks/posttrain.py --smoke           a tiny shape: tries the harness, measures nothing

Needs trl==1.16.0 and peft==0.21.2 in the same environment. Both sides get the same texts in the same order, start from
the same directory and use fused AdamW at a constant rate, clipped at norm 1, in fp32, without recomputation. Samples of
a method have one length and fill their rows, so that nobody pads and steps can be compared; losses are, round by round.
truestep runs its recipe: run log, digests, statistics. TRL logs every step. Nobody saves. Processes take turns as in
train.py.
"""

import argparse
import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

from harness import by_turns, machine, median, model_section, ratio, save, scratch, show

# isort: split
from posttrain_contenders import METHODS, Spec, recipe

from train import Contender, spread

LETTERS = "abcdefghijklmnopqrstuvwxyz "


def write_model(spec: Spec) -> None:
    """A random model with the raw bytes as its tokenizer."""
    from truestep.data.tokenizer import bytes_tokenizer
    from truestep.models.build import build_model, init_weights
    from truestep.models.hf_save import save_hf

    section = model_section(spec.shape)
    model = build_model(section, section.vocab_size).to_empty(device="cpu")
    init_weights(model, 1)
    tokenizer = bytes_tokenizer()
    tokenizer.save(spec.folder / "tokenizer")
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eod_id)
    tensors = dict(model.named_parameters())
    save_hf(spec.folder / "model", tensors, section, tokenizer_dir=spec.folder / "tokenizer", generation=ids)


def write_rows(spec: Spec) -> None:
    """Texts of letters: a quarter prompt, the rest the completion, which has one token more, its end. Two of them fill
    the row of a pair."""
    random = Random(0)

    def text(length: int) -> str:
        return "".join(random.choices(LETTERS, k=length))

    with (spec.folder / "sft.jsonl").open("w") as sft, (spec.folder / "dpo.jsonl").open("w") as dpo:
        for _ in range(spec.rows * sum(spec.lengths)):
            prompt, whole = text(spec.context // 4), spec.context - spec.context // 4 - 1
            sft.write(json.dumps({"prompt": prompt, "completion": text(whole)}) + "\n")
            prompt, whole = text(spec.context // 8), spec.context // 2 - spec.context // 8 - 1
            dpo.write(json.dumps({"prompt": prompt, "chosen": text(whole), "rejected": text(whole)}) + "\n")


def write_order(spec: Spec, method: str) -> None:
    """The rows again, as texts in the order in which truestep reads them."""
    from truestep.cli.verbs import build_data
    from truestep.data.loader import Corpus, Loader
    from truestep.data.sample_store import open_store
    from truestep.data.tokenizer import load_tokenizer
    from truestep.recipe.load import load
    from truestep.stages.corpora import supervision

    resolved = load(recipe(spec, method))
    stage, section = resolved.stages[0], resolved.data["rows"]
    store, tokenizer = open_store(build_data(resolved)["rows"]), load_tokenizer(spec.folder / "model")
    corpus = Corpus(store, packing=section.packing, too_long=section.too_long, supervision=supervision(stage))
    loader = Loader([corpus], stage.context, resolved.run.seed, stage.mask_documents)
    batch = loader.rows(loader.global_rows(0, spec.rows * sum(spec.lengths)))
    samples = 2 if method.startswith("dpo") else 1
    length = spec.context // samples
    with spec.ordered(method).open("w") as file:
        for row in batch.tokens_BT.tolist():
            texts = [tokenizer.decode(row[start : start + length - 1]) for start in range(0, spec.context, length)]
            cut = length // 4
            names = ("chosen", "rejected") if samples == 2 else ("completion",)
            answers = {name: text[cut:] for name, text in zip(names, texts, strict=True)}
            file.write(json.dumps({"prompt": texts[0][:cut]} | answers) + "\n")


def compete(spec: Spec, methods: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The answers of all rounds, by contender."""
    names = [f"{side} {method}" for method in methods for side in ("truestep", "trl")]
    with ExitStack() as stack:
        runners = {
            n: stack.enter_context(Contender(n, spec, spec.folder / f"{n}.log", "posttrain_contenders.py"))
            for n in names
        }
        for runner in runners.values():
            runner.round()  # warm-up
        return by_turns({name: runner.round for name, runner in runners.items()}, spec.rounds)


def summary(spec: Spec, methods: list[str], rounds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    found = {}
    for method in methods:
        sides = {side: rounds[f"{side} {method}"] for side in ("truestep", "trl")}
        speeds = {side: [spec.steps / answer["seconds"] for answer in answers] for side, answers in sides.items()}
        peaks = {side: answers[-1]["peak_bytes"] for side, answers in sides.items()}
        cpu = {side: [answer["cpu_seconds"] for answer in answers] for side, answers in sides.items()}
        losses = [[answer["loss"] for answer in answers] for answers in sides.values()]
        found[method] = {
            "steps_per_s": {side: median(speed) for side, speed in speeds.items()},
            "speed_ratio": ratio(speeds["truestep"], speeds["trl"]),
            "cpu_ratio": ratio(cpu["trl"], cpu["truestep"]),
            "peak_bytes": peaks,
            "memory_ratio": peaks["truestep"] / peaks["trl"],
            "losses": losses,
            "loss_spread": spread(losses),
        }
    return found


def report(result: dict[str, Any]) -> None:
    rows = []
    for method, found in result["methods"].items():
        speed, cpu = (
            f"{r['median']:.3f} ({r['min']:.3f}-{r['max']:.3f})" for r in (found["speed_ratio"], found["cpu_ratio"])
        )
        figures = [found["steps_per_s"][side] for side in ("truestep", "trl")]
        peaks = [found["peak_bytes"][side] / 2**20 for side in ("truestep", "trl")]
        rows.append(
            [method, *figures, speed, cpu, *peaks, f"{found['memory_ratio']:.3f}", f"{found['loss_spread']:.1e}"]
        )
    columns = ["method", "truestep steps/s", "TRL steps/s", "x times as fast", "by CPU-seconds"]
    columns += ["truestep peak MiB", "TRL peak MiB", "memory", "losses differ by"]
    show(f"{result['parameters'] / 1e6:.1f}M parameters, {result['settings']['shape']}, fp32", columns, rows)


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--shape", default="30m-32k", choices=["30m-32k", "30m-4k", "tiny"])
    parse.add_argument("--context", type=int, default=512, help="tokens in a row")
    parse.add_argument("--rows", type=int, default=4, help="rows in a step: samples, or pairs")
    parse.add_argument("--steps", type=int, default=3, help="steps in a round")
    parse.add_argument("--rounds", type=int, default=5)
    parse.add_argument("--threads", type=int, default=2)
    parse.add_argument("--only", nargs="+", default=list(METHODS), choices=list(METHODS))
    parse.add_argument("--smoke", action="store_true")
    parse.add_argument("--out", type=Path, help="the JSON file; by default benchmarks/out/posttrain-SHAPE.json")
    asked = parse.parse_args()
    if asked.smoke:
        asked.shape, asked.context, asked.steps, asked.rounds = "tiny", 64, 2, 2
    with scratch() as name:
        spec = Spec(asked.shape, name, asked.context, asked.rows, asked.steps, asked.steps, asked.rounds, asked.threads)
        write_model(spec)
        write_rows(spec)
        for method in asked.only:
            write_order(spec, method)
        facts = machine()
        methods = summary(spec, asked.only, compete(spec, asked.only))
    result = {"methods": methods, "settings": asdict(spec), "machine": facts}
    result["parameters"] = model_section(asked.shape).counts().total
    report(result)
    save(f"posttrain-{asked.shape}", result, asked.out)
    if any(found["loss_spread"] > 0.01 for found in methods.values()):
        raise SystemExit("the losses of a method differ by more than 1 %, so the two sides did not do the same work")


if __name__ == "__main__":
    main()

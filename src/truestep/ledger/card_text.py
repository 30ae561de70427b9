"""The card as a page of Markdown that a person enjoys reading."""

from typing import Any

from truestep.ledger.figure import NOT_RECORDED, Figure
from truestep.ledger.words import bare, duration, flat, show

_SIGNS = {"pass": "✅ PASS", "fail": "❌ FAIL", "undecided": "❔ UNDECIDED", "void": "⚪ VOID", "UNGATED": "⚠️ UNGATED"}
_OUTCOMES = {"holds": "✅", "broken": "❌ BROKEN", "not checked": "– not checked"}
_BAR = 24


def card_text(card: dict[str, Any]) -> str:
    """Markdown of a card built by `build_card`."""
    parts = [
        _head(card),
        _glance(card),
        _evaluation(card["evaluation"]),
        _samples(card["samples"]),
        _data(card["data"]),
    ]
    parts += [_model(card), _compute(card), _time(card["time"]), _attempts(card["attempts"]), _faults(card["faults"])]
    parts += [_energy(card), _lineage(card), _proof(card)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _figure(values: dict[str, Any]) -> Figure:
    value = None if values["value"] == NOT_RECORDED else values["value"]
    return Figure(value, values["unit"], values["method"], values["source"])


def _show(values: dict[str, Any]) -> str:
    return show(_figure(values))


def _plain(values: dict[str, Any]) -> str:
    return bare(_figure(values))


def _table(header: list[str], rows: list[list[str]], align: str = "") -> str:
    """A Markdown table. `align` has l or r a column; by default all but the first to the right."""
    sides = align or "l" + "r" * (len(header) - 1)
    rule = ["---:" if side == "r" else "---" for side in sides]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in [header, rule, *rows])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _head(card: dict[str, Any]) -> str:
    gate = card["gate"]
    broken = [check["name"] for check in card["checks"] if check["outcome"] == "broken"]
    alarm = f"\n>\n> ❌ **This card contradicts itself:** {'; '.join(broken)}." if broken else ""
    return f"# {card['name']}\n\n> **{_SIGNS[gate['verdict']]}** · {_cell(gate['reason'])}{alarm}"


def _glance(card: dict[str, Any]) -> str:
    compute, evaluation = card["compute"], card["evaluation"]
    rows = [
        ["parameters", _plain(card["model"]["parameters"]["total"])],
        ["trained on", f"{_show(card['training']['tokens'])} in {_show(card['training']['steps'])}"],
        ["held-out", f"{_show(evaluation['loss'])}, {_show(evaluation['bits_per_byte'])}"],
        ["compute", f"{_show(compute['flops_causal'])} ({_show(compute['device_hours'])})"],
        ["MFU in steps", f"{_show(compute['mfu_causal'])} causal, {_show(compute['mfu_full'])} full attention"],
        ["wall time", f"{_show(card['time']['wall'])}, goodput {_show(compute['goodput'])}"],
        ["cost", _show(card["money"]["cost"])],
        ["electricity", _show(card["energy"]["electricity"])],
    ]
    return _table([f"{card['stage']['kind']} stage `{card['stage']['name']}`", ""], rows)


def _evaluation(evaluation: dict[str, Any]) -> str:
    rows = {name: _figure(values) for name, values in evaluation["yardsticks"].items()}
    ours = _figure(evaluation["bits_per_byte"])
    numbers = {name: n for name, figure in rows.items() if (n := figure.number()) is not None}
    if (mine := ours.number()) is not None:
        numbers["**this model**"] = mine
    if not numbers:
        return f"## Evaluation\n\nHeld-out bits per byte: {NOT_RECORDED}."
    longest = max(numbers.values())
    lines = [[name, f"{n:.4f}", f"`{_bar(n / longest)}`"] for name, n in sorted(numbers.items(), key=lambda kv: -kv[1])]
    table = _table(["held-out text", "bits per byte", "lower is better"], lines)
    return f"## Evaluation\n\n{table}\n\nBits per byte: {ours.method}."


def _bar(share: float) -> str:
    return ("█" * round(_BAR * max(0.0, min(1.0, share)))).ljust(_BAR, "·")


def _samples(samples: list[dict[str, str]]) -> str:
    if not samples:
        return ""
    blocks = [f"After `{_line(s['prompt'])}`:\n\n{_quoted(s['prompt'] + s['text'])}" for s in samples]
    return "## Samples\n\n" + "\n\n".join(blocks)


def _line(text: str) -> str:
    """One short line without back-ticks."""
    line = " ".join(text.replace("`", "'").split()) or " "
    return line if len(line) <= 60 else line[:59] + "…"


def _quoted(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text.rstrip()}\n{fence}"


def _data(corpora: list[dict[str, Any]]) -> str:
    if not corpora:
        return f"## Data\n\n{NOT_RECORDED.capitalize()}."
    rows = []
    for corpus in corpora:
        dropped = ", ".join(f"{_plain(n)} {why}" for why, n in corpus["dropped"].items() if n["value"])
        dropped = dropped or ("none" if corpus["dropped"] else NOT_RECORDED)
        kept = [_plain(corpus[name]) for name in ("documents", "tokens", "bytes")]
        rows.append([f"{corpus['name']} ({corpus['source']})", *kept, dropped, corpus["licence"] or NOT_RECORDED])
    table = _table(["corpus", "documents", "tokens", "text", "documents dropped", "licence"], rows, "lrrrll")
    prints = "\n".join(f"- `{corpus['name']}`: fingerprint `{corpus['fingerprint']}`" for corpus in corpora)
    return f"## Data\n\n{table}\n\n{prints}"


def _model(card: dict[str, Any]) -> str:
    model, training = card["model"], card["training"]
    parameters = ", ".join(f"{name} {_plain(values)}" for name, values in model["parameters"].items())
    architecture = ", ".join(f"{name} {value}" for name, value in flat(model["architecture"]).items()) or NOT_RECORDED
    steps = f"{_plain(training['steps'])} of {training['steps_planned']:,} planned steps"
    updates = f"{_plain(training['skipped_updates'])} updates skipped"
    shape = f"context {_or(training['context'])}, batch {_or(training['batch_tokens'])} tokens"
    lines = [
        f"- parameters: {parameters}",
        f"- architecture: {architecture}",
        f"- training: {steps} ({updates}), {shape}, precision {_or(model['precision'])}",
        f"- training loss at the end: {_show(training['final_loss'])}",
        f"- weights: digest `{_or(model['digest'])}`, size {_show(model['bytes'])}",
    ]
    settings = "\n".join(f"{path} = {value}" for path, value in flat(card["stage"]["settings"]).items())
    shown = f"<details><summary>All settings</summary>\n\n{_quoted(settings)}\n\n</details>" if settings else ""
    return "\n\n".join(["## Model", "\n".join(lines), shown]).strip()


def _or(value: object) -> str:
    return NOT_RECORDED if value is None else f"{value:,}" if isinstance(value, int) else str(value)


_COMPUTE = {
    "flops_causal": "model FLOPs, causal attention",
    "flops_full": "model FLOPs, full attention",
    "device_hours": "device-hours",
    "mfu_causal": "MFU in steps, causal",
    "mfu_full": "MFU in steps, full",
    "mfu_all_causal": "MFU of all time, causal",
    "mfu_all_full": "MFU of all time, full",
    "goodput": "goodput",
    "tokens_repeated": "tokens done again",
}


def _compute(card: dict[str, Any]) -> str:
    rows = [[words, _plain(card["compute"][key])] for key, words in _COMPUTE.items()]
    mfu = _figure(card["compute"]["mfu_causal"])
    return f"## Compute\n\n{_table(['', ''], rows)}\n\nMFU: {mfu.method}. Source: {mfu.source}."


def _time(time: dict[str, Any]) -> str:
    wall = _figure(time["wall"])
    whole = wall.number() or 0.0
    phases = {name: _figure(values).number() or 0.0 for name, values in time["phases"].items()}
    ordered = sorted(((name, s) for name, s in phases.items() if abs(s) >= 0.05), key=lambda item: -item[1])
    rows = [
        [name, duration(s), f"{100 * s / whole:.1f} %" if whole else "–", f"`{_bar(s / whole if whole else 0)}`"]
        for name, s in ordered
    ]
    rows.append(["**wall time**", duration(whole), "", ""])
    return f"## Time\n\n{_table(['phase', 'time', 'share', ''], rows)}\n\nWall time: {wall.method}."


def _attempts(attempts: list[dict[str, Any]]) -> str:
    rows = []
    for attempt in attempts:
        devices = ", ".join(f"{n} × {name}" for name, n in attempt["devices"].items()) or NOT_RECORDED
        figures = [_plain(attempt["figures"][name]) for name in ("steps", "tokens", "wall", "device_hours", "goodput")]
        rows.append([f"{attempt['attempt']} ({attempt['end']})", devices, *figures])
    header = ["attempt", "devices", "new steps", "new tokens", "wall time", "device-hours", "goodput"]
    return f"## Attempts\n\n{_table(header, rows, 'llrrrrr')}"


def _faults(faults: dict[str, Any]) -> str:
    drills = faults["drills"]
    off = " ⚠️ restores of this run were not tried out" if drills["state"] == "OFF" else ""
    rows = [
        [
            "goodput of the run",
            f"{_show(faults['goodput'])}, with saves at the best interval {_show(faults['ideal_goodput'])}",
        ],
        ["ETTR", _show(faults["ettr"])],
        ["failures", _plain(faults["failures"])],
        ["found wrong", ", ".join(f"{_plain(n)} {kind}" for kind, n in faults["found"].items()) or "nothing"],
        ["updates skipped", _plain(faults["skipped"])],
        ["hosts in quarantine", ", ".join(faults["quarantined"]) or "none"],
        ["drills", f"{drills['state']}{off}"],
        ["newest drilled checkpoint", _show(drills["newest"])],
    ]
    return f"## Faults\n\n{_table(['', ''], rows, 'll')}\n\nETTR: {faults['ettr']['method']}."


def _energy(card: dict[str, Any]) -> str:
    names = {
        "electricity": "electricity",
        "carbon": "carbon",
        "water": "water",
        "pue": "PUE",
        "grid_region": "grid region",
    }
    rows = [[words, _show(card["energy"][key]), card["energy"][key]["method"]] for key, words in names.items()]
    cost = card["money"]["cost"]
    rows.append(["cost", _show(cost), cost["method"]])
    return f"## Energy and money\n\n{_table(['', '', 'method'], rows, 'lrl')}"


def _lineage(card: dict[str, Any]) -> str:
    lineage = card["lineage"]
    origin = " ← ".join(f"`{name}`" for name in [card["stage"]["name"], *lineage["ancestors"]])
    start = f"started from {_or(lineage['start'])} (parent digest `{_or(lineage['parent'])}`)"
    return f"## Lineage\n\n{origin}, {start}; compute with all ancestors: {_show(lineage['flops_causal'])}."


def _proof(card: dict[str, Any]) -> str:
    checks = _table(
        ["identity", "", "numbers"], [[c["name"], _OUTCOMES[c["outcome"]], c["says"]] for c in card["checks"]]
    )
    digests = ", ".join(f"{name} `{value}`" for name, value in card["digests"].items()) or NOT_RECORDED
    versions = ", ".join(f"{name} {value}" for name, value in card["versions"].items()) or NOT_RECORDED
    head = f"chain head `{card['log']['head']}`"
    log = f"Computed from the first {card['log']['records']:,} records of the run log, {head}."
    return f"## Proof\n\n{checks}\n\n{log}\n\nRecipe digests: {digests}. Versions: {versions}."

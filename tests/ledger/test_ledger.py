"""The ledger from the log alone: phases tile the time, nothing counts twice, nothing unknown is a number."""

import pytest

from tests.runlog.made_up import Clock, MadeUpRun, full_run
from truestep.factors.devices import device_peak
from truestep.ledger.checks import check_stage
from truestep.ledger.history import collect, standing_steps
from truestep.ledger.ledger import account, build_ledger
from truestep.runlog.log import read

CAUSAL, FULL, TOKENS = 9.5e6, 9.9e6, 1024


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def history_of(path):
    return collect(read(path))


def outcomes(path, stage="base"):
    history = history_of(path)
    checks = check_stage(history, stage, account(stage, history.of_stage(stage)))
    return {check.name: check.outcome for check in checks}


def test_two_attempts_by_hand(tmp_path, clock):
    run = full_run(tmp_path, clock)
    run.end("finished")
    ledger = build_ledger(history_of(tmp_path))
    first, second = ledger.attempts[1], ledger.attempts[2]
    assert first.phases_s == pytest.approx(
        {"productive": 26 * 0.45, "data wait": 26 * 0.05, "data build": 6, "evaluation": 1.5}
        | {"checkpoint stall": 0.2, "start-up": 4 + 2, "other": 0},
        abs=1e-6,
    )
    assert second.phases_s == pytest.approx(
        {"productive": 14 * 0.45, "rework": 6 * 0.45, "data wait": 20 * 0.05, "evaluation": 3}
        | {"checkpoint stall": 0.4, "restart": 4, "export": 0.8, "other": 0},
        abs=1e-6,
    )
    assert (first.value("steps"), second.value("steps"), ledger.total.value("steps")) == (26, 14, 40)
    assert (first.value("tokens_repeated"), second.value("tokens_repeated")) == (0, 6 * TOKENS)
    assert ledger.total.value("tokens") == 40 * TOKENS
    assert ledger.total.value("flops_causal") == 46 * TOKENS * CAUSAL
    assert ledger.total.value("flops_full") == 46 * TOKENS * FULL
    wall_s = first.value("wall") + second.value("wall")
    assert wall_s == pytest.approx(4 + 6 + 2 + 13 + 1.5 + 0.2 + 4 + 10 + 3 + 0.4 + 0.8)  # not the 100 s in between
    assert ledger.total.value("wall") == pytest.approx(wall_s)
    assert ledger.total.value("goodput") == pytest.approx(40 * 0.45 / wall_s)
    assert ledger.total.value("device_hours") == pytest.approx(2 * wall_s / 3600)
    assert ledger.total.value("mfu_causal") == pytest.approx(46 * TOKENS * CAUSAL / (46 * 0.5 * 2 * 2e10))
    assert ledger.total.value("mfu_all_full") == pytest.approx(46 * TOKENS * FULL / (wall_s * 2 * 2e10))
    assert "matmul-2" in ledger.total.figures["mfu_causal"].method
    assert "measured: 1024^3" in ledger.total.figures["mfu_causal"].source
    assert "attempt 1 until its last record" in ledger.total.figures["wall"].method
    assert [(attempt, stage) for attempt, stage, _ in ledger.rows] == [(1, "base"), (2, "base")]
    assert set(outcomes(tmp_path).values()) == {"holds"}


def test_parts_add_up_to_the_whole(tmp_path, clock):
    run = full_run(tmp_path, clock, price_per_device_hour=2.0, currency="EUR")
    run.stage("more", steps=5, start="stage:base")
    run.steps(1, 5, "more")
    run.end("finished")
    ledger = build_ledger(history_of(tmp_path))
    for name in ("tokens", "tokens_repeated", "steps", "wall", "device_hours", "flops_causal", "money"):
        rows = sum(row.value(name) for _, _, row in ledger.rows)
        for parts in (ledger.stages, ledger.attempts):
            assert sum(part.value(name) for part in parts.values()) == pytest.approx(rows)
        assert ledger.total.value(name) == pytest.approx(rows)
    for _, _, row in ledger.rows:
        assert sum(row.phases_s.values()) == pytest.approx(row.value("wall"))
    assert ledger.total.figures["money"].unit == "EUR"
    assert ledger.total.value("money") == pytest.approx(2 * ledger.total.value("device_hours"))


def test_c13b_what_is_missing_is_never_zero(tmp_path, clock):
    run = MadeUpRun(tmp_path, clock)
    run.begin(devices={})
    unknown = dict(train_flops_per_token_causal=None, train_flops_per_token_full=None, peak_flops=None, flops_rule=None)
    run.stage(**unknown)
    run.steps(1, 3, data_s=None)
    run.end("finished")
    ledger = build_ledger(history_of(tmp_path))
    for name in ("flops_causal", "flops_full", "mfu_causal", "mfu_all_causal", "device_hours", "money"):
        figure = ledger.total.figures[name]
        assert figure.value is None and figure.to_json()["value"] == "not recorded"
    assert "not recorded for attempt 1" in ledger.total.figures["device_hours"].method
    assert "data wait" not in ledger.total.phases_s
    assert ledger.total.value("tokens") == 3 * TOKENS
    assert outcomes(tmp_path)["FLOPs = MFU x device-seconds x peak"] == "not checked"


def test_c13b_a_sum_with_an_unknown_part_is_unknown(tmp_path, clock):
    run = MadeUpRun(tmp_path, clock)
    run.begin(price_per_device_hour=2.0, currency="EUR")
    run.stage()
    run.steps(1, 3)
    run.end(None)
    run.begin()
    run.stage(start_step=3)
    run.steps(4, 6)
    run.end("finished")
    ledger = build_ledger(history_of(tmp_path))
    assert ledger.attempts[1].value("money") is not None
    assert ledger.total.value("money") is None
    assert "not recorded for attempt 2" in ledger.total.figures["money"].method
    run.begin(price_per_device_hour=2.0, currency="USD")
    run.end("finished")
    assert "different currencies" in build_ledger(history_of(tmp_path)).total.figures["money"].method


def test_an_attempt_that_died_before_its_stage_counts_for_the_stage_it_prepared(tmp_path, clock):
    run = MadeUpRun(tmp_path, clock)
    run.begin(startup_s=7.0)
    run.say("note", text="about to die")
    run.end(None)
    run.begin(startup_s=3.0)
    run.stage()
    run.steps(1, 2)
    run.end("finished")
    ledger = build_ledger(history_of(tmp_path))
    assert ledger.stages["base"].attempts == [1, 2]
    assert ledger.stages["base"].phases_s["start-up"] == pytest.approx(7.0)
    assert ledger.stages["base"].phases_s["restart"] == pytest.approx(3.0)


def test_the_time_after_a_card_prepares_the_next_stage(tmp_path, clock):
    run = full_run(tmp_path, clock)
    run.say("card", stage="base", path="models/base", digest="d", records=60)
    clock.wait(5.0)
    run.phase("data build", 2.0)
    run.stage("more", steps=5, start="stage:base")
    run.steps(1, 5, "more")
    run.say("card", stage="more", path="models/more", digest="d", records=70)
    clock.wait(1.0)
    run.end("finished")
    ledger = build_ledger(history_of(tmp_path))
    more = ledger.stages["more"]
    assert more.phases_s["restart"] == pytest.approx(5.0) and more.phases_s["data build"] == pytest.approx(2.0)
    assert more.phases_s["other"] == pytest.approx(1.0) and more.value("wall") == pytest.approx(10.5)
    assert ledger.stages["base"].phases_s["other"] == pytest.approx(0.0, abs=1e-6)


def test_a_roll_back_inside_an_attempt_is_rework_and_its_old_steps_fall_away(tmp_path, clock):
    run = MadeUpRun(tmp_path, clock)
    run.begin()
    run.stage(steps=8)
    run.steps(1, 6)
    run.steps(4, 8, step_s=0.75, data_s=0.0)
    run.end("finished")
    history = history_of(tmp_path)
    assert [(s.step, s.step_s) for s in standing_steps(history, "base")] == [(1, 0.5), (2, 0.5), (3, 0.5)] + [
        (step, 0.75) for step in range(4, 9)
    ]
    total = build_ledger(history).total
    assert total.phases_s["rework"] == pytest.approx(3 * 0.75)
    assert (total.value("steps"), total.value("tokens_repeated")) == (8, 3 * TOKENS)
    assert set(outcomes(tmp_path).values()) == {"holds"}


def test_broken_identities_are_named(tmp_path, clock):
    run = MadeUpRun(tmp_path, clock)
    run.begin()
    run.stage(steps=4, tokens=5000, peak_flops=1e6)
    run.steps(1, 2)
    run.steps(4, 4)
    run.say("phase", name="gate", seconds=60.0)  # no time passed on the clock
    run.end("finished")
    assert set(outcomes(tmp_path).values()) == {"broken"}


@pytest.mark.parametrize(
    "name, dtype, peak",
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H200", "bfloat16", 989.4e12),
        ("NVIDIA H200 NVL", "float16", 835.5e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5e12),
        ("NVIDIA B200", "bfloat16", 2250e12),
        ("NVIDIA GB200", "bfloat16", 2500e12),
        ("NVIDIA L40S", "bfloat16", 362.05e12),
        ("AMD Instinct MI300X", "bfloat16", 1307.4e12),
    ],
)
def test_dense_peaks_by_device_name(name, dtype, peak):
    found = device_peak(name, dtype)
    assert found is not None and found.flops == pytest.approx(peak) and found.source


@pytest.mark.parametrize(
    "name, dtype", [("AMD EPYC 7763", "float32"), ("NVIDIA H1000", "bfloat16"), ("NVIDIA L40S", "int3")]
)
def test_an_unknown_device_or_dtype_has_no_peak(name, dtype):
    assert device_peak(name, dtype) is None


def test_a_stage_without_a_declared_peak_takes_the_table(tmp_path, clock):
    run = MadeUpRun(tmp_path, clock)
    run.begin(devices={"NVIDIA H200": 8})
    run.stage(precision="bfloat16", peak_flops=None, peak_source=None, train_flops_per_token_causal=1e12)
    run.steps(1, 2)
    run.end("finished")
    figure = build_ledger(history_of(tmp_path)).total.figures["mfu_causal"]
    assert figure.value == pytest.approx(2 * 1024 * 1e12 / (2 * 0.5 * 8 * 989.4e12))
    assert "NVIDIA H200 data sheet" in figure.source

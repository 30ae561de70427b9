"""What must hold between fields: one sentence each, with the remedy."""

import pytest

from tests.recipe.small import problems, small
from truestep.recipe.effect import RULES
from truestep.recipe.load import load


def _two_stages(**second):
    recipe = small()
    gate = {"margin": 0.01}
    recipe["stages"].append(recipe["stages"][0] | {"name": "next", "start": "stage:base", "gate": gate} | second)
    return recipe


@pytest.mark.parametrize(
    "overrides, says",
    [
        # names
        (
            ["stages.base.data=trian"],
            "stages.base.data names 'trian', which is no [data.*] section; did you mean 'train'?",
        ),
        (["stages.base.evaluate.data=hled"], "stages.base.evaluate.data names 'hled', which is no [data.*] section; "),
        (
            ["tokenizer.kind=train-bpe", "tokenizer.data=['tran']"],
            "tokenizer.data names 'tran', which is no [data.*] section; did you mean 'train'?",
        ),
        (
            ["data.more.source=python-stdlib"],
            "data.more is used by no stage; remove it, or name it in a stage's `data`.",
        ),
        (
            ["data.a b.source=python-stdlib", "tokenizer={kind='train-bpe', data=['a b']}"],
            "data.a b is not a good name: use letters, digits, -",
        ),
        (
            ["stages.base.data=[{data='train'}, {data='train'}]"],
            "stages.base.data names a corpus twice; add the weights up",
        ),
        # starts
        (
            ["stages.base.start=stage:first"],
            "stages.base.start is 'stage:first', but that is no earlier stage; there is none",
        ),
        (
            ["stages.base.start=stage:base"],
            "stages.base.start is 'stage:base', but that is no earlier stage; there is none",
        ),
        (["model="], 'model is missing, but a stage starts from "init"; add [model], or start from a model.'),
        (
            ["stages.base.start=some/folder"],
            'model is set but will not be used: no stage has start = "init"; remove it.',
        ),
        # gates
        (["stages.base.gate="], 'stages.base.gate is missing; add [stages.gate] with a bound, or kind = "none" with'),
        (
            ["stages.base.gate={kind='none'}"],
            'stages.base.gate.reason is missing; a stage with gate kind = "none" must say',
        ),
        (["stages.base.gate={kind='none', reason=' '}"], "stages.base.gate.reason is missing; a stage with gate kind"),
        (
            ["stages.base.evaluate=", "data.held="],
            "stages.base.evaluate is missing, but the gate needs held-out data; add [",
        ),
        (
            ["stages.base.gate.max_bits_per_byte="],
            "stages.base.gate has no bound and no parent to compare with; add max_",
        ),
        (
            ["stages.base.gate.margin=0.1"],
            "stages.base.gate.margin will not be used: the stage has no parent; remove it.",
        ),
        (
            ["stages.base.evaluate.data=train", "data.held="],
            "stages.base.evaluate.data is 'train', the same text as 'train'",
        ),
        (
            ["data.train.split=all", "data.train.holdout="],
            "stages.base.evaluate.data is 'held', the same text as 'train'",
        ),
        # batches
        (
            ["stages.base.batch_tokens=8200"],
            "stages.base.batch_tokens is 8200, not a whole number of rows of 128 tokens; try",
        ),
        (
            ["stages.base.batch_tokens=512"],
            "stages.base.batch_tokens is 4 rows, not a whole number of microbatches of 8 rows",
        ),
        (
            ["stages.base.ramp=[{after=8192, batch_tokens=10000}]"],
            "stages.base.ramp.0.batch_tokens is 10000, not a whole number of rows of 128 tokens; try 9984.",
        ),
        (
            ["stages.base.ramp=[{after=8192, batch_tokens=8320}]"],
            "stages.base.ramp.0.batch_tokens is 65 rows, not a whole number of microbatches of 8 rows; change",
        ),
        (
            ["stages.base.ramp=[{after=8192, batch_tokens=8192}, {after=8192, batch_tokens=16384}]"],
            "stages.base.ramp.1.after is 8192, but must be more than 8192, where the size before it begins;",
        ),
        (
            ["stages.base.ramp=[{after=0, batch_tokens=8192}]"],
            "stages.base.ramp.0.after is 0, but must be more than 0",
        ),
        (
            ["stages.base.ramp=[{after='2M', batch_tokens=8192}]"],
            "stages.base.ramp.0.after is 2000000, but the stage ends at 1000000 tokens; remove the point.",
        ),
        # schedule
        (
            ["stages.base.optim.schedule.warmup=1.5"],
            "stages.base.optim.schedule.warmup is 1.5: write a fraction below 1, or",
        ),
        (
            ["stages.base.optim.schedule.warmup=100"],
            "stages.base.optim.schedule has warmup 100 and decay 0.2, more than the 123 steps of the stage; make them",
        ),
        # machine
        (
            ["model={module='my.lab:Net', vocab_size=300, max_context=128}", "machine.activation_checkpointing=auto"],
            'machine.activation_checkpointing is "auto", but what blocks of a module of your own keep is not known;',
        ),
        (
            ["stages.base.optim={kind='my.lab:adam', lr=0.1}", "machine.offload_optimizer=true"],
            "machine.offload_optimizer moves the state of adamw or muon, not that of an optimizer of your own; remove",
        ),
        # model
        (
            ["model.num_heads=3"],
            "model.num_heads is 3, which does not divide hidden_size 64; change one, or set head_dim.",
        ),
        (["model.num_kv_heads=3"], "model.num_kv_heads is 3, which does not divide num_heads 4; change one of them."),
        (["model.head_dim=15"], "model.head_dim is 15: rotary positions need an even size."),
        (["model.num_heads=64"], "model.head_dim is 1: rotary positions need an even size."),
        (
            ["model.max_context=64"],
            "stages.base.context is 128, but model.max_context is 64; raise that, or shorten the rows",
        ),
        (
            ["model.vocab_size=100"],
            "model.vocab_size is 100, but the tokenizer has 257 ids; set that or more, or 0 to take",
        ),
        (
            ["model.rope_scaling={kind='llama3', factor=8, low_freq_factor=4}"],
            "model.rope_scaling.high_freq_factor is 4, but must be more than low_freq_factor 4; raise it.",
        ),
        # data
        (
            ["data.train.source=txt"],
            "data.train.source is 'txt'; did you mean 'text'? Your own is written \"package.module:",
        ),
        (["data.train.source=text"], "data.train.path is missing; source 'text' needs files or folders to read."),
        (["data.train.path=a"], "data.train.path is set but will not be used by source 'python-stdlib'; remove it."),
        (
            ["data.train.holdout=0.5"],
            "data.held.holdout is 0.01, but 0.5 in data.train, of the same text: held-out doc",
        ),
        (["tokenizer.kind=file"], 'tokenizer.path is missing, but kind = "file" needs a tokenizer.json, a folder or a'),
        # kinds
        (
            ["stages.base.optim.kind=adam"],
            "stages.base.optim.kind is 'adam'; did you mean 'adamw'? Your own is written",
        ),
        (
            ["stages.base.loss.kind=crossentropy"],
            "stages.base.loss.kind is 'crossentropy'; did you mean 'cross-entropy'?",
        ),
        # machine
        (
            ["machine.mesh.dp_replicate=auto"],
            'machine.mesh has several degrees that are "auto" (dp_replicate, dp_shard); only one can be what is left',
        ),
        (["ledger.price_per_device_hour=2"], "ledger.currency is missing, but there is a price; add currency"),
        (
            ["checkpoint.every_time=0s"],
            "checkpoint has every = 0 and every_time = 0: nothing would be saved; set one of them.",
        ),
    ],
)
def test_one_sentence(overrides, says):
    (sentence,) = problems(small(), *overrides)
    assert sentence.partition(": ")[2].startswith(says), sentence


def test_held_out_share_of_zero():
    found = problems(small(), "data.train.holdout=0", "data.held.holdout=0")
    assert [s.partition(": ")[2] for s in found] == [
        'data.train.holdout is 0, but split = "train" needs a share; set holdout = 0.01, say.',
        'data.held.holdout is 0, but split = "heldout" needs a share; set holdout = 0.01, say.',
    ]


def test_names_of_stages_are_unique():
    assert problems(_two_stages(name="base", start="init", gate={"max_loss": 3})) == [
        "recipe: stages.base.name is 'base' twice; give every stage a name of its own."
    ]


def test_a_gate_does_not_trust_data_that_an_earlier_stage_was_trained_on():
    recipe = _two_stages()
    recipe["data"]["more"] = {"source": "text", "path": "a"}
    recipe["stages"][0] |= {"data": [{"data": "train"}, {"data": "more"}]}
    recipe["stages"][1] |= {"evaluate": {"data": "more"}}
    (sentence,) = problems(recipe)
    assert sentence.startswith(
        "recipe: stages.next.evaluate.data is 'more', the same text as 'more', which is trained on"
    )


def test_a_start_must_be_an_earlier_stage():
    assert load(_two_stages()).stages[1].start == "stage:base"
    assert problems(_two_stages(start="stage:bsae")) == [
        "recipe: stages.next.start is 'stage:bsae', but that is no earlier stage; did you mean 'base'?"
    ]
    assert problems(_two_stages(start="base")) == [
        "recipe: stages.next.start is 'base'; write \"stage:base\" to go on from that stage."
    ]


@pytest.mark.parametrize(
    "overrides, field, needs",
    [
        (["data.train.near_threshold=0.8"], "data.train.near_threshold", 'dedup = "near"'),
        (["data.train.too_long=split"], "data.train.too_long", 'packing = "best-fit"'),
        (["data.train.text_field=body"], "data.train.text_field", "a source with named fields"),
        (["data.train.storage_options.region=eu"], "data.train.storage_options", "a path with a URL"),
        (
            ["data.train.split=all", "data.held.source=my:Source"],
            "data.train.holdout",
            'split = "train" or "heldout"',
        ),
        (["stages.base.optim.muon_lr=0.02"], "stages.base.optim.muon_lr", 'kind = "muon"'),
        (["stages.base.optim.muon_dtype=auto"], "stages.base.optim.muon_dtype", 'kind = "muon"'),
        (["stages.base.optim.options.a=1"], "stages.base.optim.options", "kind to be an import path"),
        (["stages.base.optim={kind='my:opt', eps=1}"], "stages.base.optim.eps", 'kind = "adamw" or "muon"'),
        (
            ["stages.base.optim={kind='my:opt', weight_decay=1}"],
            "stages.base.optim.weight_decay",
            'kind = "adamw" or "muon"',
        ),
        (
            ["stages.base.optim={weight_decay=0, decay_embeddings=true}"],
            "stages.base.optim.decay_embeddings",
            "a weight_decay above 0",
        ),
        (["stages.base.optim.schedule={kind='cosine', decay=0.2}"], "stages.base.optim.schedule.decay", 'kind = "wsd"'),
        (
            ["stages.base.optim.schedule={kind='constant', final=0.1}"],
            "stages.base.optim.schedule.final",
            'kind = "wsd" or "cosine" or "linear"',
        ),
        (["stages.base.loss={kind='my:Loss', z_loss=1e-4}"], "stages.base.loss.z_loss", 'kind = "cross-entropy"'),
        (["stages.base.loss.options.a=1"], "stages.base.loss.options", "kind to be an import path"),
        (["stages.base.gate.reason=because"], "stages.base.gate.reason", 'kind = "none"'),
        (["stages.base.gate={kind='none', reason='a', max_loss=3}"], "stages.base.gate.max_loss", 'kind = "heldout"'),
        (
            ["stages.base.sample={prompts=['a'], temperature=0, top_p=0.9}"],
            "stages.base.sample.top_p",
            "a temperature above 0",
        ),
        (["tokenizer.path=a"], "tokenizer.path", 'kind = "file"'),
        (["tokenizer.vocab_size=4096"], "tokenizer.vocab_size", 'kind = "train-bpe"'),
        (["model.options.a=1"], "model.options", "a `module` of your own"),
        (["model={module='my:Model', num_layers=3}"], "model.num_layers", "`module` to be left out"),
        (["model.family=gemma2", "model.full_attention_every=2"], "model.full_attention_every", "a sliding_window"),
        (
            ["model.rope_scaling={kind='linear', factor=2, original_context=4096}"],
            "model.rope_scaling.original_context",
            'kind = "llama3" or "yarn"',
        ),
        (
            ["model.rope_scaling={kind='llama3', factor=2, beta_fast=32}"],
            "model.rope_scaling.beta_fast",
            'kind = "yarn"',
        ),
        (
            ["machine={reshard_after_forward=true, mesh={dp_shard=1}}"],
            "machine.reshard_after_forward",
            "mesh.dp_shard above 1",
        ),
        (["checkpoint.storage_options.region=eu"], "checkpoint.storage_options", "an object store as `url`"),
        (["checkpoint={keep=0, keep_every=100}"], "checkpoint.keep_every", "keep above 0 (all are kept)"),
        (["sentinel.spikes={action='say', skips=3}"], "sentinel.spikes.skips", 'action = "skip"'),
        (["ledger.currency=EUR"], "ledger.currency", "price_per_device_hour"),
    ],
)
def test_an_option_without_effect_is_refused_even_at_its_default(overrides, field, needs):
    (sentence,) = problems(small(), *overrides)
    assert f"{field} is set but will not be used: it needs {needs}" in sentence and sentence.endswith("; remove it.")


def test_options_with_effect_are_welcome():
    load(
        small(),
        [
            "data.train.dedup=near",
            "data.train.near_threshold=0.7",
            "data.train.packing=best-fit",
            "data.train.too_long=split",
            "stages.base.optim={kind='muon', muon_lr=0.02, weight_decay=0.1, decay_embeddings=true}",
            "stages.base.optim.schedule={warmup=10, decay=20, decay_shape='linear'}",
            "tokenizer={kind='train-bpe', vocab_size=1000, data=['train']}",
            "checkpoint={url='s3://bucket/run', storage_options={region='eu'}}",
            "ledger={price_per_device_hour=2, currency='EUR'}",
            "model.rope_scaling={kind='yarn', factor=2, beta_fast=16}",
        ],
    )
    load(small(), ["model={module='my:Model', options={width=3}, max_context=128}"])


def test_every_rule_names_fields_that_exist():
    for section, rules in RULES.items():
        for rule in rules:
            assert set(rule.fields) <= set(section.model_fields)
            assert {path.split(".")[0] for path in rule.reads} <= set(section.model_fields)

"""The pretrain stage: text in, base model out. Read top to bottom."""

import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

from truestep.checkpoint.catalogue import begin_epoch
from truestep.checkpoint.checkpointer import Checkpointer
from truestep.checkpoint.control import Group
from truestep.checkpoint.load import load_newest
from truestep.data.loader import Loader, Prefetcher, eval_batches
from truestep.data.tokenizer import Tokenizer, check_vocab
from truestep.models.build import build_model, init_weights
from truestep.models.hf import load_hf, read_section
from truestep.recipe.batch_schedule import BatchSchedule
from truestep.recipe.digests import bits, what
from truestep.recipe.model import ModelSection
from truestep.recipe.stage import Stage
from truestep.runlog.metrics import RankMetrics
from truestep.stages.context import Context
from truestep.stages.corpora import Corpora
from truestep.stages.finish import Finished, finish
from truestep.stages.measure import measure_peak, measure_precision
from truestep.storage.store import open_store
from truestep.train.build import build
from truestep.train.evaluate import HeldOut, Text, evaluate
from truestep.train.loop import Loop
from truestep.train.state import TrainState


def carry_out(context: Context, stage: Stage) -> str:
    """Returns "done", "interrupted" or "gate" (the model was made, but not accepted)."""
    recipe, job, machine = context.recipe, context.job, context.recipe.machine
    schedule = BatchSchedule.of(stage)
    corpora = Corpora.prepare(context, stage)
    tokenizer = corpora.tokenizer
    start = starting_point(context, stage)
    section = (read_section(start) if start else recipe.model).resolved(tokenizer.vocab_size)
    check_vocab(tokenizer, section.vocab_size)
    loader = Loader(corpora.training(stage), context=stage.context, seed=recipe.run.seed, mask_documents=stage.mask_documents)

    precision = measure_precision(context)
    state = build(
        stage,
        build_model(section, tokenizer.vocab_size),
        partial(load_into, start) if start else partial(init_weights, seed=recipe.run.seed),
        job=job,
        machine=machine,
        precision=precision,
        seed=recipe.run.seed,
        steps=schedule.steps,
    )
    say_start(context, stage, section, schedule, precision, corpora)
    checkpointer = open_checkpoints(context, stage)
    resume(context, stage, state, loader, checkpointer)

    held_out = corpora.held_out(stage)
    loop = Loop(
        stage=stage.name,
        state=state,
        feed=Prefetcher(loader, schedule, job.rank, job.world, machine.microbatch_rows, machine.prefetch, state.step),
        loader_state=lambda step: loader.state(schedule.rows(step - 1)[1]),
        tokens_of=lambda step: schedule.rows_in(step) * stage.context,
        checkpointer=checkpointer,
        cadence=recipe.checkpoint,
        metrics=RankMetrics(context.run_dir, context.attempt, job.rank),
        log=context.log,
        watcher=context.progress,
        evaluate=held_out and partial(evaluate_on, state, stage, machine.microbatch_rows, held_out, tokenizer),
        evaluate_every=stage.evaluate.every if stage.evaluate else 0,
    )
    context.progress.begin(stage.name, state.step, state.steps)
    outcome = loop.run()
    context.progress.close()
    checkpointer.close()
    loop.metrics.close()
    if outcome == "stopped":
        context.progress.say(f"{stage.name}: stopped after step {state.step}; to go on: {context.command}")
        return "interrupted"
    return finish(context, stage, Finished(state, section, corpora, loop.figures, start))

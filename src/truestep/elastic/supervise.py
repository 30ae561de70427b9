"""A recipe, supervised: `truestep run` for more than one process, or with [machine.elastic]. Torch-free."""

import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from truestep.elastic.agent import Agent
from truestep.elastic.budget import Budget
from truestep.elastic.events import Events
from truestep.elastic.machines import Here, Hub
from truestep.elastic.members import Members
from truestep.elastic.places import hosts_here, start_of
from truestep.elastic.roster import Roster
from truestep.elastic.stopping import Warnings
from truestep.elastic.supervisor import STATE, Outcome, Supervisor
from truestep.elastic.watcher import HangWatch
from truestep.elastic.wire import read_token
from truestep.elastic.worlds import Worlds
from truestep.recipe.dump import dump
from truestep.recipe.recipe import Recipe
from truestep.storage.keeper import TOKEN


def supervise(recipe: Recipe, file: Path, ranks: int, gpus: int, variables: Mapping[str, str]) -> Outcome:
    """Carry out the recipe that lies in `file` with `ranks` processes of this machine, and of those that join."""
    run_dir = recipe.directory
    elastic = recipe.machine.elastic
    if recipe.checkpoint.memory:
        variables = {**variables, TOKEN: secrets.token_hex(32)}
    start, regroup = start_of(recipe.machine, gpus)
    budget = Budget.load(run_dir / STATE, elastic.restarts, elastic.forget)
    budget.once_more()
    members = Members(
        fewest=elastic.min or ranks,
        most=elastic.max or ranks,
        fits=Worlds(recipe, ranks).fit,
        budget=budget,
        usual=ranks,
        spares=elastic.spares,
    )
    hub = _hub(recipe, start, regroup) if elastic.listen else None
    hosts = hosts_here(os.environ, ranks + elastic.spares)
    agent = Agent(hosts, start, ["run", str(file)], regroup)
    here = Here(agent)
    warnings = Warnings(Path(elastic.notice).expanduser() if elastic.notice else None)
    events = Events(run_dir)
    hangs = HangWatch(recipe.machine.hang_s, alike=recipe.machine.mesh.pp == 1)
    roster = Roster(members, events, {here.name: here}, hub)
    return Supervisor(events, members, roster, dict(variables), warnings, hangs, regroup).run()


def _hub(recipe: Recipe, start: str, regroup: bool) -> Hub:
    """Where other machines join; the token lies beside the run's directory, made here if it is not there."""
    assert recipe.machine.elastic.listen is not None
    file = recipe.directory.with_name(f".{recipe.run.name}.token")
    if not file.exists():
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as token:
            token.write(secrets.token_hex(32) + "\n")
    welcome = {"do": "welcome", "recipe": dump(recipe), "start": start, "regroup": regroup}
    hub = Hub(recipe.machine.elastic.listen, read_token(file), welcome)
    print(f"supervisor: others join with: truestep node {_address(recipe, hub)} --token-file {file}", flush=True)
    return hub


def _address(recipe: Recipe, hub: Hub) -> str:
    host = str(recipe.machine.elastic.listen).rpartition(":")[0]
    return f"{socket.gethostname() if host in ('', '0.0.0.0', '[::]') else host}:{hub.port}"

"""What [machine.elastic] may say: numbers of processes that the run can go on with. Torch-free."""

import re
from collections.abc import Iterator

from truestep.recipe.check_mesh import asked_of
from truestep.recipe.degrees import AXES
from truestep.recipe.machine import Machine
from truestep.recipe.problems import Problem


def elastic_problems(machine: Machine) -> Iterator[Problem]:
    """Problems of [machine.elastic], as far as the recipe tells them."""
    elastic, at = machine.elastic, "machine.elastic"
    fewest, most = elastic.min or machine.processes, elastic.max or machine.processes
    if elastic.min is not None and elastic.min > most:
        of = f"{at}.max" if elastic.max is not None else "machine.processes"
        yield Problem(f"{at}.min", f"is {elastic.min}, more than {of} {most}; lower it.", (of,))
    elif elastic.max is not None and elastic.max < machine.processes:
        text = f"is {most}, fewer than machine.processes {machine.processes}; raise it, or start fewer processes."
        yield Problem(f"{at}.max", text, ("machine.processes",))
    elif fewest != most and not any(asked_of(machine.mesh)[axis] is None for axis in AXES):
        text = f'has no degree that is "auto", so that the run cannot go on with {fewest} to {most} processes; '
        yield Problem("machine.mesh", text + 'set dp_shard or dp_replicate to "auto".', (f"{at}.min", f"{at}.max"))
    if elastic.listen is not None and not re.fullmatch(r".*:\d{1,5}", elastic.listen):
        text = f'is {elastic.listen!r}, which is not host:port; write for instance "0.0.0.0:29400".'
        yield Problem(f"{at}.listen", text)

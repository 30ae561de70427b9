"""Reading a Hugging Face configuration key by key, so that none is passed over."""

from typing import Any

from truestep.errors import ModelError

_NO_EFFECT = frozenset(
    {"_name_or_path", "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache"}
    | {"bos_token_id", "eos_token_id", "pad_token_id", "cache_implementation", "_attn_implementation_autoset"}
    | {"pretraining_tp", "max_window_layers", "use_sliding_window", "_sliding_window_pattern", "unsloth_version"}
    | {"id2label", "label2id", "problem_type", "return_dict", "output_hidden_states", "output_attentions"}
    | {"chunk_size_feed_forward", "is_encoder_decoder"}
    | {"quantization_config"}  # of how weights are stored, not of what is computed: read_scheme
    # of models with experts: what only their training reads, and modules for further tokens, whose weights lie apart
    | {"router_aux_loss_coef", "output_router_logits", "aux_loss_alpha", "seq_aux", "ep_size"}
    | {"num_nextn_predict_layers", "num_mtp_layers"}
)


class Reader:
    """A configuration, and which of its keys were obeyed."""

    def __init__(self, config: dict[str, Any], defaults: dict[str, Any], where: str):
        self._config, self._defaults, self._where = config, defaults, where
        self._used: set[str] = set(_NO_EFFECT)

    def get(self, key: str, default: Any = None) -> Any:
        """The value, that of the family's defaults where the key is absent, or `default`."""
        self._used.add(key)
        return self._config.get(key, self._defaults.get(key, default))

    def need(self, key: str) -> Any:
        """The same of a key that cannot do without a value."""
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self._where} has no {key!r}; add it, it is needed to build the model.")
        return value

    def only(self, key: str, meant: tuple[Any, ...], remedy: str) -> None:
        """Refuse every value but the absent one and those that mean what we do anyway."""
        value = self.get(key)
        if value is not None and value not in meant:
            self.refuse(key, value, remedy)

    def refuse(self, key: str, value: Any, remedy: str) -> None:
        """ModelError: we would not obey this value."""
        raise ModelError(f"{self._where} has {key} = {value!r}, which is not supported; {remedy}.")

    def finish(self) -> None:
        """Every other key must be switched off."""
        for key, value in self._config.items():
            if key not in self._used and value not in (None, False, 0, [], {}):
                self.refuse(key, value, "remove it if the model does not depend on it")

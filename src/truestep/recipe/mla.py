"""[model.mla]: attention whose keys and values come from one small vector a token."""

from truestep.recipe.section import Section, field


class Mla(Section):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1). Keys and values of all heads are projected from a
    latent vector; positions are in `rope_dim` further numbers of each key, which all heads share."""

    q_rank: int = field(0, help="width of the latent vector of queries; 0: queries come from the hidden state", ge=0)
    kv_rank: int = field(help="width of the latent vector of keys and values", gt=0)
    nope_dim: int = field(help="numbers of a query or key without position", gt=0)
    rope_dim: int = field(help="numbers of a query or key that are rotated; even", gt=0)
    v_dim: int = field(help="size of a head's value", gt=0)
    interleave: bool = field(True, help="rotate pairs (2i, 2i + 1), as DeepSeek does, not (i, i + rope_dim / 2)")

"""What a parameter is for. Decay groups, Muon's choice of matrices and initialisation go by role, never by name."""

from enum import StrEnum


class Role(StrEnum):
    EMBEDDING = "embedding"  # token table, also when it is tied to the head
    HEAD = "head"  # untied output matrix
    MATRIX = "matrix"  # 2-D weight of a linear map inside a block, or 3-D of several (experts), stacked
    ROUTER = "router"  # matrix that scores experts
    NORM = "norm"  # scale of a normalisation
    BIAS = "bias"  # 1-D offset
    OTHER = "other"  # anything else of a user's own module with two or more dimensions

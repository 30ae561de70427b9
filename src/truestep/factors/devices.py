"""Peak arithmetic of known devices: dense (no structured sparsity), as the vendor states it, for MFU.

To add a device, add a row: more specific names before general ones. A name that is not here has no peak: say
"not recorded" or measure it, never guess.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """FLOP/s of one device in one dtype, without sparsity, and where the figure comes from."""

    flops: float
    source: str


_H100_SHEET = "NVIDIA H100 data sheet (sparse figures halved)"
_H200_SHEET = "NVIDIA H200 data sheet (sparse figures halved)"
_BLACKWELL_SHEET = "NVIDIA HGX B200 specifications per GPU (sparse figures halved)"
_GRACE_SHEET = "NVIDIA GB200 NVL72 specifications per GPU (sparse figures halved)"

# Pattern of the name that the driver reports; TFLOP/s by dtype; source. float32 is without TF32.
_TABLE: list[tuple[str, dict[str, float], str]] = [
    (r"\bGB200\b", {"float16": 2500, "tf32": 1250, "float8": 5000}, _GRACE_SHEET),
    (r"\bB200\b", {"float16": 2250, "tf32": 1125, "float32": 75, "float8": 4500}, _BLACKWELL_SHEET),
    (r"\bH200 NVL\b", {"float16": 835.5, "tf32": 417.5, "float32": 60, "float64": 30, "float8": 1670.5}, _H200_SHEET),
    (
        r"\bG?H200\b",
        {"float16": 989.4, "tf32": 494.7, "float32": 66.9, "float64": 33.5, "float8": 1978.9},
        _H200_SHEET,
    ),
    (r"\bH100 NVL\b", {"float16": 835.5, "tf32": 417.5, "float32": 60, "float64": 30, "float8": 1670.5}, _H100_SHEET),
    (r"\bH100 PCIe\b", {"float16": 756, "tf32": 378, "float32": 51, "float64": 26, "float8": 1513}, _H100_SHEET),
    (
        r"\bH100\b",
        {"float16": 989.4, "tf32": 494.7, "float32": 66.9, "float64": 33.5, "float8": 1978.9},
        "NVIDIA H100 Tensor Core GPU architecture paper, SXM5, dense",
    ),
    (r"\bA100\b", {"float16": 312, "tf32": 156, "float32": 19.5, "float64": 9.7}, "NVIDIA A100 data sheet, dense"),
    (r"\bL40S\b", {"float16": 362.05, "tf32": 183, "float32": 91.6, "float8": 733}, "NVIDIA L40S data sheet, dense"),
    (r"\bL4\b", {"float16": 121, "tf32": 60, "float32": 30.3, "float8": 242.5}, "NVIDIA L4 data sheet (halved)"),
    (r"\bMI325X\b", {"float16": 1307.4, "tf32": 653.7, "float32": 163.4, "float8": 2614.9}, "AMD MI325X data sheet"),
    (r"\bMI300X\b", {"float16": 1307.4, "tf32": 653.7, "float32": 163.4, "float8": 2614.9}, "AMD MI300X data sheet"),
    (r"\bMI355X\b", {"float16": 2516.6, "float32": 157.3, "float8": 5033.2}, "AMD MI355X data sheet"),
    (r"\bMI250X\b", {"float16": 191.5}, "AMD MI250X data sheet, one of two dies (a die is a device)"),
]
_LIKE = {"bfloat16": "float16"}  # every device above runs the two at one rate


def device_peak(name: str, dtype: str) -> Peak | None:
    """The dense peak of the device that the driver calls `name`, for `dtype` as torch spells it; None if not known."""
    for pattern, tflops, source in _TABLE:
        if re.search(pattern, name, re.IGNORECASE):
            value = tflops.get(_LIKE.get(dtype, dtype))
            return Peak(value * 1e12, source) if value else None
    return None

"""Description of the machine and its libraries."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess

import accelerate
import torch
import transformers

from headscan.testing.overhead import processor


def describe(device: torch.device) -> str:
    """Return the names of device, driver and libraries, in two lines."""
    libraries = (
        f"torch {torch.__version__}, transformers {transformers.__version__}, accelerate {accelerate.__version__}, "
        f"Python {platform.python_version()}, {os.cpu_count()} CPU cores"
    )
    if device.type != "cuda":
        return f"{processor('cpu')}\n{libraries}"
    properties = torch.cuda.get_device_properties(device)
    gpu = (
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability "
        f"{properties.major}.{properties.minor}, {properties.multi_processor_count} SMs, CUDA {torch.version.cuda}, "
        f"cuDNN {torch.backends.cudnn.version()}, driver {_driver()}"
    )
    return f"{gpu}\n{libraries}"


def _driver() -> str:
    """Return the version of NVIDIA's driver, or "unknown"."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    try:
        found = subprocess.run(
            [tool, "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (found.stdout.split() or ["unknown"])[0]

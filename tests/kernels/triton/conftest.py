"""Triton's interpreter, which runs kernels on the CPU: it must be chosen before Triton is imported."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

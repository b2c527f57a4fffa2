"""What is meant: DeepSeek-V4 in pure PyTorch, FP32, one descent from config to logits.

`reference.load` is the way in; `reference/model.py` is the file to read first.
"""

from __future__ import annotations

from typing import Any


def load(*args: Any, **kwargs: Any) -> Any:
    """Load the reference model. See `reference.model.load` for the arguments."""
    from reference.model import load as load_model

    return load_model(*args, **kwargs)

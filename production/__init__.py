"""The model on kernels: DeepSeek-V4 assembled from the CUDA kernels in `kernels/`.

`production.load` is the way in; `production/model.py` is the twin of `reference/model.py`.
"""

from __future__ import annotations

from typing import Any


def load(*args: Any, **kwargs: Any) -> Any:
    """Load the production model. See `production.model.load` for the arguments."""
    from production.model import load as load_model

    return load_model(*args, **kwargs)

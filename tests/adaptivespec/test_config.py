"""Settings: one way in, and errors that name the key, the value and what is allowed."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from adaptivespec.config import (
    DCSPolicy,
    EagleSettings,
    LookupSettings,
    StaticPolicy,
    load_settings,
)
from adaptivespec.errors import ConfigError
from adaptivespec.shape import Shape


def test_everything_has_a_default() -> None:
    settings = load_settings({})
    assert settings.model.path == "smollm2"
    assert settings.drafter == EagleSettings(path="smollm2-eagle3")
    assert isinstance(settings.policy, DCSPolicy)
    assert settings.kappa == 0.2


def test_the_shipped_configuration_is_valid() -> None:
    file = Path(__file__).parents[2] / "serve_config.yaml"
    (application,) = yaml.safe_load(file.read_text())["applications"]
    settings = load_settings(application["args"])
    assert (settings.drafter_kind, settings.policy_kind, settings.kappa) == (
        "eagle3",
        "goodput",
        0.2,
    )


def test_the_packaged_head_is_the_default_of_the_packaged_model_only() -> None:
    other = {"model": {"path": "some/model"}}
    assert isinstance(load_settings(other).drafter, LookupSettings)
    assert load_settings(other | {"drafter": None}).drafter is None
    assert load_settings(other | {"drafter": {"kind": "eagle3"}}).drafter_kind == "eagle3"


def test_alternatives_are_told_apart_by_kind() -> None:
    settings = load_settings(
        {
            "drafter": {"kind": "eagle3", "path": "some/head"},
            "policy": {"kind": "static", "shape": [5, 4, 16]},
        }
    )
    assert settings.drafter == EagleSettings(path="some/head")
    assert settings.policy == StaticPolicy(shape=Shape(5, 4, 16))
    assert load_settings({"drafter": None}).drafter_kind == "none"


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"kapa": 0.2}, ["kapa"]),
        ({"model": {"dtypo": 1}}, ["model", "dtypo"]),
        ({"kappa": 0}, ["kappa", "0", "> 0"]),
        ({"kappa": 1.5}, ["kappa", "1.5", "<= 1"]),
        ({"kappa": "high"}, ["kappa", "'high'", "float"]),
        ({"model": {"dtype": "float16"}}, ["model.dtype", "'float16'", "bfloat16, float32"]),
        ({"max_shape": [None, 1, 2]}, ["max_shape.0", "None", "int"]),
        ({"max_shape": [65, 1, 66]}, ["max_shape", "[65, 1, 66]", "[64, 64, 1024]"]),
        ({"target": {"kv_tokens": 64}}, ["target.kv_tokens", "64", "max_shape"]),
        ({"orchestrator_cpus": 0}, ["orchestrator_cpus", "0", "> 0"]),
        ({"link_timeout_s": float("inf")}, ["link_timeout_s", "inf", "86400"]),
        ({"target": {"max_running": 0}}, ["target.max_running", "0", ">= 1"]),
        ({"target": {"compute": {"device": "tpu"}}}, ["target.compute.device", "'tpu'", "cuda"]),
        ({"target": {"compute": {"device": "cuda"}}}, ["target.compute", "'cuda'", "num_gpus"]),
        ({"drafter": {"kind": "medusa"}}, ["drafter.kind", "'medusa'", "lookup, eagle3, lm"]),
        ({"drafter": {"kind": "lm"}}, ["drafter", "path"]),
        ({"drafter": {"kind": "lookup", "min_ngram": 9}}, ["drafter.min_ngram", "9", "3"]),
        ({"policy": {"kind": "magic"}}, ["policy.kind", "'magic'", "static, dcs, goodput"]),
        ({"policy": {"kind": "static", "shape": [3, 4]}}, ["policy.shape", "[3, 4]"]),
        ({"policy": {"kind": "static", "shape": [3, 4, 3]}}, ["policy.shape", "[3, 4, 3]"]),
        ({"policy": {"kind": "goodput", "largest": [3, 4, 3]}}, ["policy.largest", "[3, 4, 3]"]),
        ({"policy": {"kind": "goodput", "largest": [9, 1, 10]}}, ["policy.largest", "[8, 16, 64]"]),
        ({"policy": {"kind": "goodput", "largest": [0, 0, 1]}}, ["policy.largest", "static"]),
        ({"max_promotions_per_window": -1}, ["max_promotions_per_window", "-1", ">= 0"]),
        ({"promotion_window": 5000}, ["promotion_window", "5000", "4096"]),
        ({"promotion_window": 8}, ["promotion_window", "8", "max_promotions_per_window"]),
        ({"never_promote": ["numbers"]}, ["never_promote.0", "'numbers'", "digits, operators"]),
        ({"policy": {"kind": "dcs", "high": [9, 1, 10]}}, ["policy.high", "[8, 16, 64]"]),
    ],
)
def test_mistakes_are_named(args: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(args)
    for part in named:
        assert part in str(caught.value)

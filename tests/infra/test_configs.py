"""The shipped GPU configurations: Serve takes each file, and the application that it builds asks
Ray for the GPUs that its comments promise. Nothing is started, and nothing downloaded."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private.build_app import build_app
from ray.serve.schema import ServeDeploySchema

from adaptivespec.config import DCSPolicy, EagleSettings, Settings, load_settings
from deployments.app import build

CONFIGS = Path(__file__).parents[2] / "infra" / "configs"

# GPUs of the target and of the drafter.
GPUS = {
    "llama-3.1-8b": (1, 1),
    "deepseek-r1-distill-llama-8b": (1, 1),
    "qwen3-8b": (1, 1),
    "llama-3.3-70b-tp2": (2, 1),
}


def test_every_file_is_known_here() -> None:
    assert {file.stem for file in CONFIGS.iterdir()} == GPUS.keys()


@pytest.fixture(params=GPUS, name="name")
def each_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def config(name: str) -> ServeDeploySchema:
    """The file as `serve run` and `serve deploy` read it; anything unknown in it is an error."""
    return ServeDeploySchema.model_validate(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()))


@pytest.fixture
def args(config: ServeDeploySchema) -> dict[str, Any]:
    (application,) = config.applications
    args: dict[str, Any] = application.args
    return args


@pytest.fixture
def settings(args: dict[str, Any]) -> Settings:
    return load_settings(args)


@pytest.fixture
def deployments(args: dict[str, Any]) -> dict[str, Any]:
    """What Serve makes of the application, by name."""
    built = build_app(build(args), name="checked")
    return {deployment.name: deployment for deployment in built.deployments}


def test_it_serves_our_application_at_the_root(config: ServeDeploySchema) -> None:
    (application,) = config.applications
    assert application.import_path == "deployments.app:build"
    assert application.route_prefix == "/"
    assert application.name
    assert config.http_options.host == "0.0.0.0"
    assert config.http_options.port == 8000


def test_each_part_has_a_bundle_with_its_gpus(name: str, deployments: dict[str, Any]) -> None:
    options = deployments["Orchestrator"]._replica_config
    orchestrator, target, drafter = options.placement_group_bundles
    assert "GPU" not in orchestrator
    assert (target["GPU"], drafter["GPU"]) == GPUS[name]
    assert options.placement_group_strategy == "PACK", "target and drafter may be on two nodes"
    assert deployments.keys() == {"Orchestrator", "Ingress"}
    assert "num_gpus" not in deployments["Ingress"]._replica_config.ray_actor_options


def test_it_is_the_papers_method_on_the_production_engine(name: str, settings: Settings) -> None:
    assert settings.engine == "sglang"
    assert isinstance(settings.drafter, EagleSettings)
    assert settings.policy == DCSPolicy()
    assert settings.kappa == 0.2
    assert settings.model.path.endswith(f"/{settings.model.name}")
    assert settings.model.name.lower().startswith(name.removesuffix("-tp2"))
    assert settings.sglang["attention_backend"] == "flashinfer"
    assert settings.sglang.get("tp_size", 1) == GPUS[name][0]


def test_the_cache_has_room_for_what_runs(settings: Settings) -> None:
    """Two trees ahead of every request, and one request of the longest context."""
    ahead = 2 * settings.max_shape.nodes
    longest = settings.sglang["context_length"] + ahead
    assert settings.target.kv_tokens >= settings.target.max_running * ahead + longest
    assert max(settings.sglang["cuda_graph_bs_decode"]) == settings.target.max_running
